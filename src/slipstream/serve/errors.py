"""What a client is told when something is wrong: an HTTP status and an error object in its API's form."""

import re
from collections.abc import Mapping
from typing import Any

from slipstream.errors import RankLostError, SlipstreamError


class HttpError(SlipstreamError):
    """An answer that is an error.

    Args:
        param: the request's field at fault.
        retry_after_s: when trying again may help.
        code: a word that programs tell this error by; the status where there is none.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that go with the status."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def body(self) -> dict[str, Any]:  # JSON
        """Return the error object clients of OpenAI's API expect."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error"),
                "param": self.param,
                "code": self.status if self.code is None else self.code,
            }
        }

    def renamed(self, names: Mapping[str, str], prefix: str = "") -> "HttpError":
        """Return the same error for another API, whose fields have other names.

        Args:
            names: that API's field for each of ours; a field within another may have its own.
            prefix: what stands before the others.
        """
        if self.param is None:
            return self
        first, dot, rest = (self.param, "", "") if self.param in names else self.param.partition(".")
        theirs = names.get(first, prefix + first)
        message = re.sub(rf"\b{re.escape(first)}\b", lambda _: theirs, str(self))
        return HttpError(
            self.status, message, param=theirs + dot + rest, retry_after_s=self.retry_after_s, code=self.code
        )

    def for_path(self, path: str, request_id: str) -> dict[str, Any]:  # JSON
        """Return the error object in the form of the API a path belongs to."""
        return self.anthropic(request_id) if path.startswith("/v1/messages") else self.body()

    def anthropic(self, request_id: str) -> dict[str, Any]:  # JSON
        """Return the error object clients of Anthropic's API expect; it has no place for the field but the message."""
        message = str(self)
        if self.param is not None and self.param not in message:
            message = f"{self.param}: {message}"
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def aborted() -> HttpError:
    """Return the end of an answer that its client called off."""
    return HttpError(499, "The answer was ended by a call of /abort_request.")


def queue_full(limit: int) -> HttpError:
    """Return the answer to one request too many."""
    return HttpError(429, f"The server already has {limit} answers under way or waiting; try again.", retry_after_s=1)


def too_many(asked: int, limit: int) -> HttpError:
    """Return the answer to a request that no amount of waiting would make room for."""
    return HttpError(400, f"The request asks for {asked} answers; the server takes {limit} at a time. Ask for fewer.")


def too_long(message: str, field: str) -> HttpError:
    """Return the answer to a request that the context has no room for, by the code that clients look for."""
    return HttpError(400, message, param=field, code="context_length_exceeded")


def shutting_down() -> HttpError:
    """Return the answer to a request that comes after the server was told to stop."""
    return HttpError(503, "The server is shutting down and takes no new requests.", retry_after_s=5)


def stopped() -> HttpError:
    """Return the end of an answer that was still under way when the server stopped."""
    return HttpError(503, "The server stopped before the answer was finished.", retry_after_s=5)


def too_many_connections(limit: int) -> HttpError:
    """Return the answer to one connection too many."""
    return HttpError(
        503, f"The server already has {limit} clients connected (--max-connections); try again.", retry_after_s=1
    )


def request_unfinished(timeout_s: float) -> HttpError:
    """Return the answer to a client that did not send the rest of its request."""
    return HttpError(408, f"The request did not arrive within {timeout_s:g} s (the server's --read-timeout).")


def lost(error: RankLostError) -> HttpError:
    """Return the answer where part of the model is gone."""
    return HttpError(503, f"{error} The server cannot answer until it is restarted.")


def timed_out(timeout_s: float) -> HttpError:
    """Return the answer to a request that took too long."""
    return HttpError(504, f"The answer was not finished within {timeout_s:g} s (the server's --request-timeout).")
