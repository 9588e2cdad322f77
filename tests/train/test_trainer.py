import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from slipstream.errors import TrainingError
from slipstream.train.data.corpus import Text, join, write_shard
from slipstream.train.draft.packing import Packer, to_device
from slipstream.train.draft.walk import kept_tokens, measure, summarize, walk_rounds
from slipstream.train.run.recipe import TrainConfig
from slipstream.train.run.trainer import Hooks, Trainer, learning_rate
from slipstream.train.run.world import World
from training import draft_step_by_step, greedy_texts, objective_for, random_texts, train

ROOT = Path(__file__).parents[2]


def test_a_draft_overfits_64_texts_to_over_95_percent_first_position_accuracy(target, tmp_path):
    target.norm.weight.fill_(15.0)  # an opinionated target, as a trained one is
    objective, corpus, _ = objective_for(target, greedy_texts(target, 64, max_new=16), draft_vocab=96)
    seen = []
    train(objective, corpus, tmp_path, 180, lr=1e-2, unroll=2, log_every=20).fit(Hooks(report=seen.append))
    assert seen[-1].accuracy[0] > 0.95
    assert seen[-1].loss < 0.5 * seen[0].loss
    measured = measure(objective, corpus)
    assert measured.walks[3].acceptance_length > 2.5


def test_the_walk_counts_the_rounds_of_a_real_chain_decode(target):
    texts = greedy_texts(target, 4, seed=3)
    objective, _, _ = objective_for(target, texts, draft_vocab=96)
    kept = kept_tokens(objective, texts, 3)
    for row, text in enumerate(texts):
        ids, (start, end) = torch.tensor(text.ids), text.spans[0]
        rounds, slot = [], start - 1
        with torch.no_grad():
            while slot + 2 < end:
                padded = torch.cat([ids, torch.zeros(4, dtype=torch.int64)])
                drafted: list[int] = []
                for step in range(3):  # each step is fed what was drafted, as serving does
                    fed = padded.clone()
                    fed[slot + 2 : slot + 2 + step] = torch.tensor(drafted[:step], dtype=torch.int64)
                    logits = draft_step_by_step(objective, fed, slot, step + 1)
                    drafted.append(int(objective.draft.token_ids_V[logits[-1].argmax()]))
                accepted = 0
                while accepted < 3 and slot + 2 + accepted < end and drafted[accepted] == text.ids[slot + 2 + accepted]:
                    accepted += 1
                rounds.append(accepted)
                slot += accepted + 1
        assert walk_rounds(kept[row].tolist(), start - 1, end, 3) == rounds


def test_a_walk_adds_up_to_the_answer():
    rounds = walk_rounds([0, 0, 2, 9, 0, 0, 1, 3, 0, 0], start=2, end=10, chain=3)
    assert rounds == [2, 0, 1]
    walk = summarize(rounds, 3)
    assert (walk.tokens, walk.rounds, walk.accepted) == (6, 3, (2, 1, 0))
    assert walk.acceptance_length == 2.0


def test_a_run_stopped_by_the_clock_goes_on_to_the_same_weights(target, tmp_path):
    texts = random_texts(60, seed=2)
    straight, corpus, _ = objective_for(target, texts)
    train(straight, corpus, tmp_path / "a", 12, log_every=2).fit(Hooks())
    halves, corpus, _ = objective_for(target, texts)
    first = train(halves, corpus, tmp_path / "b", 12, log_every=2).fit(Hooks(), stop_after_s=-1.0)
    assert first.step == 2 and not first.finished
    again, corpus, _ = objective_for(target, texts, seed=99)
    last = train(again, corpus, tmp_path / "b", 12, log_every=2).fit(Hooks())
    assert last.finished
    for (name, a), b in zip(straight.draft.named_parameters(), again.draft.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_state_is_not_gone_on_with_under_another_vocabulary(target, tmp_path):
    texts, others = random_texts(60, seed=2), random_texts(60, seed=3)
    objective, corpus, _ = objective_for(target, texts)
    train(objective, corpus, tmp_path, 2, log_every=2).fit(Hooks())
    changed, corpus, _ = objective_for(target, others)
    assert not changed.draft.token_ids_V.equal(objective.draft.token_ids_V)
    with pytest.raises(TrainingError, match=r"state\.pt: belongs to a draft of another vocabulary"):
        train(changed, corpus, tmp_path, 4, log_every=2).fit(Hooks())


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [("a", "b", "a draft, and --init-from now names another one"), ("a", None, "none"), (None, "a", "no draft, and")],
)
def test_a_state_is_not_gone_on_with_from_another_start(target, tmp_path, then, now, words):
    objective, corpus, _ = objective_for(target, random_texts(20, seed=2))
    train(objective, corpus, tmp_path, 1, started_from=then).fit(Hooks())
    with pytest.raises(TrainingError, match=words):
        train(objective, corpus, tmp_path, 2, started_from=now).fit(Hooks())
    assert train(objective, corpus, tmp_path, 2, started_from=then).fit(Hooks()).finished


def test_a_state_from_before_it_knew_its_start_is_gone_on_with(target, tmp_path):
    objective, corpus, _ = objective_for(target, random_texts(20, seed=2))
    train(objective, corpus, tmp_path, 1).fit(Hooks())
    content = torch.load(tmp_path / "state.pt", weights_only=True)
    del content["state"]["started_from"], content["state"]["vocabulary"]
    torch.save(content, tmp_path / "state.pt")
    assert train(objective, corpus, tmp_path, 2, started_from="a").fit(Hooks()).finished


def test_a_loss_that_is_no_number_stops_the_run_and_leaves_the_last_checkpoint(target, tmp_path):
    objective, corpus, _ = objective_for(target, random_texts(60, seed=2))
    train(objective, corpus, tmp_path, 4, log_every=2, checkpoint_every_s=0.0).fit(Hooks())
    before = (tmp_path / "state.pt").read_bytes()
    with torch.no_grad():
        objective.draft.fc.weight.fill_(float("nan"))
    broken = train(objective, corpus, tmp_path, 8, log_every=2)
    broken._restore = lambda: None
    with pytest.raises(TrainingError, match="lower the learning rate"):
        broken.fit(Hooks())
    assert (tmp_path / "state.pt").read_bytes() == before


def test_a_time_budget_becomes_a_number_of_steps(target, tmp_path):
    objective, corpus, _ = objective_for(target, random_texts(60, seed=2))
    before = {name: p.clone() for name, p in objective.draft.named_parameters()}
    config = TrainConfig(time_budget_s=100.0, row_length=128, rows_per_step=4, unroll=2)
    trainer = Trainer(objective, Packer(corpus, 128, 4, 2, 0), config, World(), tmp_path)
    ticks = iter(range(0, 10_000, 8))
    assert trainer._plan(Hooks(clock=lambda: float(next(ticks)))) == 95
    assert all(torch.equal(before[name], p) for name, p in objective.draft.named_parameters())


def test_the_rate_warms_up_and_falls_to_its_final_share():
    config = TrainConfig(steps=100, lr=1.0, warmup=0.1, final_lr=0.05)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.05, abs=0.002)


KILLED = """
    import sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    from slipstream.train.data.corpus import read_corpus
    from slipstream.train.run.trainer import Hooks
    from training import objective_for, random_texts, tiny_target
    from training import train
    texts = random_texts(60, seed=2)
    objective, corpus, _ = objective_for(tiny_target(), texts)
    trainer = train(objective, corpus, Path(sys.argv[1]), 20, log_every=1, checkpoint_every_s=0.0)
    trainer.fit(Hooks(report=lambda progress: print(progress.step, flush=True)))
    torch.save({n: p for n, p in objective.draft.named_parameters()}, Path(sys.argv[1]) / "final.pt")
"""


def spawn(code, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", **environment},
    )


def test_killed_in_the_middle_and_started_again_a_run_ends_with_identical_weights(tmp_path):
    straight = spawn(KILLED, str(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    killed = spawn(KILLED, str(tmp_path / "b"))
    for line in killed.stdout:
        if int(line) == 7:
            killed.send_signal(signal.SIGKILL)
            break
    killed.wait()
    assert not (tmp_path / "b" / "final.pt").exists()
    again = spawn(KILLED, str(tmp_path / "b"))
    first = again.stdout.readline()
    again.communicate()
    straight.communicate()
    assert 7 <= int(first) <= 20
    a, b = (torch.load(tmp_path / run / "final.pt") for run in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


GLOO = """
    import sys
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    from slipstream.train.draft.packing import Packer
    from slipstream.train.run.world import World
    from training import objective_for, random_texts, tiny_target
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    world = World()
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size)
        world = World(rank, size)
    objective, corpus, _ = objective_for(tiny_target(), random_texts(60, seed=2))
    out = objective(Packer(corpus, 128, 4, 3, 0).batch(0, rank, size), world.sum)
    out.loss.backward()
    parameters = [p for p in objective.draft.parameters() if p.requires_grad]
    world.sum_gradients(parameters)
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    if rank == 0:
        print(float(world.sum(out.loss.detach())), float(norm))
    else:
        world.sum(out.loss.detach())
"""


def test_two_processes_have_the_loss_and_gradient_of_one_on_the_joined_batch(tmp_path):
    pair = [spawn(GLOO, str(rank), "2", str(tmp_path / "meet")) for rank in range(2)]
    alone = spawn(GLOO, "0", "1", "none")
    joined = [float(x) for x in pair[0].communicate()[0].split()]
    pair[1].communicate()
    single = [float(x) for x in alone.communicate()[0].split()]
    assert joined == pytest.approx(single, rel=1e-5)


def test_a_batch_supervises_exactly_the_slots_serving_reaches():
    corpus = join([Text([5] * 10, [(4, 8)])])
    batch = to_device(Packer(corpus, 16, 1, 3, 0).batch(0), torch.device("cpu"))
    # The answer is tokens 4..7: a round may start with 4, 5 or 6 as the target's own token (slots 3, 4, 5).
    assert batch.slots_BS.tolist() == [[3, 4, 5]]
    assert [rows.slots_N.tolist() for rows in batch.steps] == [[0, 1, 2], [0, 1], [0]]
    assert batch.teacher_slots_N.tolist() == [3, 4, 5, 6]
    assert [rows.teacher_N.tolist() for rows in batch.steps] == [[1, 2, 3], [2, 3], [3]]


def test_shards_read_back_as_written_and_damage_is_noticed(tmp_path):
    from slipstream.errors import DataError
    from slipstream.train.data.corpus import read_corpus, read_shard

    texts = [*random_texts(5), Text([70_000, 3], [(1, 2)])]
    write_shard(tmp_path / "shard-00000.safetensors", texts[:3])
    write_shard(tmp_path / "shard-00001.safetensors", texts[3:])
    corpus = read_corpus(tmp_path)
    assert [corpus.text(i) for i in range(6)] == texts
    data = bytearray((tmp_path / "shard-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "shard-00000.safetensors").write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        read_shard(tmp_path / "shard-00000.safetensors")
