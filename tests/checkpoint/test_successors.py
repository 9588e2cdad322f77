"""Drafts that came after EAGLE-3 are refused by name, with what to do."""

import pytest

from slipstream.checkpoint.draft_config import draft_spec
from slipstream.errors import CheckpointError

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "block_size": 16}, "DFlash2"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "a DFlash draft of another architecture"),
        ({"architectures": ["Qwen3ForCausalLM"], "dflash_config": {"mask_token_id": 7}}, "a DFlash draft of another"),
        ({"architectures": ["Qwen3DSparkModel"], "dflash_config": {"mask_token_id": 7}}, "DSpark"),
        ({"speculators_model_type": "dspark", "architectures": ["DSparkDraftModel"]}, "DSpark"),
        ({"architectures": ["MedusaModel"], "medusa_num_heads": 4}, "Medusa"),
        ({"speculators_model_type": "mlp_speculator"}, "an MLP speculator"),
    ],
)
def test_a_successor_is_refused_by_name_and_the_sentence_says_what_to_do(config, name, tmp_path):
    with pytest.raises(CheckpointError, match=rf"config\.json: is {name}.*slipstream train TARGET"):
        draft_spec({**SIZES, **config}, tmp_path, None)
