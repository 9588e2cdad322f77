"""The sampler's structures as the compiled library reads them: mirrors of native/abi.h."""

import ctypes
from ctypes import Structure, c_int32, c_int64, c_void_p

from slipstream.kernels.sampling import SamplingState

MaskCallback = ctypes.CFUNCTYPE(c_int32, c_int32)
"""Makes the masks of a round, which it is given the number of; anything but 0 ends the call before that round."""


class NativeSlots(Structure):
    """How requests' tokens are sampled, by slot."""

    _fields_ = (
        ("slots", c_void_p),
        ("said", c_void_p),
        ("bias", c_void_p),
        ("ends", c_void_p),
        ("num_slots", c_int64),
        ("vocab", c_int64),
        ("end_words", c_int64),
    )


class NativeSampleCall(Structure):
    """Rows of logits to sample from."""

    _fields_ = (
        ("state", NativeSlots),
        ("slot", c_void_p),
        ("position", c_void_p),
        ("path", c_void_p),
        ("words", c_void_p),
        ("mask_row", c_void_p),
        ("num_words", c_int64),
        ("rows", c_int64),
        ("depth", c_int64),
    )


class NativeSampleOut(Structure):
    """Where what was sampled goes."""

    _fields_ = (("tokens", c_void_p), ("logprob", c_void_p), ("top_ids", c_void_p), ("top_logprobs", c_void_p))


def describe_slots(state: SamplingState) -> NativeSlots:
    """Return where a state's tensors lie."""
    return NativeSlots(
        state.records_SC.data_ptr(),
        state.said_SV.data_ptr(),
        state.bias_SV.data_ptr(),
        state.ends_SW.data_ptr(),
        len(state.records_SC),
        state.vocab_size,
        state.ends_SW.shape[1],
    )
