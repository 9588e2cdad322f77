"""A model split over ranks gives the tokens of the whole model, and every rank reads only its part."""

import functools

import pytest
import torch

from parallel import folders, programs
from slipstream.kernels import RowSampling
from slipstream.models.parallel import ALONE
from slipstream.speculation.tree import TreeShape
from tiny import OPS
from tiny_families import folder_of


@functools.cache
def whole_answers(target, draft):
    """Return the answers of the model in one piece."""
    return programs.answers(ALONE, target, draft)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [3, 1500])  # 1500 x 96 values are added up in shares, 3 x 96 all at once
def test_a_sum_over_ranks_has_the_same_bits_everywhere_and_for_any_number_of_rows(at_work, dtype, num_rows):
    found = at_work.run(4, programs.sums, dtype, num_rows)
    parts = [torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(4)]
    expected = parts[0].float() + parts[1].float() + parts[2].float() + parts[3].float()
    for whole, first in found:
        assert torch.equal(whole, expected.to(dtype))
        assert torch.equal(first, whole[:1])


def test_the_best_entries_of_split_logits_are_those_of_whole_ones(at_work):
    generator = torch.Generator().manual_seed(0)
    logits_LV = torch.randn(40, 64, generator=generator).mul(2).round()  # rounded: ties are common
    temperature_L = torch.tensor([0.0, 0.7, 1.3, 0.0] * 10)
    seed_L = torch.randint(0, 2**62, (40,), generator=generator)
    sampling = RowSampling(temperature_L, seed_L, torch.arange(40))
    for size in (2, 4):
        for scores_LK, tokens_LK in at_work.run(size, programs.best_entries, logits_LV, sampling, 5):
            scores, _ = OPS.top_k(logits_LV, torch.arange(64), sampling, 5)
            torch.testing.assert_close(scores_LK, scores)
            found = torch.log_softmax(OPS.perturb(logits_LV, torch.arange(64), sampling), -1).gather(1, tokens_LK)
            torch.testing.assert_close(found, scores)


@pytest.mark.parametrize("size", [2, 4])  # with four ranks, two share each key head
@pytest.mark.parametrize("draft", ["none", "whole", "split"])
def test_a_split_target_gives_the_tokens_of_the_whole_one(at_work, dense, size, draft):
    folder = None if draft == "none" else dense.draft
    whole = whole_answers(dense.target, folder)
    split, *_ = at_work.run(size, programs.answers, dense.target, folder, draft == "split")
    assert split[0] == whole[0]
    assert split[1] == pytest.approx(whole[1], abs=1e-4)
    assert split[2] == pytest.approx(whole[2], abs=0.1)  # the draft still guesses as well
    assert (split[2] > 1.1) == (draft != "none")


@pytest.mark.parametrize(("draft", "num_refused"), [("none", 3), ("ngram", 1), ("whole", 0), ("split", 0)])
def test_the_tree_may_change_on_ranks_and_a_shape_that_is_refused_hurts_nobody(at_work, dense, draft, num_refused):
    folder = {"none": None, "ngram": "ngram"}.get(draft, dense.draft)
    shapes = [TreeShape.chain(4), TreeShape(depth=2, width=2), TreeShape.chain(1)]
    (tokens, refusals), _ = at_work.run(2, programs.reshaped, dense.target, folder, draft == "split", shapes)
    assert tokens == whole_answers(dense.target, None)[0]
    assert len(refusals) == num_refused


def test_a_grammar_that_fails_on_the_first_rank_ends_its_own_request_only(at_work, dense):
    (tokens, errors), _ = at_work.run(2, programs.beside_a_broken_grammar, dense.target)
    first, second, *_ = whole_answers(dense.target, None)[0]
    assert tokens == [first, [], second, first]
    assert errors == ["no first rule"]


@pytest.mark.parametrize(("name", "experts"), [("gpt-oss", 1), ("gpt-oss", 2), ("Phi-4", 1), ("Gemma 4 MoE", 2)])
def test_a_split_target_of_another_family_gives_the_tokens_of_the_whole_one(at_work, name, experts, tmp_path):
    """Sinks go with their heads, an expert's bias is added once, and joined tensors are cut as if they lay apart."""
    folder = folder_of(name, tmp_path, folders.VOCAB)
    whole = programs.answers(ALONE, folder, None)
    split, *_ = at_work.run(2, programs.answers, folder, None, experts=experts)
    assert split[0] == whole[0]
    assert split[1] == pytest.approx(whole[1], abs=1e-4)


@pytest.mark.parametrize(("size", "experts"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("model", ["deepseek", "minimax"])
def test_experts_split_by_width_or_dealt_out_give_the_tokens_of_the_whole_model(at_work, request, model, size, experts):
    folder = request.getfixturevalue(model)
    whole = whole_answers(folder, "ngram")
    split, *_ = at_work.run(size, programs.answers, folder, "ngram", experts=experts)
    assert split[0] == whole[0]
    assert split[1] == pytest.approx(whole[1], abs=1e-4)
