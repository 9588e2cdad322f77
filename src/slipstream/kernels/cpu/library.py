"""The compiled library as Python sees it: its structures (mirrors of native/abi.h and native/table.h) and its calls."""

import ctypes
import weakref
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Literal

from slipstream.errors import KernelError
from slipstream.kernels.cpu.arena import Arena
from slipstream.kernels.cpu.slots import MaskCallback, NativeSampleCall, NativeSampleOut, NativeSlots

LIBRARY_PATH = Path(__file__).with_name("libslipstream_cpu.so")
ABI = 16

Isa = Literal["portable", "avx2", "avx512"]
ISAS: tuple[Isa, ...] = ("portable", "avx2", "avx512")

FORMATS = {
    "f32": 0,
    "bf16": 1,
    "f16": 2,
    "q4_1": 3,
    "q4_0": 4,
    "q8_0": 5,
    "w8a8_int8": 6,
    "w4a8": 7,
    "q4_k": 8,
    "q6_k": 9,
    "q5_0": 10,
    "q5_1": 11,
    "q5_k": 12,
    "e4m3": 13,
}


class NativeLinear(Structure):
    """A weight: dense rows, or panels of 16 rows; `rest` points at the rows that follow in another format."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("rest", c_void_p),
        ("format", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("reserved", c_int32),
    )


class NativeLayer(Structure):
    """One decoder block."""

    _fields_ = (
        ("qkv", NativeLinear),
        ("o", NativeLinear),
        ("gate_up", NativeLinear),
        ("down", NativeLinear),
        ("input_norm", c_void_p),
        ("hidden_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("eps", c_float),
        ("qk_eps", c_float),
        ("scale", c_float),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary_half", c_int32),
        ("positions", c_int32),
        ("window", c_int32),
        ("normed_residual", c_int32),
        ("intermediate", c_int32),
        ("reserved", c_int32),
    )


class NativeBatch(Structure):
    """AttentionBatch with slots and positions."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("kv_lens", c_void_p),
        ("page_table", c_void_p),
        ("kv_index", c_void_p),
        ("ancestors", c_void_p),
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("page_table_stride", c_int64),
        ("requests", c_int32),
        ("tokens", c_int32),
        ("page_size", c_int32),
        ("reserved", c_int32),
    )


class NativeKv(Structure):
    """Keys and values of one layer."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("slot_stride", c_int64),
        ("num_slots", c_int64),
        ("format", c_int32),
        ("reserved", c_int32),
    )


class NativeStack(Structure):
    """Blocks, their keys and values, and the states to capture."""

    _fields_ = (
        ("layers", c_void_p),
        ("kv", c_void_p),
        ("captured", c_void_p),
        ("captured_out", c_void_p),
        ("num_layers", c_int32),
        ("num_captured", c_int32),
        ("width", c_int32),
        ("reserved", c_int32),
    )


class NativeSampling(Structure):
    """Temperature, seed and position of each row."""

    _fields_ = (("temperature", c_void_p), ("seed", c_void_p), ("position", c_void_p))


class NativeAttention(Structure):
    """The shape of one attention call."""

    _fields_ = (
        ("sinks", c_void_p),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("chunk", c_int32),
    )


class NativeRotation(Structure):
    """The shape of one rotation, and its tables."""

    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("stride", c_int64),
        ("tokens", c_int64),
        ("heads", c_int32),
        ("head_dim", c_int32),
        ("half", c_int32),
        ("reserved", c_int32),
    )


class NativeTopK(Structure):
    """The shape of one search for the best entries."""

    _fields_ = (("rows", c_int64), ("vocab", c_int64), ("k", c_int32), ("reserved", c_int32))


class NativeEmbedding(Structure):
    """A table of embeddings."""

    _fields_ = (("rows", c_void_p), ("format", c_int32), ("reserved", c_int32))


class NativeEnds(Structure):
    """What a model has around its blocks."""

    _fields_ = (
        ("head", NativeLinear),
        ("embedding", NativeEmbedding),
        ("norm", c_void_p),
        ("eps", c_float),
        ("reserved", c_int32),
    )


class NativeDraft(Structure):
    """What a draft has beside its blocks."""

    _fields_ = (
        ("ends", NativeEnds),
        ("fuse", NativeLinear),
        ("fuse_norms", c_void_p),
        ("token_ids", c_void_p),
        ("fuse_eps", c_float),
        ("fuse_norm", c_int32),
        ("normed_feedback", c_int32),
        ("reserved", c_int32),
    )


class NativeBorrowed(Structure):
    """What a request has borrowed."""

    _fields_ = (("tokens", c_void_p), ("rows", c_void_p), ("count", c_int32), ("bonus", c_float))


class NativeChain(Structure):
    """Chains to draft."""

    _fields_ = (
        ("page_table", c_void_p),
        ("lengths", c_void_p),
        ("temperature", c_void_p),
        ("seed", c_void_p),
        ("root_logits", c_void_p),
        ("hidden", c_void_p),
        ("borrowed", c_void_p),
        ("texts", c_void_p),
        ("scores", c_void_p),
        ("tokens", c_void_p),
        ("page_table_stride", c_int64),
        ("requests", c_int32),
        ("page_size", c_int32),
        ("depth", c_int32),
        ("floor", c_float),
        ("need", c_float),
        ("trust", c_double),
    )


class NativeRoundModels(Structure):
    """The models of a round."""

    _fields_ = (("target", c_void_p), ("ends", c_void_p), ("draft_blocks", c_void_p), ("draft", c_void_p))


class NativeRounds(Structure):
    """Rounds of decoding."""

    _fields_ = (
        ("page_table", c_void_p),
        ("slots", c_void_p),
        ("roots", c_void_p),
        ("lengths", c_void_p),
        ("wanted", c_void_p),
        ("ends", c_void_p),
        ("end_starts", c_void_p),
        ("hurry", c_void_p),
        ("sampling", NativeSlots),
        ("sampling_slots", c_void_p),
        ("fill_masks", MaskCallback),
        ("words", c_void_p),
        ("mask_rows", c_void_p),
        ("masks", c_int64),
        ("num_words", c_int64),
        ("limits", c_void_p),
        ("borrowed", c_void_p),
        ("feedback", c_void_p),
        ("late_states", c_void_p),
        ("late_tokens", c_void_p),
        ("late", c_void_p),
        ("texts", c_void_p),
        ("copies", c_void_p),
        ("room", c_void_p),
        ("depths", c_void_p),
        ("scores", c_void_p),
        ("drafted", c_void_p),
        ("parents", c_void_p),
        ("guessed", c_void_p),
        ("checked", c_void_p),
        ("kept", c_void_p),
        ("foretold", c_void_p),
        ("emitted", c_void_p),
        ("scored", NativeSampleOut),
        ("seconds", c_void_p),
        ("ran", c_void_p),
        ("patience", c_double),
        ("page_table_stride", c_int64),
        ("requests", c_int32),
        ("page_size", c_int32),
        ("depth", c_int32),
        ("nodes", c_int32),
        ("floor", c_float),
        ("need", c_float),
        ("trust", c_double),
        ("least", c_double),
        ("row", c_double),
        ("follow", c_int32),
        ("capacity", c_int32),
        ("rounds", c_int32),
    )


_RETURNS_STATUS: dict[str, tuple[object, ...]] = {
    "slip_linear": (c_void_p, POINTER(NativeLinear), c_void_p, c_int64, c_int32, c_void_p),
    "slip_attention": (
        c_void_p,
        POINTER(NativeBatch),
        POINTER(NativeKv),
        POINTER(NativeAttention),
        c_void_p,
        c_void_p,
    ),
    "slip_run_layers": (c_void_p, POINTER(NativeStack), POINTER(NativeBatch), c_void_p, c_void_p),
    "slip_rms_norm": (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32, c_float),
    "slip_silu_mul": (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int32),
    "slip_rotate": (c_void_p, POINTER(NativeRotation), c_void_p, c_void_p),
    "slip_sample": (c_void_p, POINTER(NativeSampleCall), c_int64, c_void_p, POINTER(NativeSampleOut)),
    "slip_perturb": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, POINTER(NativeSampling), c_void_p),
    "slip_top_k": (
        c_void_p,
        POINTER(NativeTopK),
        c_void_p,
        c_void_p,
        POINTER(NativeSampling),
        c_void_p,
        c_void_p,
    ),
    "slip_draft_chain": (c_void_p, POINTER(NativeStack), POINTER(NativeDraft), POINTER(NativeChain), c_int64),
    "slip_rounds": (c_void_p, POINTER(NativeRoundModels), POINTER(NativeRounds), c_int64),
    "slip_text_extend": (c_void_p, c_void_p, c_int64, c_int32),
    "slip_write_slots": (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64),
    "slip_repack": (c_void_p, c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "slip_gather_rows": (c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p),
}

_STATUS = {
    1: "ran out of memory",
    2: "was given an index outside its pages, slots, positions or rows",
    3: "was given query heads that are no multiple of the key heads, or more than 256 to one key head",
}


def load_library(path: Path = LIBRARY_PATH) -> ctypes.CDLL:
    """Load the library and declare its calls; a KernelError says why it cannot be had."""
    if not path.exists():
        raise KernelError(f"{path} does not exist: the CPU kernels were not built when the package was installed.")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"{path} cannot be loaded ({error}).") from error
    library.slip_abi.restype = c_int32
    if library.slip_abi() != ABI:
        raise KernelError(f"{path} was built from other sources (interface {library.slip_abi()}, not {ABI}).")
    library.slip_best_isa.restype = c_int32
    library.slip_engine_create.argtypes = (c_int32, c_int32)
    library.slip_engine_create.restype = c_void_p
    library.slip_engine_destroy.argtypes = (c_void_p,)
    library.slip_engine_destroy.restype = None
    library.slip_text_create.argtypes = (c_void_p,)
    library.slip_text_create.restype = c_void_p
    library.slip_text_destroy.argtypes = (c_void_p,)
    library.slip_text_destroy.restype = None
    library.slip_text_size.argtypes = (c_void_p,)
    library.slip_text_size.restype = c_int64
    library.slip_text_learned.argtypes = (c_void_p, c_void_p)
    library.slip_text_learned.restype = None
    library.slip_text_copy.argtypes = (c_void_p, c_void_p, c_int32, c_int32, c_double, c_void_p, c_void_p)
    library.slip_text_copy.restype = c_int32
    library.slip_panel_bytes.argtypes = (c_int32, c_int64, c_int64)
    library.slip_panel_bytes.restype = c_int64
    for name, arguments in _RETURNS_STATUS.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int32
    return library


class NativeEngine:
    """Threads, scratch memory and the kernels of one instruction set; calls are made through `library`."""

    def __init__(self, threads: int, isa: Isa | None = None, path: Path = LIBRARY_PATH) -> None:
        self.library = load_library(path)
        best = self.library.slip_best_isa()
        wanted = best if isa is None else ISAS.index(isa)
        if wanted > best:
            raise KernelError(f"This CPU cannot run the {isa} kernels; the best it can run are {ISAS[best]}.")
        self.isa: Isa = ISAS[wanted]
        self.threads = threads
        self.arena = Arena()
        self.handle: int = self.library.slip_engine_create(threads, wanted)
        if not self.handle:
            raise KernelError(f"The CPU kernels could not start {threads} threads.")
        # Not at exit: a thread that still runs may be within a call.
        weakref.finalize(self, self.library.slip_engine_destroy, self.handle).atexit = False


def check(status: int) -> None:
    """Raise what a call's status means."""
    if status:
        raise KernelError(f"A CPU kernel {_STATUS.get(status, f'failed with status {status}')}.")
