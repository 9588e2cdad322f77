"""litellm: one call for OpenAI's chats, its Responses and Anthropic's messages."""

import litellm

from report import MODEL, PROMPT, SCHEMA, URL, Forecast, run_all, weather

USER = [{"role": "user", "content": PROMPT}]
TOOL = {"type": "function", "function": {"name": "weather", "description": weather.__doc__, "parameters": SCHEMA}}
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 60, "temperature": 0}
VLLM = {**OPENAI, "model": f"hosted_vllm/{MODEL}"}
ANTHROPIC = {**OPENAI, "model": f"anthropic/{MODEL}", "api_base": URL}


def chat():
    for route in (OPENAI, VLLM, ANTHROPIC):
        assert litellm.completion(messages=USER, **route).choices[0].message.content


def stream():
    for route in (OPENAI, VLLM, ANTHROPIC):
        whole = litellm.completion(messages=USER, **route).choices[0].message.content
        parts = litellm.completion(messages=USER, stream=True, **route)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole


def structured_output():
    for route in (OPENAI, VLLM):
        answer = litellm.completion(messages=USER, response_format=Forecast, **route)
        Forecast.model_validate_json(answer.choices[0].message.content)


def forced_tool():
    for route in (OPENAI, VLLM, ANTHROPIC):
        answer = litellm.completion(messages=USER, tools=[TOOL], tool_choice="required", **route)
        Forecast.model_validate_json(answer.choices[0].message.tool_calls[0].function.arguments)


def streamed_tool():
    for route in (OPENAI, ANTHROPIC):
        parts = litellm.completion(messages=USER, tools=[TOOL], tool_choice="required", stream=True, **route)
        whole = litellm.stream_chunk_builder(list(parts))
        Forecast.model_validate_json(whole.choices[0].message.tool_calls[0].function.arguments)


def response():
    route = {name: value for name, value in OPENAI.items() if name != "max_tokens"}
    assert litellm.responses(input=PROMPT, max_output_tokens=40, **route).output


async def asynchronous():
    assert (await litellm.acompletion(messages=USER, **OPENAI)).choices[0].message.content


run_all([chat, stream, structured_output, forced_tool, streamed_tool, response, asynchronous])
