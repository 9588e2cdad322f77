"""Attack a server on this machine and report what broke; exit status 1 if anything did.

    python -m tests.attack                      # minutes: the embedded model and its draft
    python -m tests.attack --short              # seconds: one or two attacks of each kind
    python -m tests.attack --tp 3               # a model over ranks (the embedded one has 9 heads)
    python -m tests.attack --device cuda

The server is a process of its own with 256 descriptors. Beside the attack honest clients ask for texts known
beforehand, /health is asked 20 times a second from another process, and memory is watched.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.serve_client import free_port

from tests.attack import amplification, heads, mutations, sampling, schemas, sockets, tenants
from tests.attack.campaign import Campaign, Row, vocabulary
from tests.attack.ending import check_log, drain
from tests.attack.hosted import HostedServer
from tests.attack.kinds import Attack
from tests.attack.neighbours import PLAIN
from tests.attack.offline import Choice, offline_texts
from tests.attack.table import report
from tests.attack.watch import Prober
from tests.attack.wire import Violation, Wire


def groups(options: argparse.Namespace) -> dict[str, list[Attack]]:
    """Return the attacks to make, by group."""
    found = {
        "schemas": schemas.attacks(),
        "amplification": amplification.attacks(),
        "sampling": sampling.attacks(),
        "heads": heads.attacks(),
        "sockets": sockets.attacks(options.seed),
        "tenants": tenants.attacks(with_trees=not options.device.startswith("cuda")),
        "mutations": mutations.attacks(options.seed, options.mutations, num_short=15),
    }
    chosen = found if options.groups is None else {name: found[name] for name in options.groups.split(",")}
    return {name: [a for a in attacks if a.in_short or not options.short] for name, attacks in chosen.items()}


async def attack(options: argparse.Namespace, log: Path, expected: Sequence[str]) -> list[Row]:
    """Run the whole attack; return a row for each group."""
    attacks = groups(options)
    choice = Choice(options.model, options.draft, options.device, options.tp)
    limits = ["--max-output-tokens", "256", "--request-timeout", "300", "--drain-timeout", f"{_drain_s(options):g}"]
    port = free_port()
    hosted = HostedServer([*choice.flags, *limits], port, log, options.ceiling_mib)
    await hosted.start()
    prober = Prober(port)
    watching = asyncio.ensure_future(hosted.watch_memory())
    try:
        campaign = Campaign(hosted, Wire(port, await vocabulary(Wire(port))), expected)
        await _run(campaign, attacks, options)
        campaign.attribute(prober.stop())
        await _end(campaign, _drain_s(options))
    finally:
        watching.cancel()
        hosted.close()
    campaign.rows["ending"].violations += check_log(log)
    return list(campaign.rows.values())


async def _run(campaign: Campaign, groups: dict[str, list[Attack]], options: argparse.Namespace) -> None:
    await campaign.settle(13 if options.short else 100)
    if options.groups is None or "tenants" in options.groups:
        await campaign.strike("tenants", tenants.quiet_attacks())
    await campaign.invite_neighbours(2 if options.short else 4)
    readers = None if options.short else sockets.SilentReaders(campaign.wire.port)
    for name, attacks in groups.items():
        await campaign.strike(name, attacks)
        _say(options, f"{name}: {len(campaign.rows[name].violations)} violations so far")
    if readers is not None:
        await campaign.silent_readers(readers)
    await campaign.farewell()
    await campaign.aftermath(13)


async def _end(campaign: Campaign, drain_s: float) -> None:
    row = campaign.rows.setdefault("ending", Row("ending", 1))
    started = time.monotonic()
    try:
        row.statuses.update(await drain(campaign.wire, campaign.hosted.process, drain_s))
        row.statuses.pop(503, None)  # which is what draining answers
    except Violation as violation:
        row.violations.append(str(violation))
    except TimeoutError:
        row.violations.append("the server did not end in time")
    row.seconds = time.monotonic() - started


def _drain_s(options: argparse.Namespace) -> float:
    return 1.0 if options.short else 3.0


def _say(options: argparse.Namespace, line: str) -> None:
    if not options.short:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def main() -> int:
    """Attack and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="a few attacks of each kind, for every test run")
    parser.add_argument("--groups", help="only these, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutations", type=int, default=400, help="how many changed bodies")
    parser.add_argument("--ceiling-mib", type=float, default=3072, help="end a server whose memory rises further")
    parser.add_argument("--log", type=Path, help="keep the server's log here")
    options = parser.parse_args()
    started = time.monotonic()
    choice = Choice(options.model, options.draft, options.device, options.tp)
    expected = [] if options.short else offline_texts(PLAIN, choice)
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(attack(options, options.log or Path(folder) / "server.log", expected))
    sys.stdout.write(report(rows) + "\n")
    sys.stdout.write(f"seed {options.seed}, {time.monotonic() - started:.0f} s\n")
    return 1 if any(row.violations for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
