"""Parts of prompts: laid out for one pass, alone or beside the decoding batch, without waiting for the device.

A prompt's last part leaves its row in the decoding batch: the first token, sampled on the device, becomes the root of
the row's place, and what the draft left at its last slot the beginning of its first chain. A few tokens are padded to
one of a few sizes, so that they can be part of a captured step; more run as they come.

Shape letters: T tokens of all parts, S parts that reach their prompt's end, R parts, P pages of a row, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.executors.cuda_graph.state import StepModels
from slipstream.executors.cuda_graph.step import Step, StepBuffers
from slipstream.executors.cuda_graph.transfer import Arrival, download, staged, upload
from slipstream.executors.cuda_graph.tree_step import TreeStep
from slipstream.kernels import AttentionBatch, Sampled, SampleRows, TokenMasks
from slipstream.models.context import KvCache, PagedContext
from slipstream.models.target import Hidden

MOST_PARTS = 16
"""Parts of a padded batch."""
PADDED_SIZES = (64, 96, 128, 224, 352, 608)
"""Tokens of padded batches: with 32, 160 or 256 nodes beside them they fill tiles of 128 rows."""
_MANY_QUERIES = 128
"""So many queries of a part are each tile's own work in any kernel; parts without queries must share no tile."""


@dataclass(frozen=True)
class Part:
    """Some tokens of a row's text: from `start` on, with the token after each but the last of a whole text.

    Args:
        place: where the row will decode, if these tokens reach the end of its text.
        num_prompt: tokens of its text that are the prompt's own.
        mask: the row of its grammar's mask; -1 for none.
    """

    tokens: Sequence[int]
    followers: Sequence[int]
    start: int
    pages: Sequence[int]
    slot: int
    num_prompt: int
    place: int | None = None
    mask: int = -1

    @property
    def end(self) -> int:
        """Tokens of the row's text up to the end of this part."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class PromptBatch:
    """Parts as tensors: by token, by part, and by part that ends its prompt.

    Args:
        followers_T: the token after each; after ends 0, until their tokens are chosen.
        is_prompt: for each token, whether it belongs to the prompt itself.
        ends_S: which tokens end prompts; places, samplers and lengths are those of their rows (length 0: nobody's).
    """

    tokens_T: Tensor
    followers_T: Tensor
    slots_T: Tensor
    batch: AttentionBatch
    is_prompt: Sequence[bool]
    ends_S: Tensor
    places_S: Tensor
    samplers_S: Tensor
    lengths_S: Tensor
    masks: TokenMasks | None

    def context(self, models: StepModels, kv: KvCache) -> PagedContext:
        """Return the context of a pass over these tokens alone."""
        return PagedContext(models.ops, self.batch.kv_index_T, self.slots_T, self.batch, kv, self.is_prompt)


class Prompts:
    """Computes parts of prompts."""

    def __init__(self, models: StepModels, buffers: StepBuffers) -> None:
        self._models, self._buffers = models, buffers

    def run(self, parts: Sequence[Part], words_MW: Tensor | None) -> Arrival | None:
        """Compute parts as they are; return what was chosen after whole prompts, if there are any."""
        batch = self.lay_out(parts, words_MW)
        hidden = self.compute(batch)
        ends = any(part.place is not None for part in parts)
        arrival = download(self.choose(batch, hidden.last_TD)) if ends else None
        if self._models.draft is not None:
            self.extend(batch, hidden.captured)
        return arrival

    def lay_out(self, parts: Sequence[Part], words_MW: Tensor | None) -> PromptBatch:
        """Return parts as they are.

        Args:
            words_MW: masks of grammars, on the host.
        """
        device, layout = self._models.device, _Layout(parts, self._models.target_kv.page_size)
        whole = {name: _sent(values, torch.int64, device) for name, values in layout.whole.items()}
        masks = None
        if words_MW is not None:
            masks = TokenMasks(_sent(words_MW, torch.int32, device), whole["masks"])
        batch = AttentionBatch(
            _sent(layout.starts, torch.int32, device),
            _sent(layout.lengths, torch.int32, device),
            _sent(layout.pages_RP, torch.int32, device),
            whole["index"],
            torch.full_like(whole["index"], -1),
            self._models.target_kv.page_size,
            max(_MANY_QUERIES, *(len(part.tokens) for part in parts)),
            layout.pages_RP.shape[1] * self._models.target_kv.page_size,
        )
        return PromptBatch(
            whole["tokens"],
            whole["followers"],
            whole["slots"],
            batch,
            [index < part.num_prompt for part in parts for index in range(part.start, part.end)],
            whole["ends"],
            whole["places"],
            whole["samplers"],
            whole["lengths"],
            masks,
        )

    def compute(self, prompts: PromptBatch) -> Hidden:
        """Run the target over prompts alone."""
        models = self._models
        ctx = prompts.context(models, models.target_kv)
        hidden: Hidden = models.target(prompts.tokens_T, ctx, models.captured_layers)
        return hidden

    def choose(self, prompts: PromptBatch, last_TD: Tensor) -> Sampled:
        """Let the target choose after whole prompts, and make its tokens the roots of their rows."""
        models, buffers = self._models, self._buffers
        logits_SV = models.target.ranks.join(models.target.logits(last_TD[prompts.ends_S], models.ops))
        no_path_S0 = prompts.lengths_S.new_empty(len(prompts.ends_S), 0)
        rows = SampleRows(prompts.samplers_S, prompts.lengths_S, no_path_S0)
        sampled = models.ops.sample(logits_SV, rows, buffers.sampling, prompts.masks)
        tokens_S = sampled.tokens_L.clamp(min=0)
        buffers.state.rows.root_R.index_copy_(0, prompts.places_S, tokens_S)
        # Added to the zeros after ends: ends that nobody has may share the last token, and must leave what is there.
        prompts.followers_T.index_add_(0, prompts.ends_S, torch.where(prompts.lengths_S > 0, tokens_S, 0))
        models.ops.count(buffers.sampling, prompts.samplers_S, sampled.tokens_L[:, None], torch.ones_like(tokens_S))
        return sampled

    def extend(self, prompts: PromptBatch, captured: tuple[Tensor, ...]) -> None:
        """Run the draft over prompts, and keep what it left at their ends."""
        models, state = self._models, self._buffers.state
        assert models.draft is not None and models.draft_kv is not None, "only drafts are extended"
        fused_TD = models.draft.fuse(captured, models.ops)
        hidden = models.draft(fused_TD, prompts.followers_T, prompts.context(models, models.draft_kv))
        if len(prompts.ends_S):
            logits_SV = models.draft.logits(hidden.normed_TD[prompts.ends_S], models.ops)
            state.feedback_RD.index_copy_(0, prompts.places_S, hidden.feedback_TD[prompts.ends_S])
            state.logits_RV.index_copy_(0, prompts.places_S, logits_SV)


class Mixed:
    """A pass of the target over a step's nodes and a padded prompt batch behind them."""

    def __init__(self, models: StepModels, step: Step | TreeStep, prompts: "PaddedPrompts") -> None:
        self._models, self._step, self._prompts = models, step, prompts

    def verify(self) -> None:
        """Run the pass; leave each side what the step's and the prompts' own passes would."""
        models, step, prompts = self._models, self._step, self._prompts
        assert step.hidden is not None, "the step's own pass was prepared before"
        if isinstance(step, Step) and not step.kind.num_drafted:
            step.place()
        tokens_T = torch.cat([step.chain_RN.flatten(), prompts.batch.tokens_T])
        ctx = beside(step.context(models.target_kv), prompts.batch)
        hidden = models.target(tokens_T, ctx, models.captured_layers)
        count = step.chain_RN.numel()
        pairs = [(hidden.last_TD, step.hidden.last_TD, prompts.hidden.last_TD)]
        pairs += zip(hidden.captured, step.hidden.captured, prompts.hidden.captured, strict=True)
        for both_TD, nodes_TD, prompt_TD in pairs:
            nodes_TD.copy_(both_TD[:count])
            prompt_TD.copy_(both_TD[count:])


class PaddedPrompts:
    """A prompt batch of one size, whose tensors stay where they are; what is left over computes for nobody.

    Left-over tokens are a part of their own, on a page that is nobody's; left-over ends belong to the place and the
    slot after the last.
    """

    def __init__(self, models: StepModels, buffers: StepBuffers, size: int) -> None:
        device, page_size = models.device, models.target_kv.page_size
        self.size, self._page_size = size, page_size
        self._empty_page, self._nobody = buffers.state.empty_page, len(buffers.state.active_R) - 1
        self._tokens_4T = torch.zeros(4, size, dtype=torch.int64, device=device)
        self._ends_5S = torch.zeros(5, MOST_PARTS, dtype=torch.int64, device=device)
        self._parts_2R = torch.zeros(2, MOST_PARTS + 2, dtype=torch.int32, device=device)
        num_columns = buffers.state.rows.pages_RP.shape[1]
        pages_RP = torch.full((MOST_PARTS + 1, num_columns), self._empty_page, dtype=torch.int32, device=device)
        self._words_SW = torch.zeros(MOST_PARTS + 1, buffers.masks.words_MW.shape[1], dtype=torch.int32, device=device)
        tokens_T, followers_T, index_T, slots_T = self._tokens_4T.unbind()
        ends_S, places_S, samplers_S, lengths_S, masks_S = self._ends_5S.unbind()
        batch = AttentionBatch(
            self._parts_2R[0],
            self._parts_2R[1, : MOST_PARTS + 1],
            pages_RP,
            index_T,
            torch.full_like(index_T, -1),
            page_size,
            max(size, _MANY_QUERIES),
            num_columns * page_size,
        )
        masks = TokenMasks(self._words_SW, masks_S)
        everyone = [True] * size
        self.batch = PromptBatch(
            tokens_T, followers_T, slots_T, batch, everyone, ends_S, places_S, samplers_S, lengths_S, masks
        )
        spec = models.target.spec
        states = [torch.zeros(size, spec.hidden_size, dtype=models.target.embed_tokens.dtype, device=device)]
        states += [torch.zeros_like(states[0]) for _ in models.captured_layers]
        self.hidden = Hidden(states[0], tuple(states[1:]))
        self.sampled: Sampled | None = None
        self._prompts = Prompts(models, buffers)
        self.fill([], None)

    def compute(self) -> None:
        """Run the target over the prompts alone."""
        hidden = self._prompts.compute(self.batch)
        for kept_TD, state_TD in zip(
            (self.hidden.last_TD, *self.hidden.captured), (hidden.last_TD, *hidden.captured), strict=True
        ):
            kept_TD.copy_(state_TD)

    def choose(self) -> None:
        """Choose after whole prompts."""
        self.sampled = self._prompts.choose(self.batch, self.hidden.last_TD)

    def extend(self) -> None:
        """Run the draft over the prompts."""
        self._prompts.extend(self.batch, self.hidden.captured)

    def fill(self, parts: Sequence[Part], words_MW: Tensor | None) -> None:
        """Lay out parts."""
        layout = _Layout(parts, self._page_size)
        left = self.size - layout.starts[-1]
        fill = {"tokens": 0, "followers": 0, "index": 0, "slots": self._empty_page * self._page_size}
        upload([[*layout.whole[name], *[value] * left] for name, value in fill.items()], self._tokens_4T)
        unused = MOST_PARTS - len(layout.whole["ends"])
        nobody = self._nobody
        fill = {"ends": self.size - 1, "places": nobody, "samplers": nobody, "lengths": 0, "masks": -1}
        upload([[*layout.whole[name], *[value] * unused] for name, value in fill.items()], self._ends_5S)
        empty = MOST_PARTS - len(parts)  # parts without tokens, and then the part of what is left over
        starts = [*layout.starts, *[layout.starts[-1]] * empty, self.size]
        upload([starts, [*layout.lengths, *[0] * empty, 1, 0]], self._parts_2R)
        pages_RP = self.batch.batch.page_table_RP
        if parts:
            upload(layout.pages_RP, pages_RP[: len(parts), : layout.pages_RP.shape[1]])
        if words_MW is not None:
            upload(words_MW, self._words_SW[: len(words_MW)])


def fits_padded(parts: Sequence[Part]) -> int | None:
    """Return the padded size that holds parts; None if none does, or if tokens of answers are among them."""
    if len(parts) > MOST_PARTS or any(part.end > part.num_prompt for part in parts):
        return None
    total = sum(len(part.tokens) for part in parts)
    return next((size for size in PADDED_SIZES if size >= total), None)


def beside(ctx: PagedContext, prompts: PromptBatch) -> PagedContext:
    """Return the context of a pass over a decoding batch and then prompts."""
    return replace(
        ctx,
        positions_T=torch.cat([ctx.positions_T, prompts.batch.kv_index_T]),
        slots_T=torch.cat([ctx.slots_T, prompts.slots_T]),
        beside=prompts.batch,
    )


class _Layout:
    """Parts as lists of whole numbers."""

    def __init__(self, parts: Sequence[Part], page_size: int) -> None:
        self.starts = [0]
        self.lengths = [part.end for part in parts]
        names = ("tokens", "followers", "index", "slots", "ends", "places", "samplers", "lengths", "masks")
        self.whole: dict[str, list[int]] = {name: [] for name in names}
        whole = self.whole
        for part in parts:
            whole["tokens"] += part.tokens
            whole["followers"] += [*part.followers, *[0] * (len(part.tokens) - len(part.followers))]
            whole["index"] += range(part.start, part.end)
            whole["slots"] += [
                part.pages[i // page_size] * page_size + i % page_size for i in range(part.start, part.end)
            ]
            self.starts.append(self.starts[-1] + len(part.tokens))
            if part.place is not None:
                whole["ends"].append(self.starts[-1] - 1)
                whole["places"].append(part.place)
                whole["samplers"].append(part.slot)
                whole["lengths"].append(part.end)
                whole["masks"].append(part.mask)
        longest = max((-(-part.end // page_size) for part in parts), default=0)
        self.pages_RP = torch.zeros(len(parts), longest, dtype=torch.int32)
        for row_P, part in zip(self.pages_RP, parts, strict=True):
            count = -(-part.end // page_size)
            row_P[:count] = torch.tensor(part.pages[:count], dtype=torch.int32)


def _sent(values: Sequence[int] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return staged(values, dtype, device).to(device, non_blocking=True)
