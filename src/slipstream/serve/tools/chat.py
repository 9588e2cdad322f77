"""A chat as the model's template reads it: messages, tools, calls and reasoning of earlier turns, and switches.

Templates differ in what they know. One that has never heard of tools gets them in a system message, in Hermes's words;
one that writes a call's arguments as they are gets the client's JSON text, so that the prompt has what the model wrote;
one that writes JSON itself gets values.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.errors import RequestError
from slipstream.serve.tools.gemma4 import THOUGHT, THOUGHT_END
from slipstream.serve.tools.protocol import arguments_json
from slipstream.serve.tools.reasoning import END, START
from slipstream.serve.tools.typescript import sorted_keys, typescript_of

Json = dict[str, Any]  # foreign JSON

_THOUGHTS = (START, END, THOUGHT, THOUGHT_END)  # templates look for these in what an assistant said
_PROBE = "slipstream"
_PROBE_CHAT: list[Json] = [
    {"role": "user", "content": "-"},
    {"role": "tool", "tool_call_id": "call00000", "name": "probe", "content": "-"},
]
_DECLARATION = (
    "You may call functions to answer the user. They are described in JSON between <tools> and </tools>:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, write its name and its arguments as a JSON object between <tool_call> and </tool_call>:\n"
    '<tool_call>\n{{"name": <function>, "arguments": <arguments>}}\n</tool_call>'
)


@dataclass(frozen=True)
class Chat:
    """What a client wants rendered.

    Args:
        messages: in OpenAI's form, content as text; a call's arguments are JSON text, or values.
        tools: as the client wrote them.
        variables: what the template is given besides.
    """

    messages: Sequence[Json]
    open_answer: bool = True
    tools: Sequence[Json] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatRenderer:
    """Renders chats with a model's template."""

    def __init__(self, tokenizer: Tokenizer, allow_special: bool = False) -> None:
        """Keep what renders.

        Args:
            allow_special: let control tokens that clients spell be control tokens.
        """
        self._tokenizer = tokenizer
        self._allow_special = allow_special
        self._knows_tools = "tools" in tokenizer.template_variables
        self._wants_typescript = "tools_ts_str" in tokenizer.template_variables
        template = tokenizer.chat_template or ""
        self._knows_developers = "'developer'" in template or '"developer"' in template
        self._calls_it_thinking = "message.thinking" in template  # gpt-oss's does

    def render(self, chat: Chat) -> str:
        """Return the text of a chat; control tokens that clients merely spelled are marked in it."""
        # Before texts are marked: what is spelled with escapes in JSON text shows in its values only.
        messages = [self._marked(self._as_taken(message)) for message in chat.messages]
        tools = self._marked(list(chat.tools))
        variables = dict(self._marked(chat.variables))
        if not self._knows_tools:
            messages, tools = _in_hermes_words(messages, tools), []
        elif self._wants_typescript and tools:
            tools = sorted_keys(tools)
            if (declared := typescript_of(tools)) is not None:
                variables["tools_ts_str"] = declared
        return self._tokenizer.render_chat(messages, chat.open_answer, **variables, tools=tools or None)

    @functools.cached_property
    def _takes_no_content(self) -> bool:
        """Whether the template takes a message with calls and null for its content, and writes nothing for that."""
        probe = self._probed({_PROBE: "probe"}, None)
        return probe is not None and "None" not in probe

    @functools.cached_property
    def _takes_text(self) -> bool:
        """Whether the template writes arguments that are text as they are, or makes no JSON of values."""
        content = None if self._takes_no_content else ""
        probe = self._probed({_PROBE: "probe"}, content)
        if probe is None or f"{{'{_PROBE}'" in probe:
            return True
        return self._probed(json.dumps({_PROBE: "probe"}), content) == probe

    def _probed(self, arguments: Json | str, content: str | None) -> str | None:
        """Return what the template makes of a chat with a call; None if it refuses it."""
        function = {"name": "probe", "arguments": arguments}
        call = {"id": "call00000", "type": "function", "function": function}
        asked, *answered = _PROBE_CHAT
        try:
            return self._tokenizer.render_chat(
                [asked, {"role": "assistant", "content": content, "tool_calls": [call]}, *answered]
            )
        except RequestError:
            return None

    def _as_taken(self, message: Json) -> Json:
        """Return a message as this template takes it: a call's arguments as text or values, content as text."""
        calls = message.get("tool_calls")
        if message["role"] == "developer" and not self._knows_developers:
            message = {**message, "role": "system"}
        if self._calls_it_thinking and "reasoning_content" in message:
            message = {**message, "thinking": message["reasoning_content"]}
            if calls and message["content"]:  # it takes one of them beside a call, and writes either as analysis
                message |= {"thinking": f"{message['thinking']}\n{message['content']}", "content": None}
        if not calls or not self._knows_tools:
            return message
        message = _with_arguments(message, _text if self._takes_text else arguments_json)
        return message if self._takes_no_content else {**message, "content": message["content"] or ""}

    def _marked(self, value: Any) -> Any:  # any JSON value
        if self._allow_special:
            return value
        said = isinstance(value, Mapping) and value.get("role") == "assistant"
        return self._tokenizer.spelled.marked(value, _THOUGHTS if said else ())


def _with_arguments(message: Json, form: Callable[[Any], Any]) -> Json:
    """Return a message whose calls have arguments of another form."""
    calls = [
        {**call, "function": {**call["function"], "arguments": form(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _in_hermes_words(messages: Sequence[Json], tools: Sequence[Json]) -> list[Json]:
    """Return a chat for a template that knows nothing of tools."""
    turns = [_hermes_turn(message) for message in messages]
    if not tools:
        return turns
    declared = _DECLARATION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{declared}".strip()}, *turns[1:]]
    return [{"role": "system", "content": declared}, *turns]


def _hermes_turn(message: Json) -> Json:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content'] or ''}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [
        f'<tool_call>\n{{"name": {_text(call["function"]["name"], quoted=True)}, '
        f'"arguments": {_text(call["function"]["arguments"])}}}\n</tool_call>'
        for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": "\n".join([*filter(None, [message["content"]]), *calls])}


def _text(value: Any, quoted: bool = False) -> str:  # JSON
    return value if isinstance(value, str) and not quoted else json.dumps(value, ensure_ascii=False)
