"""Prometheus families from plain values."""

from collections.abc import Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from slipstream.serve.meters import Histogram

Labels = Mapping[str, str]
_NO_LABELS: Labels = {}


def counter(name: str, text: str, value: float, labels: Labels = _NO_LABELS) -> Metric:
    """Return a counter of one value; its sample's name ends with `_total`."""
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counters(name: str, text: str, values: Mapping[str, float], label: str, labels: Labels = _NO_LABELS) -> Metric:
    """Return a counter with a value for each of a label's values."""
    family = CounterMetricFamily(name, text, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family


def gauge(name: str, text: str, value: float, labels: Labels = _NO_LABELS) -> Metric:
    """Return a gauge of one value."""
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def gauges(name: str, text: str, values: Mapping[str, float], label: str, labels: Labels = _NO_LABELS) -> Metric:
    """Return a gauge with a value for each of a label's values."""
    family = GaugeMetricFamily(name, text, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family


def by_position(counts: Sequence[int]) -> dict[str, float]:
    """Return counts under their positions."""
    return {str(position): count for position, count in enumerate(list(counts))}


def histogram(name: str, text: str, values: Histogram, labels: Labels = _NO_LABELS) -> Metric:
    """Return a histogram."""
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), values.cumulative(), values.total)
    return family
