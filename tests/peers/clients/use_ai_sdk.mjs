// The AI SDK of node: text, streams, objects and tools, over chats, Responses and messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { check, model, prompt, runAll, url, weather } from "./node_report.mjs";

const shared = { apiKey: "none", baseURL: `${url}/v1` };
const chats = createOpenAICompatible({ name: "ours", supportsStructuredOutputs: true, ...shared })(model);
const responses = createOpenAI(shared).responses(model);
const messages = createAnthropic(shared)(model);
const Forecast = z.object({ city: z.enum(["Oslo", "Rome", "Paris"]), days: z.int().min(1).max(9) });
const ask = { prompt, maxOutputTokens: 60, temperature: 0, maxRetries: 0 };
const tools = { weather: tool({ description: "Tells the weather.", inputSchema: Forecast, execute: weather }) };
// A model of this size, once it may call again, calls again and again.
const once = {
  providerOptions: {
    ours: { parallel_tool_calls: false },
    openai: { parallelToolCalls: false },
    anthropic: { disableParallelToolUse: true },
  },
};
const failing = { onError: ({ error }) => { throw error; } };

async function text() {
  for (const one of [chats, responses, messages]) {
    check((await generateText({ ...ask, model: one })).text, "there is text");
  }
}

async function streamIsTheWhole() {
  for (const one of [chats, responses, messages]) {
    const whole = (await generateText({ ...ask, model: one })).text;
    let joined = "";
    for await (const part of streamText({ ...ask, ...failing, model: one }).textStream) joined += part;
    check(joined === whole, "the stream says the same");
  }
}

async function object() {
  for (const one of [chats, responses, messages]) {
    Forecast.parse((await generateObject({ ...ask, model: one, schema: Forecast })).object);
  }
}

async function streamedObject() {
  for (const one of [chats, responses]) {
    const stream = streamObject({ ...ask, ...failing, model: one, schema: Forecast });
    for await (const _ of stream.partialObjectStream);
    Forecast.parse(await stream.object);
  }
}

async function forcedTool() {
  for (const one of [chats, responses, messages]) {
    const { toolCalls } = await generateText({ ...ask, model: one, tools, toolChoice: "required" });
    Forecast.parse(toolCalls[0].input);
  }
}

async function streamedTool() {
  for (const one of [chats, responses, messages]) {
    const stream = streamText({ ...ask, ...failing, model: one, tools, toolChoice: "required" });
    await stream.consumeStream();
    Forecast.parse((await stream.toolCalls)[0].input);
  }
}

async function toolLoop() {
  for (const one of [chats, responses, messages]) {
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
    const loop = { stopWhen: stepCountIs(2), prepareStep, tools, ...once };
    const { steps } = await generateText({ ...ask, ...loop, model: one });
    check(steps.length === 2 && steps[0].toolResults.length, "the tool ran, and its result was sent back");
  }
}

await runAll([text, streamIsTheWhole, object, streamedObject, forcedTool, streamedTool, toolLoop]);
