"""A rank reads its part of a checkpoint and no more, in every stored form; a split that cannot be is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny_moe
from parallel import folders, programs
from parallel.programs import CPU, CountingReader
from slipstream.checkpoint.config import model_spec
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.span import Span
from slipstream.checkpoint.spec import RopeSpec
from slipstream.errors import ConfigError
from slipstream.models.load import load_draft, load_target
from slipstream.models.parallel import Ranks
from slipstream.models.topology import Topology
from slipstream.quant.load import packed_part, packed_weight, read_scheme
from slipstream.quant.plan import QuantizeOptions, plan_quantize
from slipstream.quant.quantize import quantize
from slipstream.quant.scheme import SCHEMES, dequantize, scheme_named
from slipstream.ranks.launch import take_seat
from tiny import tiny_target

FORMS = [*((name, None, "quark") for name in SCHEMES), ("int4", 32, "quark"), ("int4", 32, "compressed-tensors")]
ROWS, COLUMNS = 128, 256


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    """A checkpoint of one linear layer."""
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    folder = tmp_path_factory.mktemp("layer") / "dense"
    folders.write(folder, {"model.layers.0.mlp.up_proj.weight": weight}, {"architectures": ["LlamaForCausalLM"]})
    return folder


def check_parts(source, module="model.layers.0.mlp.up_proj"):
    scheme = read_scheme(source.config, source.names(), source.folder)
    whole = dequantize(packed_weight(source, scheme, module, ROWS, COLUMNS))
    for rows in (Span.whole(ROWS), Span(ROWS, 64, 128)):
        for columns in (Span.whole(COLUMNS), Span(COLUMNS, 0, 128), Span(COLUMNS, 128, 256)):
            part = packed_part(source, scheme, module, rows, columns)
            expected = whole[rows.start : rows.stop, columns.start : columns.stop]
            assert (part.out_features, part.in_features) == expected.shape
            assert torch.equal(dequantize(part), expected)


@pytest.mark.parametrize(("name", "group_size", "dialect"), FORMS)
def test_a_part_of_a_packed_weight_is_that_part_of_the_whole(layer, tmp_path, name, group_size, dialect):
    options = QuantizeOptions(scheme_named(name, group_size), dialect=dialect)
    quantize(plan_quantize(layer, options), tmp_path / "out")
    check_parts(open_checkpoint(tmp_path / "out"))


def write_fp8_blocks(folder, rows):
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(rows, COLUMNS).to(torch.float8_e4m3fn),
        "model.layers.0.mlp.up_proj.weight_scale_inv": torch.rand(-(-rows // 128), COLUMNS // 128) + 0.5,
    }
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    folders.write(folder, tensors, {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization})
    return open_checkpoint(folder)


def test_fp8_blocks_are_split_between_blocks_and_never_through_one(tmp_path):
    source = write_fp8_blocks(tmp_path / "blocks", 256)
    scheme = read_scheme(source.config, source.names(), source.folder)
    module = "model.layers.0.mlp.up_proj"
    whole = dequantize(packed_weight(source, scheme, module, 256, COLUMNS))
    part = packed_part(source, scheme, module, Span(256, 128, 256), Span(COLUMNS, 128, 256))
    assert torch.equal(dequantize(part), whole[128:, 128:])
    with pytest.raises(ConfigError, match=r"rows \[64, 128\) of 256 begin or end inside a stored block of 128"):
        packed_part(source, scheme, module, Span(256, 64, 128), Span.whole(COLUMNS))


@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_of_a_dense_target_read_each_split_tensor_once_between_them(dense, size):
    total = sum(open_checkpoint(dense.target).info(name).nbytes for name in open_checkpoint(dense.target).names())
    spec = model_spec(open_checkpoint(dense.target).config, dense.target)
    width, layers = spec.hidden_size, spec.num_layers
    everywhere = 4 * (spec.vocab_size * width + (2 * layers + 1) * width)
    key_heads = 4 * 2 * layers * spec.num_kv_heads * spec.head_dim * width
    copies = max(1, size // spec.num_kv_heads)
    for rank in range(size):
        split = (total - everywhere - key_heads) // size + key_heads * copies // size
        assert programs.bytes_read(Ranks(rank, size), dense.target) == everywhere + split


def test_a_rank_reads_only_the_experts_it_holds(deepseek):
    source = open_checkpoint(deepseek)
    experts = sum(source.info(name).nbytes for name in source.names() if ".experts." in name)
    dealt = [programs.bytes_read(Ranks(rank, 4, 4), deepseek) for rank in range(4)]
    split = [programs.bytes_read(Ranks(rank, 4, 1), deepseek) for rank in range(4)]
    whole = programs.bytes_read(Ranks(), deepseek)
    assert dealt == split
    assert all(whole - count >= experts * 3 // 4 for count in dealt)


@pytest.mark.parametrize(("name", "group_size"), [("w4a8", None), ("mxfp4", None), ("int4", 32), ("ptpc_fp8", None)])
def test_a_rank_of_a_quantized_target_holds_its_share_packed(tmp_path, name, group_size):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_kv_heads": 4, "head_dim": 32}
    rope = RopeSpec(theta=10000.0, rotary_dim=32)
    target = folders.write_target(tmp_path / "target", tiny_target(vocab_size=folders.VOCAB, rope=rope, **sizes))
    quantize(plan_quantize(target, QuantizeOptions(scheme_named(name, group_size))), tmp_path / "out")
    whole, split = (CountingReader(tmp_path / "out") for _ in range(2))
    all_of_it = load_target(whole, torch.float32, CPU)
    model = load_target(split, torch.float32, CPU, ranks=Ranks(1, 4))
    down, part = all_of_it.layers[0].mlp.down_proj.packed, model.layers[0].mlp.down_proj.packed
    assert torch.equal(dequantize(part), dequantize(down)[:, 64:128])
    embedding = 4 * all_of_it.embed_tokens.weight.numel()
    assert split.num_bytes - embedding < 0.3 * (whole.num_bytes - embedding)


@pytest.mark.parametrize(
    ("topology", "changes", "words"),
    [
        ((3,), {}, "tp is 3, which does not divide the target's 4 attention heads"),
        ((4,), {"vocab_size": 66}, "does not divide the target's 66 tokens in the vocabulary"),
        ((4,), {"intermediate_size": 98}, "does not divide the target's 98 feed-forward columns"),
        ((8, 8), {"num_attention_heads": 8}, "ep is 8, which does not divide the target's 12 experts"),
        (
            (4, 1),
            {"moe_intermediate_size": 30, "n_shared_experts": 2},
            "4 ranks split each expert.*30 columns. Raise ep",
        ),
        ((4, 4), {"moe_intermediate_size": 30}, "does not divide the 30 columns of the target's shared expert"),
    ],
)
def test_a_target_that_does_not_split_evenly_is_refused(topology, changes, words):
    config = {**tiny_moe.DEEPSEEK, "vocab_size": 64, "architectures": ["DeepseekV3ForCausalLM"], **changes}
    with pytest.raises(ConfigError, match=words):
        Topology(*topology).check(model_spec(config, Path("here")))


def test_key_heads_are_split_or_shared_but_nothing_between(dense):
    spec = model_spec(open_checkpoint(dense.target).config, dense.target)
    for tp, num_kv_heads in ((4, 1), (4, 2), (4, 4), (2, 4)):
        Topology(tp).check(replace(spec, num_kv_heads=num_kv_heads))
    with pytest.raises(ConfigError, match="tp is 4, and the target has 3 key heads: one number must divide the other"):
        Topology(4).check(replace(spec, num_heads=12, num_kv_heads=3))


def test_experts_are_not_dealt_out_where_there_are_none(dense):
    with pytest.raises(ConfigError, match="ep is 2, but LlamaForCausalLM has no experts"):
        Topology(2, 2).check(model_spec(open_checkpoint(dense.target).config, dense.target))


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(ConfigError, match=r"tp is 4096, but this machine has \d+ GPUs; each rank takes one"):
        take_seat(Topology(4096), torch.device("cuda"), lambda options, seat: None, None)
    with pytest.raises(ConfigError, match="device is cuda:0, one GPU, and tp is 2"):
        take_seat(Topology(2), torch.device("cuda:0"), lambda options, seat: None, None)


def test_a_draft_without_a_head_cannot_stay_whole_beside_a_split_target(dense, tmp_path):
    tensors = {n: t for n, t in tiny_moe.tensors_of(dense.draft).items() if n != "lm_head.weight"}
    tiny_moe.write(tmp_path / "headless", json.loads((dense.draft / "config.json").read_text()), tensors)
    target = load_target(open_checkpoint(dense.target), torch.float32, CPU, ranks=Ranks(0, 2))
    with pytest.raises(ConfigError, match=r"no head of its own.*draft_tp 2"):
        load_draft(open_checkpoint(tmp_path / "headless"), target, torch.float32)
    assert (
        load_draft(open_checkpoint(tmp_path / "headless"), target, torch.float32, split=True).lm_head is target.lm_head
    )
