"""langchain-openai and langchain-anthropic: invoke, stream, structured output, bound tools, Responses."""

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from openai import LengthFinishReasonError

from report import MODEL, PROMPT, URL, Forecast, run_all, weather

SHARED = {"model": MODEL, "api_key": "none", "temperature": 0, "max_retries": 0}
chats = ChatOpenAI(base_url=f"{URL}/v1", max_completion_tokens=60, **SHARED)
responses = ChatOpenAI(base_url=f"{URL}/v1", max_completion_tokens=60, use_responses_api=True, **SHARED)
messages = ChatAnthropic(base_url=URL, max_tokens=60, **SHARED)
bound = tool(weather)


def invoke():
    for model in (chats, responses, messages):
        assert model.invoke(PROMPT).text


def stream_is_the_whole():
    for model in (chats, responses, messages):
        assert "".join(part.text for part in model.stream(PROMPT)) == model.invoke(PROMPT).text


def batch():
    assert len(chats.batch([PROMPT, "Count to three."])) == 2


def completion():
    assert OpenAI(base_url=f"{URL}/v1", max_tokens=16, **SHARED).invoke("One, two,")


def log_probabilities():
    assert chats.bind(logprobs=True).invoke(PROMPT).response_metadata["logprobs"]["content"]


def usage():
    for model in (chats, responses, messages):
        counted = model.invoke(PROMPT).usage_metadata
        assert counted["total_tokens"] == counted["input_tokens"] + counted["output_tokens"]


def structured_by_schema():
    for model in (chats, responses):
        assert isinstance(model.with_structured_output(Forecast, method="json_schema").invoke(PROMPT), Forecast)


def structured_by_call():
    for model in (chats, responses, messages):
        assert isinstance(model.with_structured_output(Forecast, method="function_calling").invoke(PROMPT), Forecast)


def structured_by_json_mode():
    asked = PROMPT + " Answer with a JSON object."
    try:
        chats.with_structured_output(method="json_mode").invoke(asked)
    except LengthFinishReasonError as error:  # a model of this size does not end an object that may hold anything
        assert error.completion.choices[0].message.content.startswith("{")


def forced_tool_and_its_result():
    for model in (chats, responses, messages):
        question = HumanMessage(PROMPT)
        first = model.bind_tools([bound], tool_choice="any", parallel_tool_calls=False).invoke([question])
        (call,) = first.tool_calls
        result = bound.invoke(call)
        assert isinstance(result, ToolMessage)
        # It takes "none" for a tool's name where it speaks to Anthropic's API.
        after = model if model is messages else model.bind_tools([bound], tool_choice="none")
        assert after.invoke([question, first, result]).text


def streamed_tool():
    for model in (chats, responses, messages):
        whole = None
        for part in model.bind_tools([bound], tool_choice="weather").stream(PROMPT):
            whole = part if whole is None else whole + part
        Forecast.model_validate(whole.tool_calls[0]["args"])


async def asynchronous():
    assert (await chats.ainvoke(PROMPT)).text
    assert [part async for part in chats.astream(PROMPT)]


run_all(
    [
        invoke, stream_is_the_whole, batch, completion, log_probabilities, usage, structured_by_schema,
        structured_by_call, structured_by_json_mode, forced_tool_and_its_result, streamed_tool, asynchronous,
    ]
)  # fmt: skip
