"""Targets from GGUF files whose tensors are in blocks of several formats, run from the stored bits."""

import gguf
import numpy as np
import pytest
import torch

from slipstream.checkpoint.gguf_file import GgufReader
from slipstream.checkpoint.names import gguf_name
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.memory import weight_bytes
from slipstream.errors import ConfigError, KernelError
from slipstream.kernels import AttentionBatch, Ops, select
from slipstream.models.context import KvCache, PagedContext
from slipstream.models.load import load_target
from slipstream.models.parallel import ALONE, Ranks
from slipstream.models.target import Target
from slipstream.quant.gguf_blocks import BLOCK_FORMATS, dequantize
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import follower_draft, run

VOCAB, WIDTH, INNER, LAYERS = 96, 256, 512, 4
CPU = torch.device("cpu")
SHAPES = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH // 2, WIDTH),
    "self_attn.v_proj": (WIDTH // 2, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}
Q4_K_M = {"self_attn.v_proj": "q6_k", "mlp.down_proj": "q6_k", "lm_head": "q6_k"}
FALLBACK = {"self_attn.v_proj": "q8_0", "mlp.down_proj": "q4_k", "lm_head": "q8_0"}


def any_blocks(format: str, shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """Valid blocks: random codes and small scales, half floats of either sign."""
    stored = BLOCK_FORMATS[format]
    blocks = random.integers(0, 256, (shape[0], shape[1] // stored.columns, stored.nbytes), dtype=np.uint8)
    starts = (208,) if format == "q6_k" else (0, 2) if format[3] in "1k" else (0,)
    size = 1.0
    for _ in range(2):  # once to see how large weights are, once to make them 1 / sqrt(columns)
        for start in starts:
            halves = (size * random.choice([-1, 1], (*blocks.shape[:2], 1))).astype(np.float16)
            blocks[..., start : start + 2] = halves.view(np.uint8)
        sample = dequantize(format, torch.from_numpy(blocks.reshape(shape[0], -1)))
        size /= float(sample.square().mean().sqrt()) * shape[1] ** 0.5
    return blocks.reshape(shape[0], -1)


def write(path, most: str, but: dict[str, str], tied: bool = False):
    """Write a llama of random blocks: `most` is the format of all weights, except those in `but`."""
    random = np.random.default_rng(11)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)

    def add(name: str, shape: tuple[int, int]) -> None:
        part = name.split(".", 3)[3] if ".layers." in name else name
        kind = gguf.GGMLQuantizationType[but.get(part, most).upper()]
        if kind.name.lower() in BLOCK_FORMATS:
            data = any_blocks(kind.name.lower(), shape, random)
        else:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            data = np.zeros((shape[0], shape[1] // block * size), np.uint8)
        writer.add_tensor(gguf_name(f"{name}.weight"), data, raw_dtype=kind)

    add("model.embed_tokens", (VOCAB, WIDTH))
    for layer in range(LAYERS):
        for part, shape in SHAPES.items():
            add(f"model.layers.{layer}.{part}", shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            writer.add_tensor(gguf_name(f"model.layers.{layer}.{norm}.weight"), np.ones(WIDTH, np.float32))
    writer.add_tensor(gguf_name("model.norm.weight"), np.ones(WIDTH, np.float32))
    if not tied:
        add("lm_head", (VOCAB, WIDTH))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def cpu_kernels() -> Ops:
    try:
        return select(CPU, "cpu")
    except KernelError:
        pytest.skip("CPU kernels not built")


def logits(model: Target, ops: Ops, ids: torch.Tensor) -> torch.Tensor:
    count = len(ids)
    index = torch.arange(count)
    batch = AttentionBatch(
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        torch.arange(16, dtype=torch.int32)[None],
        index,
        torch.full((count,), -1),
        8,
    )
    kv = KvCache.allocate(model.kv_shape, 16, 8, torch.float32, CPU)
    states = model(ids, PagedContext(ops, index, index.clone(), batch, kv))
    return model.logits(states.last_TD, ops)


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("most", "but", "tied"),
    [
        ("q4_k", Q4_K_M, False),
        ("q5_k", Q4_K_M, True),
        ("q6_k", {}, True),
        ("q5_0", FALLBACK, False),
        ("q5_1", {}, True),
    ],
    ids=["Q4_K_M", "Q5_K_M, tied", "Q6_K", "Q4_K_M of another width", "Q5_1"],
)
@torch.inference_mode()
def test_a_file_of_mixed_blocks_gives_the_logits_of_its_dequantized_weights(tmp_path, caplog, kernels, most, but, tied):
    ops = cpu_kernels() if kernels == "cpu" else select(CPU, "reference")
    reader = GgufReader(write(tmp_path / "m.gguf", most, but, tied))
    model = load_target(reader, torch.float32, CPU, ops=ops)
    stored = sum(reader.info(name).nbytes for name in reader.names())
    assert stored <= weight_bytes(model) <= 1.03 * stored
    exact = load_target(reader, torch.float32, CPU)
    ids = torch.arange(40) * 7 % VOCAB
    got, expected = logits(model, ops, ids), logits(exact, select(CPU, "reference"), ids)
    assert (got - expected).norm() < 0.03 * expected.norm()
    assert not caplog.records


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@torch.inference_mode()
def test_a_file_of_mixed_blocks_gives_the_same_tokens_with_a_draft_and_without(tmp_path, caplog, temperature):
    ops = cpu_kernels()
    reader = GgufReader(write(tmp_path / "m.gguf", "q4_k", Q4_K_M))
    target = load_target(reader, torch.float32, CPU, ops=ops)
    exact = load_target(reader, torch.float32, CPU)
    draft = follower_draft(exact, hidden_size=WIDTH, target_hidden_size=WIDTH)
    draft.share_embedding(target.embed_tokens)
    for layer in draft.layers:  # at this width the noise they add would drown the target's state
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    config = EngineConfig(max_context=128, page_size=8, max_requests=4, max_batch_tokens=64)
    prompts = [[3, 14, 15], [92, 65, 35, 89, 79], [1]]
    params = [SamplingParams(max_tokens=24, temperature=temperature)] * len(prompts)
    engines = [
        build_engine(target, draft, TreeShape.chain(4), config, ops),
        build_engine(target, None, None, config, ops),
    ]
    with_draft, without = (run(engine, prompts, params, [5, 6, 7]) for engine in engines)
    assert with_draft == without
    assert sum(engines[0].stats.acceptance.accepted) > 5
    assert not caplog.records


@torch.inference_mode()
def test_layers_with_a_part_in_an_unknown_format_are_expanded_and_said_so(tmp_path, caplog):
    ops = cpu_kernels()
    reader = GgufReader(write(tmp_path / "m.gguf", "q4_k", {"self_attn.k_proj": "q3_k", "mlp.down_proj": "q2_k"}))
    model = load_target(reader, torch.float32, CPU, ops=ops)
    first = model.layers[0]
    assert first.self_attn.qkv_proj.packed is None and first.mlp.down_proj.packed is None
    assert first.mlp.gate_up_proj.packed is not None
    [record] = caplog.records
    assert "m.gguf: 16 tensors in Q2_K, Q3_K, Q4_K are expanded to float32" in record.message
    assert "Q4_K, Q5_K, Q6_K as stored" in record.message


def test_a_rank_holds_its_rows_and_whole_blocks_of_columns(tmp_path):
    reference = select(CPU, "reference")
    reader = GgufReader(write(tmp_path / "m.gguf", "q4_k", {**Q4_K_M, "self_attn.o_proj": "q8_0"}))
    whole, part = (
        load_target(reader, torch.float32, CPU, ops=reference, ranks=ranks) for ranks in (ALONE, Ranks(1, 2))
    )
    (qk, v), down = whole.layers[0].self_attn.qkv_proj.packed.runs, whole.layers[0].mlp.down_proj.packed
    own_qk, own_v = part.layers[0].self_attn.qkv_proj.packed.runs
    q, k = qk.codes.split([WIDTH, WIDTH // 2])
    assert torch.equal(own_qk.codes, torch.cat([q[WIDTH // 2 :], k[WIDTH // 4 :]]))
    assert torch.equal(own_v.codes, v.codes[WIDTH // 4 :])
    assert torch.equal(part.layers[0].mlp.down_proj.packed.codes, down.codes[:, BLOCK_FORMATS["q6_k"].nbytes :])
    with pytest.raises(ConfigError, match="o_proj cut through a block of 256"):
        load_target(
            GgufReader(write(tmp_path / "k.gguf", "q4_k", {})), torch.float32, CPU, ops=reference, ranks=Ranks(1, 2)
        )
