"""Reads a server's own Prometheus counters: what was drafted and accepted, and where step time went."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.records.point import Acceptance, ContextCost, Phases

_VLLM = "vllm:spec_decode_num_"
_AVERAGE = "avg_spec_accept_length"
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class MetricsPage:
    """One scrape: sums by name, and by name and one label's value."""

    values: Mapping[str, float]
    by_label: Mapping[tuple[str, str, str], float]

    def labelled(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a metric by one of its labels."""
        return {value: x for (n, key, value), x in self.by_label.items() if n == name and key == label}


def parse_metrics(text: str) -> MetricsPage:
    """Parse Prometheus text; series of one name are summed (several engines behind one server add up)."""
    values: dict[str, float] = {}
    by_label: dict[tuple[str, str, str], float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isnan(value):
            continue
        values[name] = values.get(name, 0.0) + value
        for label, text_value in _LABEL.findall(labels or ""):
            key = (name, label, text_value)
            by_label[key] = by_label.get(key, 0.0) + value
    return MetricsPage(values, by_label)


def page_of_server_info(document: Mapping[str, object]) -> MetricsPage | None:
    """Return what SGLang's description of itself counts, which it has without `--enable-metrics`; None if nothing."""
    states = document.get("internal_states")
    if not isinstance(states, list):
        return None
    lengths = [state.get(_AVERAGE) for state in states if isinstance(state, dict)]
    told = [float(length) for length in lengths if isinstance(length, int | float)]
    return MetricsPage({_AVERAGE: sum(told) / len(told)} if told else {}, {})


def read_acceptance(before: MetricsPage, after: MetricsPage) -> Acceptance | None:
    """Return what was accepted between two scrapes, or None when the server counted no drafts in between."""
    if f"{_VLLM}drafts_total" in after.values:
        return _from_vllm_names(before, after)
    return _from_sglang_names(before, after)


def read_phases(before: MetricsPage, after: MetricsPage) -> Phases | None:
    """Return step time by phase between two scrapes; None of servers without such timers.

    vLLM and SGLang count what requests waited for (their prefill and decode time), which requests of one batch share;
    what the device spent on drafts and on verification they do not tell.
    """
    if "slipstream_phase_seconds_total" not in after.values:
        return None
    spent = _grown_by_label(before, after, "slipstream_phase_seconds_total", "phase")
    parts = {f"{phase}_s": spent.get(phase, 0.0) for phase in ("draft", "verify", "host", "prefill", "mixed")}
    return Phases(**parts, by_context=_by_context(before, after))


def _by_context(before: MetricsPage, after: MetricsPage) -> tuple[ContextCost, ...]:
    """Return what passes took between two scrapes, the shortest context first."""
    names = ("passes", "rows", "tokens", "draft_seconds", "verify_seconds")
    grown = [_grown_by_label(before, after, f"slipstream_decode_{name}_total", "context") for name in names]
    passes = grown[0]
    return tuple(
        ContextCost(int(context), *(values.get(context, 0.0) for values in grown))
        for context in sorted(passes, key=int)
        if passes[context]
    )


def _from_vllm_names(before: MetricsPage, after: MetricsPage) -> Acceptance | None:
    drafts = _grown(before, after, f"{_VLLM}drafts_total")
    if not drafts:
        return None
    accepted = _grown(before, after, f"{_VLLM}accepted_tokens_total") or 0.0
    by_position = _grown_by_position(before, after, f"{_VLLM}accepted_tokens_per_pos_total")
    drafted = _grown_by_position(before, after, "slipstream_drafted_tokens_total")
    source = f"{_VLLM}drafts_total, accepted_tokens_total"
    # vLLM does not count passes without a draft (n-gram finds nothing); slipstream counts every pass.
    passes = _grown(before, after, "slipstream_target_passes_total")
    source += ", slipstream_target_passes_total" if passes else ""
    if len(drafted) == len(by_position) and drafted:
        source += ", slipstream_drafted_tokens_total"
    else:
        drafted = (drafts,) * len(by_position)
    return Acceptance(
        length=1 + accepted / (passes or drafts),
        source=source,
        num_drafts=drafts,
        num_draft_tokens=_grown(before, after, f"{_VLLM}draft_tokens_total"),
        num_accepted_tokens=accepted,
        accepted_by_position=by_position,
        drafted_by_position=drafted,
    )


def _from_sglang_names(before: MetricsPage, after: MetricsPage) -> Acceptance | None:
    calls = _grown(before, after, "sglang:spec_verify_calls_total")
    tokens = _grown(before, after, "sglang:generation_tokens_total")
    if calls and tokens:
        # The first token of a request comes out of its prompt pass, not out of a verify pass.
        finished = _grown(before, after, "sglang:num_requests_total") or 0.0
        source = "sglang:generation_tokens_total / spec_verify_calls_total"
        return Acceptance(length=(tokens - finished) / calls, source=source, num_drafts=calls)
    gauge = after.values.get("sglang:spec_accept_length")
    if gauge:
        return Acceptance(
            length=gauge, source="sglang:spec_accept_length (gauge: a recent window, not this point alone)"
        )
    average = after.values.get(_AVERAGE)
    if average:
        source = f"/server_info: {_AVERAGE} (the average since the server's start, not this point alone)"
        return Acceptance(length=average, source=source)
    return None


def _grown(before: MetricsPage, after: MetricsPage, name: str) -> float | None:
    if name not in after.values:
        return None
    return after.values[name] - before.values.get(name, 0.0)


def _grown_by_position(before: MetricsPage, after: MetricsPage, name: str) -> tuple[float, ...]:
    grown = _grown_by_label(before, after, name, "position")
    return tuple(grown[position] for position in sorted(grown, key=int))


def _grown_by_label(before: MetricsPage, after: MetricsPage, name: str, label: str) -> dict[str, float]:
    old, new = before.labelled(name, label), after.labelled(name, label)
    return {value: new[value] - old.get(value, 0.0) for value in new}
