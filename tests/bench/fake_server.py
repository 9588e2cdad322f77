"""A server with known behaviour: fixed timing, known acceptance, and faults on demand. No model behind it."""

import argparse
import asyncio
import json
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

FAKE = Path(__file__)
"""The program itself, for recipes that start it."""
FAST = {"ttft_s": 0.002, "step_s": 0.0005}
DRAFTING = FAST | {"accepts": [0.9, 0.5]}


@dataclass
class Behaviour:
    """What the fake does. Times in seconds; `accepts` is the chance that a drafted token at each depth is accepted."""

    ttft_s: float = 0.2
    step_s: float = 0.03
    accepts: tuple[float, ...] = ()
    noise: float = 0.0
    seed: int = 0
    fail_every: int = 0
    hang_every: int = 0
    garbage_every: int = 0
    cut_every: int = 0
    die_after: int = 0
    ignore_eos: bool = True
    counts_chunks: bool = True
    metrics: bool = True
    names: str = "vllm"
    text: str = "word{} "
    reply: dict[str, str] = field(default_factory=dict)


class FakeServer:
    def __init__(self, behaviour: Behaviour):
        self.behaviour = behaviour
        self.rng = random.Random(behaviour.seed)
        self.num_requests = 0
        self.bodies: list[dict] = []
        depth = len(behaviour.accepts)
        self.drafts = 0
        self.accepted = [0] * depth
        self.drafted = [0] * depth
        self.phase_s = {"draft": 0.0, "verify": 0.0, "host": 0.0}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._ok)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/get_server_info", self._server_info)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        return app

    async def start(self) -> str:
        """Listen on a free port of the loopback and return the address."""
        self.runner = web.AppRunner(self.app(), shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        host, port = self.runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def stop(self):
        await self.runner.cleanup()

    async def _ok(self, _):
        return web.Response(text="ok")

    async def _version(self, _):
        return web.json_response({"version": "0.0-fake"})

    async def _models(self, _):
        return web.json_response({"data": [{"id": "fake-model"}]})

    async def _tokenize(self, request):
        body = await request.json()
        content = body["messages"][-1]["content"]
        return web.json_response({"tokens": [1, 2, 3, *(ord(c) for c in content), 4, 5]})

    async def _metrics(self, _):
        if not self.behaviour.metrics:
            return web.Response(status=404)
        lines = ["# HELP nothing"]
        accepted, drafted = sum(self.accepted), sum(self.drafted)
        if self.behaviour.names == "sglang":
            lines += [f'sglang:spec_verify_calls_total{{tp="0"}} {self.drafts}']
            lines += [f'sglang:generation_tokens_total{{tp="0"}} {self.drafts + accepted + self.num_requests}']
            lines += [f'sglang:num_requests_total{{tp="0"}} {self.num_requests}']
        elif self.behaviour.accepts:
            lines += [f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self.drafts}']
            lines += [f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}']
            lines += [f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}']
            for position, count in enumerate(self.accepted):
                label = f'engine="0",position="{position}"'
                lines += [f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label}}} {count}"]
        if self.behaviour.names == "slipstream":
            lines += [f"slipstream_target_passes_total {self.drafts}", "sglang:spec_accept_length 1.0"]
            lines += [] if self.behaviour.accepts else ["vllm:spec_decode_num_drafts_total 0"]
            for phase, seconds in self.phase_s.items():
                lines += [f'slipstream_phase_seconds_total{{phase="{phase}"}} {seconds}']
            for name, count in (("passes", self.drafts), ("rows", self.drafts), ("tokens", self.drafts + accepted)):
                lines += [f'slipstream_decode_{name}_total{{context="256"}} {count}']
            for name in ("draft", "verify"):
                lines += [f'slipstream_decode_{name}_seconds_total{{context="256"}} {self.phase_s[name]}']
            for position, count in enumerate(self.drafted):
                lines += [f'slipstream_drafted_tokens_total{{position="{position}"}} {count}']
        return web.Response(text="\n".join(lines) + "\n")

    async def _server_info(self, _):
        if self.behaviour.names != "sglang":
            return web.Response(status=404)
        length = {"avg_spec_accept_length": 1 + sum(self.accepted) / self.drafts} if self.drafts else {}
        return web.json_response({"version": "0.0-fake", "internal_states": [length]})

    def _tokens_of_step(self) -> int:
        """Draft, verify, and return how many tokens the step emits."""
        emitted = 1
        alive = True
        self.drafts += 1
        for depth, chance in enumerate(self.behaviour.accepts):
            self.drafted[depth] += 1
            alive = alive and self.rng.random() < chance
            if alive:
                self.accepted[depth] += 1
                emitted += 1
        return emitted

    async def _generate(self, request):
        body = await request.json()
        b = self.behaviour
        options = body.get("stream_options", {})
        if not b.counts_chunks and options.get("continuous_usage_stats"):
            return web.json_response({"error": {"message": "unknown field"}}, status=400)
        if not body.get("stream"):
            return web.json_response(self._whole_answer(body))
        probe = body["max_tokens"] == 1
        if not probe:
            self.num_requests += 1
            self.bodies.append(body)
        number = self.num_requests
        if b.die_after and number > b.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if b.fail_every and number % b.fail_every == 0 and not probe:
            return web.json_response({"error": "overloaded"}, status=503)
        if b.hang_every and number % b.hang_every == 0 and not probe:
            await asyncio.sleep(1e6)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._stream(response, body, number)
        return response

    def _whole_answer(self, body):
        """Answer without streaming, for the evals: a canned reply for a prompt that contains its key."""
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        text = next((reply for key, reply in self.behaviour.reply.items() if key in prompt), "no idea")
        tokens = text.split(" ")
        if "messages" in body:
            content = [
                {
                    "token": t,
                    "logprob": -0.1,
                    "top_logprobs": [{"token": t, "logprob": -0.1}, {"token": "x", "logprob": -0.35}],
                }
                for t in tokens
            ]
            return {
                "choices": [
                    {
                        "index": 0,
                        "message": {"content": text},
                        "logprobs": {"content": content},
                        "finish_reason": "stop",
                    }
                ]
            }
        logprobs = {"tokens": tokens, "top_logprobs": [{t: -0.1, "x": -0.35} for t in tokens]}
        return {"choices": [{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "stop"}]}

    async def _stream(self, response, body, number):
        b = self.behaviour
        chat = "messages" in body
        wanted = body["max_tokens"] if b.ignore_eos else max(1, body["max_tokens"] // 2)
        prompt_tokens = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 7
        slow = 1.0 + (self.rng.gauss(0, b.noise) if b.noise else 0.0)
        sent = 0
        await asyncio.sleep(b.ttft_s * slow)
        while sent < wanted:
            if sent:
                await asyncio.sleep(b.step_s * slow)
            tokens = min(self._tokens_of_step() if sent else 1, wanted - sent)
            self.phase_s["draft"] += 0.2 * b.step_s
            self.phase_s["verify"] += 0.7 * b.step_s
            self.phase_s["host"] += 0.1 * b.step_s
            text = "".join(b.text.format(sent + i) for i in range(tokens))
            sent += tokens
            choice = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
            event = {"choices": [choice]}
            if body["stream_options"].get("continuous_usage_stats"):
                event["usage"] = {"prompt_tokens": prompt_tokens, "completion_tokens": sent}
            if b.garbage_every and number % b.garbage_every == 0 and wanted > 1:
                await response.write(b"data: {not json\n\n")
                return
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            if b.cut_every and number % b.cut_every == 0 and wanted > 1:
                return
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": sent}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())


def main():
    """Serve from a process of its own: `fake_server.py serve MODEL --port N --behaviour FILE`; most are ignored."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--behaviour", type=Path)
    parser.add_argument("--headless", action="store_true")
    arguments, _ = parser.parse_known_args()
    settings = json.loads(arguments.behaviour.read_text()) if arguments.behaviour else {}
    settings["accepts"] = tuple(settings.get("accepts", ()))
    if settings.pop("refuse_to_start", False):
        raise SystemExit("cannot find the model")
    if arguments.headless:  # a node that only computes
        signal.pause()
    web.run_app(
        FakeServer(Behaviour(**settings)).app(), host="127.0.0.1", port=arguments.port, print=None, shutdown_timeout=0.1
    )


if __name__ == "__main__":
    main()
