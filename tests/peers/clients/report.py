"""Runs the uses of a client one after the other and prints how each ended, one JSON object a line."""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, Field

URL = sys.argv[1] if len(sys.argv) > 1 else ""
MODEL = "embedded"
PROMPT = "What will the weather be in Oslo for the next two days?"


class Forecast(BaseModel):
    """A forecast for some days."""

    city: Literal["Oslo", "Rome", "Paris"]
    days: int = Field(ge=1, le=9)


class Person(BaseModel):
    """A person with a name that a small model has to end."""

    name: str = Field(max_length=30)
    born: int = Field(ge=1900, le=2020)


def weather(city: Literal["Oslo", "Rome", "Paris"], days: int) -> str:
    """Tell the weather of a city for some days."""
    return f"It will be {len(city)} degrees in {city} for {days} days."


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome", "Paris"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def run_all(uses: list[Callable[[], object]]) -> None:
    """Run every use; one that raises has failed."""
    for use in uses:
        try:
            outcome = use()
            if inspect.isawaitable(outcome):
                asyncio.run(_awaited(outcome))
            found = {"use": use.__name__, "ok": True}
        except Exception:  # noqa: BLE001 (whatever a client raises is the finding)
            found = {"use": use.__name__, "ok": False, "why": traceback.format_exc()[-1500:]}
        print(json.dumps(found), flush=True)  # noqa: T201 (the runner reads it)


async def _awaited(outcome: object) -> None:
    assert inspect.isawaitable(outcome)
    await outcome
