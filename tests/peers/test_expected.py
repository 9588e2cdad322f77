"""A failure of another project's test is explained by the written list, or it is told of."""

from tests.peers.run import Expected, compare, read_expected
from tests.peers.suites import SUITES

OUTCOMES = {
    "tests/a.py::test_fine": {"outcome": "passed"},
    "tests/a.py::test_adapters[big-model]": {"outcome": "failed", "why": "404"},
    "tests/a.py::test_new": {"outcome": "failed", "why": "wrong\nvery"},
    "tests/b.py::test_later": {"outcome": "skipped"},
}


def test_failures_are_held_against_the_list():
    expected = [Expected("no adapters", ("a.py::test_adapters[big-model]", "a.py::test_gone"))]
    verdict = compare(OUTCOMES, expected)
    assert (verdict.passed, verdict.skipped) == (1, 1)
    assert verdict.explained == {"no adapters": 1}
    assert verdict.unexplained == {"tests/a.py::test_new": "wrong"}
    assert verdict.idle == ("a.py::test_gone",)
    assert compare(OUTCOMES, [*expected, Expected("it depends", ("test_fine",), may_pass=True)]).idle == verdict.idle
    assert "UNEXPLAINED tests/a.py::test_new" in verdict.summary


def test_a_request_that_was_refused_is_not_explained_by_what_is_sampled():
    refused = "openai.BadRequestError: Error code: 400 - temperature is 9"
    outcomes = {name: {"outcome": "failed", "why": why} for name, why in (("a", refused), ("b", "assert '3' == '2'"))}
    verdict = compare(outcomes, [Expected("needs another model", ("a", "b"), may_pass=True)])
    assert verdict.unexplained == {"a": refused}
    assert compare(outcomes, [Expected("refused by name", ("a", "b"))]).unexplained == {}


def test_every_line_of_the_lists_has_a_reason():
    for name in (*SUITES, "kimi"):
        for line in read_expected(name):
            assert line.why
            assert line.patterns
