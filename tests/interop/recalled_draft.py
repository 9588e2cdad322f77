"""A DFlash draft for the embedded model, solved for and not trained: good enough that its guesses are kept at times.

Its one layer attends by position alone. Three heads each see the token one, two and three places before, by constant
queries and keys that rope turns; what they saw is mapped by least squares to the state that the target had where it
chose the next token. So guesses depend on features, on positions and on the tokens of the block.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from slipstream.kernels.training.ops import TrainOps
from slipstream.kernels.training.seen import Seen
from slipstream.models.target import Target
from slipstream.train.draft.packing import PackedContext

MASK, PLACES, HEADS, HEAD = 28, 3, 9, 64  # the mask is a comma
_GROUP = HEADS // PLACES * HEAD  # numbers that the heads of one distance carry
_TURNING, _SHARP = 4, 3.5  # pairs of a head that turn fastest, and how large queries and keys are


@torch.no_grad()
def write_recalled_draft(folder: Path, target: Target, texts: list[list[int]]) -> Path:
    """Write the draft that recalls these texts best, in the layout of DFlash's authors."""
    spec = target.spec
    embedding = target.embed_tokens(torch.arange(spec.vocab_size), TrainOps(torch.device("cpu"))).float()
    rows = [row for text in texts for row in _rows(target, embedding, text)]
    inputs, wanted = (torch.stack(column) for column in zip(*rows, strict=True))  # [N, PLACES, D] and [N, D]
    seen = [torch.linalg.eigh(x.T @ x).eigenvectors[:, -_GROUP:].T for x in inputs.unbind(1)]  # what varies most
    x = torch.cat([inputs[:, far] @ seen[far].T for far in range(PLACES)], 1)
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    map_out = torch.linalg.solve(x.T @ x + torch.eye(x.shape[1]), x.T @ (wanted - embedding[MASK]))
    width = spec.hidden_size
    constant, turned = _position_heads(spec.rope.theta)
    zero, layer = torch.zeros(HEADS * HEAD, width), "layers.0."
    tensors = {
        "fc.weight": torch.cat([torch.zeros(width, width), torch.eye(width)], 1),  # of two captured states, the last
        "hidden_norm.weight": torch.ones(width),
        "norm.weight": target.norm.weight.float(),
        f"{layer}input_layernorm.weight": torch.ones(width),
        f"{layer}post_attention_layernorm.weight": torch.ones(width),
        f"{layer}self_attn.q_proj.weight": zero,
        f"{layer}self_attn.k_proj.weight": zero.clone(),
        f"{layer}self_attn.v_proj.weight": torch.cat(seen),
        f"{layer}self_attn.o_proj.weight": map_out[:-1].T,
        f"{layer}self_attn.q_proj.bias": constant.repeat(HEADS),
        f"{layer}self_attn.k_proj.bias": torch.cat(
            [turned[far] for far in range(PLACES) for _ in range(HEADS // PLACES)]
        ),
        f"{layer}self_attn.v_proj.bias": torch.zeros(HEADS * HEAD),
        f"{layer}self_attn.o_proj.bias": map_out[-1],
        f"{layer}self_attn.q_norm.weight": torch.full((HEAD,), _SHARP),
        f"{layer}self_attn.k_norm.weight": torch.full((HEAD,), _SHARP),
        f"{layer}mlp.gate_proj.weight": torch.zeros(HEAD, width),
        f"{layer}mlp.up_proj.weight": torch.zeros(HEAD, width),
        f"{layer}mlp.down_proj.weight": torch.zeros(width, HEAD),
    }
    folder.mkdir(parents=True)
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(target)))
    return folder


def _config(target: Target) -> dict[str, object]:
    spec = target.spec
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 8, "dtype": "float32",
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [14, spec.num_layers - 1]},
        "num_target_layers": spec.num_layers, "num_hidden_layers": 1, "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size, "intermediate_size": HEAD, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "head_dim": HEAD, "rms_norm_eps": 1e-5, "rope_theta": spec.rope.theta,
        "max_position_embeddings": spec.max_position, "hidden_act": "silu", "attention_bias": True,
        "layer_types": ["full_attention"], "use_sliding_window": False, "tie_word_embeddings": True,
    }  # fmt: skip


def _rows(target, embedding, text):
    """Yield, for each place behind each anchor, what stands one to three places before, and the state to arrive at."""
    count = len(text)
    context = PackedContext(
        TrainOps(torch.device("cpu")), torch.arange(count)[None], Seen(torch.zeros(1, count, dtype=torch.int64))
    )
    states = target(torch.tensor([text]), context, (target.spec.num_layers,)).captured[0][0].float()
    features, arrived, embedded = _normed(states), _normed(states), _normed(embedding[text])
    mask = _normed(embedding[MASK])
    for anchor in range(PLACES, count - PLACES):
        for place in range(1, PLACES + 1):
            before = [anchor + place - far for far in range(1, PLACES + 1)]
            yield (
                torch.stack([features[p] if p < anchor else embedded[p] if p == anchor else mask for p in before]),
                arrived[anchor + place - 1],
            )


def _position_heads(theta):
    """Return a query that is the same everywhere, and the keys that meet it one, two and three places later."""
    frequency = theta ** (-torch.arange(HEAD // 2) / (HEAD // 2))
    turns = torch.arange(HEAD // 2) < _TURNING
    query = torch.cat([turns.float(), torch.zeros(HEAD // 2)])
    keys = [
        torch.cat([turns * torch.cos(far * frequency), turns * torch.sin(far * frequency)])
        for far in range(1, PLACES + 1)
    ]
    return query, keys


def _normed(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
