"""A grammar rules out tokens along each node's own path, so any draft gives the answer that plain decoding gives."""

from hypothesis import given, settings
from hypothesis import strategies as st

from residues import Residues
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import VOCAB, engine_of, follower_draft, run, tiny_draft, tiny_target


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(0, 2),
    st.sampled_from([TreeShape.chain(3), TreeShape(depth=3, width=3, budget=9)]),
    st.booleans(),
)
def test_a_grammar_gives_the_same_answer_with_any_tree_as_without_one(seed, temperature, shape, follows):
    target = tiny_target(seed % 7)
    draft = follower_draft(target) if follows else tiny_draft(target, seed % 5)
    prompt = [seed % VOCAB, 3, 5, 8]
    params = SamplingParams(max_tokens=24, temperature=temperature, grammar=Residues(20), repetition_penalty=1.3)
    plain = run(engine_of(target), [prompt], [params], [seed])
    speculative = run(engine_of(target, draft, shape), [prompt], [params], [seed])
    assert speculative == plain
    assert len(plain[0]) == 20
    assert all(token % 3 == index % 3 for index, token in enumerate(plain[0]))
