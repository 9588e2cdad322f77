// The openai package of node: chats, structured output, tools, Responses.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { check, model, prompt, runAll, schema, url, weather } from "./node_report.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: prompt }];
const ask = { model, messages, max_tokens: 60, temperature: 0 };
const respond = { model, input: prompt, max_output_tokens: 60, temperature: 0 };
const Forecast = z.object({ city: z.enum(["Oslo", "Rome", "Paris"]), days: z.int().min(1).max(9) });
const tool = { type: "function", function: { name: "weather", parameters: schema } };
const flat = { type: "function", name: "weather", parameters: schema, strict: true };

async function chat() {
  check((await client.chat.completions.create(ask)).choices[0].message.content, "there is text");
}

async function chatStreamIsTheWhole() {
  const whole = (await client.chat.completions.create(ask)).choices[0].message.content;
  let joined = "";
  for await (const part of await client.chat.completions.create({ ...ask, stream: true })) {
    joined += part.choices[0]?.delta?.content ?? "";
  }
  check(joined === whole, "the stream says the same");
}

async function parse() {
  const form = zodResponseFormat(Forecast, "forecast");
  const answer = await client.chat.completions.parse({ ...ask, response_format: form });
  Forecast.parse(answer.choices[0].message.parsed);
}

async function forcedTool() {
  const answer = await client.chat.completions.create({ ...ask, tools: [tool], tool_choice: "required" });
  Forecast.parse(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
}

async function streamedTool() {
  const stream = client.chat.completions.stream({ ...ask, tools: [tool], tool_choice: "required" });
  const call = (await stream.finalChatCompletion()).choices[0].message.tool_calls[0];
  Forecast.parse(JSON.parse(call.function.arguments));
}

async function toolRoundTrip() {
  const one = { tools: [tool], parallel_tool_calls: false };
  const first = (await client.chat.completions.create({ ...ask, ...one, tool_choice: "required" })).choices[0].message;
  const content = weather(JSON.parse(first.tool_calls[0].function.arguments));
  const result = { role: "tool", tool_call_id: first.tool_calls[0].id, content };
  const more = { ...ask, ...one, messages: [...messages, first, result], tool_choice: "none" };
  check((await client.chat.completions.create(more)).choices[0].message.content, "there is text");
}

async function errorsNameTheField() {
  try {
    await client.chat.completions.create({ ...ask, temperature: -1 });
  } catch (error) {
    check(error.status === 400 && error.param === "temperature", "the field is named");
    return;
  }
  throw new Error("a temperature of -1 was taken");
}

async function response() {
  check((await client.responses.create(respond)).output_text, "there is text");
}

async function responseStream() {
  const stream = client.responses.stream(respond);
  for await (const _ of stream);
  check((await stream.finalResponse()).output_text, "there is text");
}

async function responseParse() {
  const answer = await client.responses.parse({ ...respond, text: { format: zodTextFormat(Forecast, "forecast") } });
  Forecast.parse(answer.output_parsed);
}

async function responseTools() {
  const one = { tools: [flat], parallel_tool_calls: false };
  const first = await client.responses.create({ ...respond, ...one, tool_choice: "required" });
  const call = first.output.find((item) => item.type === "function_call");
  const output = { type: "function_call_output", call_id: call.call_id, output: weather(JSON.parse(call.arguments)) };
  const more = { ...respond, ...one, input: [output], previous_response_id: first.id, tool_choice: "none" };
  check((await client.responses.create(more)).output_text, "there is text");
}

await runAll([
  chat, chatStreamIsTheWhole, parse, forcedTool, streamedTool, toolRoundTrip, errorsNameTheField, response,
  responseStream, responseParse, responseTools,
]);
