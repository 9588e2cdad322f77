"""Sweeps on a GPU follow one another: each reads what the one before wrote, and loses none of it."""

import dataclasses
from pathlib import Path

from interpreted import DEVICE
from slipstream.kernels.triton.tuning import AttentionConfig, LinearConfig, Tuning, WideConfig, architecture_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def changed(kind: type, *required: object) -> object:
    """Return a configuration whose every number and switch is another than the one it has by itself."""
    numbers = [f for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING]
    return kind(*required, **{f.name: not f.default if f.type is bool else f.default + 1 for f in numbers})


def test_what_a_sweep_writes_is_read_again_with_every_field(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from tune_products import starting_tuning, write_tuning

    linear = {"fp8:4096:4096": changed(LinearConfig, 64, 256, 4, 4, 3)}
    tuning = dataclasses.replace(
        changed(Tuning, architecture_of(DEVICE)),
        linear=linear,
        wide=linear,
        linear_many=linear,
        wide_linear={"dense:4096:4096/64": changed(WideConfig, 64, True, 64, 4, 3)},
        attention=changed(AttentionConfig),
    )
    write_tuning(tuning, tmp_path)
    assert starting_tuning(tmp_path / f"{tuning.architecture}.json", DEVICE) == tuning
    assert tuning.fold_codes and tuning.fold_norm_codes


def test_tiles_for_few_rows_stand_before_those_for_more():
    tiles = {name: WideConfig(64, False, 64, 4, stages) for name, stages in (("d:8:8", 3), ("d:8:8/64", 4))}
    narrow = LinearConfig(64, 64, 1, 4, 3)
    stages = {}
    for name, wide in {"without": tiles, "with": {**tiles, "d:8:8/32": WideConfig(64, False, 64, 4, 5)}}.items():
        tuning = Tuning("any", wide_linear=wide)
        found = {rows: tuning.wide_linear_config("d:8:8", rows, 8, narrow) for rows in (17, 32, 33, 64, 65, 256)}
        stages[name] = {rows: config.num_stages for rows, config in found.items() if config is not None}

    assert stages["without"] == {17: 4, 32: 4, 33: 4, 64: 4, 65: 3, 256: 3}
    assert stages["with"] == {17: 5, 32: 5, 33: 4, 64: 4, 65: 3, 256: 3}


def test_a_chain_may_have_tiles_of_its_own_in_the_same_order_of_columns():
    order, few = LinearConfig(64, 128, 4, 4, 6), LinearConfig(128, 256, 1, 4, 3, 0)
    tuning = Tuning("any", linear={"d:8:8": order}, linear_few={"d:8:8": few})

    assert tuning.few_config("d:8:8", order) == LinearConfig(128, 128, 4, 4, 3, 0)
    assert tuning.few_config("d:16:8", order) == order
