"""Training from the target's states on disk: the same draft, a known cost, and a folder that is whole or refused."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import DataError
from slipstream.kernels.training.seen import Seen
from slipstream.train.draft.capture import Capture, CaptureHooks, wanted_manifest
from slipstream.train.draft.packing import Packer
from slipstream.train.run.recipe import TrainConfig
from slipstream.train.run.trainer import Hooks, Trainer
from slipstream.train.run.world import World
from training import objective_for, random_texts, tiny_target

CONFIG = TrainConfig(steps=3, row_length=128, rows_per_step=4, unroll=3, log_every=1)
ONE_STEP = 4 * 128 * 4 * 32 * 4  # bytes of a step's states: rows x tokens x (3 captured + 1) x width x float32


def plan(target, texts, folder, config=CONFIG, shard_bytes=ONE_STEP, **shape):
    objective, corpus, _ = objective_for(target, texts, **shape)
    wanted = wanted_manifest(objective, corpus, "the target", config, World())
    return Capture(objective, corpus, dataclasses.replace(wanted, shard_bytes=shard_bytes), folder)


def store(target, texts, folder, **settings):
    return plan(target, texts, folder, **settings).run(World(), CaptureHooks())


def fit(target, texts, folder, store=None, config=CONFIG):
    objective, corpus, _ = objective_for(target, texts)
    if store is not None:
        objective.target = HeadAndEmbedding(target)
    packer = Packer(corpus, config.row_length, config.rows_per_step, config.unroll, config.seed, store)
    losses = []
    trainer = Trainer(objective, packer, config, World(), folder)
    trainer.fit(Hooks(report=lambda progress: losses.append(progress.loss)))
    return losses, dict(objective.draft.named_parameters())


class HeadAndEmbedding:
    """What a target is without its blocks."""

    def __init__(self, target):
        self.embed_tokens, self.lm_head = target.embed_tokens, target.lm_head


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_stored_features_give_the_losses_and_weights_of_the_target_in_the_loop_bit_for_bit(target, tmp_path):
    texts = random_texts(60, seed=2)
    features = store(target, texts, tmp_path / "features")
    losses, weights = fit(target, texts, tmp_path / "loop")
    stored_losses, stored_weights = fit(target, texts, tmp_path / "offline", features)
    assert stored_losses == losses and len(losses) == 3
    assert all(torch.equal(stored_weights[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_in_half_precision_are_stored_as_they_are(target, tmp_path, dtype):
    texts, target = random_texts(60, seed=2), target.to(dtype)
    features = store(target, texts, tmp_path / "features")
    assert features.states(0).dtype == dtype and features.manifest.bytes_per_token == 4 * 32 * 2
    assert fit(target, texts, tmp_path / "loop")[0] == fit(target, texts, tmp_path / "offline", features)[0]


def test_later_epochs_repack_the_same_texts_and_differ_by_rounding_at_most(target, tmp_path):
    texts = random_texts(60, seed=2)
    config = dataclasses.replace(CONFIG, steps=9)
    features = store(target, texts, tmp_path / "features")
    losses, _ = fit(target, texts, tmp_path / "loop", config=config)
    stored_losses, _ = fit(target, texts, tmp_path / "offline", features, config)
    assert stored_losses == pytest.approx(losses, rel=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(8, 40), seed=st.integers(0, 99), row_length=st.sampled_from([64, 100]), shard=st.integers(1, 4)
)
def test_every_text_reads_back_as_the_target_says_it_whatever_the_rows_and_shards(
    tmp_path_factory, count, seed, row_length, shard
):
    texts, target = random_texts(count, seed), tiny_target()
    config = dataclasses.replace(CONFIG, row_length=row_length, rows_per_step=2, seed=seed)
    folder = tmp_path_factory.mktemp("features")
    features = store(target, texts, folder, config=config, shard_bytes=shard * 2 * row_length * 512)
    objective, corpus, _ = objective_for(target, texts)
    for number in range(len(texts)):
        batch = Packer(corpus, row_length, 1, 1, 0).pack([[number]])
        one_text = Seen(torch.zeros_like(batch.text_BT))
        last, captured = objective.features(batch.ids_BT, batch.positions_BT, one_text)
        expected = torch.stack([*captured, last], 2)[0, : len(texts[number].ids)]
        torch.testing.assert_close(features.states(number), expected, rtol=1e-4, atol=1e-5)


def test_the_cost_is_announced_before_anything_is_written_and_is_what_the_disk_then_holds(target, tmp_path):
    folder, seen = tmp_path / "deep" / "features", []

    def announce(cost):
        seen.append((cost, folder.exists()))

    texts = random_texts(60, seed=2)
    plan(target, texts, folder).run(World(), CaptureHooks(announce))
    (cost, existed), tokens = seen[0], sum(len(text.ids) for text in texts)
    assert not existed and cost.stored_bytes == 0 and cost.free_bytes > 0
    assert cost.total_bytes == tokens * (3 + 1) * 32 * 4
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert cost.total_bytes < written < 1.02 * cost.total_bytes
    assert f"{tokens:,} tokens x 512 bytes (3 captured layers and the last state, 32 wide, float32)" in str(cost)


def test_features_that_do_not_fit_the_disk_are_refused_and_nothing_is_written(target, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DataError, match=r"need 0\.\d MB more and the disk has 0\.0 MB free\. Free some space"):
        store(target, random_texts(60, seed=2), tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_an_interrupted_capture_goes_on_and_leaves_the_same_files(target, tmp_path):
    texts = random_texts(60, seed=2)
    store(target, texts, tmp_path / "straight")
    reports = []

    def interrupt(tokens):
        reports.append(tokens)
        if len(reports) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan(target, texts, tmp_path / "halves").run(World(), CaptureHooks(report=interrupt))
    done = {path: path.stat().st_ino for path in (tmp_path / "halves").glob("*.safetensors")}
    assert len(done) == 2
    again = plan(target, texts, tmp_path / "halves")
    assert 0 < again.cost().needed_bytes < again.cost().total_bytes
    again.run(World(), CaptureHooks())
    assert contents(tmp_path / "halves") == contents(tmp_path / "straight")
    assert all(path.stat().st_ino == inode for path, inode in done.items()), "what was there was made again"


def test_a_folder_begun_in_other_rows_is_finished_in_its_own(target, tmp_path):
    texts = random_texts(60, seed=2)
    store(target, texts, tmp_path / "straight")
    store(target, texts, tmp_path / "f")
    (tmp_path / "f" / "features-00001.safetensors").unlink()
    other = dataclasses.replace(CONFIG, row_length=96, rows_per_step=2, seed=7)
    features = store(target, texts, tmp_path / "f", config=other, shard_bytes=1)
    assert contents(tmp_path / "f") == contents(tmp_path / "straight")
    losses, _ = fit(target, texts, tmp_path / "loop", config=other)
    stored_losses, _ = fit(target, texts, tmp_path / "offline", features, other)
    assert stored_losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("change", ["corpus", "captured_layers"])
def test_features_of_something_else_are_refused_with_the_remedy(target, tmp_path, change):
    texts = random_texts(60, seed=2)
    store(target, texts, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=rf"{change}.* differ\); name another folder, or delete this one"):
        if change == "corpus":
            store(target, [*texts[1:], texts[0]], tmp_path)
        else:
            store(target, texts, tmp_path, captured_layers=(1, 2, 3))
    assert contents(tmp_path) == before


def test_a_folder_of_something_else_is_left_alone(target, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="not empty; name another folder"):
        store(target, random_texts(60, seed=2), tmp_path)
    assert contents(tmp_path) == {"letter.txt": b"dear"}


def test_a_damaged_shard_or_manifest_is_noticed(target, tmp_path):
    texts = random_texts(60, seed=2)
    store(target, texts, tmp_path)
    shard = tmp_path / "features-00000.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-7])
    with pytest.raises(DataError, match=r"features-00000.*delete it"):
        store(target, texts, tmp_path)
    shard.write_bytes((tmp_path / "features-00001.safetensors").read_bytes())
    with pytest.raises(DataError, match="holds other texts"):
        store(target, texts, tmp_path)
    shard.write_bytes(whole)
    manifest = json.loads((tmp_path / "features.json").read_text())
    (tmp_path / "features.json").write_text(json.dumps({**manifest, "width": None, "more": 1}))
    with pytest.raises(DataError, match=r"features\.json: cannot be read \('more'\); delete the folder"):
        store(target, texts, tmp_path)


def test_a_full_disk_leaves_whole_shards_only_and_the_same_command_goes_on(target, tmp_path):
    texts = random_texts(60, seed=2)
    store(target, texts, tmp_path / "straight")
    store(target, texts, tmp_path / "f")
    (tmp_path / "f" / "features-00001.safetensors").unlink()
    (tmp_path / "f" / ".features-00001.safetensors.tmp").symlink_to("/dev/full")  # every write to it finds no space
    with pytest.raises(DataError, match=r"features-00001.*the disk is full; free some space"):
        store(target, texts, tmp_path / "f")
    whole = contents(tmp_path / "straight")
    assert contents(tmp_path / "f") == {name: whole[name] for name in whole if name != "features-00001.safetensors"}
    store(target, texts, tmp_path / "f")
    assert contents(tmp_path / "f") == whole
