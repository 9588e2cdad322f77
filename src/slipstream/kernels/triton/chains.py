"""A step's bookkeeping as two kernels: where the nodes of all rows lie, and what is accepted of their chains."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.chains import ChainOutcome, ChainPlaces, ChainRows
from slipstream.kernels.triton.launch import launch_options, wait_for_inputs
from slipstream.kernels.triton.variants import Variant


@triton.jit
def _place_kernel(
    committed_ptr, root_ptr, active_ptr, temperature_ptr, seed_ptr, pages_ptr, chain_ptr, index_ptr, slots_ptr,
    position_ptr, temperatures_ptr, seeds_ptr, node_index_ptr, node_slots_ptr, node_position_ptr, kv_lens_ptr,
    num_nodes, page_size, pages_stride, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write one row's places, by row and by node."""
    wait_for_inputs(PDL)
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    committed = tl.load(committed_ptr + row) * tl.load(active_ptr + row)
    tl.store(committed_ptr + row, committed)
    node = tl.arange(0, NODES)
    real = node < num_nodes
    index = committed + node
    page = tl.load(pages_ptr + row.to(tl.int64) * pages_stride + index // page_size, mask=real, other=0).to(tl.int64)
    slot = page * page_size + index % page_size
    by_row, by_node = row * num_nodes + node, node * num_rows + row
    tl.store(chain_ptr + row * num_nodes, tl.load(root_ptr + row))
    tl.store(index_ptr + by_row, index, mask=real)
    tl.store(slots_ptr + by_row, slot, mask=real)
    tl.store(position_ptr + by_row, index + 1, mask=real)
    tl.store(temperatures_ptr + by_row, tl.zeros([NODES], tl.float32) + tl.load(temperature_ptr + row), mask=real)
    tl.store(seeds_ptr + by_row, tl.zeros([NODES], tl.int64) + tl.load(seed_ptr + row), mask=real)
    tl.store(node_index_ptr + by_node, index, mask=real)
    tl.store(node_slots_ptr + by_node, slot, mask=real)
    tl.store(node_position_ptr + by_node, index + 1, mask=real)
    tl.store(kv_lens_ptr + by_node, (index + 1).to(tl.int32), mask=real)


@triton.jit
def _scattered(seed, position):
    """Return the 32-bit number of `slipstream.kernels.reference.noise.scattered`."""
    x = (seed * -7046029254386353131 + position * -3335678366873096957).to(tl.uint64, bitcast=True)
    x = ((x ^ (x >> 30)).to(tl.int64, bitcast=True) * -4658895280553007687).to(tl.uint64, bitcast=True)
    x = ((x ^ (x >> 27)).to(tl.int64, bitcast=True) * -7723592293110705685).to(tl.uint64, bitcast=True)
    return ((x ^ (x >> 31)) >> 32).to(tl.int64)


@triton.jit
def _accept_kernel(
    committed_ptr, root_ptr, active_ptr, seed_ptr, until_ptr, chain_ptr, chosen_ptr, thresholds_ptr, emitted_ptr,
    last_ptr, last_index_ptr, last_keys_ptr, out_ptr, num_nodes, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Accept one row's chain, and move the row on."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    real, drafts = node < num_nodes, node < num_nodes - 1
    committed = tl.load(committed_ptr + row)
    emitted = tl.load(chosen_ptr + row * num_nodes + node, mask=real, other=0)
    drafted = tl.load(chain_ptr + row * num_nodes + node + 1, mask=drafts, other=0)
    accepted = tl.min(tl.where((emitted == drafted) & drafts, num_nodes, node), 0)
    if NODES > 1:
        threshold = tl.load(thresholds_ptr + node, mask=drafts, other=-1)
        simulates = tl.max(threshold, 0) >= 0
        below = tl.sum((_scattered(tl.load(seed_ptr + row), committed + 1) < threshold).to(tl.int32), 0)
        accepted = tl.where(simulates, below, accepted)
    accepted = tl.where(committed < tl.load(until_ptr + row), accepted, 0)
    emitted = tl.where(node < accepted, drafted, emitted)
    last = tl.sum(tl.where(node == accepted, emitted, 0), 0)
    kept = tl.sum(tl.where(node == accepted - 1, emitted, 0), 0)
    before = tl.where(accepted > 0, kept, tl.load(root_ptr + row))
    count = (accepted + (last >= 0).to(tl.int32)).to(tl.int64) * tl.load(active_ptr + row)
    tl.store(root_ptr + row, tl.where(last >= 0, last, before))
    tl.store(committed_ptr + row, committed + count)
    tl.store(last_ptr + row, (row * num_nodes + accepted).to(tl.int64))
    tl.store(last_index_ptr + row, committed + accepted)
    tl.store(last_keys_ptr + row, (committed + accepted + 1).to(tl.int32))
    tl.store(emitted_ptr + row * num_nodes + node, tl.maximum(emitted, 0), mask=real)
    tl.store(out_ptr + row * (num_nodes + 1), count)
    tl.store(out_ptr + row * (num_nodes + 1) + 1 + node, emitted, mask=real)


def place_chains(rows: ChainRows, places: ChainPlaces, page_size: int, dependent: bool) -> None:
    """Write where the next nodes lie."""
    num_rows, num_nodes = places.chain_RN.shape
    _place_kernel[(num_rows,)](
        rows.committed_R, rows.root_R, rows.active_R, rows.temperature_R, rows.seed_R, rows.pages_RP, places.chain_RN,
        places.index_RN, places.slots_RN, places.position_RN, places.temperature_RN, places.seed_RN, places.index_NR,
        places.slots_NR, places.position_NR, places.kv_lens_NR, num_nodes, page_size, rows.pages_RP.stride(0),
        NODES=triton.next_power_of_2(num_nodes), PDL=dependent, num_warps=1, **launch_options(dependent),
    )  # fmt: skip


def accept_chains(
    rows: ChainRows, tokens_RN: tuple[Tensor, Tensor], thresholds_K: Tensor, outcome: ChainOutcome, dependent: bool
) -> None:
    """Keep what agrees of each chain; `tokens_RN` are the chains and the target's tokens, both contiguous."""
    num_rows, num_nodes = tokens_RN[0].shape
    assert len(thresholds_K) == num_nodes - 1, "every drafted token has a threshold"
    _accept_kernel[(num_rows,)](
        rows.committed_R, rows.root_R, rows.active_R, rows.seed_R, rows.drafts_until_R, *tokens_RN, thresholds_K,
        outcome.emitted_RN, outcome.last_R, outcome.last_index_R, outcome.last_keys_R, outcome.out_RE, num_nodes,
        NODES=triton.next_power_of_2(num_nodes), PDL=dependent, num_warps=1, **launch_options(dependent),
    )  # fmt: skip


def variants(architecture: str) -> list[Variant]:
    """List what ships: chains of three drafted tokens."""
    whole = ("committed", "root", "active", "seed")
    place = {f"{name}_ptr": "*i64" for name in whole} | {
        "temperature_ptr": "*fp32", "pages_ptr": "*i32", "chain_ptr": "*i64", "index_ptr": "*i64", "slots_ptr": "*i64",
        "position_ptr": "*i64", "temperatures_ptr": "*fp32", "seeds_ptr": "*i64", "node_index_ptr": "*i64",
        "node_slots_ptr": "*i64", "node_position_ptr": "*i64", "kv_lens_ptr": "*i32", "num_nodes": "i32",
        "page_size": "i32", "pages_stride": "i32",
    }  # fmt: skip
    names = (*whole, "until", "chain", "chosen", "thresholds", "emitted", "last", "last_index", "out")
    accept = {f"{name}_ptr": "*i64" for name in names}
    accept |= {"last_keys_ptr": "*i32", "num_nodes": "i32"}
    return [
        Variant("places of chains", _place_kernel, place, {"NODES": 4, "PDL": False}, 1, 2),
        Variant("accepted chains", _accept_kernel, accept, {"NODES": 4, "PDL": False}, 1, 2),
    ]  # fmt: skip
