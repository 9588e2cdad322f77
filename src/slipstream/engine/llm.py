"""The Python interface: `LLM(model, draft=...)`, `generate`, `chat` and `stream`, with typed results."""

from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack, overload

from slipstream.checkpoint.hub import EMBEDDED
from slipstream.engine.completion import Completion
from slipstream.engine.config import PATIENCE_S
from slipstream.engine.loading import LoadOptions, load
from slipstream.engine.output import Emission
from slipstream.engine.prompt import (
    Messages,
    Prompt,
    Question,
    alone,
    ask,
    check_chat,
    encode,
    questions,
    several,
)
from slipstream.engine.settings import Sampling, Settings, load_options, sampling_params
from slipstream.errors import RequestError, StepError
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

_UNWATCHED_S = 0.1  # patience with steps whose tokens nobody reads as they come


class LLM:
    """A target with its draft, ready to answer. For one thread; `AsyncLLM` is for many callers at once.

    >>> with LLM("embedded") as llm:
    ...     llm.generate("The capital of France is", max_tokens=8).text
    ...     llm.chat([{"role": "user", "content": "Hello"}], temperature=0.7, seed=1).text

    Args:
        model: a folder, a .gguf file, a hub id, or "embedded".
        draft: a draft's folder or hub id, "ngram", None for plain decoding, or "auto" (the draft that ships for the
            embedded model, and none for any other).
        tree: what to draft; None drafts chains, each cut where going on would not pay.
        device: "auto", "cpu", or "cuda[:N]".
        settings: the fields of LoadOptions, EngineConfig and Topology by name, such as max_context=8192 or tp=2.
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
        self.engine = self._loaded.engine
        self.tokenizer = self._loaded.tokenizer
        self.summary = self._loaded.summary
        self._inboxes: dict[int, deque[Emission | StepError]] = {}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # A str is a sequence of str, so mypy sees the two overlap; the first is meant for it and comes first.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **sampling: Unpack[Sampling],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **sampling: Unpack[Sampling],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **sampling: Unpack[Sampling],
    ) -> Completion | list[Completion]:
        """Answer one prompt, or a list of them together.

        Args:
            prompts: plain text (continued as it is), token ids, or the messages of a chat; or a list of such prompts.
            params: sampling, given whole; or give its fields as keywords, such as temperature=0.7.
            speculate: False decodes without the draft; the text is the same.

        Returns:
            A completion for one prompt. For a list, a list: with `n` above 1 a prompt's answers stand side by side.
        """
        wanted = sampling_params(params, sampling)
        if (listed := several(prompts)) is not None:
            return self._answers(self._questions(listed, wanted, speculate))
        one = alone(prompts, wanted)
        return self._answers(self._questions([one], wanted, speculate))[0]

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """Answer a chat: a list of messages, each with `role` and `content`."""
        check_chat(messages)
        return self.generate(messages, params, speculate=speculate, **sampling)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **sampling: Unpack[Sampling],
    ) -> Generator[Emission, None, None]:
        """Yield an answer as it is made, a piece for each step; closing the iterator early ends the request."""
        wanted = sampling_params(params, sampling)
        one = alone(prompt, wanted)
        (question,) = self._questions([one], wanted, speculate)
        return self._pieces(question)

    def close(self) -> None:
        """End what runs: streams that are still open, and the processes that hold other parts of a split model."""
        if not self._closed:
            self._closed = True
            for request_id in list(self._inboxes):
                self.engine.abort(request_id)
            self._inboxes.clear()
            self._loaded.close()

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids."""
        return encode(prompt, self.tokenizer)

    def _questions(self, prompts: Sequence[Prompt], params: SamplingParams, speculate: bool) -> list[Question]:
        self._check_open()
        return questions(prompts, params, speculate, self.engine, self.tokenizer)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("This LLM is closed; make another.")

    def _answers(self, wanted: Sequence[Question]) -> list[Completion]:
        ids: list[int] = []
        try:
            for question in wanted:
                ids.append(self._open(question))
            return [Completion.of(list(self._until_end(request_id, _UNWATCHED_S))) for request_id in ids]
        finally:
            for request_id in ids:
                self._shut(request_id)

    def _pieces(self, question: Question) -> Generator[Emission, None, None]:
        self._check_open()
        request_id = self._open(question)
        try:
            yield from self._until_end(request_id, PATIENCE_S)
        finally:
            self._shut(request_id)

    def _open(self, question: Question) -> int:
        request_id = ask(self.engine, self.tokenizer, question)
        self._inboxes[request_id] = deque()
        return request_id

    def _shut(self, request_id: int) -> None:
        self._inboxes.pop(request_id, None)
        self.engine.abort(request_id)

    def _until_end(self, request_id: int, patience_s: float) -> Generator[Emission, None, None]:
        """Yield a request's emissions to the last, stepping the engine whenever there is none to hand."""
        while True:
            self._check_open()
            inbox = self._inboxes[request_id]
            while not inbox:
                self._step(patience_s)
            event = inbox.popleft()
            if isinstance(event, StepError):
                raise event
            if event.error is not None:
                raise event.error
            yield event
            if event.finish_reason is not None:
                return

    def _step(self, patience_s: float) -> None:
        """Run a step; what it gave, or its failure, goes to every request it was for: several streams may be open."""
        try:
            emissions = self.engine.step(patience_s)
        except StepError as error:
            for request_id in error.request_ids:
                if request_id in self._inboxes:
                    self._inboxes[request_id].append(error)
            return
        for emission in emissions:
            if emission.request_id in self._inboxes:
                self._inboxes[emission.request_id].append(emission)
