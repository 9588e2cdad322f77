"""The precisions of a run: the target's, which a recipe may name, and the draft's, which follows from the device."""

import hashlib

import torch

from slipstream.checkpoint.source import TensorSource
from slipstream.errors import ConfigError
from slipstream.models.load import load_target
from slipstream.models.target import Target
from slipstream.train.ops import TrainOps
from slipstream.train.product import product_f32
from slipstream.train.seen import Seen
from slipstream.train.unroll import PackedContext

TARGET_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_REMEDY = "set train.target_dtype to bfloat16 or float32"


def draft_dtype(device: torch.device) -> torch.dtype:
    """Return the precision of the draft's activations; never float16, in which small gradients vanish."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def target_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Return the precision a target runs in: the one named, else the draft's."""
    return draft_dtype(device) if name is None else TARGET_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return what recipes and records call a precision."""
    return str(dtype).removeprefix("torch.")


def load_and_digest(
    source: TensorSource, dtype: torch.dtype, device: torch.device, max_position: int
) -> tuple[Target, str]:
    """Return the target, and a digest of its weights that is the same for every precision it may run in."""
    if dtype != torch.float16:
        model = load_target(source, dtype, device, max_position)
        return model, weights_digest(model)
    # A number rounded to float16 and then to bfloat16 is not always the number rounded to bfloat16.
    digest = weights_digest(load_target(source, torch.bfloat16, torch.device("cpu"), max_position))
    return load_target(source, dtype, device, max_position), digest


@torch.no_grad()
def check_range(model: Target, prompt: list[int]) -> None:
    """Refuse a target in float16 whose weights, or states on a prompt, are beyond its largest number."""
    device = model.embed_tokens.device
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ConfigError(f"{name} of the target has weights beyond float16's largest number, 65504; {_REMEDY}.")
    assert model.lm_head.weight is not None
    ids_BT = torch.tensor([prompt], device=device)
    ops, positions_BT = TrainOps(device), torch.arange(len(prompt), device=device)[None]
    hidden = model(ids_BT, PackedContext(ops, positions_BT, Seen(torch.zeros_like(ids_BT))))
    if not bool(torch.isfinite(product_f32(model.norm(hidden.last_TD[0], ops), model.lm_head.weight)).all()):
        raise ConfigError(f"On a first prompt the target's states exceed float16's largest number, 65504; {_REMEDY}.")


def weights_digest(model: torch.nn.Module) -> str:
    """Return a digest of the target as it runs; the values in bfloat16 say enough to tell two targets apart."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().to(torch.bfloat16).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
