"""The HTTP application: routes, and errors in the form OpenAI's clients expect."""

import asyncio
import dataclasses
import difflib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import slipstream
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.drafts import DraftShelf
from slipstream.engine.engine import Engine
from slipstream.serve import admin, foreign, information, tokens
from slipstream.serve.answers import AnswerWriter, Wants
from slipstream.serve.anthropic import routes as anthropic_routes
from slipstream.serve.body import JsonRoute
from slipstream.serve.config import ServeConfig
from slipstream.serve.convert import Converter
from slipstream.serve.defaults import sampling_defaults
from slipstream.serve.errors import HttpError
from slipstream.serve.gate import Gate
from slipstream.serve.generate import Generator
from slipstream.serve.grammar import GrammarCompiler
from slipstream.serve.learning import Learning
from slipstream.serve.logprobs import LogprobWriter
from slipstream.serve.metrics import Metrics
from slipstream.serve.protocol import ChatRequest, CompletionRequest, Generation
from slipstream.serve.responses import routes as responses_routes
from slipstream.serve.service import Service
from slipstream.serve.sglang import routes as sglang_routes
from slipstream.serve.stream import STREAMED, Json
from slipstream.serve.threads import Threads
from slipstream.serve.tools.chat import ChatRenderer
from slipstream.serve.tools.dialect import Dialect
from slipstream.serve.worker import EngineWorker

_ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "400: a field has a wrong value, which `error.param` names. 401: the key is missing or wrong. "
        "404: there is no such model or route. 405: the route takes another method. 413: the body is too large. "
        "415: it is not JSON. 429: too much is under way; `Retry-After` says when to try again. 503: the server is "
        "shutting down. 504: the answer took too long.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "error": {
                            "type": "object",
                            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
                            "required": ["message", "type"],
                        }
                    },
                    "required": ["error"],
                }
            }
        },
    }
}
_MAX_SHOWN_PATH = 256


def build_app(engine: Engine, tokenizer: Tokenizer, config: ServeConfig, started: int) -> FastAPI:
    """Return the application; its engine's thread runs from start-up to shut-down.

    Args:
        started: when the server started, in seconds since 1970 (/v1/models reports it).
    """
    tokenizer.spelled.encode("")  # made now: a large vocabulary takes seconds, and the first chat would wait for it
    worker = EngineWorker(engine, tokenizer, config.max_waiting)
    grammars = GrammarCompiler(tokenizer, engine.vocab_size)
    shelf = DraftShelf(engine)
    service = Service(
        engine,
        tokenizer,
        worker,
        config,
        grammars,
        Threads(2, "request"),
        Threads(1, "tokenize"),
        Converter(
            engine,
            tokenizer,
            config,
            worker.max_answers,
            sampling_defaults(config.generation_config, tokenizer.origin),
            Dialect.of(tokenizer, config.tool_call_parser, config.reasoning_parser),
            ChatRenderer(tokenizer, config.allow_special_in_content),
        ),
        Generator(worker, tokenizer, config),
        Metrics(engine, worker, config.model_name, shelf),
        started,
    )

    learning = None if config.learn is None else Learning(config.learn, worker, shelf)
    if learning is not None:
        worker.on_answer = learning.keep
        service.metrics.learning = learning

    app = FastAPI(
        title="Slipstream",
        version=slipstream.__version__,
        summary="OpenAI-compatible answers, with exact speculative decoding.",
        lifespan=_lifespan(service, learning),
        responses=_ERRORS,
        docs_url=None,
        redoc_url=None,
        servers=[{"url": config.root_path}] if config.root_path else None,
    )
    app.state.service = service
    app.router.route_class = JsonRoute
    _add_generation(app, service)
    for api in (tokens, anthropic_routes, responses_routes, sglang_routes):
        api.add_routes(app, service)
    information.add_routes(app, service)
    foreign.add_routes(app, service)
    admin.add_routes(app, engine, worker, shelf)
    _add_errors(app)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Gate, config=config)
    return app


def _lifespan(service: Service, learning: Learning | None) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return what starts the threads of a server, and ends them."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        if learning is not None:
            learning.start()
        yield
        if learning is not None:
            await asyncio.to_thread(learning.stop)
        service.grammars.close()
        service.threads.close()
        service.token_threads.close()
        await service.worker.stop()

    return lifespan


def _add_generation(app: FastAPI, service: Service) -> None:
    scores = {as_ids: LogprobWriter(service.tokenizer, as_ids) for as_ids in (False, True)}

    def writer(request: Request, body: Generation, wants: Wants) -> AnswerWriter:
        own = f"{'chatcmpl' if wants.kind == 'chat' else 'cmpl'}-{body.request_id or request.state.request_id}"
        head = {
            "id": body.rid or own,
            "created": int(time.time()),
            "model": service.config.model_name,
            "system_fingerprint": service.fingerprint,
        }
        simulated = service.worker.simulated_acceptance
        whole = _wants(body, wants)
        return AnswerWriter(whole, service.tokenizer, scores[whole.tokens_as_ids], head, simulated)

    @app.post("/v1/chat/completions", responses=STREAMED, tags=["generation"])
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a chat."""
        jobs = await service.jobs(request, body)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        wants = Wants(
            "chat",
            body.stream,
            logprobs,
            prompt_ids=body.return_prompt_token_ids,
            reasoning=body.include_reasoning,
            reasons=service.converter.dialect.reasoning is not None,
        )
        return await service.generator.respond(request, jobs, writer(request, body, wants), _names(body))

    @app.post("/v1/completions", responses=STREAMED, tags=["generation"])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, or several."""
        jobs = await service.jobs(request, body)
        wants = Wants(
            "completion",
            body.stream,
            body.logprobs,
            echo=body.echo,
            drop_answer=body.max_tokens == 0,
        )
        return await service.generator.respond(request, jobs, writer(request, body, wants), _names(body))


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HttpError)
    async def on_http_error(request: Request, error: HttpError) -> JSONResponse:
        return JSONResponse(_said(error, request), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def on_framework_error(request: Request, error: HTTPException) -> JSONResponse:
        said = _said(HttpError(error.status_code, _sentence(error, request)), request)
        return JSONResponse(said, error.status_code, error.headers)

    @app.exception_handler(Exception)  # our mistake: it goes to the log with its traceback, the client is told of it
    async def on_our_error(request: Request, _: Exception) -> JSONResponse:
        error = HttpError(500, f"The server failed; its log says how, under request {request.state.request_id}.")
        # uvicorn ends the connection of a request that failed; a client that is told so does not use it again.
        return JSONResponse(_said(error, request), 500, {"Connection": "close"})


def _said(error: HttpError, request: Request) -> Json:
    return error.for_path(request.scope["path"], request.state.request_id)


def _sentence(error: HTTPException, request: Request) -> str:
    """Return what is wrong; the framework's own errors, of a wrong path or method, say no more than that."""
    path = request.scope["path"][:_MAX_SHOWN_PATH]
    if error.status_code == 404:
        near = difflib.get_close_matches(path, [getattr(route, "path", "") for route in request.app.routes], 1, 0.8)
        return f"There is no {path} here; " + (f"did you mean {near[0]}?" if near else "/docs lists what there is.")
    if error.status_code == 405:
        return f"{path} takes {(error.headers or {}).get('Allow')}, not {request.method}."
    return str(error.detail)


def _names(body: Generation) -> list[str]:
    """Return what a client calls its request by, to abort it."""
    return [name for name in (body.rid, body.request_id) if name is not None]


def _wants(body: Generation, wants: Wants) -> Wants:
    """Complete what chats and completions ask for in the same way."""
    options = body.stream_options
    return dataclasses.replace(
        wants,
        usage=not body.stream or (options is not None and options.include_usage),
        running_usage=options is not None and options.include_usage and options.continuous_usage_stats,
        speculation=body.speculation_stats,
        tokens=body.return_tokens,
        token_ids=body.return_token_ids,
        tokens_as_ids=body.return_tokens_as_token_ids,
        prompt_logprobs=body.prompt_logprobs is not None,
    )
