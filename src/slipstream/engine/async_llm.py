"""`AsyncLLM`: the Python interface for asyncio. Many callers share one engine, which runs on a thread of its own."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack, overload

from slipstream.checkpoint.hub import EMBEDDED
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.completion import Completion
from slipstream.engine.engine import Engine
from slipstream.engine.loading import LoadOptions, load
from slipstream.engine.output import Emission
from slipstream.engine.prompt import Messages, Prompt, Question, alone, ask, check_chat, questions, several
from slipstream.engine.settings import Sampling, Settings, load_options, sampling_params
from slipstream.engine.thread import EngineThread
from slipstream.errors import RequestError, SlipstreamError, StepError
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.statistics import AcceptanceStats
from slipstream.speculation.tree import TreeShape

Event = Emission | Exception
Deliver = Callable[[int, Event], None]
"""Hands the index-th answer of a call its next event; called on the engine's thread."""


class AsyncLLM:
    """A target with its draft, for asyncio: calls that run at once are answered in one batch.

    Loading takes a while and is not asynchronous: build it before the event loop has other work, or in a thread
    (`await asyncio.to_thread(AsyncLLM, "model")`).

    >>> async with AsyncLLM("embedded") as llm:
    ...     async for piece in llm.stream("Once upon a time"):
    ...         print(piece.text, end="", flush=True)

    Args: those of `LLM`.
    """

    def __init__(
        self,
        model: str | Path | LoadOptions = EMBEDDED,
        draft: str | Path | None = "auto",
        *,
        tree: TreeShape | None = None,
        device: str = "auto",
        **settings: Unpack[Settings],
    ) -> None:
        self._loaded = load(load_options(model, draft, tree, device, settings))
        self.tokenizer = self._loaded.tokenizer
        self.summary = self._loaded.summary
        self._calls = _Calls(self._loaded.engine, self.tokenizer)
        self._thread = EngineThread(self._loaded.engine, self._calls)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # A str is a sequence of str, so mypy sees the two overlap; the first is meant for it and comes first.
    @overload
    async def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **sampling: Unpack[Sampling],
    ) -> Completion: ...

    @overload
    async def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **sampling: Unpack[Sampling],
    ) -> list[Completion]: ...

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **sampling: Unpack[Sampling],
    ) -> Completion | list[Completion]:
        """Answer one prompt, or a list of them; see `LLM.generate`. Cancelling the call ends its requests."""
        wanted = sampling_params(params, sampling)
        if (listed := several(prompts)) is not None:
            return await self._answers(self._questions(listed, wanted, speculate))
        one = alone(prompts, wanted)
        return (await self._answers(self._questions([one], wanted, speculate)))[0]

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """Answer a chat: a list of messages, each with `role` and `content`."""
        check_chat(messages)
        return await self.generate(messages, params, speculate=speculate, **sampling)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[Emission, None]:
        """Yield an answer as it is made, a piece for each step; closing the iterator early ends the request."""
        wanted = sampling_params(params, sampling)
        one = alone(prompt, wanted)
        return self._pieces(self._questions([one], wanted, speculate))

    async def close(self) -> None:
        """End the thread and every answer under way; their callers get a RequestError."""
        await asyncio.to_thread(self._thread.stop)
        self._loaded.close()

    def _questions(self, prompts: Sequence[Prompt], params: SamplingParams, speculate: bool) -> list[Question]:
        return questions(prompts, params, speculate, self._loaded.engine, self.tokenizer)

    async def _answers(self, wanted: Sequence[Question]) -> list[Completion]:
        emissions: list[list[Emission]] = [[] for _ in wanted]
        async with aclosing(self._events(wanted)) as events:
            async for index, emission in events:
                emissions[index].append(emission)
        return [Completion.of(of_one) for of_one in emissions]

    async def _pieces(self, wanted: Sequence[Question]) -> AsyncGenerator[Emission, None]:
        async with aclosing(self._events(wanted)) as events:
            async for _, emission in events:
                yield emission

    async def _events(self, wanted: Sequence[Question]) -> AsyncGenerator[tuple[int, Emission], None]:
        """Yield what every step gives the questions, until all are answered; end those left over whatever happens."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

        def deliver(index: int, event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, (index, event))

        call = _Call(wanted, deliver)
        if not self._thread.command(lambda: self._calls.open(call)):
            raise RequestError("This AsyncLLM is closed; make another.")
        num_open = len(wanted)
        try:
            while num_open:
                index, event = await arrived.get()
                if isinstance(event, Exception):
                    raise event
                num_open -= event.finish_reason is not None
                yield index, event
        finally:
            self._thread.command(lambda: self._calls.shut(call))


class _Call:
    """One call's questions under way."""

    def __init__(self, wanted: Sequence[Question], deliver: Deliver) -> None:
        self.wanted = wanted
        self.deliver = deliver
        self.open_ids: set[int] = set()


class _Calls:
    """Which request belongs to which call; everything here runs on the engine's thread."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._places: dict[int, tuple[_Call, int]] = {}

    def open(self, call: _Call) -> None:
        """Queue a call's questions; one that cannot begin ends its call, and the thread lives on."""
        for index, question in enumerate(call.wanted):
            try:
                request_id = ask(self._engine, self._tokenizer, question)
            except Exception as error:  # noqa: BLE001 (raised at the caller)
                call.deliver(index, error)
                return
            self._places[request_id] = (call, index)
            call.open_ids.add(request_id)

    def shut(self, call: _Call) -> None:
        """End what is left of a call that nobody waits for."""
        for request_id in list(call.open_ids):
            self._forget(request_id)
            self._engine.abort(request_id)

    def emitted(self, emissions: Sequence[Emission]) -> None:
        """Hand out what a step gave; the engine goes on counting in its own statistics, so each gets a copy."""
        for emission in emissions:
            call, index = self._places[emission.request_id]
            if emission.finish_reason is not None:
                self._forget(emission.request_id)
            stats = AcceptanceStats()
            stats.add(emission.stats)
            call.deliver(index, emission._replace(stats=stats) if emission.error is None else emission.error)

    def failed(self, error: StepError) -> None:
        """Tell the callers whose requests a failed step ended."""
        for request_id in error.request_ids:
            if request_id in self._places:
                call, index = self._forget(request_id)
                call.deliver(index, error)

    def ended(self, error: Exception | None) -> None:
        """Tell everybody who waits that nothing more comes."""
        said = error if isinstance(error, SlipstreamError) else None
        for request_id in list(self._places):
            call, index = self._forget(request_id)
            if error is None:
                self._engine.abort(request_id)
            call.deliver(index, said or RequestError(_reason(error)))

    def _forget(self, request_id: int) -> tuple[_Call, int]:
        call, index = self._places.pop(request_id)
        call.open_ids.remove(request_id)
        return call, index


def _reason(error: Exception | None) -> str:
    if error is None:
        return "The AsyncLLM was closed before the answer was finished."
    return f"The engine failed ({type(error).__name__}: {error}) and cannot go on; make another AsyncLLM."
