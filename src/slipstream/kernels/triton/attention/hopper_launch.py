"""How attention is launched on Hopper GPUs: `hopper_split_kv`, `persistent_ws`, `hopper_prefill` and `hopper_tree`.

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

_BOX_BYTES = 128  # the most that TMA swizzles, and what it aligns boxes to
_LEAST_BOX_ROWS = 8  # what TMA's swizzle repeats after
HOPPER_ROWS = 64  # rows of a WGMMA, and keys of a block
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
    least = config.persistent_from if layer.scales is None else 1
    if not least <= counts[0] <= _MOST_REQUESTS or counts[1] < config.persistent_groups:
        return False
    keys, values, width = layer.keys_SGd, layer.values_SGd, layer.keys_SGd.shape[2]
    fits = config.persistent_programs > 0 and config.split == config.block == 64 and page_size in (16, 32, 64)
    fits = fits and width in (64, 128) and dtype == torch.bfloat16 and keys.dtype == values.dtype
    fits = fits and (
        keys.dtype == dtype if layer.scales is None else layer.scale_strides[0] == 1 and len(keys) % 16 == 0
    )
    fits = fits and keys.stride() == values.stride() and keys.stride()[1:] == (width, 1) and keys.stride(0) % 16 == 0
    return fits and all(part.data_ptr() % 16 == 0 for part in (keys, values, *(layer.scales or ())))


def persistent_programs(config: AttentionConfig, layer: KvLayer) -> int:
    """Return the programs of a pass: one to an SM, or two where keys have half the bytes."""
    return config.persistent_programs * (1 if layer.scales is None else 2)


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
    fits = fits and page_size >= _LEAST_BOX_ROWS and q_THd.shape[1] // keys.shape[1] <= HOPPER_ROWS
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
    num_requests, tile_tokens = len(described[1]), 2 * (HOPPER_ROWS * num_groups // num_heads)
    hopper_prefill_kernel[(num_groups, num_tokens // tile_tokens + num_requests)](
        _boxes(layer.keys_SGd, page_size), _boxes(layer.values_SGd, page_size), q_THd, out, *described, num_requests,
        described[2].stride(0), scale, HEADS=num_heads, GROUPS=num_groups, WIDTH=width,
        REQUESTS=triton.next_power_of_2(num_requests), PAGE=page_size, STAGES=3, PDL=dependent, num_warps=4,
        **launch_options(dependent),
    )  # fmt: skip


def launch_tree(
    grid: tuple[int, int, int], tensors: tuple[Tensor, KvLayer], described: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor], numbers: tuple[int | float, ...], shape: dict[str, Any],
) -> None:  # fmt: skip
    """Attend with the nodes of trees, as `tree_splits_kernel` does.

    Args:
        tensors: queries and the cache.
        described, results, numbers: as that kernel takes them.
        shape: what kernels for trees have in common.
    """
    from slipstream.kernels.triton.attention.hopper_tree import hopper_tree_kernel

    q_THd, layer = tensors
    names = {*hopper_tree_kernel.arg_names, *launch_options(shape["PDL"])}
    hopper_tree_kernel[grid](
        _boxes(layer.keys_SGd, shape["PAGE"]), _boxes(layer.values_SGd, shape["PAGE"]), q_THd, layer.keys_SGd,
        layer.values_SGd, *described, *results, *numbers, STAGES=2, num_warps=4,
        **{name: value for name, value in shape.items() if name in names},
    )  # fmt: skip


def _boxes(cache_SGd: Tensor, page_size: int) -> Any:  # triton has no types of its own
    """Describe a cache to TMA: boxes of a page's slots, or 64 of them, by 128 bytes of a head, or all of it."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    (num_slots, num_groups, width), itemsize = cache_SGd.shape, cache_SGd.element_size()
    box_bytes = min(_BOX_BYTES, width * itemsize)
    box = [min(page_size, HOPPER_ROWS), box_bytes // itemsize]
    layout = NVMMASharedLayout(box_bytes, 8 * itemsize, 2)
    return TensorDescriptor(cache_SGd, [num_slots, num_groups * width], [cache_SGd.stride(0), 1], box, layout)


def _scale_boxes(scales_SG: Tensor) -> Any:  # likewise
    """Describe the scales of FP8 keys or values to TMA: boxes of one head's, from a page's first on."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    num_slots, num_groups = scales_SG.shape
    apart = scales_SG.stride(1) if num_groups > 1 else num_slots  # torch may say anything of what there is one of
    return TensorDescriptor(scales_SG, [num_groups, num_slots], [apart, 1], [1, _BOX_BYTES], NVMMASharedLayout(0, 8, 2))


@dataclass(frozen=True)
class WorkList:
    """Which keys each program of a pass attends to in every layer, as `work_list.work_list_kernel` writes it.

    Args:
        numbers: int32, on the device.
        shape: what they were laid out for.
    """

    numbers: Tensor
    shape: dict[str, int]


def _work_shape(programs: int, num_requests: int, shape: dict[str, Any]) -> dict[str, int]:
    """Return all that a pass's work follows from, but for the numbers on the device."""
    names = ("TOKENS", "REQUESTS", "QUERIES", "BLOCK", "PAGE", "IN_GROUP")
    parts = max(programs // shape["GROUPS"], 1)
    return {"parts": parts, "num_requests": num_requests, **{name: shape[name] for name in names}}


def lay_out_work(
    programs: int, described: tuple[Tensor, ...], shape: dict[str, Any], launch: "AttentionLaunch"
) -> WorkList:
    """Lay out the work of a pass of so many programs.

    Args:
        described: the batch, as the kernels take it.
        shape: what the kernels' programs have in common.
    """
    from slipstream.kernels.triton.attention.work_list import OF_PART, OF_REQUEST, work_list_kernel

    starts_R1, lens_R, pages_RP, index_T = described[:4]
    needed = _work_shape(programs, len(lens_R), shape)
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

    q_THd, layer, out = tensors
    num_groups, programs = layer.keys_SGd.shape[1], persistent_programs(launch.config, layer)
    if work is None or work.shape != _work_shape(programs, len(described[1]), shape):
        work, shape = lay_out_work(programs, described, shape, launch), {**shape, "EARLY": False}
    scales = (None, None) if layer.scales is None else tuple(map(_scale_boxes, layer.scales))
    names = ("HEADS", "GROUPS", "WIDTH", "ROWS", "REQUESTS", "BLOCK", "PAGE", "IN_GROUP", "EARLY", "PDL")
    persistent_kernel[(num_groups, work.shape["parts"])](
        _boxes(layer.keys_SGd, shape["PAGE"]), _boxes(layer.values_SGd, shape["PAGE"]), *scales, q_THd, out,
        work.numbers, *described[2:], *results, launch.counters, len(described[1]), *numbers,
        **{name: shape[name] for name in names}, STAGES=_RING_STAGES, num_warps=4,
        # Registers are those of a thread on average, of 256: the producer warp needs few, the consumers have the rest.
        PRODUCER_REGISTERS=40, maxnreg=128, **launch_options(launch.dependent),
    )  # fmt: skip
