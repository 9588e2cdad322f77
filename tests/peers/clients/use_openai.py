"""The openai package: chats, completions, structured output, tools, Responses."""

import json

from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from report import MODEL, PROMPT, SCHEMA, URL, Forecast, Person, run_all, weather

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
USER = [{"role": "user", "content": PROMPT}]
ASK = {"model": MODEL, "messages": USER, "max_tokens": 60, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "weather", "description": weather.__doc__, "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "weather", "description": weather.__doc__, "parameters": SCHEMA, "strict": True}
RESPONSE = {"model": MODEL, "input": PROMPT, "max_output_tokens": 60, "temperature": 0}


def models():
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def chat():
    assert client.chat.completions.create(**ASK).choices[0].message.content


def chat_stream_is_the_whole():
    whole = client.chat.completions.create(**ASK)
    parts = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    joined = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert joined == whole.choices[0].message.content
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def chat_stream_helper():
    ends = {"structured_outputs": {"choice": ["warm", "cold"]}}  # it raises where an answer is cut off
    with client.chat.completions.stream(**ASK, extra_body=ends) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        assert "".join(deltas) == stream.get_final_completion().choices[0].message.content


def chat_logprobs():
    choice = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3).choices[0]
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode()


def chat_with_several_answers():
    answer = client.chat.completions.create(**{**ASK, "temperature": 1}, n=3, seed=4)
    assert len({choice.message.content for choice in answer.choices}) > 1


def completions():
    answer = client.completions.create(model=MODEL, prompt=["One, two,", "Red, green,"], max_tokens=8, logprobs=2)
    assert len(answer.choices) == 2
    assert len(answer.choices[0].logprobs.token_logprobs) == 8


def completion_echo():
    answer = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4, echo=True)
    assert answer.choices[0].text.startswith("One, two,")


def json_object():
    answer = client.chat.completions.create(**{**ASK, "max_tokens": 300}, response_format={"type": "json_object"})
    assert answer.choices[0].finish_reason == "length" or isinstance(
        json.loads(answer.choices[0].message.content), dict
    )


def parse():
    message = client.chat.completions.parse(**ASK, response_format=Forecast).choices[0].message
    assert isinstance(message.parsed, Forecast)


def parse_free_text():
    message = client.chat.completions.parse(**{**ASK, "max_tokens": 200}, response_format=Person).choices[0].message
    assert isinstance(message.parsed, Person)


def parse_stream():
    with client.chat.completions.stream(**ASK, response_format=Forecast) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Forecast)


def vllm_structured_outputs():
    for form in ({"choice": ["warm", "cold"]}, {"regex": "(warm|cold)er"}, {"grammar": 'root ::= "warm" | "cold"'}):
        answer = client.chat.completions.create(**ASK, extra_body={"structured_outputs": form})
        assert answer.choices[0].message.content.startswith(("warm", "cold"))


def tool_required():
    once = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    choice = client.chat.completions.create(**ASK, **once).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert Forecast.model_validate_json(choice.message.tool_calls[0].function.arguments)


def tool_named():
    named = {"type": "function", "function": {"name": "weather"}}
    choice = client.chat.completions.create(**ASK, tools=[TOOL], tool_choice=named).choices[0]
    assert len(choice.message.tool_calls) == 1


def tool_auto_and_none():
    for mode in ("auto", "none"):
        message = client.chat.completions.create(**ASK, tools=[TOOL], tool_choice=mode).choices[0].message
        assert message.content or message.tool_calls
        assert not (mode == "none" and message.tool_calls)


def tool_stream():
    asked = {**ASK, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls[0].function
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == (whole.name, whole.arguments)


def tool_round_trip():
    asked = {**ASK, "tools": [TOOL]}
    first = (
        client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False).choices[0].message
    )
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}
    answer = client.chat.completions.create(**{**asked, "messages": [*USER, first, result]}, tool_choice="none")
    assert answer.choices[0].message.content


def errors_name_the_field():
    for wrong in ({"temperature": -1}, {"max_tokens": 10**7}, {"response_format": {"type": "xml"}}):
        try:
            client.chat.completions.create(**{**ASK, **wrong})
        except BadRequestError as error:
            assert next(iter(wrong)) in error.param
        else:
            raise AssertionError(f"{wrong} was taken")
    try:
        client.chat.completions.create(**{**ASK, "model": "another"})
    except NotFoundError:
        return
    raise AssertionError("another model was taken")


def response():
    answer = client.responses.create(**RESPONSE, instructions="Be brief.")
    assert answer.output_text
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def response_stream():
    events = list(client.responses.create(**RESPONSE, stream=True))
    joined = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert joined == events[-1].response.output_text == client.responses.create(**RESPONSE).output_text


def response_stream_helper():
    ends = {"structured_outputs": {"choice": ["warm", "cold"]}}  # it knows no end but completion
    with client.responses.stream(**RESPONSE, extra_body=ends) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text


def response_parse():
    answer = client.responses.parse(**RESPONSE, text_format=Forecast)
    assert isinstance(answer.output_parsed, Forecast)


def response_goes_on():
    first = client.responses.create(**RESPONSE)
    second = client.responses.create(**{**RESPONSE, "input": "And in Rome?"}, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert client.responses.input_items.list(first.id).data
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except NotFoundError:
        return
    raise AssertionError("a deleted response is still there")


def response_tools():
    asked = {**RESPONSE, "tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False}
    first = client.responses.create(**asked)
    (call,) = [item for item in first.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": weather(**json.loads(call.arguments))}
    both = [{"role": "user", "content": PROMPT}, *first.output, output]
    for more in ({"input": [output], "previous_response_id": first.id}, {"input": both}):
        assert client.responses.create(**{**asked, "tool_choice": "none", **more}).output_text


def response_tool_stream():
    asked = {**RESPONSE, "tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        (call,) = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert Forecast.model_validate_json(call.arguments)


async def asynchronous():
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as other:
        parts = [part async for part in await other.chat.completions.create(**ASK, stream=True)]
        assert parts[-1].choices[0].finish_reason
        assert (await other.responses.create(**RESPONSE)).output_text


run_all(
    [
        models, chat, chat_stream_is_the_whole, chat_stream_helper, chat_logprobs, chat_with_several_answers,
        completions, completion_echo, json_object, parse, parse_free_text, parse_stream, vllm_structured_outputs,
        tool_required, tool_named, tool_auto_and_none, tool_stream, tool_round_trip, errors_name_the_field,
        response, response_stream, response_stream_helper, response_parse, response_goes_on, response_tools,
        response_tool_stream, asynchronous,
    ]
)  # fmt: skip
