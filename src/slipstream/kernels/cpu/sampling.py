"""The sampler's values in the library's terms."""

import torch
from torch import Tensor

from slipstream.kernels.cpu.library import NativeEngine, check
from slipstream.kernels.cpu.slots import NativeSampleCall, NativeSampleOut, describe_slots
from slipstream.kernels.sampling import MAX_TOP, Sampled, SampleRows, SamplingState, TokenMasks


def sample(
    engine: NativeEngine, logits_LV: Tensor, rows: SampleRows, state: SamplingState, masks: TokenMasks | None
) -> Sampled:
    """Return each row's token, and log probabilities where its slot wants them."""
    logits = logits_LV.to(torch.float32, copy=True, memory_format=torch.contiguous_format)  # which may be overwritten
    num_rows = len(logits)
    out = Sampled(
        torch.empty(num_rows, dtype=torch.int64),
        torch.empty(num_rows),
        torch.empty(num_rows, MAX_TOP, dtype=torch.int64),
        torch.empty(num_rows, MAX_TOP),
    )
    slot_L, position_L, path_LD = (part.contiguous() for part in (rows.slot_L, rows.position_L, rows.path_LD))
    words_MW = None if masks is None else masks.words_MW.contiguous()
    mask_L = None if masks is None else masks.row_L.contiguous()
    call = NativeSampleCall(
        describe_slots(state),
        slot_L.data_ptr(),
        position_L.data_ptr(),
        path_LD.data_ptr(),
        None if words_MW is None else words_MW.data_ptr(),
        None if mask_L is None else mask_L.data_ptr(),
        0 if words_MW is None else words_MW.shape[1],
        num_rows,
        path_LD.shape[1],
    )
    native_out = NativeSampleOut(*(part.data_ptr() for part in vars(out).values()))
    num_masks = 0 if words_MW is None else len(words_MW)
    check(engine.library.slip_sample(engine.handle, call, num_masks, logits.data_ptr(), native_out))
    return out
