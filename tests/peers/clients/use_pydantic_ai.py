"""pydantic-ai: agents over chats and Responses, their outputs and tools."""

from typing import Literal

from pydantic_ai import Agent, NativeOutput, Tool, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from report import MODEL, PROMPT, URL, Forecast, run_all, weather

openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
chats = OpenAIChatModel(MODEL, provider=openai)
responses = OpenAIResponsesModel(MODEL, provider=openai)
SETTINGS = {"temperature": 0.0, "max_tokens": 80}


def agent(model, output=str, **more) -> Agent:
    return Agent(model, output_type=output, model_settings=SETTINGS, retries=0, **more)


def text():
    for model in (chats, responses):
        assert agent(model).run_sync(PROMPT).output


def output_by_tool():
    for model in (chats, responses):
        assert isinstance(agent(model, ToolOutput(Forecast)).run_sync(PROMPT).output, Forecast)


def output_by_schema():
    for model in (chats, responses):
        assert isinstance(agent(model, NativeOutput(Forecast)).run_sync(PROMPT).output, Forecast)


def tool_and_its_result():
    """Every step must call something; the first may call the tool only, and the second the output."""
    called = []

    def once(city: Literal["Oslo", "Rome", "Paris"], days: int) -> str:
        """Tell the weather of a city for some days."""
        called.append(city)
        return weather(city, days)

    def before_the_call(_, tool):
        return None if called else tool

    outputs = ToolOutput(Forecast)
    found = agent(chats, outputs, tools=[Tool(once, prepare=before_the_call)]).run_sync(PROMPT)
    assert isinstance(found.output, Forecast)


def history_of_calls():
    first = agent(chats, ToolOutput(Forecast)).run_sync(PROMPT)
    assert agent(chats).run_sync("And so?", message_history=first.all_messages()).output


async def stream():
    for model in (chats, responses):
        async with agent(model).run_stream(PROMPT) as result:
            assert [part async for part in result.stream_text()]


async def streamed_output():
    async with agent(chats, ToolOutput(Forecast)).run_stream(PROMPT) as result:
        parts = [part async for part in result.stream_output()]
        assert isinstance(parts[-1], Forecast)


run_all(
    [text, output_by_tool, output_by_schema, tool_and_its_result, history_of_calls, stream,
     streamed_output]
)  # fmt: skip
