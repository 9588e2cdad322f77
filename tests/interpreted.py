"""Triton's interpreter, where there is no GPU: imported before any module with kernels, since it decides what they are.

Five things Triton 3.6 does are put right, so that its numbers are a GPU's: loop bounds are taken out of one-element
arrays, which numpy 2.4 no longer does by itself; floats are rounded to nearest even, not cut; bfloat16 is multiplied
as numbers, not as the 16-bit words it is kept in; a product is summed in steps of 16, as instructions do; and a fused
multiply-add is rounded once. What it lacks is added as its documentation says: products of MXFP4 blocks
(`tl.dot_scaled`).
"""

import os

import numpy as np
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INSTRUCTION = 16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)
WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def _use_interpreter():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime import interpreter

    floats = {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
    }
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_with_bounds(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert(data, source, target, rounding_mode):
        words = torch.from_numpy(np.ascontiguousarray(data).view(f"i{source.primitive_bitwidth // 8}").copy())
        numbers = words.view(floats[source]).to(floats[target])
        return numbers.view(WORDS[target.primitive_bitwidth]).numpy().view(f"u{target.primitive_bitwidth // 8}")

    def dot_of_numbers(self, a, b, d, input_precision, max_num_imprecise_acc):
        if a.dtype.is_floating() and a.dtype.primitive_bitwidth < 32:
            a, b = (interpreter.TensorHandle(_float32(x, convert, tl), tl.float32) for x in (a, b))
        for k in range(0, a.data.shape[1], INSTRUCTION):
            columns = slice(k, k + INSTRUCTION)
            left = interpreter.TensorHandle(a.data[:, columns], a.dtype)
            right = interpreter.TensorHandle(b.data[columns], b.dtype)
            d = dot(self, left, right, d, input_precision, max_num_imprecise_acc)
        return d

    def dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, fast_math, a_packed, b_packed, d):
        assert a_format == b_format == ir.ScaleDotElemTypeTY.E2M1 and a_packed and b_packed
        left, right = _mxfp4_numbers(a.data, a_scale.data), _mxfp4_numbers(b.data.T, b_scale.data).T
        return interpreter.TensorHandle((left @ right + d.data).astype(np.float32), tl.float32)

    def fused(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    interpreter._patch_lang_tensor = patch_with_bounds
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot_of_numbers
    interpreter.InterpreterBuilder.create_dot_scaled = dot_scaled
    interpreter.InterpreterBuilder.create_fma = fused


def _float32(handle, convert, tl):
    if handle.dtype == tl.float16:
        return handle.data.astype(np.float32)
    return convert(handle.data, handle.dtype, tl.float32, None).view(np.float32)


def _mxfp4_numbers(packed, scale):
    """Return rows of bytes, the first column of two in the low nibble, times a power of two for each 32 columns."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return E2M1[codes] * np.repeat(np.exp2(scale.astype(np.float64) - 127), 32, axis=1)


if DEVICE.type == "cpu":
    _use_interpreter()
