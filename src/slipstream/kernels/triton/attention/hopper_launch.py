"""How attention is launched by the kernels for Hopper GPUs: `hopper_split_kv`, `persistent_ws`, `hopper_prefill`.

Those are written in Gluon. Where there is no such GPU they are not even read.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from slipstream.kernels.attention_batch import KvLayer
from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.tuning import AttentionConfig

if TYPE_CHECKING:
    from slipstream.kernels.triton.attention.dispatch import AttentionLaunch

_BOX_COLUMNS = 64  # 128 bytes, the most that TMA swizzles
_LEAST_BOX_ROWS, _CONSUMER_ROWS = 8, 64  # what TMA's swizzle repeats after; rows of a WGMMA, and keys of a block
_GROUPS_AT_ONCE = 5  # that the last program of `hopper_split_kv` reads: of 4 rows by 4 warps, or as many numbers
_RING_STAGES = 4  # blocks of keys in the ring of a program of `persistent_ws`
_MOST_REQUESTS = 64  # whose description the registers of a `persistent_ws` program hold


def hopper_split_fits(config: AttentionConfig, q_THd: Tensor, layer: KvLayer) -> bool:
    """Tell whether programs have one short chain from queries to outputs: a split must be a block, all BF16."""
    types = {q_THd.dtype, layer.keys_SGd.dtype, layer.values_SGd.dtype}
    fits = types == {torch.bfloat16} and q_THd.shape[2] in (64, 128) and layer.keys_SGd.stride(0) % 8 == 0
    return config.hopper_split_warps > 0 and config.split == config.block and fits


def hopper_split_options(config: AttentionConfig, most_queries: int, repeats: int, rows: int) -> dict[str, int]:
    """Return warps of such programs and their registers, rows of the tile they merge, and groups they read at once.

    Args:
        rows: those of the tile of queries.
    """
    warps = config.hopper_split_warps
    rows = max(triton.next_power_of_2(repeats), 4) if most_queries == 1 else rows
    at_once = max(min(_GROUPS_AT_ONCE, _GROUPS_AT_ONCE * warps // rows), 1)
    options = {"num_warps": warps, "MERGED_ROWS": rows, "AT_ONCE": at_once}
    return options | ({"maxnreg": config.registers} if config.registers else {})


def launch_hopper_split(
    shared: tuple[Tensor, ...], num_results: int, strides: tuple[int, int, float], shape: dict[str, Any],
    grid: tuple[int, int, int],
) -> None:  # fmt: skip
    """Attend by programs whose keys are in shared memory before their queries are there."""
    from slipstream.kernels.triton.attention.hopper_split_kv import hopper_split_kv_kernel

    names = {*hopper_split_kv_kernel.arg_names, "maxnreg", *launch_options(shape["PDL"])}
    own = {name: value for name, value in shape.items() if name in names}
    hopper_split_kv_kernel[grid](*shared, num_results, *strides, **own)


def persistent_fits(
    config: AttentionConfig, counts: tuple[int, int], dtype: torch.dtype, layer: KvLayer, page_size: int
) -> bool:
    """Tell whether `persistent_ws` attends: requests and keys enough, and caches whose pages TMA copies by 64 columns.

    Args:
        counts: requests, and the most groups they have.
        dtype: that of queries.
    """
    if not config.persistent_from <= counts[0] <= _MOST_REQUESTS or counts[1] < config.persistent_groups:
        return False
    keys, values, width = layer.keys_SGd, layer.values_SGd, layer.keys_SGd.shape[2]
    fits = config.persistent_programs > 0 and config.split == config.block == 64 and page_size in (16, 32, 64)
    fits = fits and width in (64, 128) and dtype == keys.dtype == values.dtype == torch.bfloat16
    fits = fits and keys.stride() == values.stride() and keys.stride()[1:] == (width, 1) and keys.stride(0) % 8 == 0
    return fits and keys.data_ptr() % 16 == 0 and values.data_ptr() % 16 == 0


def prefill_fits(config: AttentionConfig, q_THd: Tensor, layer: KvLayer, page_size: int) -> bool:
    """Tell whether prompts' queries attend by the warp-specialised kernel: types, widths, pages that TMA can copy."""
    keys, values, width = layer.keys_SGd, layer.values_SGd, q_THd.shape[2]
    fits = (
        config.persistent_programs > 0
        and q_THd.device.type != "cpu"
        and config.split == config.block == 64
        and width in (64, 128)
    )
    fits = fits and q_THd.dtype == keys.dtype == values.dtype and q_THd.dtype in (torch.bfloat16, torch.float16)
    fits = fits and page_size >= _LEAST_BOX_ROWS and q_THd.shape[1] // keys.shape[1] <= _CONSUMER_ROWS
    fits = fits and keys.stride() == values.stride() and keys.stride()[1:] == (width, 1) and keys.stride(0) % 8 == 0
    return fits and keys.data_ptr() % 16 == 0 and values.data_ptr() % 16 == 0


def launch_prefill(
    tensors: tuple[Tensor, KvLayer, Tensor],
    described: tuple[Tensor, ...],
    page_size: int,
    scale: float,
    dependent: bool,
) -> None:
    """Attend with prompts' queries.

    Args:
        tensors: queries, the cache, and the outputs.
        described: the batch, as the kernels take it.
        scale: of scores, which are exponents of two.
    """
    from slipstream.kernels.triton.attention.hopper_prefill import hopper_prefill_kernel

    q_THd, layer, out = tensors
    (num_tokens, num_heads, width), num_groups = q_THd.shape, layer.keys_SGd.shape[1]
    num_requests, tile_tokens = len(described[1]), 2 * (_CONSUMER_ROWS * num_groups // num_heads)
    hopper_prefill_kernel[(num_groups, num_tokens // tile_tokens + num_requests)](
        _boxes(layer.keys_SGd, page_size), _boxes(layer.values_SGd, page_size), q_THd, out, *described, num_requests,
        described[2].stride(0), scale, HEADS=num_heads, GROUPS=num_groups, WIDTH=width,
        REQUESTS=triton.next_power_of_2(num_requests), PAGE=page_size, STAGES=3, PDL=dependent, num_warps=4,
        **launch_options(dependent),
    )  # fmt: skip


def _boxes(cache_SGd: Tensor, page_size: int) -> Any:  # triton has no types of its own
    """Describe a cache to TMA: boxes of a page's slots, or 64 of them, by 64 columns."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    num_slots, num_groups, width = cache_SGd.shape
    box = [min(page_size, _CONSUMER_ROWS), _BOX_COLUMNS]
    layout = NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(cache_SGd, [num_slots, num_groups * width], [cache_SGd.stride(0), 1], box, layout)


@dataclass(frozen=True)
class WorkList:
    """Which keys each program of a pass attends to in every layer, as `work_list.work_list_kernel` writes it.

    Args:
        numbers: int32, on the device.
        shape: what they were laid out for.
    """

    numbers: Tensor
    shape: dict[str, int]


def _work_shape(config: AttentionConfig, num_requests: int, shape: dict[str, Any]) -> dict[str, int]:
    """Return all that a pass's work follow from, but for the numbers on the device."""
    names = ("TOKENS", "REQUESTS", "QUERIES", "BLOCK", "PAGE", "IN_GROUP")
    parts = max(config.persistent_programs // shape["GROUPS"], 1)
    return {"parts": parts, "num_requests": num_requests, **{name: shape[name] for name in names}}


def lay_out_work(described: tuple[Tensor, ...], shape: dict[str, Any], launch: "AttentionLaunch") -> WorkList:
    """Lay out the work of a pass.

    Args:
        described: the batch, as the kernels take it.
        shape: what the kernels' programs have in common.
    """
    from slipstream.kernels.triton.attention.work_list import OF_PART, OF_REQUEST, work_list_kernel

    starts_R1, lens_R, pages_RP, index_T = described[:4]
    needed = _work_shape(launch.config, len(lens_R), shape)
    size = OF_REQUEST * needed["REQUESTS"] + OF_PART * needed["parts"]
    numbers = torch.empty(size, dtype=torch.int32, device=lens_R.device)
    constants = {name: value for name, value in needed.items() if name.isupper()}
    work_list_kernel[(needed["parts"],)](
        numbers, starts_R1, lens_R, pages_RP, index_T, len(lens_R), pages_RP.stride(0), **constants,
        PDL=launch.dependent, num_warps=1, **launch_options(launch.dependent),
    )  # fmt: skip
    return WorkList(numbers, needed)


def launch_persistent(
    tensors: tuple[Tensor, KvLayer, Tensor], described: tuple[Tensor, ...], results: tuple[Tensor, Tensor],
    numbers: tuple[int, int, float], shape: dict[str, Any], launch: "AttentionLaunch", work: WorkList | None,
) -> None:  # fmt: skip
    """Attend by persistent programs with a producer warp.

    Args:
        tensors: queries, the cache, and the outputs.
        numbers: results of a request, the stride of the page table, and the scale.
        shape: what the kernels' programs have in common.
        work: of the pass, if they were laid out two kernels ago or before; else they are just now, to be waited for.
    """
    from slipstream.kernels.triton.attention.persistent_ws import persistent_kernel

    (q_THd, layer, out), config = tensors, launch.config
    num_groups = layer.keys_SGd.shape[1]
    if work is None or work.shape != _work_shape(config, len(described[1]), shape):
        work, shape = lay_out_work(described, shape, launch), {**shape, "EARLY": False}
    names = ("HEADS", "GROUPS", "WIDTH", "ROWS", "REQUESTS", "BLOCK", "PAGE", "IN_GROUP", "EARLY", "PDL")
    persistent_kernel[(num_groups, work.shape["parts"])](
        _boxes(layer.keys_SGd, shape["PAGE"]), _boxes(layer.values_SGd, shape["PAGE"]), q_THd, out, work.numbers,
        *described[2:], *results, launch.counters, len(described[1]), *numbers,
        **{name: shape[name] for name in names}, STAGES=_RING_STAGES, num_warps=4,
        # Registers are those of a thread on average, of 256: the producer warp needs few, the consumers have the rest.
        PRODUCER_REGISTERS=40, maxnreg=128, **launch_options(launch.dependent),
    )  # fmt: skip
