"""A page's key says everything its bits depend on, however the text came about."""

from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.page_keys import PageKeys
from slipstream.engine.request import Request
from slipstream.speculation.sampling import SamplingParams

SIZE = 4


def request(prompt, answer=(), salt="", speculate=True):
    made = Request(0, tuple(prompt), SamplingParams(cache_salt=salt), 0, speculate=speculate)
    made.tokens += answer
    return made


def names(made, has_draft=False, two_forms=False):
    return PageKeys(SIZE, has_draft, two_forms).first(made, (len(made.tokens) - 1) // SIZE)


TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=24)


@given(TEXTS, TEXTS, st.booleans(), st.booleans())
def test_pages_have_one_key_exactly_if_all_that_is_before_their_end_is_equal(one, other, has_draft, two_forms):
    keys = [names(request(text), has_draft, two_forms) for text in (one, other)]
    for index, (mine, theirs) in enumerate(zip(*keys, strict=False)):
        end = (index + 1) * SIZE + has_draft  # a draft's last key depends on the token after the page
        assert (mine == theirs) == (one[:end] == other[:end])
    assert len(set(keys[0])) == len(keys[0])


@given(TEXTS, st.integers(1, 24), st.booleans(), st.booleans())
def test_a_text_has_the_same_keys_named_at_once_or_as_it_grows(text, step, has_draft, two_forms):
    at_once = names(request(text[:1], text[1:]), has_draft, two_forms)
    growing = request(text[:1])
    for start in range(1, len(text), step):
        growing.tokens += text[start : start + step]
        names(growing, has_draft, two_forms)
    assert names(growing, has_draft, two_forms) == at_once


@given(TEXTS, st.data())
def test_an_answers_pages_are_a_prompts_only_where_both_are_computed_alike(text, data):
    length = data.draw(st.integers(1, len(text)))
    prompt, answer = text[:length], text[length:]
    assert names(request(prompt, answer)) == names(request(text))
    answered, asked = (names(made, two_forms=True) for made in (request(prompt, answer), request(text)))
    same = [mine == theirs for mine, theirs in zip(answered, asked, strict=True)]
    assert same == [(index + 1) * SIZE <= length for index in range(len(same))]


def test_salts_and_requests_that_a_draft_did_not_follow_keep_apart():
    kinds = [{}, {"salt": "a"}, {"salt": "b"}, {"speculate": False}]
    keys = [set(names(request([1, 2, 3, 0] * 4, **kind), has_draft=True)) for kind in kinds]
    assert not any(keys[i] & keys[j] for i in range(4) for j in range(i))
    without = [names(request([1, 2, 3, 0] * 4, speculate=speculate)) for speculate in (True, False)]
    assert without[0] == without[1], "where no draft keeps keys there is no difference"
