"""llama-index: completions, chats, streams, structured output and tools."""

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from report import MODEL, PROMPT, URL, Forecast, run_all, weather

SHARED = {
    "model": MODEL,
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "max_tokens": 60,
    "temperature": 0,
    "max_retries": 0,
}
chats = OpenAILike(is_chat_model=True, is_function_calling_model=True, **SHARED)
texts = OpenAILike(is_chat_model=False, is_function_calling_model=False, **SHARED)
USER = [ChatMessage(role="user", content=PROMPT)]
bound = FunctionTool.from_defaults(fn=weather)


def completion():
    assert texts.complete("One, two,").text


def completion_stream():
    assert [part.delta for part in texts.stream_complete("One, two,")]


def chat():
    assert chats.chat(USER).message.content


def chat_stream_is_the_whole():
    joined = "".join(part.delta or "" for part in chats.stream_chat(USER))
    assert joined == chats.chat(USER).message.content


def structured_output():
    assert isinstance(chats.structured_predict(Forecast, PromptTemplate(PROMPT)), Forecast)


def structured_llm():
    assert isinstance(chats.as_structured_llm(Forecast).chat(USER).raw, Forecast)


def forced_tool():
    answer = chats.chat_with_tools([bound], user_msg=PROMPT, tool_required=True)
    (call, *_) = chats.get_tool_calls_from_response(answer)
    Forecast.model_validate(call.tool_kwargs)


def streamed_tool():
    *_, last = chats.stream_chat_with_tools([bound], user_msg=PROMPT, tool_required=True)
    assert chats.get_tool_calls_from_response(last)


def called_function():
    assert "degrees" in str(chats.predict_and_call([bound], user_msg=PROMPT, tool_required=True))


async def asynchronous():
    assert (await chats.achat(USER)).message.content


run_all(
    [
        completion, completion_stream, chat, chat_stream_is_the_whole, structured_output, structured_llm, forced_tool,
        streamed_tool, called_function, asynchronous,
    ]
)  # fmt: skip
