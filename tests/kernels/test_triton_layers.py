import logging
from dataclasses import replace

import pytest
import torch
from layer_samples import make_draft, make_target, run
from triton_samples import FORMATS, REFERENCE, quantized, triton_ops

from interpreted import DEVICE
from slipstream.errors import KernelError
from slipstream.kernels import KERNEL_CHOICES, KV_FP8, Ending, select
from slipstream.kernels.triton import rope
from slipstream.kernels.triton.gemm import wide_linear
from slipstream.kernels.triton.gemm.dispatch import Products
from slipstream.kernels.triton.ops import TritonOps
from slipstream.kernels.triton.tuning import LinearConfig, WideConfig, few_rows_name
from slipstream.models.context import KvCache, QueryTokens, page_table, paged_context
from slipstream.models.fused import llama as blocks
from slipstream.models.fused.run import run_layers

OPS = triton_ops()


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "qkv_bias": True}, {"sliding_window": 9}])
def test_a_targets_blocks_are_the_references(changes, generator):
    changes = {"num_layers": 2, **changes}
    model = make_target(generator, **changes).to(DEVICE)
    torch.testing.assert_close(run(model, OPS, [6, 1, 4]), run(model, REFERENCE, [6, 1, 4]), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("changes", [{"num_layers": 2}, {"num_layers": 1, "residual": "normed"}])
def test_a_drafts_blocks_are_the_references(changes, generator):
    model = make_draft(generator, **changes).to(DEVICE)
    torch.testing.assert_close(run(model, OPS, [6, 1]), run(model, REFERENCE, [6, 1]), rtol=2e-4, atol=2e-4)


def test_tokens_that_share_a_position_are_all_rotated_by_it(generator):
    """The nodes of a level, where there is one request: their position is one number, seen three times."""
    model = make_draft(generator, num_layers=1).to(DEVICE)
    index = torch.arange(4, 7, device=DEVICE)
    position = torch.tensor([[4]], device=DEVICE).expand(1, 3).flatten()
    features = torch.sin(index[:, None] * torch.arange(1, 65, device=DEVICE))
    found = []
    for ops in (OPS, REFERENCE):
        kv = KvCache.allocate(model.kv_shape, 1, 16, torch.float32, DEVICE)
        queries = QueryTokens([3], index, position, torch.full_like(index, -1))
        ctx = paged_context(ops, kv, page_table([[0]], DEVICE), queries)
        found.append(model(features, index * 7 + 3, ctx).normed_TD)
    torch.testing.assert_close(*found, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("ops", [OPS, REFERENCE], ids=["triton", "reference"])
@pytest.mark.parametrize("changes", [{"num_layers": 2}, {"num_layers": 1, "residual": "normed"}])
def test_tokens_a_pass_ends_with_are_those_of_the_whole_pass(ops, changes, generator):
    model = make_draft(generator, **changes).to(torch.bfloat16).to(DEVICE)
    model.rotary.fill(DEVICE)
    counts, rows = [3, 1, 4], torch.tensor([1, 3, 7], device=DEVICE)
    before = torch.tensor([4, 20, 9], device=DEVICE)
    index = torch.cat([torch.arange(b, b + n, device=DEVICE) for b, n in zip(before.tolist(), counts, strict=True)])
    features = torch.sin(torch.arange(1, 65, device=DEVICE) * index[:, None]).to(torch.bfloat16)
    found, caches = [], []
    for ends in (False, True):
        kv = KvCache.allocate(model.kv_shape, 6, 16, torch.bfloat16, DEVICE)
        for layer in kv.layers:
            layer.keys_SGd.copy_(torch.sin(torch.arange(layer.keys_SGd.numel(), device=DEVICE)).view_as(layer.keys_SGd))
            layer.values_SGd.copy_(layer.keys_SGd * 2)
        queries = QueryTokens(counts, index, index, torch.full_like(index, -1))
        ctx = paged_context(ops, kv, page_table([[0, 1], [2, 3], [4, 5]], DEVICE), queries)
        last = index[rows]
        starts, lens = torch.arange(4, device=DEVICE, dtype=torch.int32), (last + 1).int()
        batch = replace(ctx.batch, query_starts_R1=starts, kv_lens_R=lens, kv_index_T=last, max_queries=1,
                        ancestors_T=torch.full_like(last, -1))  # fmt: skip
        hidden = model(features, index * 7 % 61, replace(ctx, ending=Ending(rows, batch)) if ends else ctx)
        found.append(hidden.normed_TD if ends else hidden.normed_TD[rows])
        caches.append(torch.cat([layer.keys_SGd for layer in kv.layers]))
    assert torch.equal(found[0], found[1]) and torch.equal(caches[0], caches[1])


@pytest.mark.parametrize("format", FORMATS)
def test_quantized_blocks_are_the_references(format, generator):
    model = make_target(generator, num_layers=1, intermediate_size=128).to(DEVICE)
    linears = [m for layer in model.layers for m in layer.modules() if type(m).__name__ == "Linear"]
    stored = [quantized(format, sum(m.parts.values()), m.in_features, generator) for m in linears]
    found = []
    for ops in (OPS, REFERENCE):
        for linear, weight in zip(linears, stored, strict=True):
            linear.pack(ops.prepare(weight))
        embedding = model.embed_tokens(torch.arange(5, device=DEVICE), ops)
        kv = KvCache.allocate(model.kv_shape, 1, 16, torch.float32, DEVICE)
        index = torch.arange(5, device=DEVICE)
        queries = QueryTokens([5], index, index, torch.full_like(index, -1))
        ctx = paged_context(ops, kv, page_table([[0]], DEVICE), queries)
        found.append(run_layers(list(model.layers), embedding, ctx, ())[0])
    # A number at the edge between two codes may fall to either side, and more do where a GPU keeps 14 bits of FP8 sums.
    error = (found[0] - found[1]).abs().mean() / found[1].abs().mean()
    assert error < (1e-2 if format == "fp8_per_channel" and DEVICE.type == "cuda" else 2e-3)


@pytest.mark.parametrize("keys", [torch.bfloat16, KV_FP8], ids=str)
def test_bits_depend_on_neither_chunks_nor_neighbours_nor_pages(keys, generator):
    model = make_target(generator, num_layers=1).to(torch.bfloat16).to(DEVICE)
    model.rotary.fill(DEVICE)
    alone = run(model, OPS, [9, 1, 1, 1], keys=keys)
    for passes, page_size, others in (([9, 3], 16, 0), ([4, 8], 16, 0), ([9, 1, 2], 64, 2)):
        assert torch.equal(run(model, OPS, passes, page_size, others, keys), alone), (passes, page_size, others)
    exact = run(model, REFERENCE, [12], keys=keys)
    assert (alone.float() - exact.float()).abs().mean() < 0.02 * exact.float().abs().mean()


@pytest.mark.parametrize("kind", ["target", "qk norm", "draft"])
def test_sums_left_to_norm_and_rotation_change_no_bits(kind, generator):
    make = make_draft if kind == "draft" else make_target
    model = make(generator, num_layers=2, **({"qk_norm": True} if kind == "qk norm" else {}))
    model = model.to(torch.bfloat16).to(DEVICE)
    model.rotary.fill(DEVICE)
    tiles = WideConfig(64, False, 16, 4, 2)
    weights = [m.weight for m in model.modules() if type(m).__name__ == "Linear"]
    shapes = {f"dense:{weight.shape[0]}:{weight.shape[1]}" for weight in weights}
    linear = {shape: LinearConfig(64, 16, 2, 4, 2) for shape in shapes}
    left = triton_ops(linear=linear, wide_linear={few_rows_name(s): replace(tiles, deferred=True) for s in shapes})
    passes = [20, 18] if kind == "target" else [20]
    assert torch.equal(run(model, left, passes), run(model, triton_ops(linear=linear), passes))


class Recorded:
    """A kernel that notes how it was launched."""

    def __init__(self, kernel, name, launches):
        self._kernel, self._name, self._launches = kernel, name, launches

    def __getitem__(self, grid):
        def launch(*args, **options):
            self._launches.append((self._name, options.get(self._name)))
            return self._kernel[grid](*args, **options)

        return launch


@pytest.mark.parametrize(("later", "work"), [(True, True), (False, True), (True, False)])
def test_a_rotation_lets_attention_start_at_once_only_behind_a_product_that_settles(
    later, work, generator, monkeypatch
):
    """And only where attention gains by it: where programs walk through the keys of many requests."""
    model = make_target(generator, num_layers=2).to(torch.bfloat16).to(DEVICE)
    weights = [m.weight for m in model.modules() if type(m).__name__ == "Linear"]
    shapes = {f"dense:{weight.shape[0]}:{weight.shape[1]}" for weight in weights}
    tiles = WideConfig(64, False, 16, 4, 2, deferred=later)
    ops = triton_ops(
        linear={shape: LinearConfig(64, 16, 2, 4, 2) for shape in shapes},
        wide_linear={few_rows_name(shape): tiles for shape in shapes},
    )
    launches = []
    monkeypatch.setattr(blocks, "work_list_of", lambda *args: object() if work else None)
    monkeypatch.setattr(wide_linear, "wide_kernel", Recorded(wide_linear.wide_kernel, "WAITS_FIRST", launches))
    monkeypatch.setattr(rope, "_rope_kernel", Recorded(rope._rope_kernel, "WAITED", launches))
    run(model, ops, [20])
    waits_first = later and work
    layer = [("WAITS_FIRST", waits_first), ("WAITED", waits_first), *[("WAITS_FIRST", False)] * 3]
    assert launches == layer * 2


def test_walks_are_laid_out_once_for_all_layers_and_before_any_product(generator, monkeypatch):
    model = make_target(generator, num_layers=2).to(DEVICE)
    calls, work, attention, multiply = [], object(), blocks.attention, Products.multiply
    monkeypatch.setattr(blocks, "work_list_of", lambda *args: (calls.append("work"), work)[1])
    monkeypatch.setattr(blocks, "attention", lambda *args: (calls.append(args[-1]), attention(*args))[1])
    monkeypatch.setattr(Products, "multiply", lambda *args: (calls.append("product"), multiply(*args))[1])
    run(model, OPS, [5])
    layer = ["product", work, *["product"] * 3]
    assert calls == ["work", *layer * 2]


def test_sums_of_codes_left_to_norm_and_rotation_change_no_bits(generator):
    model = make_target(generator, num_layers=2, intermediate_size=128).to(torch.bfloat16).to(DEVICE)
    model.rotary.fill(DEVICE)
    linears = [m for layer in model.layers for m in layer.modules() if type(m).__name__ == "Linear"]
    shapes = set()
    for linear in linears:
        weight = quantized("fp8_per_channel", sum(linear.parts.values()), linear.in_features, generator)
        weight.scales["scale"] = weight.scales["scale"] * linear.in_features**-0.5
        linear.pack(OPS.prepare(weight))
        shapes.add(f"fp8:{weight.out_features}:{weight.in_features}")
    tuned = {"linear": {shape: LinearConfig(64, 32, 2, 4, 2) for shape in shapes}, "fp8_dot": True}
    tiles = WideConfig(64, False, 32, 4, 2, deferred=True, together=True)
    left = triton_ops(wide_linear={few_rows_name(shape): tiles for shape in shapes}, **tuned)
    expected = run(model, triton_ops(**tuned), [20])
    assert torch.isfinite(expected).all()
    assert torch.equal(run(model, left, [20]), expected)


def test_blocks_of_another_make_run_one_operation_at_a_time_and_say_so(generator, caplog):
    class Doubling(torch.nn.Module):
        def forward(self, hidden_TD, ctx):
            return hidden_TD * 2

    class Context:
        kv = object()
        ops = OPS

    hidden = torch.ones(2, 4, device=DEVICE)
    with caplog.at_level(logging.WARNING):
        last, captured = run_layers([Doubling(), Doubling()], hidden, Context(), (1,))
    assert torch.equal(last, hidden * 4) and torch.equal(captured[0], hidden * 2)
    assert "block 0 is not made of plain attention" in caplog.text


def test_triton_is_chosen_by_name_and_for_every_gpu():
    assert "triton" in KERNEL_CHOICES
    assert isinstance(select(DEVICE, "triton"), TritonOps)
    assert select(DEVICE, "auto").name in (("cpu", "reference") if DEVICE.type == "cpu" else ("triton",))
    assert select(DEVICE, "triton").row_invariant


def test_without_a_gpu_or_the_interpreter_there_is_a_clear_error(monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(KernelError, match="on a CPU choose"):
        TritonOps(torch.device("cpu"))
