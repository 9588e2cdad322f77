"""`slipstream train` from a target folder to a draft that the engine runs, on a tiny target."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from slipstream.checkpoint.draft_config import draft_spec
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.cli.main import app
from slipstream.engine.llm import LLM
from slipstream.errors import CheckpointError, ConfigError, DataError
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.statistics import AcceptanceStats
from slipstream.speculation.tree import TreeShape
from slipstream.train.data.corpus import read_corpus
from slipstream.train.data.prompts import read_prompts
from slipstream.train.run.output import average_with
from slipstream.train.run.phases import Paths, TrainingRun
from slipstream.train.run.plan import Plan, Speeds, write_plan
from slipstream.train.run.recipe import change_recipe, make_recipe, read_recipe
from training import RECIPE, objective_for, random_texts, tiny_target, write_target_folder


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_target_folder(folder / "target")
    for name, numbers in (("train", range(40)), ("test", range(50, 58))):
        lines = [json.dumps({"question": f"How many is {i} and {i + 1}?"}) for i in numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


def run_train(places, *arguments):
    recipe = places / "recipe.yaml"
    fixed = ["train", str(places / "target"), "--recipe", str(recipe), "--data", str(places), "--device", "cpu"]
    result = CliRunner().invoke(app, [*fixed, *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def draft(places):
    output = run_train(places, "--out", places / "draft")
    assert "acceptance length" in output and "held-out" in output
    return places / "draft"


def answers(places, draft, depth, dtype="float32"):
    tree = TreeShape.chain(depth)
    settings = {"device": "cpu", "dtype": dtype, "kernels": "reference"}
    llm = LLM(places / "target", draft, tree=tree, borrowed_tokens=0, **settings)  # a walk measures the draft alone
    return llm.generate(read_prompts(places / "test.jsonl"), SamplingParams(max_tokens=40, temperature=0.0))


@pytest.mark.parametrize("chain", [3, 6])
def test_the_engine_accepts_exactly_what_the_walk_says(places, draft, chain):
    record = json.loads((draft / "slipstream.json").read_text())
    walked = record["results"]["held-out"]["chains"][str(chain)]
    stats = AcceptanceStats()
    for completion in answers(places, draft, chain):
        stats.add(completion.stats)
    assert round(stats.acceptance_length, 4) == walked["acceptance_length"]
    assert walked["acceptance_length"] > 1.2


def test_the_folder_tells_how_it_was_made(draft):
    record = json.loads((draft / "slipstream.json").read_text())
    assert record["corpus"]["answer_tokens"] >= 4000
    assert [entry["step"] for entry in record["history"]] == [10, 20, 30, 40, 50, 60]
    assert record["history"][-1]["loss"] < record["history"][0]["loss"]
    assert record["history"][2]["acceptance"].keys() == {"held-out K=3", "held-out K=6"}
    assert "8 | " in (draft / "README.md").read_text()
    assert (draft / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_started_again_writes_the_same_draft(places, draft):
    before = (draft / "model.safetensors").read_bytes()
    run_train(places, "--out", draft)
    assert (draft / "model.safetensors").read_bytes() == before


def test_a_run_started_again_adds_no_texts_though_the_recipe_wants_more(places, draft):
    shards = sorted((places / "draft-work" / "corpus").iterdir())
    more = ("--work", places / "draft-work", "--set", "data.answer_tokens=4500")  # as --generate-s leaves it
    run_train(places, "--out", places / "again", *more)
    assert sorted((places / "draft-work" / "corpus").iterdir()) == shards
    assert (places / "again" / "model.safetensors").read_bytes() == (draft / "model.safetensors").read_bytes()


def test_an_offline_run_tells_its_disk_cost_first_and_writes_the_same_draft(places, draft):
    outputs = {}
    for name, options in (("loop", ()), ("offline", ("--offline", places / "features"))):
        shutil.copytree(places / "draft-work" / "corpus", places / f"{name}-work" / "corpus")
        outputs[name] = run_train(places, "--out", places / name, "--set", "train.steps=8", *options)
    words = " ".join(outputs["offline"].split())
    assert words.index("512 bytes (3 captured layers and the last state, 32 wide, float32)") < words.index("step 8/8")
    weights = [(places / name / "model.safetensors").read_bytes() for name in outputs]
    assert weights[0] == weights[1]
    records = {name: json.loads((places / name / "slipstream.json").read_text()) for name in outputs}
    assert [entry["loss"] for entry in records["loop"]["history"]] == [
        entry["loss"] for entry in records["offline"]["history"]
    ]
    assert records["loop"]["results"] == records["offline"]["results"]
    assert records["loop"]["stored_features"] is None and len(records["offline"]["stored_features"]) == 64


def test_no_texts_are_added_once_states_of_them_are_stored(places, draft):
    corpus = places / "kept-work" / "corpus"
    shutil.copytree(places / "draft-work" / "corpus", corpus)
    shards = sorted(corpus.iterdir())
    options = ("--out", places / "kept", "--set", "train.steps=2", "--offline", places / "kept-features")
    run_train(places, *options)
    (places / "kept-work" / "state.pt").unlink()  # as if it had been stopped before its first step
    run_train(places, *options, "--set", "data.answer_tokens=4500")
    assert sorted(corpus.iterdir()) == shards


def test_a_target_in_float16_goes_on_with_the_corpus_and_its_draft_is_accepted_as_the_walk_says(places, draft):
    shutil.copytree(places / "draft-work" / "corpus", places / "half-work" / "corpus")
    changes = ("--set", "train.target_dtype=float16", "--set", "train.steps=30")
    run_train(places, "--out", places / "half", *changes)
    record = json.loads((places / "half" / "slipstream.json").read_text())
    assert record["precision"] == {"target": "float16", "draft": "float32"}
    assert "the target in float16" in (places / "half" / "README.md").read_text()
    assert record["target_digest"] == json.loads((draft / "slipstream.json").read_text())["target_digest"]
    stats = AcceptanceStats()
    for completion in answers(places, places / "half", 3, "float16"):
        stats.add(completion.stats)
    walked = record["results"]["held-out"]["chains"]["3"]["acceptance_length"]
    assert round(stats.acceptance_length, 4) == walked > 1.2


def test_a_draft_that_came_without_a_head_is_given_one_of_its_own_and_the_target_stays_as_it_is(places, draft):
    from safetensors.torch import load_file, save_file

    full = ("--set", "draft.vocab_size=99", "--set", "train.steps=2", "--work", places / "draft-work-2")
    shutil.copytree(places / "draft-work" / "corpus", places / "draft-work-2" / "corpus")
    run_train(places, "--out", places / "full", *full)
    weights = load_file(places / "full" / "model.safetensors")
    head = weights.pop("lm_head.weight")
    save_file(weights, places / "full" / "model.safetensors")
    recipe = change_recipe(read_recipe(places / "recipe.yaml"), ["train.target_dtype=float16"])
    run = TrainingRun(places / "target", recipe, Paths(places, places / "w3"), torch.device("cpu"))
    table = run.speaker.model.lm_head.weight
    started, _ = run.start(read_corpus(places / "draft-work" / "corpus"), places / "full")
    assert started.lm_head.weight.dtype == torch.float32 and started.lm_head.weight.requires_grad
    assert started.lm_head.weight.shape == head.shape and torch.equal(started.lm_head.weight, table.float())
    assert run.speaker.model.lm_head.weight is table and not table.requires_grad


def test_a_renewed_vocabulary_keeps_the_rows_of_tokens_the_draft_knew(places, draft):
    corpus = read_corpus(places / "draft-work" / "corpus")
    recipe = change_recipe(read_recipe(places / "recipe.yaml"), ["draft.vocab_size=80"])
    target, paths, cpu = places / "target", Paths(places, places / "w4"), torch.device("cpu")
    kept, old = TrainingRun(target, recipe, paths, cpu).start(corpus, draft)
    recipe = change_recipe(recipe, ["draft.renew_vocab=true"])
    renewed, new = TrainingRun(target, recipe, paths, cpu).start(corpus, draft)
    assert len(old.token_ids_V) < len(new.token_ids_V) == renewed.spec.draft_vocab_size == 80
    assert new.coverage >= old.coverage
    place = new.draft_index()[old.token_ids_V]
    known = place >= 0
    assert known.sum() > len(known) // 2
    assert torch.equal(renewed.lm_head.weight[place[known]], kept.lm_head.weight[known])
    assert torch.isfinite(renewed.lm_head.weight).all() and renewed.lm_head.weight.requires_grad
    again = ("--init-from", draft, "--set", "draft.vocab_size=80", "--set", "draft.renew_vocab=true")
    run_train(places, *again, "--set", "train.steps=2", "--out", places / "renewed", "--work", places / "draft-work-4")
    assert draft_spec(open_checkpoint(places / "renewed").config, places, None).draft_vocab_size == 80


def test_a_run_with_a_plan_follows_it_to_the_same_bytes_however_often_it_was_stopped(places, draft):
    asked = {
        "target": json.loads((draft / "slipstream.json").read_text())["target_digest"],
        "budget_s": 60.0, "settings": [str(places / "recipe.yaml")], "device": "cpu",
    }  # fmt: skip
    recipe = change_recipe(read_recipe(places / "recipe.yaml"), ["train.steps=12", "data.answer_tokens=1500"])
    made = Plan(asked, recipe, Speeds(1000.0, 0.9, 2.0, 0.1, 0.1, 0.1), True, 3000, {"data": 30.0, "training": 20.0})
    for name in ("planned", "resumed"):
        write_plan(places / f"{name}-work", made)
    budget = ("--time-budget-s", "60")
    words = " ".join(run_train(places, "--out", places / "planned", *budget).split())
    assert words.index("plan: 1,500 answer tokens") < words.index("acceptance to expect: about") < words.index("data: ")
    for stop in (("--stop-after-s", "0"), ()):
        run_train(places, "--out", places / "resumed", *budget, *stop)
    weights = [(places / name / "model.safetensors").read_bytes() for name in ("planned", "resumed")]
    assert weights[0] == weights[1]
    with pytest.raises(ConfigError, match="budget_s differ"):
        run_train(places, "--out", places / "resumed", "--time-budget-s", "9")


def test_a_second_stage_averaged_with_the_first_lies_between(places, draft):
    from safetensors.torch import load_file

    common = ("--init-from", draft, "--set", "train.steps=12", "--set", "data.seed=1")
    run_train(places, *common, "--out", places / "second", "--work", places / "w2")
    found = (places / "w2" / "before.json").read_text()
    (places / "w2" / "before.json").write_text(found.replace('"texts": 8', '"texts": 7'))
    average = ("--average-with", draft, "--average-share", "0.75")
    run_train(places, *common, "--out", places / "mean", "--work", places / "w2", *average)
    before = json.loads((places / "mean" / "slipstream.json").read_text())["before"]
    assert before["held-out"]["texts"] == 7, "what the first draft has is measured once"
    first, second, mean = (load_file(places / name / "model.safetensors") for name in ("draft", "second", "mean"))
    moved = [name for name in first if not torch.equal(first[name], second[name])]
    assert "fc.weight" in moved
    for name in moved:
        assert torch.equal(mean[name], (0.25 * first[name].float() + 0.75 * second[name].float()).bfloat16()), name
    assert first["d2t"].equal(mean["d2t"])
    record = json.loads((places / "mean" / "slipstream.json").read_text())
    assert record["started_from"] == record["averaged_with"] in record["records"]
    assert "an average: 75% the trained ones" in (places / "mean" / "README.md").read_text()


def test_a_setting_given_on_the_command_line_wins_over_the_recipe():
    recipe = make_recipe(RECIPE, "test")
    changed = change_recipe(recipe, ["train.lr=6e-4", "data.temperature=[0.5, 0.6]", "train.time_budget_s=30"])
    assert (changed.train.lr, changed.data.temperature) == (6e-4, (0.5, 0.6))
    assert (changed.train.steps, changed.train.time_budget_s) == (None, 30)


@pytest.mark.parametrize("change", ["train.lr", "lr=3", "train.rate=3", "other.lr=3"])
def test_a_change_that_names_no_setting_is_refused(change):
    with pytest.raises(ConfigError, match=r"SECTION\.KEY=VALUE"):
        change_recipe(make_recipe(RECIPE, "test"), [change])


def test_drafts_whose_weights_do_not_correspond_are_not_averaged():
    target = tiny_target()
    small, large, other = (
        objective_for(target, random_texts(9, seed), n)[0] for n, seed in ((40, 0), (48, 0), (48, 5))
    )
    for one, two in ((small, large), (large, other)):
        with pytest.raises(ConfigError, match="do not correspond"):
            average_with(one.draft, two.draft, 0.5)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "recipes/train").glob("embedded*.yaml")), ids=lambda path: path.stem
)
def test_every_recipe_we_ship_is_read_and_holds_its_evaluation_out(path):
    recipe = read_recipe(path)
    held_out = {item.file for item in recipe.files.evaluate} | set(recipe.files.exclude)
    assert held_out.isdisjoint(recipe.files.prompts)
    assert {"gsm8k/test.jsonl.xz", "user_oriented_instructions.jsonl"} <= held_out


@pytest.mark.parametrize("name", ["llama-3.3-70b", "minimax-m2.5", "kimi-k2.5"])
def test_recipes_for_served_targets_are_read_and_their_texts_fit(name):
    recipe = read_recipe(Path(__file__).parents[2] / f"recipes/train/{name}.yaml")
    assert {item.file for item in recipe.files.evaluate}.isdisjoint(recipe.files.prompts)
    data, longest = recipe.data, recipe.generate.max_length
    assert data.max_prompt + data.max_answer // 2 + data.max_answer <= longest <= recipe.train.row_length


def test_an_output_that_slipstream_did_not_write_is_refused_before_any_work(places):
    questions = (places / "train.jsonl").read_text()
    for out in (places / "target", places / "train.jsonl"):
        with pytest.raises(CheckpointError, match="did not write it"):
            run_train(places, "--out", out)
        assert not out.with_name(f"{out.name}-work").exists()
    assert (places / "train.jsonl").read_text() == questions
    assert (places / "target" / "tokenizer.json").is_file()


@pytest.mark.parametrize("option", ["--init-from", "--average-with"])
def test_a_draft_to_start_from_is_looked_at_before_any_work(places, option):
    with pytest.raises(CheckpointError, match="not an EAGLE-3 draft"):
        run_train(places, "--out", places / "refused", option, places / "target")
    assert not (places / "refused-work").exists()


def test_a_work_folder_that_cannot_be_made_is_refused_before_anything_is_generated(places):
    with pytest.raises(DataError, match=r"train\.jsonl/corpus: cannot be made"):
        run_train(places, "--out", places / "refused", "--work", places / "train.jsonl")
