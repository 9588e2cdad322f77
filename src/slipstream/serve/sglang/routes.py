"""The route `/generate`."""

from collections.abc import Sequence

from fastapi import FastAPI, Request
from starlette.responses import Response

from slipstream.serve.errors import HttpError, too_many
from slipstream.serve.protocol import CompletionRequest
from slipstream.serve.service import Service
from slipstream.serve.sglang.answer import Asked, GenerateWriter
from slipstream.serve.sglang.request import THEIRS, GenerateRequest
from slipstream.serve.stream import STREAMED
from slipstream.serve.ticket import Job


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post("/generate", responses=STREAMED, tags=["generation"])
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue a text, or several, as SGLang's own API does."""
        asked: list[Asked] = []
        jobs: list[Job] = []
        completions = body.completions()
        num_answers = sum(one.n or 1 for one in completions)
        if num_answers > service.worker.max_answers:
            raise too_many(num_answers, service.worker.max_answers)
        names = _names(body, len(completions), request.state.request_id)
        for name, completion, start in zip(names, completions, _starts(body, completions), strict=True):
            try:
                own = await service.jobs(request, completion, bool(body.require_reasoning))
            except HttpError as error:
                raise error.renamed({"prompt": body.source, **THEIRS}, "sampling_params.") from error
            if start is not None and start > len(own[0].prompt):
                said = f"logprob_start_len is {start}, and the prompt has {len(own[0].prompt)} tokens; begin within it."
                raise HttpError(400, said, param="logprob_start_len")
            jobs += own
            drops = completion.max_tokens == 0
            asked += [Asked(name, completion.logprobs, start, drops) for _ in own]
        writer = GenerateWriter(body, asked, service.tokenizer)
        whole = (body.rid,) if isinstance(body.rid, str) else ()
        return await service.generator.respond(request, jobs, writer, whole, [one.name for one in asked])


def _names(body: GenerateRequest, size: int, request_id: str) -> list[str]:
    """Return the id of each prompt's answers: the client's, or the request's."""
    if isinstance(body.rid, list):
        if len(body.rid) != size:
            raise HttpError(400, f"rid has {len(body.rid)} entries for {size} prompts.", param="rid")
        return body.rid
    name = body.rid or request_id
    return [name] if size == 1 else [f"{name}_{index}" for index in range(size)]


def _starts(body: GenerateRequest, completions: Sequence[CompletionRequest]) -> list[int | None]:
    given = body.logprob_start_len
    starts = given if isinstance(given, list) else [given] * len(completions)
    return [start if one.prompt_logprobs is not None else None for start, one in zip(starts, completions, strict=True)]
