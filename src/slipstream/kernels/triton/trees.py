"""The trees of a step: a kernel for each level that grows, one that reranks candidates, one that accepts a path."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.chains import ChainRows
from slipstream.kernels.trees import Children, Growth, LevelNodes, TreeNodes, TreeOutcome
from slipstream.kernels.triton.launch import launch_options, wait_for_inputs
from slipstream.kernels.triton.sampling_tokens import key_of
from slipstream.kernels.triton.speculative import below_thresholds, settle

_MOST_COLUMNS = 4096
"""Columns of a hidden state that are copied together."""


@triton.jit
def _order_of(score, real):
    """Return int32 in the order of the scores; below all where nothing is."""
    return tl.where(real, key_of(tl.where(score == 0, 0.0, score)), -2147483648)


@triton.jit
def _new_candidates(
    scores_ptr, tokens_ptr, above_ptr, made_scores_ptr, row, at, real, num_new, num_made, tried, ROOT: tl.constexpr
):
    """Return scores, parents and tokens of the children [at] of the level above."""
    score = tl.load(scores_ptr + row * num_new + at, mask=real, other=0.0)
    score = tl.where(score != score, float("-inf"), tl.where(score > 0, 0.0, score))
    token = tl.load(tokens_ptr + row * num_new + at, mask=real, other=0)
    parent = tl.full(at.shape, -1, tl.int64)
    if not ROOT:
        parent = tl.load(above_ptr + row * (num_new // tried) + at // tried, mask=real, other=0)
        score += tl.load(made_scores_ptr + row * num_made + parent, mask=real, other=0.0)
    return score, parent, token


@triton.jit(do_not_specialize=["num_new", "num_made", "tried", "first", "written", "first_above", "depth", "page_size"])
def expand_kernel(
    scores_ptr, tokens_ptr, above_ptr, above_bits_ptr, feedback_ptr, expanded_ptr, made_tokens_ptr, made_parents_ptr,
    made_scores_ptr, pages_ptr, lengths_ptr, foretold_ptr, temperature_ptr, seed_ptr, ids_ptr, parents_ptr, out_ptr,
    bits_ptr, index_ptr, slots_ptr, position_ptr, starts_ptr, lens_ptr, temperatures_ptr, seeds_ptr, foretells_ptr,
    hidden_ptr, num_new, num_made, tried, first, written, first_above, depth, page_size, pages_stride, hidden_width,
    feedback_stride,
    NEW: tl.constexpr, ROOT: tl.constexpr, STATIC: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose one node of a row's level, and write all that the draft's pass needs of it.

    Every program looks at all of the row's new candidates; the first one notes them.
    """
    wait_for_inputs(PDL)
    row, node, width = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = tl.arange(0, NEW)
    real = at < num_new
    score, parent, token = _new_candidates(
        scores_ptr, tokens_ptr, above_ptr, made_scores_ptr, row, at, real, num_new, num_made, tried, ROOT
    )
    if node == 0:
        made = row * num_made + first + at
        tl.store(made_tokens_ptr + made, token, mask=real)
        tl.store(made_parents_ptr + made, parent, mask=real)
        tl.store(made_scores_ptr + made, score, mask=real)
    if STATIC:
        best = tl.load(expanded_ptr + node).to(tl.int32)
    else:
        # One number orders candidates: by score, equal ones by their place. As many as come before are taken away.
        order = (_order_of(score, real).to(tl.int64) << 32) + (2147483647 - at)
        for _ in range(node):
            order = tl.where(order == tl.max(order, 0), -9223372036854775807, order)
        best = (2147483647 - (tl.max(order, 0) & 0xFFFFFFFF)).to(tl.int32)
    hangs = best // tried
    place = written + node
    distance = place - first_above - hangs
    seen = tl.full([], -1, tl.int64)
    if not ROOT:
        seen = tl.load(above_bits_ptr + row * (num_new // tried) + hangs)
    seen = tl.where(distance < 64, seen << tl.minimum(distance, 63).to(tl.int64), 0)
    length = tl.load(lengths_ptr + row)
    index = length + place
    page = tl.load(pages_ptr + row * pages_stride + index // page_size).to(tl.int64)
    cell = row * width + node
    tl.store(ids_ptr + cell, (best + first).to(tl.int64))
    tl.store(parents_ptr + cell, hangs.to(tl.int64))
    tl.store(out_ptr + cell, tl.sum(tl.where(at == best, token, 0), 0))
    tl.store(bits_ptr + cell, seen | 1)
    tl.store(index_ptr + cell, index)
    tl.store(slots_ptr + cell, page * page_size + index % page_size)
    tl.store(position_ptr + cell, length + depth - 1)
    tl.store(temperatures_ptr + cell, tl.load(temperature_ptr + row))
    tl.store(seeds_ptr + cell, tl.load(seed_ptr + row))
    tl.store(foretells_ptr + cell, tl.load(foretold_ptr + row) + depth)
    if node == width - 1:
        tl.store(starts_ptr + row + 1, ((row + 1) * width).to(tl.int32))
        tl.store(lens_ptr + row, (index + 1).to(tl.int32))
        if row == 0:
            tl.store(starts_ptr, 0)
    for begin in range(0, hidden_width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        fed = tl.load(
            feedback_ptr + (row * (num_new // tried) + hangs) * feedback_stride + column, mask=column < hidden_width
        )
        tl.store(hidden_ptr + cell * hidden_width + column, fed, mask=column < hidden_width)


@triton.jit
def _of_best(order, num_kept):
    """Tell of int32 orders which are the `num_kept` largest, equal ones from the first on.

    The least that is kept is found bit by bit, from the highest.
    """
    bit, least = tl.full([], 0x80000000, tl.uint32), tl.full([], 0, tl.uint32)
    biased = order.to(tl.uint32, bitcast=True) ^ bit
    for _ in range(32):
        tried = least | bit
        least = tl.where(tl.sum((biased >= tried).to(tl.int32), 0) >= num_kept, tried, least)
        bit = bit >> 1
    equal = biased == least
    above = tl.sum((biased > least).to(tl.int32), 0)
    return (biased > least) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= num_kept - above))


@triton.jit(do_not_specialize=["num_new", "num_made", "tried", "first", "num_kept", "depth"])
def rerank_kernel(
    scores_ptr, child_tokens_ptr, above_ptr, made_tokens_ptr, made_parents_ptr, made_scores_ptr, kept_ptr, lengths_ptr,
    tokens_ptr, slots_ptr, parents_ptr, depth_ptr, position_ptr, foretold_ptr, nodes_ptr, path_ptr, node_slots_ptr,
    root_ptr, num_new, num_made, tried, first, num_kept, depth,
    MADE: tl.constexpr, ROOT: tl.constexpr, STATIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Keep some of a row's candidates, and write them, and the root, as the nodes of its tree."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, MADE)
    there, is_new = at < num_made, (at >= first) & (at < num_made)
    new_score, new_parent, new_token = _new_candidates(
        scores_ptr, child_tokens_ptr, above_ptr, made_scores_ptr, row, at - first, is_new, num_new, num_made, tried,
        ROOT,
    )  # fmt: skip
    made, before = row * num_made + at, at < first
    token = tl.where(before, tl.load(made_tokens_ptr + made, mask=before, other=0), new_token).to(tl.int32)
    parent = tl.where(before, tl.load(made_parents_ptr + made, mask=before, other=0), new_parent).to(tl.int32)
    if STATIC:
        kept = tl.load(kept_ptr + at, mask=there, other=0) != 0
    else:
        score = tl.where(before, tl.load(made_scores_ptr + made, mask=before, other=0.0), new_score)
        kept = _of_best(_order_of(score, there), num_kept)
    node = tl.cumsum(kept.to(tl.int32), 0)  # the root is node 0
    own_depth, up = tl.full([MADE], 1, tl.int32), parent
    for _ in range(depth - 1):
        own_depth += (up >= 0).to(tl.int32)
        up = tl.where(up >= 0, tl.gather(parent, tl.maximum(up, 0), 0), -1)
    length, root = tl.load(lengths_ptr + row), row * (num_kept + 1)
    root_slot = tl.load(slots_ptr + root).to(tl.int32)
    tl.store(root_ptr + row, length.to(tl.int32))
    tl.store(parents_ptr + root, -1)
    tl.store(depth_ptr + root, 0)
    tl.store(position_ptr + root, length)
    tl.store(foretold_ptr + root, length + 1)
    up = tl.where(parent >= 0, tl.gather(node, tl.maximum(parent, 0), 0), 0)
    cell = root + node
    tl.store(tokens_ptr + cell, token.to(tl.int64), mask=kept)
    tl.store(parents_ptr + cell, up.to(tl.int64), mask=kept)
    tl.store(depth_ptr + cell, own_depth.to(tl.int64), mask=kept)
    tl.store(position_ptr + cell, length + own_depth, mask=kept)
    tl.store(foretold_ptr + cell, length + own_depth + 1, mask=kept)
    way = at
    for turn in range(depth):
        level = depth - 1 - turn
        way = tl.where(level < own_depth - 1, tl.gather(parent, way, 0), way)
        way_node = tl.gather(node, way, 0)
        way_token = tl.where(level < own_depth, tl.gather(token, way, 0), -1)
        slot = tl.load(slots_ptr + root + way_node, mask=kept, other=0)
        tl.store(nodes_ptr + cell * depth + level, way_node.to(tl.int64), mask=kept)
        tl.store(path_ptr + cell * depth + level, way_token.to(tl.int64), mask=kept)
        tl.store(node_slots_ptr + cell * depth + level, slot.to(tl.int32), mask=kept)
        tl.store(nodes_ptr + root * depth + level, 0)
        tl.store(path_ptr + root * depth + level, -1)
        tl.store(node_slots_ptr + root * depth + level, root_slot)


@triton.jit(do_not_specialize=["num_nodes", "depth"])
def accept_kernel(
    committed_ptr, roots_ptr, active_ptr, seed_ptr, until_ptr, tokens_ptr, parents_ptr, depth_ptr, slots_ptr,
    chosen_ptr, thresholds_ptr, emitted_ptr, last_ptr, last_index_ptr, last_keys_ptr, out_ptr, rows_ptr, from_ptr,
    num_nodes, depth, NODES: tl.constexpr, PATH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Walk one row's tree along the target's tokens, write what came of it, and move the row on."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at, step = tl.arange(0, NODES), tl.arange(0, PATH)
    root, num_path, width = row * num_nodes, depth + 1, 3 * depth + 3
    drafted = (at > 0) & (at < num_nodes)
    token = tl.load(tokens_ptr + root + at, mask=drafted, other=-1)
    parent = tl.load(parents_ptr + root + at, mask=drafted, other=-1)
    own_depth = tl.load(depth_ptr + root + at, mask=drafted, other=0)
    chosen = tl.load(chosen_ptr + root + at, mask=at < num_nodes, other=0)
    committed = tl.load(committed_ptr + row)
    simulates, below = below_thresholds(thresholds_ptr, seed_ptr, row, committed, step, step < depth)
    going = committed < tl.load(until_ptr + row)
    node, accepted = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    path, emitted = tl.full([PATH], 0, tl.int32), tl.full([PATH], 0, tl.int64)
    for level in range(depth):
        here = tl.sum(tl.where(at == node, chosen, 0), 0)
        follows = (parent == node) & tl.where(simulates, level < below, token == here)
        found = tl.min(tl.where(follows, at, NODES), 0)
        going = going & (found < NODES)
        node = tl.where(going, found, node)
        accepted += going.to(tl.int32)
        path = tl.where((step == level + 1) & going, found, path)
        emitted = tl.where((step == level) & going, tl.sum(tl.where(at == found, token, 0), 0), emitted)
        of_depth = tl.sum((own_depth == level + 1).to(tl.int64), 0)
        tl.store(out_ptr + row * width + 1 + 2 * num_path + level, of_depth)
    emitted = tl.where(step == accepted, tl.sum(tl.where(at == node, chosen, 0), 0), emitted)
    settle(
        committed_ptr, roots_ptr, active_ptr, emitted_ptr, last_ptr, last_index_ptr, last_keys_ptr,
        out_ptr + row * width, row, committed, emitted, accepted, step, num_path,
    )  # fmt: skip
    real = step < num_path
    tl.store(out_ptr + row * width + 1 + num_path + step, path.to(tl.int64), mask=real)
    tl.store(rows_ptr + row * num_path + step, root + path, mask=real)
    moved = real & (step > 0)
    slot = tl.load(slots_ptr + root + tl.where(path > 0, path, step), mask=moved, other=0)
    tl.store(from_ptr + row * depth + step - 1, slot, mask=moved)


def expand_level(
    growth: Growth, above: LevelNodes | None, children: Children, feedback_LH: Tensor | None, dependent: bool
) -> LevelNodes:
    """Note a level's candidates, and return those that the draft is run on next."""
    plan, rows, made = growth.plan, growth.rows, growth.made
    level = LevelNodes.allocate(growth, above, feedback_LH)
    num_new, num_rows, width = children.tokens_RAK[0].numel(), *level.ids_RW.shape
    written = sum(plan.widths[: level.depth - 1])
    first_above = -1 if above is None else written - plan.widths[level.depth - 2]
    hidden, unread = (0, 0) if feedback_LH is None else (feedback_LH.shape[1], feedback_LH.stride(0)), level.ids_RW
    expand_kernel[(num_rows, width)](
        *_of_children(children, above), unread if above is None else above.bits_RW,
        unread if feedback_LH is None else feedback_LH, plan.expanded[level.depth - 1] if plan.expanded else unread,
        made.tokens_RC, made.parents_RC, made.scores_RC, rows.pages_RP, rows.lengths_R, rows.foretold_R,
        rows.temperature_R, rows.seed_R, level.ids_RW, level.parents_RW, level.tokens_RW, level.bits_RW,
        level.index_RW, level.slots_RW, level.position_RW, level.starts_R1, level.kv_lens_R,
        level.sampling.temperature_L, level.sampling.seed_L, level.sampling.position_L,
        unread if level.hidden_LH is None else level.hidden_LH, num_new, plan.num_candidates, plan.tried,
        plan.first(level.depth), written, first_above, level.depth, growth.page_size, rows.pages_RP.stride(0), *hidden,
        NEW=triton.next_power_of_2(num_new), ROOT=above is None, STATIC=bool(plan.expanded),
        COLUMNS=min(triton.next_power_of_2(max(hidden[0], 1)), _MOST_COLUMNS), PDL=dependent, num_warps=4,
        **launch_options(dependent),
    )  # fmt: skip
    return level


def rerank_trees(
    growth: Growth, above: LevelNodes | None, children: Children, nodes: TreeNodes, dependent: bool
) -> None:
    """Keep what the plan says of all candidates, and write the nodes."""
    plan, made, num_new = growth.plan, growth.made, children.tokens_RAK[0].numel()
    rerank_kernel[(len(nodes.root_R),)](
        *_of_children(children, above), made.tokens_RC, made.parents_RC, made.scores_RC,
        nodes.parents_RN if plan.kept_C is None else plan.kept_C, growth.rows.lengths_R, nodes.tokens_RN,
        nodes.slots_RN, nodes.parents_RN, nodes.depth_RN, nodes.position_RN, nodes.foretold_RN, nodes.nodes_RND,
        nodes.path_RND, nodes.slots_RND, nodes.root_R, num_new, plan.num_candidates, plan.tried,
        plan.num_candidates - num_new, plan.num_kept, nodes.nodes_RND.shape[-1],
        MADE=triton.next_power_of_2(plan.num_candidates), ROOT=above is None, STATIC=plan.kept_C is not None,
        PDL=dependent, num_warps=4 if plan.num_candidates <= 1024 else 16, **launch_options(dependent),
    )  # fmt: skip


def _of_children(children: Children, above: LevelNodes | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return children as kernels take them, with the nodes they are of; where that is the root, nobody looks."""
    scores_RAK, tokens_RAK = children
    assert scores_RAK.is_contiguous() and tokens_RAK.is_contiguous(), "children lie side by side"
    return scores_RAK, tokens_RAK, tokens_RAK if above is None else above.ids_RW


def accept_trees(
    rows: ChainRows, nodes: TreeNodes, chosen_RN: Tensor, thresholds_K: Tensor, outcome: TreeOutcome, dependent: bool
) -> None:  # fmt: skip
    """Keep of each tree the path that agrees with the target's tokens, which are contiguous."""
    (num_rows, num_nodes), depth, chain = nodes.tokens_RN.shape, outcome.from_RD.shape[1], outcome.chain
    assert len(thresholds_K) == depth, "every depth has a threshold"
    accept_kernel[(num_rows,)](
        rows.committed_R, rows.root_R, rows.active_R, rows.seed_R, rows.drafts_until_R, nodes.tokens_RN,
        nodes.parents_RN, nodes.depth_RN, nodes.slots_RN, chosen_RN, thresholds_K, chain.emitted_RN, chain.last_R,
        chain.last_index_R, chain.last_keys_R, outcome.out_RX, outcome.node_L, outcome.from_RD, num_nodes, depth,
        NODES=triton.next_power_of_2(num_nodes), PATH=triton.next_power_of_2(depth + 1), PDL=dependent, num_warps=1,
        **launch_options(dependent),
    )  # fmt: skip
