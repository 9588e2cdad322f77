"""Small routes that the clients of vLLM and SGLang call: model, load, cache, aborted requests."""

from typing import Annotated

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

import slipstream
from slipstream.engine.engine import Engine
from slipstream.serve.admin import describe
from slipstream.serve.errors import HttpError
from slipstream.serve.gate import check_admin
from slipstream.serve.service import Service
from slipstream.serve.stream import Json
from slipstream.serve.structured import Part
from slipstream.serve.ticket import Job
from slipstream.speculation.sampling import SamplingParams

_PATIENCE_S = 20.0  # SGLang's, for a token of /health_generate


class AbortRequest(Part):
    """The body of /abort_request."""

    rid: Annotated[str, Field(max_length=512)] | None = None
    abort_all: bool = False


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    _add_information(app, service)
    _add_cache(app, service)

    @app.post("/abort_request", tags=["information"])
    async def abort_request(body: AbortRequest, request: Request) -> Json:
        """End the caller's answers with that id: `rid` of /generate, or any request's X-Request-ID."""
        if body.abort_all:
            check_admin(service.config, request.headers)
            return {"aborted": service.generator.abort_all()}
        if body.rid is None:
            raise HttpError(400, "rid names the request to end; it is missing.", param="rid")
        return {"aborted": service.generator.abort(request.state.caller, body.rid)}


def _add_information(app: FastAPI, service: Service) -> None:
    config, tokenizer, worker = service.config, service.tokenizer, service.worker

    @app.get("/model_info", tags=["information"])
    @app.get("/get_model_info", include_in_schema=False)
    async def model_info() -> Json:
        """Describe the model as SGLang does."""
        return {
            "model_path": config.model_name,
            "served_model_name": config.model_name,
            "tokenizer_path": config.model_name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "max_context_length": service.engine.config.max_context,
            "vocab_size": service.engine.vocab_size,
        }

    @app.get("/server_info", tags=["information"])
    @app.get("/get_server_info", include_in_schema=False)
    async def server_info() -> Json:
        """Describe the server as SGLang does: what there is room for, and what its bench reads at a run's end."""
        engine = service.engine
        length = engine.stats.acceptance.acceptance_length
        return {
            **describe(engine),
            "internal_states": [{"avg_spec_accept_length": length}],
            "version": slipstream.__version__,
            "model_path": config.model_name,
            "served_model_name": config.model_name,
            "context_length": engine.config.max_context,
            "max_running_requests": engine.config.max_requests,
            "max_total_num_tokens": service.metrics.cache_tokens,
            "page_size": engine.config.page_size,
        }

    @app.get("/tokenizer_info", tags=["information"])
    async def tokenizer_info() -> Json:
        """Describe the tokenizer as vLLM does."""
        return {"tokenizer_class": type(tokenizer).__name__, **tokenizer.describe()}

    @app.get("/load", tags=["information"])
    async def load() -> Json:
        """Return how many answers are under way or waiting."""
        return {"server_load": worker.num_open}

    @app.get("/get_load", include_in_schema=False)
    async def get_load() -> Response:
        """Return the same as SGLang does."""
        waiting = service.engine.num_waiting
        return JSONResponse([{"dp_rank": 0, "num_reqs": worker.num_open, "num_waiting_reqs": waiting}])

    @app.get("/health_generate", tags=["information"])
    async def health_generate() -> Response:
        """Answer 200 once the model has made a token, or if it is busy making others."""
        if worker.num_open == 0:
            await service.generator.probe(_one_token(service), _PATIENCE_S)
        return JSONResponse({"status": "ready"} if worker.alive else {"status": "dead"}, 200 if worker.alive else 503)


def _add_cache(app: FastAPI, service: Service) -> None:
    def forget(engine: Engine) -> bool:
        return engine.forget_prompts()

    @app.get("/flush_cache", include_in_schema=False)
    @app.post("/flush_cache", response_class=PlainTextResponse, tags=["admin"])
    async def flush_cache() -> Response:
        """Drop the cached pages of earlier prompts, if nothing is under way (SGLang's name for it)."""
        if await service.worker.call(forget):
            return PlainTextResponse("Cache flushed.\n")
        raise HttpError(400, "Answers are under way; the cache is not flushed. Try again when they are over.")

    @app.post("/reset_prefix_cache", tags=["admin"])
    async def reset_prefix_cache() -> Json:
        """Drop the cached pages of earlier prompts, if nothing is under way (vLLM's name for it)."""
        return {"success": await service.worker.call(forget)}


def _one_token(service: Service) -> Job:
    prompt = service.tokenizer.bos_token_id
    return Job((0 if prompt is None else prompt,), SamplingParams(max_tokens=1), seed=0)
