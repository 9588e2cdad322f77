"""Packed masks of whole trees say what a matcher asked node by node says."""

import json
import random

import torch
from llguidance import LLExecutor, LLTokenizer
from tiny_server import tiny_tokenizer

from slipstream.errors import RequestError
from slipstream.serve.grammar_trial import GrammarSource, compile_grammar
from slipstream.serve.matcher import Matcher
from slipstream.speculation.grammar import DraftedAnswer, fill_masks, fill_singly

TOKENIZER = tiny_tokenizer()
VOCAB = TOKENIZER.vocab_size + 3  # a head may have more rows than the tokenizer has tokens
READABLE = LLTokenizer(TOKENIZER.to_json(), n_vocab=VOCAB, eos_token=list(TOKENIZER.eos_token_ids))
EXECUTOR = LLExecutor(2)
SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["xx", "xy", "z"]}, "maxItems": 3},
    {"type": "boolean"},
]


def matcher(schema) -> Matcher:
    return Matcher(
        compile_grammar(READABLE, GrammarSource("json_schema", json.dumps(schema))), VOCAB, "response_format", EXECUTOR
    )


def words(num_nodes: int) -> torch.Tensor:
    return torch.zeros(num_nodes, (VOCAB + 31) // 32, dtype=torch.int32)


def unpacked(words_W: torch.Tensor) -> torch.Tensor:
    return (words_W[:, None] >> torch.arange(32) & 1).flatten().bool()


def drafted(state: Matcher, rng: random.Random, num_nodes: int) -> DraftedAnswer:
    """Return a random tree, most of whose tokens the grammar allows."""
    answer = DraftedAnswer(state, [0], [-1])
    for _ in range(num_nodes - 1):
        parent = rng.randrange(len(answer.tokens))
        allowed_V = state.allowed(answer.path(parent))
        good = [] if allowed_V is None or rng.random() < 0.2 else allowed_V.nonzero().flatten().tolist()
        token = rng.choice(good) if good else rng.randrange(VOCAB)
        answer = DraftedAnswer(state, [*answer.tokens, token], [*answer.parents, parent])
    return answer


def test_the_masks_of_a_batch_of_trees_are_those_of_each_path_alone():
    rng = random.Random(5)
    for _ in range(15):
        states = [matcher(schema) for schema in SCHEMAS]
        for state in states:
            for _ in range(rng.randrange(6)):
                if not state.finished and (allowed := state.allowed([]).nonzero().flatten().tolist()):
                    state.advance([rng.choice(allowed)])
        answers = [drafted(state, rng, rng.choice([1, 2, 9])) for state in states]
        num_nodes = sum(len(answer.tokens) for answer in answers)
        words_MW = words(num_nodes)
        filled = fill_masks(answers, words_MW)
        nodes = [(answer, node) for answer in answers for node in range(len(answer.tokens))]
        assert not filled.failed
        for (answer, node), row in zip(nodes, filled.rows, strict=True):
            expected_V = answer.state.allowed(answer.path(node))
            if expected_V is not None:  # elsewhere any mask will do: the target never gets there
                assert unpacked(words_MW[row])[:VOCAB].equal(expected_V)


def test_the_masks_of_a_chain_come_in_its_order():
    state = matcher(SCHEMAS[0])
    tokens = [0, *TOKENIZER.encode('{"a":1')]
    filled = fill_masks([DraftedAnswer(state, tokens, range(-1, len(tokens) - 1))], words(len(tokens)))
    assert filled.rows == list(range(len(tokens)))


def test_one_answers_limit_fails_its_own_nodes_only():
    wide = {"anyOf": [{"properties": {f"p{i + j}": {"type": "string"} for j in range(10)}} for i in range(300)]}
    late = {"type": "array", "prefixItems": [{"type": "string", "minLength": 150}, wide], "minItems": 2}
    state, neighbour = matcher(late), matcher(SCHEMAS[0])
    state.advance(TOKENIZER.encode('["' + 150 * "x" + '",'))
    tokens = [0, *TOKENIZER.encode('{"p')]
    chain = DraftedAnswer(state, tokens, range(-1, len(tokens) - 1))
    other = DraftedAnswer(neighbour, [0, *TOKENIZER.encode("{")], [-1, 0])
    words_MW = words(len(tokens) + 2)
    filled = fill_masks([chain, other], words_MW)
    assert filled.failed and set(filled.failed) <= set(range(1, len(tokens)))
    assert all(isinstance(error, RequestError) for error in filled.failed.values())
    assert unpacked(words_MW[filled.rows[0]])[:VOCAB].equal(state.allowed([]))
    assert unpacked(words_MW[filled.rows[-1]])[:VOCAB].equal(neighbour.allowed(other.tokens[1:]))


class Odd:
    """A grammar without masks in batches: odd tokens only, and it fails at 7."""

    finished = False

    def allowed(self, path):
        if 7 in path:
            raise ValueError("seven")
        return torch.arange(VOCAB) % 2 == 1 if all(token % 2 for token in path) else None

    def advance(self, tokens):
        pass


def test_a_grammar_that_only_answers_path_by_path_mixes_with_others():
    state = matcher(SCHEMAS[1])
    odd = DraftedAnswer(Odd(), [0, 3, 4, 7], [-1, 0, 0, 1])
    json_answer = DraftedAnswer(state, [0, *TOKENIZER.encode("[")], [-1, 0])
    words_MW = words(8)
    filled = fill_masks([json_answer, odd, json_answer], words_MW)
    assert filled.rows == [0, 1, 2, 3, -1, -1, 6, 7]
    assert list(filled.failed) == [5]
    assert unpacked(words_MW[3])[:VOCAB].equal(torch.arange(VOCAB) % 2 == 1)
    assert words_MW[6].equal(words_MW[0])
    alone_MW = words(2)
    assert fill_singly([json_answer], alone_MW).rows == [0, 1]
    assert alone_MW.equal(words_MW[:2])
