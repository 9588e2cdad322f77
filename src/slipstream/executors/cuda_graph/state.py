"""The decoding batch on the device: a place for each row, which steps update without asking the host.

A step without drafts leaves the target's states with each row, so that the draft can follow some such steps at once,
when it is wanted again (`passes.CatchUp`): rows are *late* by so many positions.

Shape letters: R places, P pages of a row, D draft width, V draft vocabulary, W late positions, F the target's captured
states of one position side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.executors.cuda_graph.transfer import staged, upload
from slipstream.kernels import ChainRows, Ops
from slipstream.models.context import KvCache
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.target import Target

MOST_LATE = 32
"""Steps without drafts that the draft follows at once, so that its weights are read once for all of them."""


@dataclass(frozen=True)
class StepModels:
    """What a step runs: the target, the draft if there is one, their caches and the kernels."""

    ops: Ops
    target: Target
    target_kv: KvCache
    captured_layers: tuple[int, ...] = ()
    draft: Eagle3Draft | None = None
    draft_kv: KvCache | None = None

    @property
    def device(self) -> torch.device:
        """Where everything lives."""
        device: torch.device = self.target.embed_tokens.device
        return device


@dataclass(frozen=True)
class Loaded:
    """What a place is given when a row begins to decode there.

    Args:
        committed: keys in the cache: the index of the root, whose own key is still to be computed.
        drafts_until: root index from which a drafted token could not be emitted any more (0 = never drafts).
        slot: where the sampler keeps the row's settings.
    """

    committed: int
    root: int
    seed: int
    drafts_until: int
    slot: int
    temperature: float


class BatchState:
    """The places of the batch; tensors are written to, never replaced.

    `active_R` is 1 for places in use. The others compute on a page that is nobody's.
    """

    @torch.no_grad()
    def __init__(self, models: StepModels, num_rows: int, num_columns: int) -> None:
        device, table = models.device, models.target.embed_tokens
        self.empty_page = models.target_kv.num_pages - 1
        self._packed_FR = torch.zeros(7, num_rows, dtype=torch.int64, device=device)
        committed_R, root_R, self.active_R, seed_R, drafts_until_R, self.slot_R, self.late_R = self._packed_FR.unbind()
        pages_RP = torch.full((num_rows, num_columns), self.empty_page, dtype=torch.int32, device=device)
        temperature_R = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.rows = ChainRows(committed_R, root_R, self.active_R, temperature_R, seed_R, drafts_until_R, pages_RP)
        width = 0 if models.draft is None else models.draft.spec.hidden_size
        feedback_1D = torch.zeros(1, width, dtype=table.dtype, device=device)
        logits_1V = feedback_1D if models.draft is None else models.draft.logits(feedback_1D, models.ops)
        self.feedback_RD = feedback_1D.repeat(num_rows, 1)
        self.logits_RV = logits_1V.repeat(num_rows, 1)
        self._blank = feedback_1D[0], logits_1V[0].clone()
        # The last column takes what nobody needs.
        num_late = 0 if models.draft is None else MOST_LATE + 1
        num_states = len(models.captured_layers) * models.target.spec.hidden_size
        self.late_tokens_RW = torch.zeros(num_rows, num_late, dtype=torch.int64, device=device)
        self.late_states_RWF = torch.zeros(num_rows, num_late, num_states, dtype=table.dtype, device=device)

    @property
    def _all(self) -> tuple[Tensor, ...]:
        rows = self.rows
        return self._packed_FR, rows.temperature_R, rows.pages_RP, self.feedback_RD, self.logits_RV

    def load(self, place: int, loaded: Loaded, pages: Sequence[int]) -> None:
        """Give a place to a row."""
        values = [loaded.committed, loaded.root, 1, loaded.seed, loaded.drafts_until, loaded.slot, 0]
        upload(values, self._packed_FR[:, place])
        self.rows.temperature_R[place].fill_(loaded.temperature)
        row_P = self.rows.pages_RP[place]
        filled = [*pages, *[self.empty_page] * (len(row_P) - len(pages))]
        upload(filled, row_P)

    def imagine(self, place: int) -> None:
        """Let the draft have nothing in mind about a place's next token (measurements)."""
        self.feedback_RD[place].copy_(self._blank[0])
        self.logits_RV[place].copy_(self._blank[1])

    def imagine_rows(self, vocab_size: int) -> None:
        """Fill every place with a row that is nobody's, whose keys lie all over the cache (measurements)."""
        rows, device = self.rows, self.active_R.device
        spread_C = torch.arange(rows.pages_RP.numel(), dtype=torch.int32, device=device) % max(self.empty_page, 1)
        rows.pages_RP.copy_(spread_C.view_as(rows.pages_RP))
        self.active_R.fill_(1)
        drawn = torch.Generator(device).manual_seed(0)
        rows.root_R.random_(0, vocab_size, generator=drawn)
        self.feedback_RD.normal_(generator=drawn)
        self.logits_RV.normal_(generator=drawn)

    def add_pages(self, added: Sequence[tuple[int, int, int]]) -> None:
        """Give places more pages: (place, column, page) each."""
        if added:
            width = self.rows.pages_RP.shape[1]
            device = self.rows.pages_RP.device
            cells = staged([place * width + column for place, column, _ in added], torch.int64, device)
            pages = staged([page for _, _, page in added], torch.int32, device)
            at = cells.to(device, non_blocking=True)
            self.rows.pages_RP.view(-1).index_copy_(0, at, pages.to(device, non_blocking=True))

    def draft_until(self, place: int, length: int) -> None:
        """Let nothing that is drafted for a place be kept from a root index on; 0 keeps nothing at all."""
        self.rows.drafts_until_R[place].fill_(length)

    def unload(self, place: int) -> None:
        """Let a place be nobody's."""
        self.active_R[place].fill_(0)
        self.rows.pages_RP[place].fill_(self.empty_page)

    def move(self, source: int, destination: int) -> None:
        """Move a row to another place."""
        self._packed_FR[:, destination].copy_(self._packed_FR[:, source])
        for tensor in (*self._all[1:], self.late_tokens_RW, self.late_states_RWF):
            tensor[destination].copy_(tensor[source])
        self.unload(source)

    def note_late(self, num_rows: int, token_R: Tensor, captured: Sequence[Tensor]) -> None:
        """Keep the target's states at the position that a step without drafts computed, and the token after it."""
        late_R, active_R = self.late_R[:num_rows], self.active_R[:num_rows]
        row_R = torch.arange(num_rows, device=late_R.device)
        at_R = torch.where(active_R > 0, late_R, MOST_LATE).clamp(max=MOST_LATE)
        self.late_tokens_RW[row_R, at_R] = token_R
        self.late_states_RWF[row_R, at_R] = torch.cat(tuple(captured), -1)
        late_R.add_(active_R).clamp_(max=MOST_LATE)

    def saved(self) -> tuple[Tensor, ...]:
        """Return a copy of everything, for `restore`."""
        return tuple(tensor.clone() for tensor in self._all)

    def restore(self, saved: tuple[Tensor, ...]) -> None:
        """Put everything back."""
        for tensor, values in zip(self._all, saved, strict=True):
            tensor.copy_(values)
