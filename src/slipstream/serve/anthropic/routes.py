"""The routes of Anthropic's Messages API."""

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from slipstream.serve.anthropic.answer import MessageWriter
from slipstream.serve.anthropic.request import THEIRS, MessagesRequest, Prompt, chat_of
from slipstream.serve.convert import MAX_TOKENIZED
from slipstream.serve.errors import HttpError
from slipstream.serve.service import Service
from slipstream.serve.stream import STREAMED, Json


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post("/v1/messages", responses=STREAMED, tags=["generation"])
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a chat as Anthropic's API does."""
        try:
            jobs = await service.jobs(request, chat_of(body))
        except HttpError as error:
            raise error.renamed(THEIRS) from error
        head: Json = {"id": f"msg_{request.state.request_id}", "model": body.model or service.config.model_name}
        if simulated := service.worker.simulated_acceptance:
            head["simulated_acceptance"] = list(simulated)
        writer = MessageWriter(service.tokenizer, head, request.state.request_id, body.stream)
        return await service.generator.respond(request, jobs, writer)

    @app.post("/v1/messages/count_tokens", tags=["tokens"])
    async def count_tokens(body: Prompt, request: Request) -> Response:
        """Count the tokens of a chat."""
        service.converter.check_model(body.model)

        def answer() -> JSONResponse:
            return JSONResponse({"input_tokens": len(service.converter.prompt(chat_of(body), MAX_TOKENIZED).tokens)})

        return await service.token_threads.run(len(await request.body()), answer)
