"""A request's body: JSON read and checked off the event loop where it is long, and given up at its first mistakes."""

import inspect
import json
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response

from slipstream.serve.errors import HttpError

MAX_DEPTH = 128  # what llguidance reads of a schema; deeper values end in recursion errors elsewhere
MAX_PARTS = 1 << 17  # objects, arrays and names: each takes 100 bytes and time under Python's lock
_NAME_LENGTH = 100  # of a client's own names in messages
_FORM = re.compile(r"[\[(-]|^(?:str|int|float|bool|[A-Z]\w*)$")

M = TypeVar("M", bound=BaseModel)


class JsonRoute(APIRoute):
    """A route whose parameter `body` is a pydantic model. FastAPI describes it; `parse` reads it.

    FastAPI itself parses and checks bodies on the event loop, all mistakes of a body of megabytes included.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        model = get_type_hints(self.endpoint).get("body")
        if model is None:
            return super().get_route_handler()
        endpoint = self.endpoint
        takes_request = "request" in inspect.signature(endpoint).parameters

        async def handle(request: Request) -> Response:
            # A web page may send other types to any server without asking for leave first.
            if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise HttpError(415, "The body must be JSON; send the header 'Content-Type: application/json'.")
            if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
                raise HttpError(415, f"The body is encoded as {encoding[:_NAME_LENGTH]}; send it as it is.")
            content = await request.body()
            threads = request.app.state.service.threads
            body = await threads.run(len(content), lambda: parse(content, model), holds_lock=True)
            answer = await (endpoint(body, request) if takes_request else endpoint(body))
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        return handle


def parse(content: bytes, model: type[M]) -> M:
    """Return the body as a model; raises HttpError that names the first field at fault."""
    _check_parts(content)
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        raise HttpError(400, f"The body is not JSON (at character {error.pos}: {error.msg}).") from error
    except RecursionError as error:
        raise HttpError(400, f"The body nests deeper than {MAX_DEPTH} levels.") from error
    except ValueError as error:  # not Unicode, or a number of thousands of digits
        raise HttpError(400, f"The body is not JSON ({error}).") from error
    if content.count(b"[") + content.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    return checked(value, model)


def checked(value: object, model: type[M]) -> M:
    """Return JSON as a model; raises HttpError that names the first field at fault."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_input=False, include_context=False)) from None


def _check_parts(content: bytes) -> None:
    """Count before anything is built. Texts may hold as many braces and colons as they like."""
    if _num_parts(content) <= MAX_PARTS:
        return
    plain = content.replace(rb"\\", b"").replace(rb"\"", b"")
    if _num_parts(b"".join(plain.split(b'"')[::2])) > MAX_PARTS:
        raise HttpError(400, f"The body has more than {MAX_PARTS} objects, arrays and names.")


def _num_parts(content: bytes) -> int:
    return content.count(b"{") + content.count(b"[") + content.count(b":")


def _check_depth(value: object) -> None:
    fields = value.items() if isinstance(value, dict) else [("", value)]
    for name, field in fields:
        level = [field]
        for _ in range(MAX_DEPTH):
            level = [
                child
                for parent in level
                if isinstance(parent, dict | list)
                for child in (parent.values() if isinstance(parent, dict) else parent)
            ]
            if not level:
                break
        else:
            where = name[:_NAME_LENGTH] or None
            raise HttpError(400, f"{where or 'The body'} nests deeper than {MAX_DEPTH} levels.", param=where)


def _invalid(errors: Sequence[Any]) -> HttpError:
    """Name the first field at fault. What the client sent is not repeated: it may be large, or secret."""
    first = errors[0]
    path = _path(first)
    if not path:
        return HttpError(400, _said(first) if first["type"] == "value_error" else "The body must be a JSON object.")
    # A field of several forms has an error for each; those of the form that was meant go deeper than its type.
    same = [error for error in errors if _path(error)[:1] == path[:1]]
    meant = [error for error in same if not error["type"].endswith("_type")] or same
    where = ".".join(_path(meant[0]))
    said = "; or: ".join(dict.fromkeys(_said(error) for error in meant if _path(error) == _path(meant[0])))
    return HttpError(400, f"{where}: {said}", param=path[0])


def _said(error: Any) -> str:
    """Return an error's message, without pydantic's words before one of ours."""
    return str(error["msg"]).removeprefix("Value error, ")


def _path(error: Any) -> list[str]:
    """Return where an error is, without pydantic's names for the forms a field may have."""
    return [str(part)[:_NAME_LENGTH] for part in error["loc"] if not _FORM.search(str(part))]
