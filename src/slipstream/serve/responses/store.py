"""Responses that may be asked for again or gone on from: the latest ones, in memory, each for who asked for it."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.serve.errors import HttpError
from slipstream.serve.stream import Json

MAX_RESPONSES = 4096
MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Stored:
    """A response, and the chat up to its end without the instructions, which hold for one response only."""

    response: Json
    input_items: Sequence[Json]
    messages: Sequence[Json]
    caller: str
    num_bytes: int


@dataclass
class ResponseStore:
    """The latest responses; older ones make way, by number and by size."""

    max_responses: int = MAX_RESPONSES
    max_bytes: int = MAX_BYTES
    _stored: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    _num_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)  # long answers are written on threads of their own

    def add(self, caller: str, response: Json, input_items: Sequence[Json], messages: Sequence[Json]) -> None:
        """Keep a response; one that is larger than everything together may be is not kept."""
        size = len(json.dumps(response)) + len(json.dumps(input_items)) + len(json.dumps(messages))
        with self._lock:
            self._stored[response["id"]] = Stored(response, input_items, messages, caller, size)
            self._num_bytes += size
            while self._num_bytes > self.max_bytes or len(self._stored) > self.max_responses:
                _, oldest = self._stored.popitem(last=False)
                self._num_bytes -= oldest.num_bytes

    def get(self, caller: str, response_id: str) -> Stored:
        """Return a caller's response; raises HttpError if there is none (any more)."""
        found = self._find(caller, response_id)
        if found is None:
            raise HttpError(404, f"Response with id {response_id[:128]!r} not found. {self._kept}")
        return found

    def before(self, caller: str, response_id: str) -> Stored:
        """Return the response that another one goes on from; a wrong id is a mistake in the request, as with OpenAI."""
        found = self._find(caller, response_id)
        if found is None:
            said = f"Previous response with id {response_id[:128]!r} not found. {self._kept}"
            raise HttpError(400, said, param="previous_response_id", code="previous_response_not_found")
        return found

    @property
    def _kept(self) -> str:
        return f"This server keeps the latest {self.max_responses} that were not sent with store false, until it ends."

    def _find(self, caller: str, response_id: str) -> Stored | None:
        found = self._stored.get(response_id)
        return None if found is None or found.caller != caller else found

    def remove(self, caller: str, response_id: str) -> None:
        """Forget a caller's response; raises HttpError if there is none."""
        found = self.get(caller, response_id)
        with self._lock:
            if self._stored.pop(response_id, None) is not None:
                self._num_bytes -= found.num_bytes
