import copy
import itertools
import logging

import pytest
import torch
from cpu_samples import causal, packed_weight
from layer_samples import make_draft, make_target, run

from slipstream.checkpoint.spec import MlaSpec, RopeSpec
from slipstream.errors import KernelError
from slipstream.kernels import KV_FP8, AttentionBatch, select
from slipstream.kernels.cpu import library
from slipstream.kernels.cpu.library import ISAS
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.models.context import KvCache, PagedContext
from slipstream.quant.packed import MixedWeight

REFERENCE = ReferenceOps(torch.device("cpu"))
KEYS = (torch.float32, torch.bfloat16, torch.float16)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "rope": RopeSpec(10000.0, 64), "num_layers": 2}


def pack(model, format, ops, generator):
    """Replace the blocks' weights by packed ones, prepared for `ops`."""
    for layer in model.layers:
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            rows = sum(linear.parts.values())
            linear.pack(ops.prepare(packed_weight(format, rows, linear.in_features, generator)))


def pack_mixed(model, formats, ops, generator):
    """Replace the blocks' weights by packed ones, joined layers' parts in as many formats as there are."""
    for layer in model.layers:
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            kinds = [formats[part % len(formats)] for part in range(len(linear.parts))]
            runs = [
                ops.prepare(packed_weight(kind, rows, linear.in_features, generator))
                for kind, rows in zip(kinds, linear.parts.values(), strict=True)
            ]
            linear.pack(MixedWeight(tuple(runs)))


def context(ops, kv, start, count, page_size):
    index = torch.arange(start, start + count)
    pages = -(-256 // page_size)
    batch = AttentionBatch(
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([start + count], dtype=torch.int32),
        torch.arange(pages, dtype=torch.int32)[None],
        index,
        torch.full((count,), -1),
        page_size,
    )
    return PagedContext(ops, index, index.clone(), batch, kv)


def cache(model, page_size=16, dtype=torch.float32):
    pages = -(-256 // page_size)
    return KvCache.allocate(model.kv_shape, pages, page_size, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": True},
        {"qkv_bias": True, "mlp_bias": True, "output_bias": True},
        {"sliding_window": 7},
        {"intermediate_size": 100},
        {"num_kv_heads": 1, "rope": RopeSpec(10000.0, 8)},
    ],
)
def test_the_blocks_in_one_call_match_the_reference(cpu_ops, generator, caplog, changes):
    model = make_target(generator, **changes)
    ids = torch.randint(0, 90, (37,), generator=generator)
    got = model(ids, context(cpu_ops, cache(model), 0, 37, 16), (0, 1, 3, 1))
    expected = model(ids, context(REFERENCE, cache(model), 0, 37, 16), (0, 1, 3, 1))
    assert torch.allclose(got.last_TD, expected.last_TD, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(got.captured, expected.captured, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    assert not caplog.records


@pytest.mark.parametrize("residual", ["raw", "normed"])
@pytest.mark.parametrize("rows", [1, 2, 3, 20])
def test_the_draft_in_one_call_matches_the_reference(cpu_ops, generator, caplog, residual, rows):
    draft = make_draft(generator, num_layers=2, residual=residual, qk_norm=True)
    hidden = torch.randn(rows, 64, generator=generator)
    ids = torch.randint(0, 90, (rows,), generator=generator)
    got = draft(hidden, ids, context(cpu_ops, cache(draft), 0, rows, 16))
    expected = draft(hidden, ids, context(REFERENCE, cache(draft), 0, rows, 16))
    assert torch.allclose(got.normed_TD, expected.normed_TD, rtol=1e-4, atol=1e-4)
    assert not caplog.records


@pytest.mark.parametrize("keys", KEYS, ids=[f"{str(dtype).removeprefix('torch.')}-keys" for dtype in KEYS])
@pytest.mark.parametrize(
    "format", ["float32", "bfloat16", "q4_1", "q8_0", "w8a8_int8", "w4a8", "q4_k", "q6_k", "mixed"]
)
def test_bits_do_not_depend_on_chunks_threads_or_pages(fast_ops, generator, format, keys):
    model = make_target(generator, **(WIDE if format in ("q4_k", "q6_k", "mixed") else {}))
    if format == "bfloat16":
        model.layers.to(torch.bfloat16)
    elif format == "mixed":
        pack_mixed(model, ("q4_k", "q6_k", "q8_0"), fast_ops, generator)
    elif format != "float32":
        pack(model, format, fast_ops, generator)
    ids = torch.randint(0, 90, (64,), generator=generator)
    whole = model(ids, context(fast_ops, cache(model, 16, keys), 0, 64, 16), (2,))
    for ops in (CpuOps(1), CpuOps(2)):
        for page_size in (3, 64):
            for chunk in (1, 2, 5, 13, 40):
                kv = cache(model, page_size, keys)
                parts = []
                for at in range(0, 64, chunk):
                    part = ids[at : at + chunk]
                    parts.append(model(part, context(ops, kv, at, len(part), page_size), (2,)))
                assert torch.equal(torch.cat([part.last_TD for part in parts]), whole.last_TD)
                assert torch.equal(torch.cat([part.captured[0] for part in parts]), whole.captured[0])


@pytest.mark.parametrize("window", [None, 50])
def test_a_long_prompt_has_the_bits_of_its_chunks_whatever_cuts_it(fast_ops, generator, window):
    model = make_target(generator, **WIDE, sliding_window=window)
    pack(model, "q4_1", fast_ops, generator)
    ids = torch.randint(0, 90, (231,), generator=generator)
    kv = cache(model, 16, torch.float16)
    chunks = [0, 1, 8, 47, 110, 231]
    parts = [
        model(ids[at:end], context(CpuOps(1), kv, at, end - at, 16), (1,)) for at, end in itertools.pairwise(chunks)
    ]
    slower = [CpuOps(2, isa) for isa in ISAS[: ISAS.index(fast_ops.isa)]]
    for ops in [CpuOps(threads) for threads in (1, 2, 3, 4)] + slower:
        whole = model(ids, context(ops, cache(model, 16, torch.float16), 0, 231, 16), (1,))
        assert torch.equal(torch.cat([part.last_TD for part in parts]), whole.last_TD)
        assert torch.equal(torch.cat([part.captured[0] for part in parts]), whole.captured[0])


@pytest.mark.parametrize("format", ["q4_1", "q8_0", "w4a8"])
def test_requests_cut_between_threads_give_the_bits_of_each_alone(fast_ops, generator, format):
    counts, before = [3, 1, 11, 2, 9], [17, 0, 40, 5, 33]
    model = make_target(generator)
    pack(model, format, fast_ops, generator)
    ids = torch.randint(0, 90, (sum(counts),), generator=generator)
    batch = causal(counts, before, 16, generator)
    empty = KvCache.allocate(model.kv_shape, int(batch.page_table_RP.max()) + 1, 16, torch.float16, torch.device("cpu"))
    for layer in empty.layers:
        layer.keys_SGd.copy_(torch.randn(layer.keys_SGd.shape, generator=generator))
        layer.values_SGd.copy_(torch.randn(layer.values_SGd.shape, generator=generator))

    def run(ops, first, last):
        at = slice(int(batch.query_starts_R1[first]), int(batch.query_starts_R1[last]))
        part = AttentionBatch(
            batch.query_starts_R1[first : last + 1] - at.start,
            batch.kv_lens_R[first:last],
            batch.page_table_RP[first:last].contiguous(),
            batch.kv_index_T[at],
            batch.ancestors_T[at],
            16,
        )
        index = batch.kv_index_T[at]
        rows = torch.arange(len(counts))[first:last].repeat_interleave(torch.tensor(counts)[first:last])
        slots = batch.page_table_RP[rows, index // 16].long() * 16 + index % 16
        kv = copy.deepcopy(empty)
        result = model(ids[at], PagedContext(ops, index, slots, part, kv), (0, 2, 3))
        return torch.stack([result.last_TD, *result.captured], dim=1)

    alone = torch.cat([run(CpuOps(1), request, request + 1) for request in range(len(counts))])
    for threads in (1, 2, 3, 4):
        assert torch.equal(run(CpuOps(threads), 0, len(counts)), alone)


@pytest.mark.parametrize("formats", [("q4_k", "q4_k", "q6_k"), ("q5_0", "q5_0", "q8_0"), ("q4_0", "q6_k", "q5_1")])
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_blocks_of_mixed_formats_in_one_call_match_the_reference(cpu_ops, generator, caplog, formats, rows):
    seed = generator.initial_seed()
    biases = {"qkv_bias": True, "mlp_bias": True}
    model, plain = (make_target(torch.Generator().manual_seed(seed), **WIDE, **biases) for _ in range(2))
    pack_mixed(model, formats, cpu_ops, torch.Generator().manual_seed(seed + 1))
    pack_mixed(plain, formats, REFERENCE, torch.Generator().manual_seed(seed + 1))
    ids = torch.randint(0, 90, (rows,), generator=generator)
    got = model(ids, context(cpu_ops, cache(model), 0, rows, 16))
    assert not caplog.records
    by_parts = context(cpu_ops, cache(model), 0, rows, 16)
    hidden = model.embed_tokens(ids, cpu_ops)
    for layer in model.layers:
        hidden = layer(hidden, by_parts)
    assert torch.equal(hidden, got.last_TD)
    expected = plain(ids, context(REFERENCE, cache(plain), 0, rows, 16))
    assert (got.last_TD - expected.last_TD).norm() < 0.02 * expected.last_TD.norm()


def test_a_format_that_changes_within_a_panel_is_multiplied_part_by_part_and_said_so(fast_ops, generator, caplog):
    model = make_target(generator, head_dim=8, num_kv_heads=1, rope=RopeSpec(10000.0, 8), hidden_size=32)
    pack_mixed(model, ("q4_1", "q8_0", "q5_0"), fast_ops, generator)
    ids = torch.randint(0, 90, (6,), generator=generator)
    with caplog.at_level(logging.WARNING):
        whole = model(ids, context(fast_ops, cache(model), 0, 6, 16)).last_TD
    assert sum("format changes within 16 rows" in record.message for record in caplog.records) == 1
    kv = cache(model)
    parts = [model(ids[at : at + 2], context(fast_ops, kv, at, 2, 16)).last_TD for at in range(0, 6, 2)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("keys", KEYS, ids=[f"{str(dtype).removeprefix('torch.')}-keys" for dtype in KEYS])
def test_blocks_one_by_one_give_the_bits_of_one_call(cpu_ops, generator, keys):
    fast_ops, model = cpu_ops, make_target(generator)
    ids = torch.randint(0, 90, (20,), generator=generator)
    whole = model(ids, context(fast_ops, cache(model, 16, keys), 0, 20, 16))
    ctx = context(fast_ops, cache(model, 16, keys), 0, 20, 16)
    hidden = model.embed_tokens(ids, fast_ops)
    for layer in model.layers:
        hidden = layer(hidden, ctx)
    assert torch.equal(hidden, whole.last_TD)


@pytest.mark.parametrize("dtype", KEYS[1:], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("size", [1e-7, 1e-4, 1.0, 3e4, 1e9])
def test_short_keys_are_kept_as_the_reference_rounds_them(cpu_ops, generator, dtype, size):
    model = make_target(generator, num_layers=1, head_dim=24, rope=RopeSpec(10000.0, 24))
    model.layers[0].self_attn.qkv_proj.weight.mul_(size)
    ids = torch.randint(0, 90, (40,), generator=generator)
    long, short, expected = (cache(model, dtype=kind) for kind in (torch.float32, dtype, dtype))
    for kv in (long, short):
        model(ids, context(cpu_ops, kv, 0, 40, 16))
    REFERENCE.write_kv(expected.layers[0], long.layers[0].keys_SGd, long.layers[0].values_SGd, torch.arange(256))
    assert torch.equal(short.layers[0].keys_SGd, expected.layers[0].keys_SGd)
    assert torch.equal(short.layers[0].values_SGd, expected.layers[0].values_SGd)
    assert short.layers[0].keys_SGd.isfinite().all()


def test_weights_replaced_after_a_pass_are_used_by_the_next(fast_ops, generator):
    model = make_target(generator)
    ids = torch.randint(0, 90, (4,), generator=generator)
    before = model(ids, context(fast_ops, cache(model), 0, 4, 16)).last_TD
    pack(model, "q4_1", fast_ops, generator)
    after = model(ids, context(fast_ops, cache(model), 0, 4, 16)).last_TD
    assert not torch.equal(before, after)


def test_blocks_that_do_not_fit_run_one_by_one_and_say_so_once(fast_ops, generator, caplog):
    model = make_target(generator)
    ids = torch.randint(0, 90, (4,), generator=generator)
    kv = KvCache.allocate(model.kv_shape, 16, 16, torch.float64, torch.device("cpu"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            got = model(ids, context(fast_ops, kv, 0, 4, 16)).last_TD
    assert sum("one by one" in record.message for record in caplog.records) == 1
    expected = model(ids, context(REFERENCE, cache(model), 0, 4, 16)).last_TD
    assert torch.allclose(got, expected, rtol=0.1, atol=0.1)


def test_blocks_whose_query_heads_cannot_share_the_key_heads_are_refused(fast_ops, generator, caplog):
    with pytest.raises(KernelError, match="no multiple of the key heads"):
        run(make_draft(generator, num_heads=2, num_kv_heads=4), fast_ops, [4])
    assert "2 query heads cannot share 4 key heads evenly" in caplog.text


def test_blocks_the_library_has_not_are_named_by_what_they_are_made_of(fast_ops, generator, caplog):
    latent = MlaSpec(q_rank=24, kv_rank=16, nope_dim=16, rope_dim=16, value_dim=16, scale=0.25)
    model = make_target(generator, mla=latent)
    with caplog.at_level(logging.WARNING):
        model(torch.tensor([1, 2]), context(fast_ops, cache(model), 0, 2, 16))
    assert "no blocks of latent attention and a gated feed-forward" in caplog.text


def test_no_tokens_give_no_states(fast_ops, generator):
    model = make_target(generator)
    empty = model(torch.zeros(0, dtype=torch.int64), context(fast_ops, cache(model), 0, 0, 16), (1,))
    assert empty.last_TD.shape == (0, 64)


def test_positions_past_the_rotary_table_are_refused(fast_ops, generator):
    model = make_target(generator)
    ctx = context(fast_ops, cache(model), 0, 1, 16)
    beyond = PagedContext(fast_ops, torch.tensor([10**6]), ctx.slots_T, ctx.batch, ctx.kv)
    with pytest.raises(KernelError, match="outside"):
        model(torch.tensor([1]), beyond)


def test_auto_takes_the_cpu_kernels_and_reference_takes_torch(fast_ops):
    device = torch.device("cpu")
    assert select(device).name == "cpu"
    assert select(device, "cpu").row_invariant
    assert select(device, "reference").name == "reference"


def test_without_the_library_auto_takes_torch_and_says_what_it_costs(monkeypatch, tmp_path, caplog):
    missing = tmp_path / "libslipstream_cpu.so"
    monkeypatch.setattr(library.load_library, "__defaults__", (missing,))
    monkeypatch.setattr(library.NativeEngine.__init__, "__defaults__", (None, missing))
    with caplog.at_level(logging.WARNING):
        assert select(torch.device("cpu")).name == "reference"
    assert len(caplog.records) == 1
    assert "costs" in caplog.text
    assert "install" in caplog.text
    with pytest.raises(KernelError, match="does not exist"):
        select(torch.device("cpu"), "cpu")


def test_the_blocks_write_keys_and_values_in_fp8_as_the_reference_does(cpu_ops, generator):
    model = make_target(generator, qk_norm=True)
    tokens = torch.randint(0, 90, (37,), generator=generator)
    caches = [cache(model, dtype=KV_FP8) for _ in range(2)]
    got = model(tokens, context(cpu_ops, caches[0], 0, 37, 16), ())
    expected = model(tokens, context(REFERENCE, caches[1], 0, 37, 16), ())
    first, second = caches[0].layers[0], caches[1].layers[0]
    assert torch.equal(first.scales[0][:37], second.scales[0][:37])
    for mine, theirs in ((first.keys_SGd, second.keys_SGd), (first.values_SGd, second.values_SGd)):
        steps = mine[:37].view(torch.uint8).int() - theirs[:37].view(torch.uint8).int()
        assert (steps == 0).float().mean() > 0.99  # products round otherwise, and a few numbers lie at a boundary
        assert steps.abs().max() <= 1
    assert torch.allclose(got.last_TD, expected.last_TD, rtol=0.05, atol=0.05)
