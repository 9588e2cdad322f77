"""instructor: its modes over chats, Responses and messages, partial answers and lists."""

import instructor
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI

from report import MODEL, PROMPT, URL, Forecast, Person, run_all

ASK = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_retries": 0}
openai = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def tools():
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
    assert isinstance(client.create(response_model=Forecast, max_tokens=80, temperature=0, **ASK), Forecast)


def strict_tools():
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS_STRICT)
    assert isinstance(client.create(response_model=Forecast, max_tokens=80, temperature=0, **ASK), Forecast)


def json_schema():
    client = instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(client.create(response_model=Person, max_tokens=120, temperature=0, **ASK), Person)


def responses_tools():
    client = instructor.from_openai(openai, mode=instructor.Mode.RESPONSES_TOOLS)
    found = client.create(response_model=Forecast, max_output_tokens=80, temperature=0, **ASK)
    assert isinstance(found, Forecast)


def partial():
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
    parts = list(client.create_partial(response_model=Person, max_tokens=120, temperature=0, **ASK))
    assert parts[-1].name
    assert len(parts) > 1


def several_answers():
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
    found = client.create_iterable(response_model=Forecast, max_tokens=200, temperature=0, **ASK)
    assert isinstance(next(iter(found)), Forecast)


def anthropic_tools():
    client = instructor.from_anthropic(
        Anthropic(base_url=URL, api_key="none", max_retries=0), mode=instructor.Mode.ANTHROPIC_TOOLS
    )
    assert isinstance(
        client.create(response_model=Forecast, max_tokens=80, extra_body={"temperature": 0}, **ASK), Forecast
    )


async def asynchronous():
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as other:
        client = instructor.from_openai(other)
        assert isinstance(await client.create(response_model=Forecast, max_tokens=80, temperature=0, **ASK), Forecast)


run_all([tools, strict_tools, json_schema, responses_tools, partial, several_answers, anthropic_tools, asynchronous])
