// Norms, rotations and activations, row by row.
#pragma once
#include "abi.h"
#include "vec.h"

namespace slip {
namespace SLIP_NAMESPACE {

static void rms_norm_row(const float* x, const float* weight, float* y, int n, float eps) {
    V squares = vzero();
    for (int i = 0; i < n; i += 16) {
        const V v = n - i >= 16 ? vload(x + i) : vload_n(x + i, n - i);
        squares = vfma(v, v, squares);
    }
    const V scale = vset(1.0f / sqrtf(vsum(squares) / static_cast<float>(n) + eps));
    for (int i = 0; i < n; i += 16) {
        if (n - i >= 16) vstore(y + i, vmul(vload(weight + i), vmul(vload(x + i), scale)));
        else vstore_n(y + i, vmul(vload_n(weight + i, n - i), vmul(vload_n(x + i, n - i), scale)), n - i);
    }
}

SLIP_INLINE V silu_times(V gate, V up) {
    return vmul(vdiv(gate, vadd(vset(1.0f), vexp(vsub(vzero(), gate)))), up);
}

static void silu_mul_span(const float* gate, const float* up, float* y, int n) {
    for (int i = 0; i < n; i += 16) {
        if (n - i >= 16) vstore(y + i, silu_times(vload(gate + i), vload(up + i)));
        else vstore_n(y + i, silu_times(vload_n(gate + i, n - i), vload_n(up + i, n - i)), n - i);
    }
}

// Rotate pairs (i, i + half) of one head; values past 2 half stay as they are.
static void rotate_head(const float* x, const float* cos, const float* sin, float* y, int half, int n) {
    int i = 0;
    for (; i + 16 <= half; i += 16) {
        const V a = vload(x + i), b = vload(x + half + i), c = vload(cos + i), s = vload(sin + i);
        vstore(y + i, vsub(vmul(a, c), vmul(b, s)));
        vstore(y + half + i, vadd(vmul(b, c), vmul(a, s)));
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        y[i] = a * cos[i] - b * sin[i];
        y[half + i] = b * cos[i] + a * sin[i];
    }
    if (y != x && n > 2 * half) std::memcpy(y + 2 * half, x + 2 * half, sizeof(float) * static_cast<size_t>(n - 2 * half));
}

static void scale_span(float* x, float scale, int n) {
    for (int i = 0; i < n; ++i) x[i] *= scale;
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
