"""The HTTP application: routes, and errors in the form OpenAI's clients expect."""

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import slipstream
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.engine import Engine
from slipstream.serve import admin, information
from slipstream.serve.answers import Json, Wants
from slipstream.serve.config import ServeConfig
from slipstream.serve.convert import Converter
from slipstream.serve.errors import HttpError
from slipstream.serve.gate import Gate
from slipstream.serve.generate import Generator
from slipstream.serve.grammar import GrammarCompiler
from slipstream.serve.metrics import Metrics
from slipstream.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, Generation, TokenizeRequest
from slipstream.serve.service import Service
from slipstream.serve.ticket import Job
from slipstream.serve.worker import EngineWorker

_FORM = re.compile(r"[\[(-]|^(?:str|int|float|bool)$")
_LONG_PROMPT = 1 << 14  # characters; tokenizing more than this would hold up the event loop for milliseconds
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in (
        (400, "A field has a wrong value; `error.param` names it."),
        (401, "The API key is missing or wrong."),
        (404, "There is no such model."),
        (413, "The body is too large."),
        (415, "The body is not JSON."),
        (429, "Too many answers are under way or waiting; `Retry-After` says when to try again."),
        (503, "The server is shutting down."),
        (504, "The answer took too long."),
    )
}
B = TypeVar("B", bound=Generation)


def build_app(engine: Engine, tokenizer: Tokenizer, config: ServeConfig, started: int) -> FastAPI:
    """Return the application; its engine's thread runs from start-up to shut-down.

    Args:
        started: when the server started, in seconds since 1970 (/v1/models reports it).
    """
    worker = EngineWorker(engine, tokenizer, config.max_waiting)
    grammars = GrammarCompiler(tokenizer, engine.vocab_size)
    service = Service(
        engine,
        tokenizer,
        worker,
        config,
        Converter(engine, tokenizer, grammars, config),
        Generator(worker, tokenizer, config),
        Metrics(engine, worker, config.model_name),
        started,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await worker.stop()

    app = FastAPI(
        title="Slipstream",
        version=slipstream.__version__,
        summary="OpenAI-compatible answers, with exact speculative decoding.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    _add_generation(app, service)
    _add_tokens(app, service)
    information.add_routes(app, service)
    admin.add_routes(app, engine, worker)
    _add_errors(app)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Gate, config=config)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    converter, generator = service.converter, service.generator

    @app.post("/v1/chat/completions", responses=_ERRORS, tags=["generation"])
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a chat."""
        length = sum(len(str(message.content)) for message in body.messages)
        jobs = await _maybe_in_thread(length, converter.chat, body)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return await generator.respond(request, jobs, _wants(body, Wants("chat", body.stream, logprobs)))

    @app.post("/v1/completions", responses=_ERRORS, tags=["generation"])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, or several."""
        jobs = await _maybe_in_thread(_length(body.prompt), converter.completion, body)
        wants = Wants(
            "completion",
            body.stream,
            body.logprobs,
            prompt_logprobs=body.prompt_logprobs is not None,
            echo=body.echo,
            drop_answer=body.max_tokens == 0,
        )
        return await generator.respond(request, jobs, _wants(body, wants))


def _add_tokens(app: FastAPI, service: Service) -> None:
    converter, tokenizer = service.converter, service.tokenizer

    @app.post("/tokenize", responses=_ERRORS, tags=["tokens"])
    async def tokenize(body: TokenizeRequest) -> Json:
        """Return the tokens of a text or of a chat."""
        converter.check_model(body.model)
        if body.messages is not None:
            ids = converter.chat_prompt(body.messages, body.add_generation_prompt, {})
        else:
            ids = tokenizer.encode(body.prompt or "", body.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": service.engine.config.max_context}

    @app.post("/detokenize", responses=_ERRORS, tags=["tokens"])
    async def detokenize(body: DetokenizeRequest) -> Json:
        """Return the text of tokens."""
        converter.check_model(body.model)
        if wrong := [token for token in body.tokens if token >= service.engine.vocab_size]:
            raise HttpError(400, f"tokens has {wrong[0]}; ids end at {service.engine.vocab_size - 1}.", param="tokens")
        return {"prompt": tokenizer.decode(body.tokens, body.skip_special_tokens)}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HttpError)
    async def on_http_error(_: Request, error: HttpError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(_invalid(error.errors()).body(), 400)

    @app.exception_handler(HTTPException)
    async def on_framework_error(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(HttpError(error.status_code, str(error.detail)).body(), error.status_code, error.headers)

    @app.exception_handler(Exception)  # our mistake: it goes to the log with its traceback, the client is told of it
    async def on_our_error(request: Request, _: Exception) -> JSONResponse:
        error = HttpError(500, f"The server failed; its log says how, under request {request.state.request_id}.")
        # uvicorn ends the connection of a request that failed; a client that is told so does not use it again.
        return JSONResponse(error.body(), 500, {"Connection": "close"})


def _invalid(errors: Sequence[Any]) -> HttpError:
    """Name the first field at fault. What the client sent is not repeated: it may be large, or secret."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return HttpError(400, f"The body is not JSON (at character {first['loc'][-1]}: {first['ctx']['error']}).")
    path = _path(first)
    if not path:
        return HttpError(400, f"the body: {first['msg']}")
    # A field of several forms has an error for each; those of the form that was meant go deeper than its type.
    same = [error for error in errors if _path(error)[:1] == path[:1]]
    meant = [error for error in same if not error["type"].endswith("_type")] or same
    where = ".".join(_path(meant[0]))
    said = "; or: ".join(dict.fromkeys(error["msg"] for error in meant if _path(error) == _path(meant[0])))
    return HttpError(400, f"{where}: {said}", param=path[0])


def _path(error: Any) -> list[str]:
    """Return where an error is, without the body and pydantic's names for the forms a field may have."""
    return [str(part) for part in error["loc"] if part != "body" and not _FORM.search(str(part))]


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
    )


async def _maybe_in_thread(length: int, convert: Callable[[B], list[Job]], body: B) -> list[Job]:
    """Convert a request; a long prompt is tokenized off the event loop."""
    return await asyncio.to_thread(convert, body) if length > _LONG_PROMPT else convert(body)


def _length(prompt: object) -> int:
    """Return about how many characters a prompt has."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(part) for part in prompt if isinstance(part, str)) if isinstance(prompt, list) else 0
