"""A sweep survives servers that die, hang, lie or will not start; it loses nothing, and a rerun fills only the gaps."""

import asyncio
import json
import os
import socket
import sys

import pytest

from slipstream.bench.client import ServerError
from slipstream.bench.plan import build_plan
from slipstream.bench.recipe_file import RecipeError, load_recipe
from slipstream.bench.sweep import RunOptions, run_plan
from slipstream.errors import ConfigError
from slipstream.records.store import read_record, read_records
from tests.bench.fake_server import DRAFTING, FAKE, FAST
from tests.bench.quiet import Quiet
from tests.ports import free_port

FAULTS = {
    "dies": DRAFTING | {"die_after": 6},
    "hangs": DRAFTING | {"hang_every": 5},
    "garbage": DRAFTING | {"garbage_every": 7},
    "fails": DRAFTING | {"fail_every": 20},
    "absent": {"refuse_to_start": True},
    "silent": FAST,  # declares a draft and never drafts
}


@pytest.fixture
def bench(tmp_path):
    """Write a recipe with one arm for each behaviour, and return a function that runs it."""

    def prepare(behaviours, **changes):
        arms = {"plain": {"flags": {"behaviour": str(tmp_path / "plain.json")}}}
        (tmp_path / "plain.json").write_text(json.dumps(FAST))
        for name, behaviour in behaviours.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(behaviour))
            speculation = {"method": "eagle3", "num_steps": 2}
            arms[name] = {
                "draft": "draft",
                "speculation": speculation,
                "flags": {"behaviour": str(tmp_path / f"{name}.json")},
            }
        server = {"port": free_port(num=16), "program": [sys.executable, str(FAKE), "serve"], "start_timeout_s": 20}
        recipe = {
            "name": "faults",
            "about": "test",
            "machine": {"name": "here", "gpus": 0},
            "target": {"id": "fake", "context": 4096, "token_range": [10, 100]},
            "drafts": {"draft": {"id": "fake-draft", "precision": "bf16"}},
            "servers": {"vllm": server},
            "baseline": "plain",
            "arms": arms,
            "workloads": {"w": {"kind": "random", "input_tokens": 16, "output_tokens": 8}},
            "concurrency": [2],
            "seeds": [1],
            "traffic": {"requests_per_stream": 10, "warmups_per_stream": 0, "timeout_s": 1.0},
        } | changes
        path = tmp_path / "faults.yaml"
        path.write_text(json.dumps(recipe))

        def run(url=None, arms=(), keep_going=True, images=None):
            plan = build_plan(load_recipe(path), arms)
            watcher = Quiet()
            options = RunOptions(tmp_path / "out", url, keep_going=keep_going, images=images)
            summary = asyncio.run(run_plan(plan, options, watcher))
            records = {record.key.arm: record for record in read_records([tmp_path / "out" / "points"]).points}
            return summary, records, watcher

        return run

    return prepare


def test_every_fault_is_an_invalid_point_with_its_reason_and_a_rerun_completes_only_what_is_missing(bench, tmp_path):
    run = bench(FAULTS | {"good": DRAFTING})
    summary, records, _ = run()
    assert (summary.measured, summary.invalid) == (8, 6)
    reasons = {arm: " / ".join(record.reasons) for arm, record in records.items()}
    assert reasons["plain"] == reasons["good"] == ""
    assert "the server ended with signal SIGKILL" in reasons["dies"]
    assert "requests failed" in reasons["dies"]
    assert "no complete answer within 1 s" in reasons["hangs"]
    assert "not JSON" in reasons["garbage"]
    assert "1 of 20 requests failed: 1x HTTP 503" in reasons["fails"]
    assert "exit status 1" in reasons["absent"] and "cannot find the model" in reasons["absent"]
    assert "declares eagle3 drafting, but the server counted no drafts" in reasons["silent"]
    assert all(records[arm].throughput is None for arm in FAULTS)

    kept = {path.name: path.read_bytes() for path in (tmp_path / "out/points").iterdir()}
    for name in FAULTS:
        (tmp_path / f"{name}.json").write_text(json.dumps(DRAFTING))
    summary, records, watcher = run()
    assert (summary.measured, summary.invalid, summary.skipped) == (6, 0, 2)
    assert {key.arm for key in watcher.started} == set(FAULTS)
    assert all(record.status == "valid" for record in records.values())
    for arm in ("plain", "good"):
        name = records[arm].key.file_name()
        assert (tmp_path / "out/points" / name).read_bytes() == kept[name]
    assert len(list((tmp_path / "out/superseded").iterdir())) == 6

    summary, _, watcher = run()
    assert (summary.measured, summary.skipped, watcher.servers) == (0, 8, 0)


def test_a_sweep_stops_at_an_arm_whose_server_cannot_start_unless_told_to_go_on(bench):
    run = bench({"absent": {"refuse_to_start": True}, "good": DRAFTING})
    summary, records, _ = run(keep_going=False)
    assert (summary.measured, summary.invalid) == (2, 1)
    assert "the server of arm absent cannot be started" in summary.stopped
    assert "cannot find the model" in summary.stopped
    assert set(records) == {"plain", "absent"}
    summary, records, _ = run()
    assert (summary.measured, summary.invalid, summary.stopped) == (2, 1, "")
    assert records["good"].status == "valid"


def test_a_server_that_died_is_started_again_for_the_next_point(bench):
    run = bench({"dies": DRAFTING | {"die_after": 30}}, seeds=[1, 2, 3])
    summary, _, watcher = run(arms=["dies"])
    assert (summary.measured, summary.invalid) == (3, 1)
    assert watcher.servers == 2


def test_a_record_carries_what_is_needed_to_run_it_again(bench, tmp_path):
    run = bench({"good": DRAFTING})
    _, records, _ = run()
    record = records["good"]
    assert record.provenance.argv[:3] == (sys.executable, str(FAKE), "serve")
    assert record.provenance.versions["server"] == "vllm 0.0-fake"
    assert len(record.provenance.config_sha256) == len(record.provenance.recipe_sha256) == 64
    assert record.provenance.hardware.num_cpus >= 1
    assert record.provenance.config["load"]["seed"] == 1
    assert record.input_tokens == 16
    assert len(record.requests) == 20
    assert 2.0 < record.acceptance.length < 2.8
    assert read_record(tmp_path / "out/points" / record.key.file_name()) == record
    assert (tmp_path / "out/logs").glob("*.log")


def test_a_changed_setting_is_measured_again_and_the_old_record_kept(bench, tmp_path):
    run = bench({})
    run()
    changed = bench({}, traffic={"requests_per_stream": 3, "warmups_per_stream": 1, "timeout_s": 1.0})
    summary, records, _ = changed()
    assert (summary.measured, summary.skipped) == (1, 0)
    assert records["plain"].num_requests == 6
    assert len(list((tmp_path / "out/superseded").iterdir())) == 1


def test_half_a_record_is_measured_again(bench, tmp_path):
    run = bench({})
    _, records, _ = run()
    path = tmp_path / "out/points" / records["plain"].key.file_name()
    path.write_text(path.read_text()[:100])
    summary, records, _ = run()
    assert (summary.measured, records["plain"].status) == (1, "valid")


def test_a_port_that_is_taken_is_not_measured_by_mistake(bench):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = {"port": other.getsockname()[1], "program": [sys.executable, str(FAKE), "serve"]}
        run = bench({}, servers={"vllm": server})
        _, records, _ = run()
    assert "something already listens there" in records["plain"].reasons[0]


def test_a_port_held_by_a_connection_is_named_before_anything_is_started(bench):
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_connection(there.getsockname()) as held:
        server = {"port": held.getsockname()[1], "program": [sys.executable, str(FAKE), "serve"]}
        run = bench({}, servers={"vllm": server})
        _, records, _ = run()
    (reason,) = records["plain"].reasons
    assert "a server cannot listen there: Address already in use. Change the server's port" in reason


def test_a_program_that_is_not_installed_is_a_reason_not_a_crash(bench):
    run = bench({}, servers={"vllm": {"port": free_port(), "program": ["no-such-server"]}})
    _, records, _ = run()
    assert "no-such-server: cannot be started" in records["plain"].reasons[0]


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "127.0.0.1:{port}"])
def test_a_url_where_no_server_answers_is_refused_and_nothing_is_written(bench, tmp_path, url):
    url = url.format(port=free_port())
    with pytest.raises(ServerError, match=f"{url}.*start the server first.*leave --url out"):
        bench({})(url=url, arms=["plain"])
    assert not (tmp_path / "out").exists()


def test_a_url_measures_one_arm_and_starts_nothing(bench, tmp_path):
    async def scenario(run_in_thread):
        from tests.bench.fake_server import Behaviour, FakeServer

        fake = FakeServer(Behaviour(ttft_s=0.001, step_s=0.0002))
        url = await fake.start()
        try:
            return await asyncio.to_thread(run_in_thread, url)
        finally:
            await fake.stop()

    run = bench({"good": DRAFTING})
    with pytest.raises(RecipeError, match="name its arm with --arm"):
        run(url="http://127.0.0.1:1")
    summary, records, watcher = asyncio.run(scenario(lambda url: run(url=url, arms=["plain"])))
    assert (summary.measured, summary.invalid, watcher.servers) == (1, 0, 0)
    assert records["plain"].provenance.versions["server"] == "vllm 0.0-fake"


# A container runtime without containers: it runs the entry point with what stands behind the image.
DOCKER = """#!/bin/sh
while [ "$1" != --entrypoint ]; do shift; done
entry=$2; shift 3; exec "$entry" "$@"
"""


def test_arms_run_in_their_own_images_and_the_record_names_an_image_only_if_it_was_used(bench, tmp_path, monkeypatch):
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    behaviour = {"behaviour": str(tmp_path / "plain.json")}
    arms = {"plain": {"flags": behaviour, "image": "vllm:v1"}, "other": {"flags": behaviour, "image": "vllm:v2"}}
    run = bench({}, arms=arms)
    with pytest.raises(RecipeError, match="Start containers of them with --images docker"):
        run()
    summary, records, _ = run(images="docker")
    assert (summary.measured, summary.invalid) == (2, 0)
    assert [records[arm].provenance.image for arm in arms] == ["vllm:v1", "vllm:v2"]
    assert records["other"].provenance.argv[:3] == ("docker", "run", "--rm")
    assert "vllm:v2" in records["other"].provenance.argv
    assert records["other"].warnings == ()


def test_an_image_that_was_not_used_is_a_warning_not_provenance(bench):
    arms = {"plain": {"image": "vllm:v1", "env": {"A": "1"}}}
    run = bench({}, arms=arms)
    _, records, _ = run()
    assert records["plain"].provenance.image == ""
    assert records["plain"].warnings == ("the recipe's image was not used: vllm:v1",)
    with pytest.raises(ConfigError, match="names no image"):
        bench({})(images="docker")


def test_a_recipe_with_nodes_measures_a_server_that_is_spread_over_them(bench, tmp_path):
    nodes = {"hosts": ["a=127.0.0.1", "b=127.0.0.2"], "rsh": "env NODE={node}"}
    run = bench({"good": DRAFTING}, nodes=nodes, topologies=[{"tp": 1, "pp": 2}])
    _, records, _ = run()
    assert [record.reasons for record in records.values()] == [(), ()]
    good = records["good"]
    assert (good.num_devices, good.key.topology) == (2, "tp1-pp2")
    said = " ".join(good.provenance.argv)
    assert said.endswith("--nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29500")
    assert good.provenance.config["launch"]["nodes"]["hosts"] == nodes["hosts"]
    assert sorted(path.stem.rpartition("-")[2] for path in (tmp_path / "out/logs").iterdir()) == ["a", "a", "b", "b"]
