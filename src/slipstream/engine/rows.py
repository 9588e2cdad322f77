"""Which request sits in which row of the device's batch, and the values that go with it in both directions."""

from collections.abc import Sequence

import torch

from slipstream.engine.cycle import CycleState
from slipstream.engine.graphs import Upload
from slipstream.engine.request import Request, Status
from slipstream.speculation.eagle3_drafter import Eagle3Drafter


class Rows:
    """The rows of a batch. Requests are loaded together; a row whose request ends stays empty until the next load.

    Args:
        empty_page: a page no request ever holds; unused rows, and slots past a request's own pages, lie there.
    """

    def __init__(self, state: CycleState, empty_page: int, drafter: Eagle3Drafter | None) -> None:
        self._state = state
        self._drafter = drafter
        self._empty_page = empty_page
        self._requests: list[Request | None] = [None] * len(state.root_R)
        self._known_pages = [0] * len(self._requests)
        self._pages_RP = torch.full_like(state.pages_RP, empty_page, device="cpu")
        self._active_R = torch.zeros_like(state.active_R, device="cpu")
        self._upload_pages, self._upload_active = Upload(state.pages_RP), Upload(state.active_R)
        self.clear()

    @property
    def live(self) -> list[tuple[int, Request]]:
        """Rows and their requests that are still running."""
        return [(row, r) for row, r in enumerate(self._requests) if r is not None and r.status is Status.RUNNING]

    def clear(self) -> None:
        """Empty every row."""
        self._requests = [None] * len(self._requests)
        self._active_R.zero_()
        self._pages_RP.fill_(self._empty_page)
        self._upload_active.send(self._active_R)
        self._upload_pages.send(self._pages_RP)

    def load(self, requests: Sequence[Request], drafts: bool) -> None:
        """Give each request a row, the first ones; every request has one token to compute, its last."""
        state, count = self._state, len(requests)
        integers = [[len(r.tokens) - 1, r.tokens[-1], r.seed, _drafts_until(r)] for r in requests]
        columns_4R = torch.tensor(integers, dtype=torch.int64).t().contiguous().to(state.root_R.device)
        for tensor_R, values_R in zip(
            (state.committed_R, state.root_R, state.seed_R, state.drafts_until_R), columns_4R, strict=True
        ):
            tensor_R[:count] = values_R
        state.temperature_R[:count] = torch.tensor([request.params.temperature for request in requests])
        self._requests[:count] = requests
        self._known_pages = [0] * len(self._requests)
        self._active_R[:count] = 1
        self._upload_active.send(self._active_R)
        drafting = [row for row, request in enumerate(requests) if request.speculate]
        if drafts and self._drafter is not None and drafting:
            slots = self._drafter.last_slots([requests[row].request_id for row in drafting])
            state.feedback_RD[drafting], state.logits_RV[drafting] = slots

    def refresh(self) -> None:
        """Empty the rows whose requests have ended, and show the device the pages reserved since the last time."""
        ended = False
        changed = False
        for row, request in enumerate(self._requests):
            if request is None:
                continue
            known = self._known_pages[row]
            if request.status is not Status.RUNNING:
                self._requests[row] = None
                self._active_R[row] = 0
                self._pages_RP[row] = self._empty_page
                ended = changed = True
            elif len(request.pages) > known:
                self._pages_RP[row, known : len(request.pages)] = torch.tensor(request.pages[known:])
                self._known_pages[row] = len(request.pages)
                changed = True
        if ended:
            self._upload_active.send(self._active_R)
        if changed:
            self._upload_pages.send(self._pages_RP)

    def hand_back(self, drafts: bool) -> None:
        """Give the drafter what it needs to go on from here by itself. Every launched cycle must have been read."""
        drafting = [(row, request) for row, request in self.live if request.speculate]
        if not drafts or self._drafter is None or not drafting:
            return
        rows_R = torch.tensor([row for row, _ in drafting], device=self._state.root_R.device)
        lengths = {request.request_id: len(request.tokens) - 1 for _, request in drafting}
        self._drafter.resume(lengths, self._state.feedback_RD[rows_R], self._state.logits_RV[rows_R])


def _drafts_until(request: Request) -> int:
    """Return the root index from which only one more token is wanted, so that drafting would be for nothing."""
    return len(request.prompt) + request.params.max_tokens - 2 if request.speculate else 0
