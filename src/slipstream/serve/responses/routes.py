"""The routes of OpenAI's Responses API."""

import time
import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from slipstream.serve.errors import HttpError
from slipstream.serve.responses.answer import ResponseWriter
from slipstream.serve.responses.items import messages_of
from slipstream.serve.responses.request import THEIRS, ResponsesRequest
from slipstream.serve.responses.store import ResponseStore
from slipstream.serve.service import Service
from slipstream.serve.stream import STREAMED, Json


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    store = ResponseStore()

    @app.post("/v1/responses", responses=STREAMED, tags=["generation"])
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """Answer as OpenAI's Responses API does."""
        caller = request.state.caller
        before = body.previous_response_id
        history = [] if before is None else store.before(caller, before).messages
        try:
            jobs = await service.jobs(request, body.chat(history))
        except HttpError as error:
            raise error.renamed(THEIRS) from error
        head: Json = {
            "id": f"resp_{uuid.uuid4().hex}",  # not the request's id, which is the client's to choose
            "created_at": int(time.time()),
            "model": body.model or service.config.model_name,
        }
        if simulated := service.worker.simulated_acceptance:
            head["simulated_acceptance"] = list(simulated)

        def finished(response: Json) -> None:
            if body.store is not False:
                said = [*messages_of(body.input), *messages_of(response["output"])]
                store.add(caller, response, _input_items(body), [*history, *said])

        writer = ResponseWriter(body, head, service.tokenizer, finished)
        return await service.generator.respond(request, jobs, writer, (head["id"],))

    @app.get("/v1/responses/{response_id}", tags=["generation"])
    async def retrieve(response_id: str, request: Request) -> Json:
        """Return a response that was kept."""
        return store.get(request.state.caller, response_id).response

    @app.get("/v1/responses/{response_id}/input_items", tags=["generation"])
    async def input_items(response_id: str, request: Request) -> Json:
        """Return what a response was asked."""
        items = list(store.get(request.state.caller, response_id).input_items)
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
        return {"object": "list", "data": items, "has_more": False, **ends}

    @app.delete("/v1/responses/{response_id}", tags=["generation"])
    async def remove(response_id: str, request: Request) -> Json:
        """Forget a response."""
        store.remove(request.state.caller, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.post("/v1/responses/{response_id}/cancel", tags=["generation"])
    async def cancel(response_id: str, request: Request) -> Json:
        """End a response that is under way; one that is over cannot be ended."""
        if service.generator.abort(request.state.caller, response_id):
            return {"id": response_id, "object": "response", "status": "cancelled"}
        store.get(request.state.caller, response_id)
        raise HttpError(400, "Cannot cancel a synchronous response. This one is over.", param="response_id")


def _input_items(body: ResponsesRequest) -> list[Json]:
    if isinstance(body.input, str):
        content = [{"type": "input_text", "text": body.input}]
        return [{"type": "message", "id": _item_id(), "role": "user", "status": "completed", "content": content}]
    return [{"type": "message", "id": _item_id(), **item} for item in body.input]


def _item_id() -> str:
    return f"msg_{uuid.uuid4().hex}"
