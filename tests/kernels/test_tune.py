"""`slipstream tune` keeps what is faster and has the shipped tiles' bits. Times are made up, bits are not."""

import dataclasses

import pytest
import torch
from triton_samples import small_tuning
from typer.testing import CliRunner

from interpreted import DEVICE
from slipstream.checkpoint.spec import ModelSpec, RopeSpec
from slipstream.cli.main import app
from slipstream.kernels.triton.gemm.dispatch import WeightShape
from slipstream.kernels.triton.tuning import read_tuning
from slipstream.measure.tune import PASSES, Rows, Search, Subject, candidates, tune

SPEC = ModelSpec("LlamaForCausalLM", 90, 32, 48, 1, 2, 1, 16, 1e-5, RopeSpec(10000.0, 16), 256, False)
SHIPPED = small_tuning()


class Timed(Subject):
    """Layers whose passes take as long as a tuning is said to, and go wrong where it is said to."""

    parts = (None,)  # attention; interpreted passes take their time

    def __init__(self, rows, milliseconds, goes_wrong=lambda tuning: False):
        super().__init__(SPEC, "dense", DEVICE, context=40, passes=(rows,))
        self._milliseconds, self._goes_wrong, self._last = milliseconds, goes_wrong, SHIPPED
        self.said = []

    def step(self, tuning, rows):
        self._last = tuning
        run = super().step(tuning, rows)
        return (lambda: run() + 1) if self._goes_wrong(tuning) else run

    def search(self, is_late=lambda: False):
        return Search(lambda step: self._milliseconds(self._last), is_late, self.said.append, compiles=False)


def deeper_is_faster(tuning):
    return 10.0 - tuning.attention.num_stages


def test_the_fastest_tiles_of_attention_are_kept():
    subject = Timed(Rows(2, 2), deeper_is_faster)
    found = tune(subject, SHIPPED, subject.search())
    assert found == dataclasses.replace(SHIPPED, attention=dataclasses.replace(SHIPPED.attention, num_stages=4))
    assert subject.said[-1] == "2 x 2: 8.0000 ms as it ships, 6.0000 ms tuned"


def test_tiles_with_other_bits_are_not_kept_however_fast():
    subject = Timed(Rows(2, 2), deeper_is_faster, lambda tuning: tuning.attention.num_stages == 4)
    found = tune(subject, SHIPPED, subject.search())
    assert found.attention.num_stages == 3
    assert "2 x 2 attention {'num_stages': 4}: other bits" in subject.said


@pytest.mark.parametrize(
    ("rows", "section", "name"),
    [(Rows(1, 3), "linear_few", "{}"), (Rows(3, 3), "linear", "{}"), (Rows(6, 3), "wide_linear", "{}/64")],
)
def test_each_number_of_rows_has_tiles_of_its_own_in_the_order_of_columns_that_ships(rows, section, name):
    shape = WeightShape("dense", 2 * SPEC.intermediate_size, SPEC.hidden_size, 2)
    key = name.format(shape.key)

    def milliseconds(tuning):
        tiles = getattr(tuning, section).get(key)
        return 5.0 if tiles is None else 4.0 - tiles.block_n / 100

    subject = Timed(rows, milliseconds)
    assert shape in Subject.parts.fget(subject), "it is one of the model's"
    subject.parts = (shape,)
    found = tune(subject, SHIPPED, subject.search())
    assert getattr(found, section)[key].block_n == 128
    assert found.linear_config(*shape).split_k == SHIPPED.linear_config(*shape).split_k
    assert found.linear_config(*shape).block_k == SHIPPED.linear_config(*shape).block_k


def test_nothing_is_tried_when_time_is_up():
    subject = Timed(Rows(1, 1), deeper_is_faster)
    assert tune(subject, SHIPPED, subject.search(lambda: True)) == SHIPPED
    assert subject.said == ["no time left for 1 x 1"]


def test_hopper_is_offered_its_own_kernels_within_what_three_minutes_hold():
    shapes = [WeightShape("dense", n, k, 2) for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))]
    tuning = read_tuning("sm_90")
    offered = {
        rows: [found.tuning for shape in (None, *shapes) for found in candidates(tuning, shape, rows)]
        for rows in PASSES
    }
    assert any(entry.gemv_stages for t in offered[Rows(1, 1)] for entry in t.linear_few.values())
    assert any(entry.warp_specialised for t in offered[Rows(40, 4)] for entry in t.wide_linear.values())
    assert 100 < sum(map(len, offered.values())) < 500


def test_a_machine_without_a_gpu_is_told_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = CliRunner().invoke(app, ["tune", "embedded"])
    assert done.exit_code == 1
    assert "There is no GPU here to tune for" in str(done.exception)
