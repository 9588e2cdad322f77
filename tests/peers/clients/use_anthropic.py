"""The anthropic package: messages, streams, tools, counted tokens, errors."""

from anthropic import Anthropic, AsyncAnthropic, BadRequestError

from report import MODEL, PROMPT, SCHEMA, URL, Forecast, run_all, weather

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
USER = [{"role": "user", "content": PROMPT}]
ASK = {"model": MODEL, "messages": USER, "max_tokens": 60, "extra_body": {"temperature": 0}}
TOOL = {"name": "weather", "description": weather.__doc__, "input_schema": SCHEMA}


def message():
    answer = client.messages.create(**ASK, system="Be brief.")
    assert answer.content[0].text
    assert answer.usage.output_tokens > 0
    assert answer.stop_reason in ("end_turn", "max_tokens")


def stream_is_the_whole():
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        joined = "".join(stream.text_stream)
        assert joined == whole.content[0].text == stream.get_final_message().content[0].text


def raw_stream():
    kinds = [event.type for event in client.messages.create(**ASK, stream=True)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def stop_sequence():
    first = client.messages.create(**ASK).content[0].text.split()[1]
    answer = client.messages.create(**ASK, stop_sequences=[first])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", first)


def prefilled_answer():
    begun = [*USER, {"role": "assistant", "content": "In Oslo it will be"}]
    assert client.messages.create(**{**ASK, "messages": begun}).content[0].text


def forced_tool_and_its_result():
    asked = {**ASK, "tools": [TOOL]}
    one = {"type": "any", "disable_parallel_tool_use": True}
    first = client.messages.create(**asked, tool_choice=one)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use"
    Forecast.model_validate(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
    history = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**{**asked, "messages": history}, tool_choice={"type": "none"})
    assert answer.content[0].text


def named_tool_streamed():
    with client.messages.stream(**ASK, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}) as stream:
        for _ in stream:
            pass
        (call,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    Forecast.model_validate(call.input)


def tool_if_it_likes():
    answer = client.messages.create(**ASK, tools=[TOOL])
    assert answer.content


def structured_output():
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = client.messages.create(**ASK, output_config=form)
    Forecast.model_validate_json(answer.content[0].text)


def counted_tokens():
    counted = client.messages.count_tokens(model=MODEL, messages=USER, system="Be brief.", tools=[TOOL])
    usage = client.messages.create(**ASK, system="Be brief.", tools=[TOOL]).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def errors_name_the_field():
    try:
        client.messages.create(**{**ASK, "max_tokens": 20000})
    except BadRequestError as error:
        assert "max_tokens" in error.body["error"]["message"]
        assert error.body["error"]["type"] == "invalid_request_error"
        return
    raise AssertionError("more tokens than there is room for were promised")


async def asynchronous():
    async with (
        AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as other,
        other.messages.stream(**ASK) as stream,
    ):
        assert (await stream.get_final_message()).content[0].text


run_all(
    [
        message, stream_is_the_whole, raw_stream, stop_sequence, prefilled_answer, forced_tool_and_its_result,
        named_tool_streamed, tool_if_it_likes, structured_output, counted_tokens, errors_name_the_field, asynchronous,
    ]
)  # fmt: skip
