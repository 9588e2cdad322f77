"""Configurations of the kernels: what ships, what `slipstream tune` found beside it, and which tiles stand first."""

import dataclasses

import pytest

from slipstream.errors import KernelError
from slipstream.kernels.triton.tuning import (
    AttentionConfig,
    LinearConfig,
    Tuning,
    WideConfig,
    parse_tuning,
    read_tuning,
    with_tuned,
    write_tuned,
)


def changed(kind: type, *required: object) -> object:
    """Return a configuration whose every number and switch is another than the one it has by itself."""
    numbers = [f for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING]
    return kind(*required, **{f.name: not f.default if f.type is bool else f.default + 1 for f in numbers})


def test_what_was_tuned_is_read_again_with_every_field(tmp_path):
    shipped, file = read_tuning("sm_90"), tmp_path / "gpu.json"
    linear = {"fp8:4096:4096": changed(LinearConfig, 64, 256, 4, 4, 3)}
    wide = {"dense:4096:4096/64": changed(WideConfig, 64, True, 64, 4, 3)}
    tuned = dataclasses.replace(
        shipped,
        linear={**shipped.linear, **linear},
        linear_few={**shipped.linear_few, **linear},
        wide_linear={**shipped.wide_linear, **wide},
        attention=changed(AttentionConfig),
    )
    assert with_tuned(shipped, file) == shipped
    write_tuned(file, shipped, tuned)
    assert with_tuned(shipped, file) == tuned

    other = {**shipped.linear_few, "dense:8:8": changed(LinearConfig, 64, 64, 1, 4, 3)}
    write_tuned(file, shipped, dataclasses.replace(shipped, linear_few=other))
    assert with_tuned(shipped, file).linear_few == {**other, **linear}, "another model's tiles stay"


def test_tiles_that_were_tuned_beside_other_kernels_are_not_used(tmp_path, caplog):
    shipped, file = read_tuning("sm_90"), tmp_path / "gpu.json"
    write_tuned(file, shipped, dataclasses.replace(shipped, attention=changed(AttentionConfig)))
    later = dataclasses.replace(shipped, add_warps=shipped.add_warps + 1)
    assert with_tuned(later, file) == later
    assert "another version of the kernels" in caplog.text


@pytest.mark.parametrize("damage", ["{", "[]", '{"attention": {"sp'])
def test_a_damaged_file_of_tuned_tiles_is_not_used_and_the_log_says_so(damage, tmp_path, caplog):
    shipped, file = read_tuning("sm_90"), tmp_path / "gpu.json"
    file.write_text(damage)
    assert with_tuned(shipped, file) == shipped
    assert "run `slipstream tune` again" in caplog.text


def test_a_file_with_a_field_nobody_knows_is_an_error():
    with pytest.raises(KernelError, match="a field this version does not know"):
        parse_tuning("sm_90", {"programes": 3})


def test_tiles_for_few_rows_stand_before_those_for_more():
    tiles = {name: WideConfig(64, False, 64, 4, stages) for name, stages in (("d:8:8", 3), ("d:8:8/64", 4))}
    stages = {}
    for name, wide in {"without": tiles, "with": {**tiles, "d:8:8/32": WideConfig(64, False, 64, 4, 5)}}.items():
        tuning = Tuning("any", wide_linear=wide)
        found = {rows: tuning.wide_linear_config("d:8:8", rows) for rows in (17, 32, 33, 64, 65, 256)}
        stages[name] = {rows: config.num_stages for rows, config in found.items() if config is not None}

    assert stages["without"] == {17: 4, 32: 4, 33: 4, 64: 4, 65: 3, 256: 3}
    assert stages["with"] == {17: 5, 32: 5, 33: 4, 64: 4, 65: 3, 256: 3}


def test_a_chain_may_have_tiles_of_its_own_in_the_same_order_of_columns():
    order, few = LinearConfig(64, 128, 4, 4, 6), LinearConfig(128, 256, 1, 4, 3, 0)
    tuning = Tuning("any", linear={"d:8:8": order}, linear_few={"d:8:8": few})

    assert tuning.few_config("d:8:8", order) == LinearConfig(128, 128, 4, 4, 3, 0)
    assert tuning.few_config("d:16:8", order) == order
