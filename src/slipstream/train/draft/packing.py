"""Packing texts into rows of one length, and the batch a training step needs, worked out on the host.

Slot t is supervised at step j if tokens t + 1 (the target's own, which starts the round) and t + 2 + j (the one
predicted) belong to the same answer: those are the slots that exist while serving.

The draft is unrolled over such rows at once, with exactly the attention that step-by-step drafting has (`unroll`): step
j of slot t sees the step-0 keys of slots up to t in its own text and, from each step 1..j, slot t's own key.

Shape letters beyond the models': B rows, T slots of a row.
"""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import DataError
from slipstream.kernels import KvLayer, Sight, sight_of
from slipstream.kernels.reference.attention import sink_attention
from slipstream.kernels.training.ops import TrainOps
from slipstream.kernels.training.seen import Seen
from slipstream.models.eagle3 import DraftHidden, Eagle3Draft
from slipstream.models.latent import LatentUp, attend_by_head
from slipstream.train.data.corpus import Array, Corpus, answer_numbers
from slipstream.train.draft.features import FeatureStore

ROW_SEARCH = 64


@dataclass(frozen=True)
class StepRows:
    """The supervised slots of one unrolled step, and for each the row of the teacher (both flat indices)."""

    slots_N: Tensor
    teacher_N: Tensor


@dataclass(frozen=True)
class Batch:
    """What a training step reads, all on one device; B rows of T tokens.

    Args:
        text_BT: which text of the row a token belongs to; padding is -1.
        positions_BT: each token's position in its text.
        teacher_slots_N: flat positions whose next token the target's opinion is needed for.
        states_LBTD: the target's states where they are stored: the captured ones, then the normed last one.
    """

    ids_BT: Tensor
    text_BT: Tensor
    positions_BT: Tensor
    teacher_slots_N: Tensor
    steps: tuple[StepRows, ...]
    states_LBTD: Tensor | None = None


def epoch_rows(corpus: Corpus, row_length: int, seed: int, epoch: int) -> list[list[int]]:
    """Shuffle the texts and pack them into rows, best fit among the rows lately opened; the same for the same seed."""
    lengths = np.diff(corpus.offsets)
    if len(lengths) == 0 or lengths.max() > row_length:
        raise DataError(
            f"A text of {0 if len(lengths) == 0 else lengths.max()} tokens does not fit rows of {row_length}; "
            f"raise row_length."
        )
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
    done: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []  # room left, texts
    for text in order.tolist():
        need = int(lengths[text])
        fits = [i for i, (room, _) in enumerate(open_rows) if room >= need]
        if fits:
            best = min(fits, key=lambda i: open_rows[i][0])
            room, texts = open_rows[best]
            texts.append(text)
            open_rows[best] = (room - need, texts)
        else:
            open_rows.append((row_length - need, [text]))
        if len(open_rows) > ROW_SEARCH:
            fullest = min(range(len(open_rows)), key=lambda i: open_rows[i][0])
            done.append(open_rows.pop(fullest)[1])
    return done + [texts for _, texts in open_rows]


class Packer:
    """Serves batches by step number, so that a run can go on from any step."""

    def __init__(
        self, corpus: Corpus, row_length: int, rows: int, steps: int, seed: int, store: FeatureStore | None = None
    ) -> None:
        """Prepare a corpus; `rows` per step over all processes, `steps` unrolled; batches bring what `store` holds."""
        self._corpus, self._row_length, self._rows, self._steps, self._seed = corpus, row_length, rows, steps, seed
        self._store = store
        self._answers = answer_numbers(corpus)
        self._epoch, self._epoch_rows = -1, [[0]]
        self._load_epoch(0)
        if len(self._epoch_rows) < rows:
            raise DataError(
                f"The corpus fills {len(self._epoch_rows)} rows of {row_length} tokens, fewer than the {rows} of one "
                f"step; generate more data or lower rows_per_step."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Full steps in one pass over the corpus (the next epoch's packing may differ by a row)."""
        return len(self._epoch_rows) // self._rows

    def row_ids(self, step: int) -> list[list[int]]:
        """Return the texts in each row of a step; steps run on through epochs."""
        per_epoch = self._per_epoch
        self._load_epoch(step // per_epoch)
        start = step % per_epoch * self._rows
        return [self._epoch_rows[(start + i) % len(self._epoch_rows)] for i in range(self._rows)]

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Return this process's share of a step, on the CPU."""
        return self.pack(self.row_ids(step)[rank::world])

    def pack(self, rows: list[list[int]]) -> Batch:
        """Lay texts out in rows."""
        shape = (len(rows), self._row_length)
        ids, text = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        positions, answers = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        offsets = self._corpus.offsets
        for row, texts in enumerate(rows):
            at = 0
            for number, index in enumerate(texts):
                start, end = int(offsets[index]), int(offsets[index + 1])
                here = slice(at, at + end - start)
                ids[row, here] = self._corpus.ids[start:end]
                answers[row, here] = self._answers[start:end]
                text[row, here] = number
                positions[row, here] = np.arange(end - start)
                at += end - start
        batch = _batch(ids, text, positions, answers, self._steps)
        return batch if self._store is None else replace(batch, states_LBTD=self._store.rows(rows, self._row_length))

    def _load_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._epoch_rows = epoch, epoch_rows(self._corpus, self._row_length, self._seed, epoch)
            if epoch == 0:
                self._per_epoch = max(1, len(self._epoch_rows) // self._rows)


def prefetch(packer: Packer, first: int, last: int, rank: int, world: int) -> Generator[Batch, None, None]:
    """Yield the batches of steps `first` to `last` (excluded), each packed while the one before is in use."""
    with ThreadPoolExecutor(1) as pool:
        ahead = [pool.submit(packer.batch, step, rank, world) for step in range(first, min(first + 2, last))]
        for step in range(first, last):
            batch = ahead.pop(0).result()
            if step + 2 < last:
                ahead.append(pool.submit(packer.batch, step + 2, rank, world))
            yield batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to a device, without waiting where that is possible."""

    def move(tensor: Tensor) -> Tensor:
        if device.type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    return Batch(
        move(batch.ids_BT),
        move(batch.text_BT),
        move(batch.positions_BT),
        move(batch.teacher_slots_N),
        tuple(StepRows(move(rows.slots_N), move(rows.teacher_N)) for rows in batch.steps),
        None if batch.states_LBTD is None else move(batch.states_LBTD),
    )


def _batch(ids: Array, text: Array, positions: Array, answers: Array, steps: int) -> Batch:
    length = ids.shape[1]
    padded = np.pad(answers, ((0, 0), (0, steps + 2)))
    first = padded[:, 1 : 1 + length]
    # The position before an answer token is where the target's opinion on that token is read.
    teacher = np.flatnonzero(first.reshape(-1) > 0)
    teacher_row = np.full(ids.size, -1, np.int64)
    teacher_row[teacher] = np.arange(len(teacher))
    step_rows = []
    for step in range(steps):
        valid = (first > 0) & (padded[:, 2 + step : 2 + step + length] == first)
        slots = np.flatnonzero(valid.reshape(-1))
        step_rows.append(StepRows(torch.from_numpy(slots), torch.from_numpy(teacher_row[slots + 1 + step])))
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(text),
        torch.from_numpy(positions),
        torch.from_numpy(teacher),
        tuple(step_rows),
    )


class PackedContext:
    """A pass of the target over rows of packed texts: causal inside each text."""

    def __init__(self, ops: TrainOps, positions_BT: Tensor, seen: Seen) -> None:
        self.ops = ops
        self.positions_T = positions_BT
        self._seen = seen

    @property
    def text_BT(self) -> Tensor:
        """Which text of its row each slot belongs to."""
        return self._seen.text_BT

    def attend(
        self, layer_index: int, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor, scale: float, window: int | Sight | None
    ) -> Tensor:
        """Attend within the row; nothing is kept for later passes."""
        sight = sight_of(window)
        if sight.sinks_H is None and sight.chunk is None and (sight.window is None or sight.window >= q_BTHd.shape[1]):
            return self.ops.packed_attention(q_BTHd, k_BTGd, v_BTGd, self._seen, scale)
        visible_BTT = self._seen.within(sight.window, sight.chunk, self.positions_T)
        sinks_H = q_BTHd.new_full((q_BTHd.shape[2],), -torch.inf) if sight.sinks_H is None else sight.sinks_H
        return sink_attention(q_BTHd, KvLayer(k_BTGd, v_BTGd), visible_BTT, scale, sinks_H)

    def attend_latent(self, layer_index: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        """Keep the heads that latents stand for, and attend over those."""
        return attend_by_head(self, layer_index, q, latent, up)


class UnrollContext:
    """The context of draft steps: `advance` moves every slot one token on, keeping earlier steps' keys."""

    def __init__(self, ops: TrainOps, positions_BT: Tensor, seen: Seen) -> None:
        self.ops = ops
        self.positions_T = positions_BT
        self._seen = seen
        self._windowed: dict[int, Seen] = {}
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def advance(self) -> None:
        """Go on to the next step."""
        self.positions_T = self.positions_T + 1

    def attend(
        self, layer_index: int, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor, scale: float, window: int | Sight | None
    ) -> Tensor:
        """Keep this step's keys and values, and attend as drafting would."""
        shown = sight_of(window).window
        keys, values = self._keys.setdefault(layer_index, []), self._values.setdefault(layer_index, [])
        keys.append(k_BTGd)
        values.append(v_BTGd)
        seen = self._seen if shown is None or shown >= q_BTHd.shape[1] else self._within(shown + 1 - len(keys))
        return self.ops.draft_attention(q_BTHd, keys, values, seen, scale)

    def _within(self, window: int) -> Seen:
        """Return what is seen of the first step's keys; each later step's own takes a place in the window."""
        if window not in self._windowed:
            self._windowed[window] = Seen(self._seen.text_BT, window)
        return self._windowed[window]

    def attend_latent(self, layer_index: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        """Keep the heads that latents stand for, and attend over those."""
        return attend_by_head(self, layer_index, q, latent, up)


def unroll(
    draft: Eagle3Draft, features: tuple[Tensor, ...], ids_BT: Tensor, ctx: UnrollContext, steps: int
) -> Iterator[DraftHidden]:
    """Yield each step's hidden states; step j of slot t is given token t + 1 + j (past the row's end, token 0)."""
    hidden_BTD = draft.fuse(features, ctx.ops)
    for step in range(steps):
        if step > 0:
            ctx.advance()
        out: DraftHidden = draft(hidden_BTD, shift_left(ids_BT, 1 + step), ctx)
        yield out
        hidden_BTD = out.feedback_TD


def shift_left(ids_BT: Tensor, by: int) -> Tensor:
    """Move each row left, filling with token 0."""
    return torch.nn.functional.pad(ids_BT[:, by:], (0, min(by, ids_BT.shape[1])))
