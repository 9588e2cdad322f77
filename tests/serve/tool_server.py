"""Servers over tiny random models that speak a family's syntax: their vocabulary is bytes and the family's markers."""

from pathlib import Path

from tiny_server import Running
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.serve.tools.families import FAMILIES
from slipstream.serve.tools.reasoning import REASONING
from slipstream.speculation.tree import TreeShape
from tiny import engine_of, follower_draft, tiny_target

CHATML = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)
WORDS = {
    "hermes": "{# <tool_call> #}",
    "kimi_k2": "{# <|tool_call_begin|> #}",
    "minimax_m2": "{# minimax:tool_call #}",
}
THINKING = "{% if thinking %}<think>{% else %}<think></think>{% endif %}"
CONTROL = ("<|im_end|>", "<|im_start|>")
# The parts of OpenAI's template that matter here: it refuses null contents, names reasoning `thinking`, knows one call.
GPT_OSS = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' and message.tool_calls %}"
    "{{ '' if '<|channel|>' in message.content else '' }}"
    "{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "{% set call = message.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name }}"
    "<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# How templates write an earlier call `f` of an assistant, whose arguments they take as values.
_TEXT_OR_JSON = "{{ v if v is string else v | tojson }}"
SYNTAXES = {
    "glm45": "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    f"<arg_value>{_TEXT_OR_JSON}</arg_value>\n{{% endfor %}}</tool_call>",
    "glm47": "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
    f"{_TEXT_OR_JSON}</arg_value>{{% endfor %}}</tool_call>",
    "qwen3_coder": "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
    f"{_TEXT_OR_JSON}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>",
    "gemma4": '{% macro q(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is sequence %}[{% for one in v %}'
    "{{ q(one) }}{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
    "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | dictsort %}{{ k }}:{{ q(v) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<tool_call|>",
}


def byte_tokenizer(template: str, markers: tuple[str, ...] = ()) -> Tokenizer:
    """Return a tokenizer of single bytes, control tokens, and markers that are tokens but not special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    fast.add_tokens([AddedToken(token, special=False, normalized=False) for token in markers])
    return Tokenizer(fast, {"eos_token": CONTROL[0]}, Path("bytes"), template)


def kimi(tree: TreeShape | None = None) -> Running:
    """Return a server that writes calls and thoughts as Kimi-K2 does."""
    template = WORDS["kimi_k2"] + CHATML.replace("{{ opening }}", THINKING)
    return running(byte_tokenizer(template, (*FAMILIES["kimi_k2"].markers, "<think>", "</think>")), tree)


def gpt_oss(tree: TreeShape | None = None) -> Running:
    """Return a server that writes messages on channels as gpt-oss does."""
    return running(byte_tokenizer(GPT_OSS, FAMILIES["openai"].markers), tree)


def speaking(family: str, tree: TreeShape | None = None) -> Running:
    """Return a server that writes calls in one of `SYNTAXES`, and thoughts as that family does."""
    reasoning = REASONING[family if family in REASONING else "glm45"]
    start, end = reasoning.start + reasoning.label, reasoning.end
    before, _, rest = CHATML.partition("[{{ c.id }}")
    written = before + "{% set f = c.function %}" + SYNTAXES[family] + rest.partition("]")[2]
    template = written.replace("{{ opening }}", f"{{% if thinking %}}{start}{{% else %}}{start}{end}{{% endif %}}")
    return running(byte_tokenizer(template, (*FAMILIES[family].markers, reasoning.start, end)), tree)


def running(tokenizer: Tokenizer, tree: TreeShape | None = None, **settings: object) -> Running:
    """Return a server whose draft guesses well."""
    target = tiny_target(vocab_size=tokenizer.vocab_size, max_position=8192)
    shape = TreeShape(depth=3, width=2, budget=6) if tree is None else tree
    draft = follower_draft(target, max_position=8192)
    return Running(
        engine_of(target, draft, shape, page_size=16, num_pages=300, max_context=4096, max_batch_tokens=512),
        tokenizer,
        **settings,
    )
