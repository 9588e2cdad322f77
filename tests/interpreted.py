"""Triton's interpreter, where there is no GPU: imported before any module with kernels, since it decides what they are.

Six things Triton 3.6 does are put right, so that its numbers are a GPU's: loop bounds are taken out of one-element
arrays, which numpy 2.4 no longer does by itself; floats are rounded to nearest even, not cut; bfloat16 is multiplied
as numbers, not as the 16-bit words it is kept in; a product is summed in steps of 16, as instructions do, each step
rounded once, since how numpy's library orders 16 summands depends on the processor and on how many rows there are; one
of FP8 is whole, and added, after as many columns as it says; and a fused multiply-add is rounded once.

Products of fewer columns than compile for sm_90 are refused. And every address is checked, as a GPU would not: a kernel
that reads or writes outside the tensors it was given fails.

Three things are done once that Triton does again and again, which was most of an interpreted kernel's time: it prepares
its language anew for every function that a kernel calls, and makes a table of types and a shape for every value.
"""

import functools
import math
import os

import numpy as np
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INSTRUCTION = 16
WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def _use_interpreter():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    floats = {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
    }
    patch = interpreter._patch_lang_tensor

    def patch_with_bounds(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert(data, source, target, rounding_mode):
        words = torch.from_numpy(np.ascontiguousarray(data).view(f"i{source.primitive_bitwidth // 8}").copy())
        numbers = words.view(floats[source]).to(floats[target])
        return numbers.view(WORDS[target.primitive_bitwidth]).numpy().view(f"u{target.primitive_bitwidth // 8}")

    def dot_of_numbers(self, a, b, d, input_precision, max_num_imprecise_acc):
        least = 32 if a.dtype.primitive_bitwidth == 8 else INSTRUCTION
        if a.data.shape[1] < least:
            raise ValueError(f"a product on a GPU has at least {least} columns, not {a.data.shape[1]}")
        whole = max_num_imprecise_acc if a.dtype.is_floating() and a.dtype.primitive_bitwidth == 8 else 0
        if a.dtype.is_floating() and a.dtype.primitive_bitwidth < 32:
            a, b = (interpreter.TensorHandle(_float32(x, convert, tl), tl.float32) for x in (a, b))
        wide = np.float64 if a.dtype.is_floating() else d.data.dtype
        left, right = (x.data.astype(wide) for x in (a, b))
        total, sums = None, d.data
        for k in range(0, left.shape[1], INSTRUCTION):
            if whole and k % whole == 0:
                total = sums if total is None else total + sums
                sums = np.zeros_like(sums)
            step = np.matmul(left[:, k : k + INSTRUCTION], right[k : k + INSTRUCTION])
            sums = sums + step.astype(d.data.dtype)
        return interpreter.TensorHandle(sums if total is None else total + sums, d.dtype.scalar)

    def fused(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    _prepare_once(interpreter)
    _watch_addresses(interpreter)
    interpreter._patch_lang_tensor = patch_with_bounds
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot_of_numbers
    interpreter.InterpreterBuilder.create_fma = fused


def _prepare_once(interpreter):
    """Prepare the language once a launch for the functions of each module, and make a type and a shape once."""
    function, executor, tl = interpreter.InterpretedFunction, interpreter.GridExecutor, interpreter.tl
    launch, prepare, type_of = executor.__call__, interpreter._patch_lang, interpreter._get_np_dtype
    type_of_numbers = functools.cache(type_of)
    prepared: set[int] = set()

    def launch_anew(self, *args, **kwargs):
        prepared.clear()  # a launch that ends takes back what it prepared
        return launch(self, *args, **kwargs)

    def call(self, *args, **kwargs):
        if id(self.fn.__globals__) not in prepared:
            prepare(self.fn)
            prepared.add(id(self.fn.__globals__))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def type_once(given):
        # Types of blocks and pointers cannot be keys; a block's is that of its numbers.
        return type_of(given) if given.scalar.is_ptr() else type_of_numbers(given.scalar)

    @functools.cache
    def shape_of(sizes):
        return tl.core.constexpr(math.prod(sizes)), tl.core.tuple([tl.core.constexpr(size) for size in sizes])

    def tensor_of_known_shape(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(tuple(type.shape) if type.is_block() else ())

    tl.tensor.__init__ = tensor_of_known_shape
    executor.__call__, function.__call__ = launch_anew, call
    interpreter._get_np_dtype = type_once


def _watch_addresses(interpreter):
    """Refuse loads, stores and atomics at addresses that belong to no argument of the kernel."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    to_host = executor._init_args_hst
    spans: list[tuple[int, int]] = []
    name = [""]

    def to_host_with_spans(self, args, kwargs):
        args_hst, kwargs_hst = to_host(self, args, kwargs)
        given = [getattr(arg, "base", arg) for arg in (*args_hst, *kwargs_hst.values())]  # descriptors have a base
        spans[:] = [(arg.data_ptr(), _end_of(arg)) for arg in given if isinstance(arg, torch.Tensor) and arg.numel()]
        name[0] = self.fn.__name__
        return args_hst, kwargs_hst

    def check(pointers, mask):
        width = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        taken = np.broadcast_to(mask.data, pointers.data.shape).astype(bool, copy=False)
        addresses = (pointers.data if taken.all() else pointers.data[taken]).astype(np.uint64, copy=False)
        if not addresses.size:
            return
        first, last = int(addresses.min()), int(addresses.max()) + width
        if any(start <= first and last <= end for start, end in spans):  # nearly always one tensor holds them all
            return
        inside = np.zeros(addresses.shape, bool)
        for start, end in spans:
            inside |= (addresses >= start) & (addresses + np.uint64(width) <= end)
        if not inside.all():
            raise IndexError(f"{name[0]} touches {(~inside).sum()} numbers outside the tensors it was given")

    def checked_load(self, pointers, mask, *rest, **options):
        check(pointers, mask)
        return load(self, pointers, mask, *rest, **options)

    def checked_store(self, pointers, value, mask, *rest, **options):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest, **options)

    def checked_rmw(self, kind, pointers, value, mask, *rest):
        check(pointers, mask)
        return rmw(self, kind, pointers, value, mask, *rest)

    load, store, rmw = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    executor._init_args_hst = to_host_with_spans
    builder.create_masked_load = checked_load
    builder.create_masked_store = checked_store
    builder.create_atomic_rmw = checked_rmw


def _end_of(tensor):
    """Return the address behind the last number of a tensor, which need not be contiguous."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _float32(handle, convert, tl):
    if handle.dtype == tl.float16:
        return handle.data.astype(np.float32)
    return convert(handle.data, handle.dtype, tl.float32, None).view(np.float32)


if DEVICE.type == "cpu":
    _use_interpreter()
