"""Choosing at the nodes of trees: the target's distribution, and settings along each node's own path."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residues import Residues
from slipstream.executors.choice import Chooser
from slipstream.executors.interface import Joined
from slipstream.executors.rows import Row
from slipstream.speculation.accept import accept
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import Tree, TreeBatch
from tiny import DEVICE, OPS, VOCAB


def row_of(number: int, params: SamplingParams, prompt: list[int], answer: list[int], seed: int) -> Row:
    """Return a row that has said `answer` so far; token 7 would end it."""
    tokens = [*prompt, *answer]
    return Row(Joined(number, 0, tokens, len(prompt), 0, (), params, seed, (7,), True, 1000))


def chosen(rows: list[Row], trees: list[Tree], logits: torch.Tensor) -> list[int]:
    """Return the target's token at every node."""
    chooser = Chooser(OPS, len(rows), logits.shape[1], DEVICE)
    for row in rows:
        chooser.load(row)
    tokens: list[int] = chooser.choose(logits.to(DEVICE), rows, trees, chooser.masks(rows, trees)).tokens_L.tolist()
    return tokens


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("drafted", [[], [0, 1], [2]])
def test_sampled_tokens_have_the_targets_distribution_whatever_was_drafted(drafted):
    """Draw two tokens in a row from known distributions through a tree, many times; each pair has its probability.

    With 12 outcomes (11 degrees of freedom) chi-square exceeds 31.3 once in a thousand honest runs.
    """
    first = torch.tensor([0.5, 0.3, 0.2])
    second = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
    draws, params = 4000, SamplingParams(temperature=1.0)
    root_logits = torch.cat([first.log(), torch.tensor([-30.0])])
    size = 1 + len(drafted)
    batch = TreeBatch(
        torch.tensor([[9, *drafted]] * draws),
        torch.tensor([[-1] + [0] * len(drafted)] * draws),
        torch.full((draws,), size),
    )
    rows = [row_of(seed, params, [1] * 6, [9], seed) for seed in range(draws)]
    logits = torch.stack([root_logits, *(second[token].log() for token in drafted)]).repeat(draws, 1)
    accepted = accept(batch, torch.tensor(chosen(rows, batch.unpack(), logits)).view(draws, size))
    emitted = [
        tokens[:count] for tokens, count in zip(accepted.tokens_RE.tolist(), accepted.counts_R.tolist(), strict=True)
    ]
    # What was not drafted is drawn by the next pass, at its own position.
    later = [row_of(seed, params, [1] * 6, [9, tokens[0]], seed) for seed, tokens in enumerate(emitted)]
    roots = TreeBatch.lone_roots([tokens[0] for tokens in emitted], torch.device("cpu")).unpack()
    following = chosen(later, roots, torch.stack([second[tokens[0]].log() for tokens in emitted]))
    counts = torch.zeros(3, 4)
    for tokens, token in zip(emitted, following, strict=True):
        assert tokens[1:] in ([], [token]), "a drafted token is the one that plain decoding draws"
        counts[tokens[0], token] += 1
    assert chi_square(counts.flatten(), (first[:, None] * second).flatten()) < 31.3


some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.1]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.8]),
    logit_bias=st.sampled_from([{}, {5: 5, 7: 9.0}]),
    min_tokens=st.sampled_from([0, 4]),
    grammar=st.sampled_from([None, None, Residues(30)]),
)


@settings(max_examples=30, deadline=None)
@given(some_params, st.randoms(use_true_random=False), st.integers(0, 2**40))
def test_a_nodes_token_is_the_one_chosen_after_its_path_was_said(params, order, seed):
    answer = [3, 4] if params.grammar is not None else [order.randrange(9) for _ in range(2)]
    parents = [-1, *(order.randrange(node) for node in range(1, 7))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = [answer[-1]]
    for depth in depths[1:]:  # a grammar would never choose along a path that breaks it
        tokens.append(3 * order.randrange(3) + (1 + depth) % 3 if params.grammar is not None else order.randrange(9))
    tree = Tree(tokens, parents, depths, [-1] * 7)
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    alone = []
    for node in range(7):
        said = [*answer, *tree.path(node)]
        lone = Tree([said[-1]], [-1], [0], [-1])
        alone += chosen([row_of(0, params, [1, 2], said, seed)], [lone], logits[node : node + 1])
    assert chosen([row_of(0, params, [1, 2], answer, seed)], [tree], logits) == alone


def test_a_bias_may_be_a_whole_number():
    row = row_of(0, SamplingParams(logit_bias={5: 5}), [1], [], 0)
    assert chosen([row], [Tree([1], [-1], [0], [-1])], torch.zeros(1, VOCAB)) == [5]
