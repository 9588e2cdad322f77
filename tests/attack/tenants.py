"""What one client could learn from another, or change for it."""

import json

from tests.attack.kinds import ANY, COMPLETIONS, REFUSED, Attack, post, require
from tests.attack.wire import Reply, Wire

_ADMIN = "/admin/speculation"
_HIT = 250
"""Cached tokens that only the long prompt's own pages can account for."""


def quiet_attacks() -> list[Attack]:
    """Return those that read the server's counters, and so need it to themselves."""
    return [Attack("prefixes under another salt", _salted, limit_s=120, in_short=True)]


def attacks(with_trees: bool) -> list[Attack]:
    """Return every other attack of this kind.

    Args:
        with_trees: whether a change to a draft tree must leave the neighbours' texts alone, as it does on a CPU.
    """
    shapes = [{"depth": 1, "width": 1, "budget": 0}, {"depth": 7, "width": 1, "budget": 0}]
    shapes += [{"depth": 5, "width": 4, "budget": 16}, {"depth": 2, "width": 2}] if with_trees else []
    wrong = [
        {"depth": 0}, {"depth": 10**9}, {"width": -1}, {"budget": 65}, {"depth": None, "budget": "x"}, {"tree": 1},
        {"simulated_acceptance": [2]}, {"simulated_acceptance": ["a"]},
        {"simulated_acceptance": [0.5] * 10_000, "depth": 0},
    ]  # fmt: skip
    closing = post("back to a chain of three", {"depth": 3, "width": 1, "budget": 0}, _ADMIN)
    return [
        *(post(f"the tree is {json.dumps(shape)}", shape, _ADMIN) for shape in shapes),
        *(post(f"no tree is {str(change)[:40]}", change, _ADMIN, REFUSED) for change in wrong),
        closing,
        Attack("routes that tell of requests", _nothing_told, in_short=True),
    ]


async def _salted(wire: Wire) -> list[int]:
    """Ask the same long prompt under salts; only the same salt may find what was kept."""
    prompt = "A secret that took long to read. " * 45
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    statuses = []

    async def hit(**salt: str) -> bool:
        before = await _cached(wire)
        reply = await wire.post(COMPLETIONS, {**body, **salt})
        statuses.append(reply.status)
        return await _cached(wire) - before >= _HIT

    require(not await hit(cache_salt="mine"), "a prompt was found before anybody sent it")
    require(await hit(cache_salt="mine"), "the same salt does not find its own pages")
    require(not await hit(cache_salt="yours"), "another salt found pages kept under mine")
    require(not await hit(), "no salt found pages kept under mine")
    require(not await hit(cache_salt="min"), "a salt's beginning found pages kept under it")
    return statuses


async def _cached(wire: Wire) -> float:
    lines = (await wire.get("/metrics")).body.decode().splitlines()
    return float(next(line for line in lines if line.startswith("slipstream_cached_tokens_total ")).split()[-1])


async def _nothing_told(wire: Wire) -> list[int]:
    """Ask every open route for something only another client knows."""
    secret = "zebra-7741-quartz"
    body = {"prompt": f"{secret} {secret}", "max_tokens": 4, "user": secret, "cache_salt": secret, "seed": 1}
    statuses = [(await wire.post(COMPLETIONS, body, [("X-Request-ID", secret)])).status]
    paths = (
        "/metrics",
        "/speculation",
        "/server_info",
        "/v1/models",
        "/openapi.json",
        "/version",
        "/health",
        "/docs",
        "/",
    )
    replies: list[Reply] = [await wire.get(path) for path in paths]
    for path, reply in zip(paths, replies, strict=True):
        require(secret.encode() not in reply.received, f"{path} tells of another client's request")
    require(all(reply.status in ANY for reply in replies), "an open route failed")
    return [*statuses, *(reply.status for reply in replies)]
