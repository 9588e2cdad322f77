"""Targets as they are published load onto meta tensors: every tensor of transformers' model is one of ours, by name
and shape, and together they have the sizes that the models' cards name.

Beside the publishers' configs stand those that transformers' classes have by themselves.
"""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from published_targets import PUBLISHED, default_config
from transformers.core_model_loading import revert_weight_conversion

from slipstream.checkpoint.config import model_spec
from slipstream.checkpoint.families import FAMILIES
from slipstream.checkpoint.joined import taken_apart
from slipstream.checkpoint.names import canonical_names, canonical_target_name, left_out_of_target
from slipstream.checkpoint.source import TensorInfo
from slipstream.errors import CheckpointError
from slipstream.models.accounting import check_tensors, places
from slipstream.models.target import Target

# The default of GLM-4.5's class has no head_dim that fits, and Kimi-K2.5's class does not save the names it reads.
UNFIT = ("Glm4MoeForCausalLM", "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")


class Shapes:
    """The tensors of transformers' model of a config, as it saves them, without their numbers."""

    def __init__(self, config: dict) -> None:
        self.folder, self.config = Path("meta"), config
        kind = getattr(transformers, config["architectures"][0])
        fields = {key: value for key, value in config.items() if key != "quantization_config"}
        if "attn_temperature_tuning" in fields.get("text_config", {}):  # Scout's 4, which transformers 5 takes no more
            fields["text_config"] = fields["text_config"] | {"attn_temperature_tuning": True}
        with torch.device("meta"):
            model = kind(kind.config_class.from_dict(fields))
        self._tensors = revert_weight_conversion(model, model.state_dict())

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def info(self, name: str) -> TensorInfo:
        tensor = self._tensors[name]
        return TensorInfo(name, tuple(tensor.shape), "BF16", self.folder, 2 * tensor.numel())


@pytest.mark.parametrize("name", [*PUBLISHED, *(name for name in FAMILIES if name not in UNFIT)])
def test_a_published_config_is_read_and_every_tensor_is_accounted_for(name):
    config, parameters = PUBLISHED[name] if name in PUBLISHED else (default_config(name), None)
    spec = model_spec(config, Path(name))
    with torch.device("meta"):
        model = Target(spec, max_position=8)
    wanted = {f"model.{path}": place.shape for path, place in places(model).items() if path != "lm_head.weight"}
    source = taken_apart(Shapes(config), spec)
    ours = [path for path in source.names() if left_out_of_target(path, spec) is None]
    names = canonical_names(ours, partial(canonical_target_name, norms_around=spec.norms_around))
    head = names.pop("lm_head.weight", None)
    assert spec.tie_embeddings or source.info(head).shape == model.lm_head.weight.shape
    check_tensors(source, names, wanted)
    if parameters is not None:
        tables = 1 if spec.tie_embeddings else 2
        blocks = sum(math.prod(shape) for path, shape in wanted.items() if "embed_tokens" not in path)
        assert blocks + tables * spec.vocab_size * spec.hidden_size == pytest.approx(parameters, rel=2e-3)


def test_gemma_turns_positions_by_two_bases_and_stretches_one_of_them():
    spec = model_spec(PUBLISHED["gemma-3-4b-it, text"][0], Path("gemma"))
    windowed, whole = spec.block(0), spec.block(5)
    assert (windowed.window, windowed.rope.theta, windowed.rope.scaling) == (1024, 1e4, "none")
    assert (whole.window, whole.rope.theta, whole.rope.factor) == (None, 1e6, 8.0)
    assert spec.tie_embeddings and spec.embedding_scale == 2560**0.5 and spec.attention_scale == 256**-0.5


def test_gemma_4_has_wider_and_fewer_key_heads_where_it_sees_all_keys():
    spec = model_spec(PUBLISHED["gemma-4-31B-it, text"][0], Path("gemma"))
    windowed, whole = spec.block(0), spec.block(59)
    assert (windowed.window, spec.block_heads(0), windowed.keys_as_values) == (1024, (256, 16), False)
    assert (whole.window, spec.block_heads(59), whole.keys_as_values) == (None, (512, 4), True)
    assert (whole.rope.rotary_dim, whole.rope.turning) == (512, 64)


def test_a_gemma_4_with_embeddings_for_every_block_is_refused_by_its_name():
    config, _ = PUBLISHED["gemma-4-31B-it, text"]
    small = config | {"text_config": config["text_config"] | {"hidden_size_per_layer_input": 256}}
    with pytest.raises(CheckpointError, match=r"'text_config.hidden_size_per_layer_input' is 256.*E2B and E4B.*vllm"):
        model_spec(small, Path("gemma"))
