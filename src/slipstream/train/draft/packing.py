"""Packing texts into rows of one length, and the batch a training step needs, worked out on the host.

Slot t is supervised at step j if tokens t + 1 (the target's own, which starts the round) and t + 2 + j (the one
predicted) belong to the same answer: those are the slots that exist while serving.

The draft is unrolled over such rows at once, with exactly the attention that step-by-step drafting has (`unroll`): step
j of slot t sees the step-0 keys of slots up to t in its own text and, from each step 1..j, slot t's own key. So of a
slot that is never supervised, a prompt's, nothing is needed but its step-0 key and value.

Shape letters beyond the models': B rows, T slots of a row, S slots of a row that are unrolled.
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
from slipstream.models.eagle3 import DraftHidden, Eagle3Draft, Eagle3Layer
from slipstream.models.latent import LatentUp, attend_by_head
from slipstream.train.data.corpus import Array, Corpus, answer_numbers
from slipstream.train.draft.features import FeatureStore

ROW_SEARCH = 64


@dataclass(frozen=True)
class StepRows:
    """The supervised slots of one unrolled step (flat indices of `slots_BS`), and for each the row of the teacher."""

    slots_N: Tensor
    teacher_N: Tensor


@dataclass(frozen=True)
class Batch:
    """What a training step reads, all on one device; B rows of T tokens.

    Args:
        text_BT: which text of the row a token belongs to; padding is -1.
        positions_BT: each token's position in its text.
        teacher_slots_N: flat positions whose next token the target's opinion is needed for.
        slots_BS: each row's supervised slots; where a row has fewer than another, its last one again.
        states_LBTD: the target's states where they are stored: the captured ones, then the normed last one.
    """

    ids_BT: Tensor
    text_BT: Tensor
    positions_BT: Tensor
    teacher_slots_N: Tensor
    slots_BS: Tensor
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
        move(batch.slots_BS),
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
    # A later step supervises some of the slots that the first one does.
    slots_BS, place = _by_row((first > 0) & (padded[:, 2 : 2 + length] == first))
    step_rows = []
    for step in range(steps):
        valid = (first > 0) & (padded[:, 2 + step : 2 + step + length] == first)
        slots = np.flatnonzero(valid.reshape(-1))
        step_rows.append(StepRows(torch.from_numpy(place[slots]), torch.from_numpy(teacher_row[slots + 1 + step])))
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(text),
        torch.from_numpy(positions),
        torch.from_numpy(teacher),
        torch.from_numpy(slots_BS),
        tuple(step_rows),
    )


def _by_row(wanted_BT: Array) -> tuple[Array, Array]:
    """Return the wanted slots of each row, [B, S], and for each flat slot that is wanted its flat place in those."""
    count_B = wanted_BT.sum(1)
    width = max(1, int(count_B.max()))
    # Stable: wanted slots first, in order.
    order_BT = np.argsort(~wanted_BT, axis=1, kind="stable")
    at_BS = np.minimum(np.arange(width), np.maximum(count_B, 1)[:, None] - 1)
    place = np.full(wanted_BT.size, -1, np.int64)
    place[np.flatnonzero(wanted_BT)] = np.flatnonzero(np.arange(width) < count_B[:, None])
    return np.take_along_axis(order_BT, at_BS, axis=1), place


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
    """The context of draft steps: `advance` moves every slot one token on, keeping earlier steps' keys.

    After `narrow` steps are of some slots of each row only, over the first step's keys of all of them.
    """

    def __init__(self, ops: TrainOps, positions_BT: Tensor, seen: Seen) -> None:
        self.ops = ops
        self.positions_T = positions_BT
        self._seen = seen
        self._step = 0
        self._slots_BS: Tensor | None = None
        self._windowed: dict[int, Seen] = {}
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def advance(self) -> None:
        """Go on to the next step."""
        self._step += 1
        self.positions_T = self.positions_T + 1

    def narrow(self, slots_BS: Tensor, key_BTGd: Tensor, value_BTGd: Tensor) -> None:
        """Go on with some slots of each row; what they see of the draft's one layer in the first step is given."""
        self._slots_BS = slots_BS
        self._keys[0], self._values[0] = [key_BTGd], [value_BTGd]
        self.positions_T = self.positions_T.gather(1, slots_BS)

    def attend(
        self, layer_index: int, q_BSHd: Tensor, k_BSGd: Tensor, v_BSGd: Tensor, scale: float, window: int | Sight | None
    ) -> Tensor:
        """Keep this step's keys and values, and attend as drafting would."""
        keys, values = self._keys.setdefault(layer_index, []), self._values.setdefault(layer_index, [])
        if len(keys) == self._step:
            keys.append(k_BSGd)
            values.append(v_BSGd)
        shown = sight_of(window).window
        all_seen = shown is None or shown >= self._seen.text_BT.shape[1]
        seen = self._seen if all_seen or shown is None else self._within(shown + 1 - len(keys))
        return self.ops.draft_attention(q_BSHd, keys, values, seen, scale, self._slots_BS)

    def _within(self, window: int) -> Seen:
        """Return what is seen of the first step's keys; each later step's own takes a place in the window."""
        if window not in self._windowed:
            self._windowed[window] = Seen(self._seen.text_BT, window)
        return self._windowed[window]

    def attend_latent(self, layer_index: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        """Keep the heads that latents stand for, and attend over those."""
        return attend_by_head(self, layer_index, q, latent, up)


def unroll(
    draft: Eagle3Draft,
    features: tuple[Tensor, ...],
    ids_BT: Tensor,
    ctx: UnrollContext,
    steps: int,
    slots_BS: Tensor | None = None,
) -> Iterator[DraftHidden]:
    """Yield each step's hidden states; step j of slot t is given token t + 1 + j (past the row's end, token 0).

    With `slots_BS` the states are those slots' only, and of the others no more is computed than they see.
    """
    hidden = draft.fuse(features, ctx.ops)
    tokens_JBT = [shift_left(ids_BT, 1 + step) for step in range(steps)]
    narrow = slots_BS is not None and _narrows(draft, ctx.ops)
    if slots_BS is not None and narrow:
        layer = draft.layers[0]
        assert isinstance(layer, Eagle3Layer)
        embedding_BTD = draft.embed_tokens(tokens_JBT[0], ctx.ops).to(hidden.dtype)
        ctx.narrow(slots_BS, *layer.keys_and_values(hidden, ctx, embedding_BTD))
        hidden, tokens_JBT = _at(hidden, slots_BS), [tokens.gather(1, slots_BS) for tokens in tokens_JBT]
    for step, tokens in enumerate(tokens_JBT):
        if step > 0:
            ctx.advance()
        out: DraftHidden = draft(hidden, tokens, ctx)
        hidden = out.feedback_TD
        if slots_BS is not None and not narrow:
            out = DraftHidden(_at(out.normed_TD, slots_BS), _at(out.feedback_TD, slots_BS))
        yield out


def _narrows(draft: Eagle3Draft, ops: TrainOps) -> bool:
    """Tell whether some slots can be unrolled by themselves: fused attention knows whole rows only.

    And what a second layer would read of the other slots is their first layer's output.
    """
    return draft.spec.num_layers == 1 and draft.spec.mla is None and not ops.fuses_attention


def _at(states_BTD: Tensor, slots_BS: Tensor) -> Tensor:
    return states_BTD.gather(1, slots_BS[..., None].expand(-1, -1, states_BTD.shape[-1]))


def shift_left(ids_BT: Tensor, by: int) -> Tensor:
    """Move each row left, filling with token 0."""
    return torch.nn.functional.pad(ids_BT[:, by:], (0, min(by, ids_BT.shape[1])))
