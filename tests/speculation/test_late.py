"""What requests leave behind for a draft that rested is found by page, joined again, and never outgrows its bound."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.speculation.late import LatePages, LateRun

PAGE = 4
BYTES = 3 * 4  # of one position's states


def run_of(start: int, count: int) -> LateRun:
    positions = range(start, start + count)
    return LateRun(start, [10 * at for at in positions], torch.tensor([[float(at)] * 3 for at in positions]))


def positions_of(runs: list[LateRun]) -> list[list[int]]:
    for run in runs:
        assert run.states_LF[:, 0].tolist() == [token / 10 for token in run.tokens]
    return [list(range(run.start, run.end)) for run in runs]


def test_what_was_left_is_handed_over_once_and_only_from_whole_pages_of_the_prefix():
    late = LatePages(PAGE, 10**6)
    assert late.leave([7, 3, 9, 5], run_of(6, 10))
    assert positions_of(late.take_up([7, 3, 9, 1], 12)) == [list(range(6, 12))]
    assert late.take_up([7, 3, 9, 1], 12) == []
    assert positions_of(late.take_up([7, 3, 9, 5], 16)) == [list(range(12, 16))]
    assert late.num_bytes == 0


def test_a_page_given_to_somebody_else_leaves_a_gap_and_two_runs():
    late = LatePages(PAGE, 10**6)
    late.leave([0, 1, 2], run_of(0, 12))
    late.lose(1)
    assert positions_of(late.take_up([0, 1, 2], 12)) == [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_the_states_left_do_not_keep_their_whole_buffer_alive():
    late = LatePages(PAGE, 10**6)
    states = torch.zeros(100, 3)
    late.leave([0], LateRun(0, [1] * 4, states[:4]))
    (run,) = late.take_up([0], 4)
    assert run.states_LF.untyped_storage().nbytes() == 4 * BYTES


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20), st.permutations(range(7))), max_size=20),
    st.integers(0, 40),
)
def test_no_more_is_kept_than_there_is_room_for_and_what_is_refused_changes_nothing(left, room):
    late = LatePages(PAGE, room * BYTES)
    for start, count, pages in left:
        before = late.num_bytes
        kept = late.leave(pages, run_of(start, count))
        assert kept == (before + count * BYTES <= room * BYTES)
        assert late.num_bytes <= room * BYTES
        assert kept or late.num_bytes == before
    for page in range(7):
        late.lose(page)
    assert late.num_bytes == 0
