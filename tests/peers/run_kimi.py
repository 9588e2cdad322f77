"""Runs Kimi-Vendor-Verifier's suites against our server: parameters, tool schemas, tool_choice; compares prompts.

    python -m tests.peers.run_kimi --source CHECKOUT [params] [schemas] [tool_choice] [tokens] [prompts]

`params` runs on the embedded model under --fixed-sampling kimi, the others on a tiny Kimi that is made here
(tiny_kimi.py) from the tokenizer in the checkout: `schemas` every tool schema, whole and streamed, with an EAGLE-3
draft and without any; `tokens` sends every schema with a seed, drafted and not, and compares the tokens; `prompts`
compares the prompts of 200 chats with what the tokenizer code in the checkout makes of them.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from tests.peers.kimi_prompts import same_prompts, the_chats, theirs
from tests.peers.launcher import Launcher, launcher_for
from tests.peers.run import HERE, ROOT, compare, read_expected
from tests.peers.suites import KIMI, version_of
from tests.peers.tiny_kimi import CONTEXT, TEMPLATE, write_tiny_kimi
from tests.serve.interop import python_of

PARTS = ("params", "schemas", "tool_choice", "tokens", "prompts")


def run_tests(source: Path, address: str, out: Path, model: str, tests: Sequence[str]) -> bool:
    """Run some of its tests against an address; returns whether nothing failed that is not on the list."""
    command = [str(python_of(KIMI)), "-P", "-m", "pytest", "-p", "address_plugin", "-p", "no:cacheprovider", "-q"]
    command += ["--tb=short", "--base-url", f"{address}/v1", "--api-key", "none", "--think-mode", "opensource"]
    command += ["--smoke-model", model, "--slipstream-out", str(out), *tests]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(source)])}
    subprocess.run(command, check=False, cwd=source, env=env)
    outcomes = json.loads(out.read_text(encoding="utf-8"))["outcomes"]
    verdict = compare(outcomes, read_expected("kimi"))
    sys.stdout.write(f"{out.stem}: {verdict.summary}\n")
    return not verdict.unexplained


def schemas_in(source: Path) -> Iterator[object]:
    """Yield the schemas of its tool suite: one JSON a line."""
    for file in sorted((source / "testdata" / "walle_validator_cases" / "validator_cases").rglob("valid.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def same_tokens(source: Path, address: str) -> bool:
    """Send each schema as a tool that must be called, with a draft and without; tell whether tokens are the same."""
    tool = {"name": "kvv_walle_case", "strict": True}
    counts = {"same": 0, "different": 0, "refused": 0}
    with httpx.Client(base_url=address, timeout=120) as client:
        for seed, schema in enumerate(schemas_in(source)):
            body = {"messages": [{"role": "user", "content": "Call it."}], "tool_choice": "required", "seed": seed}
            body |= {"tools": [{"type": "function", "function": {**tool, "parameters": schema}}], "max_tokens": 512}
            body |= {"thinking": {"type": "disabled"}}
            answers = [
                client.post("/v1/chat/completions", json={**body, "return_token_ids": True, "speculate": speculate})
                for speculate in (True, False)
            ]
            if any(answer.status_code != 200 for answer in answers):
                counts["refused"] += 1
                sys.stdout.write(f"schema {seed} is refused: {answers[0].text[:300]}\n")
                continue
            ids = [answer.json()["choices"][0]["token_ids"] for answer in answers]
            counts["same" if ids[0] == ids[1] else "different"] += 1
        drafts, accepted = (
            counted(client, f"vllm:spec_decode_num_{what}_total") for what in ("drafts", "accepted_tokens")
        )
    sys.stdout.write(f"tokens with a draft and without: {counts}\n")
    sys.stdout.write(f"{accepted:.0f} drafted tokens kept in {drafts:.0f} passes: {1 + accepted / drafts:.2f} a pass\n")
    return counts["same"] > 0 and not counts["different"]


def counted(client: httpx.Client, name: str) -> float:
    """Return the sum of a metric's series."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def on_tiny_kimi(
    launcher: Launcher, source: Path, work: Path, parts: Sequence[str], own_template: Path | None
) -> Iterator[bool]:
    """Run what needs a Kimi; yields whether each part went well."""
    template = TEMPLATE if own_template is None else own_template.read_text(encoding="utf-8")
    target, draft = write_tiny_kimi(source / "beam" / "tokenizer", work / "tiny-kimi", template)
    flags = ["--model", str(target), "--served-model-name", "kimi", "--max-context", str(CONTEXT)]
    if "prompts" in parts:
        yield from prompts_like_theirs(launcher, flags, source, work)
    for name, path in (("none", "none"), ("eagle3", str(draft))):
        if not set(parts) & ({"schemas", "tokens"} if name == "eagle3" else {"schemas"}):
            continue
        address = launcher.url("kimi", [*flags, "--draft", path])
        if "schemas" in parts:
            tests = ("tests/tool_call_json_schema", "--tool-json-report", str(work / f"kimi-schemas-{name}.report"))
            tests += ("--max-tokens", "512")
            yield run_tests(source, address, work / f"kimi-schemas-{name}.json", "kimi", tests)
        if name == "eagle3" and "tokens" in parts:
            yield same_tokens(source, address)
    if "tool_choice" in parts:  # left to itself, the model would go on to the end of its context
        address = launcher.url("kimi", [*flags, "--draft", str(draft), "--max-output-tokens", "256"])
        tests = ("tests/k3_features/test_tool_choice.py", "-o", "markers=flaky")
        yield run_tests(source, address, work / "kimi-tool_choice.json", "kimi", tests)


def prompts_like_theirs(launcher: Launcher, flags: Sequence[str], source: Path, work: Path) -> Iterator[bool]:
    """Compare prompts where texts that spell control tokens stay texts, and where they do not."""
    chats = the_chats([schema for schema in schemas_in(source) if isinstance(schema, dict)])
    expected = theirs(chats, source / "beam" / "tokenizer", work / "tiny-kimi" / "kimi" / "chat_template.jinja", work)
    for kind, more in (("kept", ()), ("plain", ("--allow-special-in-content",))):
        yield same_prompts(launcher.url("kimi", [*flags, "--draft", "none", *more]), expected, chats, kind)


def main() -> None:
    """Run the parts that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of Kimi-Vendor-Verifier")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "peers", help="where outcomes and logs go")
    parser.add_argument("--template", type=Path, help="a chat template of Kimi's (the checkout has none)")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="instead of all of them")
    given = parser.parse_args()
    parts, work, source = given.parts or PARTS, given.out.resolve(), given.source.resolve()
    work.mkdir(parents=True, exist_ok=True)
    launcher = launcher_for(sys.executable, str(ROOT / "src"), work / "kimi.log")
    sys.stdout.write(f"Kimi-Vendor-Verifier {version_of(source)}\n")
    well: list[bool] = []
    try:
        if "params" in parts:
            address = launcher.url("embedded", ["--fixed-sampling", "kimi", "--max-output-tokens", "64"])
            well.append(run_tests(source, address, work / "kimi-params.json", "embedded", ["tests/params"]))
        if set(parts) - {"params"}:
            well.extend(on_tiny_kimi(launcher, source, work, parts, given.template))
    finally:
        launcher.stop()
    sys.exit(0 if all(well) else 1)


if __name__ == "__main__":
    main()
