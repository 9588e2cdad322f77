"""Scheduling: which requests run in a step, over which tokens, with which pages. Plain Python, no torch.

A request's pending tokens are computed in chunks. The chunk that reaches its last known token emits: that token is
the root of a draft tree, whose nodes take the slots after it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.engine.config import EngineConfig
from slipstream.engine.page_keys import PageKeys
from slipstream.engine.pages import PageAllocator
from slipstream.engine.request import FinishReason, Request, Status
from slipstream.errors import RequestError

_PAGES_AT_A_TIME = 256


@dataclass(frozen=True)
class Scheduled:
    """A request's part of a step: its next `num_tokens`; `emits` if they reach the last one known to the executor."""

    request: Request
    num_tokens: int
    emits: bool
    drafts: bool


@dataclass(frozen=True)
class DraftNeeds:
    """What drafting asks of the scheduler: nodes to check beside the root, slots needed past it, keys of its own."""

    max_nodes: int
    scratch: int
    has_kv: bool

    @property
    def extra_slots(self) -> int:
        """Slots past the last known token that a step may write."""
        return max(self.max_nodes - 1, self.scratch)


class Scheduler:
    """Owns the queues and the pages of every request.

    Args:
        leaving: told of a request about to give its pages back.
        two_forms: the target computes the tokens of prompts in another form than those of answers (`page_keys.py`).
        keeps: no layer looks further back than so many committed tokens, and the pages before them are given back;
            None keeps all.
    """

    def __init__(
        self,
        config: EngineConfig,
        pages: PageAllocator,
        needs: DraftNeeds,
        leaving: Callable[[Request], None] = lambda request: None,
        two_forms: bool = False,
        keeps: int | None = None,
    ) -> None:
        self._config = config
        self._leaving = leaving
        self._pages = pages
        self._needs = needs
        self._keeps = keeps
        self._keys = PageKeys(config.page_size, needs.has_kv, two_forms)
        self._waiting: deque[Request] = deque()
        self.running: list[Request] = []  # those that hold pages, oldest first

    @property
    def num_waiting(self) -> int:
        """Requests not yet started (or preempted)."""
        return len(self._waiting)

    def set_needs(self, needs: DraftNeeds) -> None:
        """Follow a change of tree shape; steps not read yet may still give as much as the old one allowed."""
        self._needs = needs

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def start_computed(self, request: Request) -> None:
        """Start a waiting request with all its tokens but the last taken for committed; RequestError without pages."""
        count = self._config.pages_for(len(request.tokens) + self._needs.extra_slots)
        pages = self._pages.allocate(count) if len(self.running) < self._config.max_requests else None
        if pages is None:
            raise RequestError("There is no room to start this request at once; give the engine more pages.")
        self._waiting.remove(request)
        request.pages, request.status = pages, Status.RUNNING
        request.num_committed = request.num_sent = len(request.tokens) - 1
        request.computed = True
        self.running.append(request)

    def start_over(self) -> None:
        """Preempt every running request: the executor will run them another way."""
        for request in reversed(list(self.running)):
            self._preempt(request)

    def plan(self, budget: int | None = None) -> list[Scheduled]:
        """Choose this step's work and reserve its pages; running requests go first, the oldest before the newest.

        Requests that decode take part in every step; what is left of the budget goes to prompts.

        Args:
            budget: tokens of the step; None takes as many as a step may have.
        """
        budget = self._config.max_batch_tokens if budget is None else budget
        planned: list[Scheduled] = []
        for request in list(self.running):
            if request.status is not Status.RUNNING:  # preempted for an older one in this very loop
                continue
            if budget <= 0 and not request.decodes:
                continue
            work = self._fit(request, max(budget, 1), planned)
            if work is not None:
                planned.append(work)
                budget -= work.num_tokens
        while self._waiting and budget > 0 and len(self.running) < self._config.max_requests:
            admitted = self._admit(self._waiting[0], budget)
            if admitted is None:
                break
            self._waiting.popleft()
            planned.append(admitted)
            budget -= admitted.num_tokens
        return planned

    def reserve_answers(self, num_tokens: int) -> bool:
        """Reserve pages for so many more tokens of every running request, or as many as its answer may have; False,
        and nothing reserved, if they are not to be had.
        """
        missing = {}
        for request in self.running:
            most = min(len(request.prompt) + request.params.max_tokens, self._config.max_context)
            slots = min(len(request.tokens) + num_tokens, most + self._needs.extra_slots)
            missing[request.request_id] = max(0, self._config.pages_for(slots) - len(request.pages))
        if sum(missing.values()) > self._pages.num_available:
            return False
        for request in self.running:
            self._reserve(request, missing[request.request_id])
        return True

    def read(self, request: Request) -> None:
        """Take note that what a step emits is here; it is committed round by round, if the step ran several."""
        assert request.unread, "more was read than was asked for"
        request.unread.popleft()

    def commit(self, request: Request, num_tokens: int, emitted: list[int]) -> None:
        """Record what a step gave: `num_tokens` known ones have their keys in the cache, and `emitted` follow them.

        Of the emitted tokens all but the last have theirs, too.
        """
        request.num_committed += num_tokens + max(len(emitted) - 1, 0)
        request.tokens.extend(emitted)
        if emitted:
            request.num_sent = len(request.tokens) - (request.num_unread == 0)
        assert request.num_committed < len(request.tokens), "the last token is always left to compute"
        if self._config.prefix_cache and not request.computed:
            self._register_pages(request)
        if self._keeps is not None:
            behind = max(request.num_committed - self._keeps, 0) // self._config.page_size
            self._pages.release(request.pages[request.num_behind : behind])
            request.num_behind = max(request.num_behind, behind)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and give its pages back."""
        if request.status is Status.WAITING:
            self._waiting.remove(request)
        elif request.status is Status.RUNNING:
            self._give_back(request)
            request.pages, request.num_behind = [], 0
        request.status = Status.FINISHED
        request.finish_reason = reason

    def check(self) -> None:
        """Assert the invariants of queues and pages."""
        self._pages.check([request.held_pages for request in self.running])
        for request in self.running:
            assert request.status is Status.RUNNING
            assert request.num_committed <= len(request.pages) * self._config.page_size, "committed past the pages"
            assert request.num_committed < len(request.tokens), "a running request has nothing to compute"
            assert request.num_committed <= request.num_sent <= len(request.tokens), "sent is between done and known"
        for request in self._waiting:
            assert request.status is Status.WAITING
            assert not request.pages, "a waiting request holds pages"

    def _fit(self, request: Request, budget: int, planned: list[Scheduled]) -> Scheduled | None:
        """Plan a running request's next chunk, preempting newer requests while pages are short.

        None if all it may say is on its way already.
        """
        work = self._chunk(request, budget)
        if work is None:
            return None
        missing = self._missing_pages(work)
        while missing > self._pages.num_available:
            victim = self.running[-1]
            assert all(work.request is not victim for work in planned), "requests are planned oldest first"
            self._preempt(victim)
            if victim is request:
                return None
        self._reserve(request, missing)
        return self._sent(work)

    def _admit(self, request: Request, budget: int) -> Scheduled | None:
        """Start a waiting request on cached pages where it can, if its first chunk's pages are to be had."""
        cached = self._cached_prefix(request)
        self._pages.hold(cached)
        request.pages = list(cached)
        request.num_committed = request.num_sent = len(cached) * self._config.page_size
        work = self._chunk(request, budget)
        assert work is not None, "nothing of a waiting request is on its way"
        missing = self._missing_pages(work)
        if missing > self._pages.num_available:
            self._pages.release(cached)
            request.pages, request.num_committed, request.num_sent = [], 0, 0
            return None
        request.num_registered = len(cached)
        if request.num_preempted == 0:  # a later time it finds its own pages, too
            request.num_cached = request.num_committed
        request.status = Status.RUNNING
        self.running.append(request)
        self._reserve(request, missing)
        return self._sent(work)

    def _chunk(self, request: Request, budget: int) -> Scheduled | None:
        wanted = request.params.max_tokens - request.num_output - request.num_unread
        if wanted <= 0 or request.least_length >= self._config.max_context:
            return None
        pending = len(request.tokens) - request.num_sent if request.num_unread == 0 else 1
        num_tokens = min(pending, budget)
        emits = num_tokens == pending
        # Every node must lie within the context: the model has no positions beyond it.
        fits = request.most_length + self._needs.extra_slots <= self._config.max_context
        drafts = emits and request.speculate and self._needs.max_nodes > 1 and wanted > 1 and fits
        return Scheduled(request, num_tokens, emits, drafts)

    def _sent(self, work: Scheduled) -> Scheduled:
        """Take note that a step computes this."""
        request = work.request
        request.num_sent = min(request.num_sent + work.num_tokens, len(request.tokens))
        if work.emits:
            request.unread.append(self._needs.max_nodes)
        return work

    def _missing_pages(self, work: Scheduled) -> int:
        """Return how many pages a step may need beyond those its request has.

        A step whose output was not read yet may have given as many tokens as a tree is deep, and one; and whether the
        next one drafts is then not known here.
        """
        request = work.request
        extra = self._needs.extra_slots if work.drafts or (request.num_unread and request.speculate) else 0
        length = request.most_length if request.num_unread else request.num_sent + work.num_tokens
        slots = min(length, self._config.max_context) + extra
        return max(0, self._config.pages_for(slots) - len(request.pages))

    def _reserve(self, request: Request, count: int) -> None:
        pages = self._pages.allocate(count)
        assert pages is not None, "pages were counted before they were taken"
        request.pages.extend(pages)

    def _preempt(self, request: Request) -> None:
        self._give_back(request)
        request.restart()
        self._waiting.appendleft(request)

    def _give_back(self, request: Request) -> None:
        self.running.remove(request)
        self._leaving(request)
        self._pages.release(request.held_pages)

    def _cached_prefix(self, request: Request) -> list[int]:
        """Return known pages of the request's beginning; its last token is always left to compute."""
        if not self._config.prefix_cache or request.params.prompt_logprobs is not None:
            return []
        full = (len(request.tokens) - 1) // self._config.page_size
        found: list[int] = []
        while len(found) < full:  # a few at a time: most texts are new, and are named as they are computed
            some = min(full, len(found) + _PAGES_AT_A_TIME)
            pages = self._pages.lookup(self._keys.first(request, some)[len(found) :])
            found += pages
            if len(found) < some:
                break
        return found

    def _register_pages(self, request: Request) -> None:
        """Name the pages that are full and whose following token is known."""
        full = min(request.num_committed, len(request.tokens) - 1) // self._config.page_size
        if full > request.num_registered:
            keys = self._keys.first(request, full)
            for index in range(request.num_registered, full):
                self._pages.register(request.pages[index], keys[index])
            request.num_registered = full
