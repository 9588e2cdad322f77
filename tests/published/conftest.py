"""The folder in which published lines are started."""

import pytest

from tests.published.checkpoints import write_published
from tests.published.documents import published_lines
from tests.published.servers import PLACES, slipstream


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A working folder with every checkpoint that the lines name; published lines make the FP8 and the INT4 draft."""
    folder = tmp_path_factory.mktemp("published")
    write_published(folder)
    (line,) = [line for line in published_lines() if line.kind() == "quantize"]
    done = slipstream(folder, "quantize", *line.arguments())
    assert done.returncode == 0, done.stderr
    card = "--quant_scheme int4_wo_per_channel --exclude_layers embed_tokens lm_head fc *norm --output_dir"
    done = slipstream(
        folder,
        "quantize",
        "--model_dir",
        "lightseekorg/kimi-k2.5-eagle3",
        *card.split(),
        PLACES["<path-to-this-model>"],
    )
    assert done.returncode == 0, done.stderr
    return folder
