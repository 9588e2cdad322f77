import numpy as np

from slipstream.train.data.generate import GenerationRequest, Generator, loop_end
from training import EOS, ListSource, engine_over, greedy


def test_batched_generation_with_refills_writes_what_plain_greedy_decoding_writes(target):
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(key, rng.integers(3, 96, int(rng.integers(1, 30))).tolist(), int(rng.integers(1, 25)))
        for key in range(11)
    ]
    source = ListSource(requests)
    stats = Generator(engine_over(target, 4, 64, max_batch_tokens=64), [EOS], stop_loops=False).run(source)
    assert stats.texts == 11
    for request in requests:
        expected = greedy(target, request.prompt, request.max_new)
        assert source.results[request.key].tokens == expected
        assert source.results[request.key].ended == (expected[-1] == EOS)


def test_a_sampled_text_follows_from_its_seed_whatever_runs_beside_it(target):
    def written(rows, seeds):
        source = ListSource([GenerationRequest(seed, [5, 6, 7], 20, 1.0, seed=seed) for seed in seeds])
        Generator(engine_over(target, rows, 64), [EOS], stop_loops=False).run(source)
        return {key: result.tokens for key, result in source.results.items()}

    alone, together = written(1, [3]), written(4, range(6))
    assert together[3] == alone[3]
    assert len({tuple(tokens) for tokens in together.values()}) == 6


def test_a_text_that_repeats_itself_is_ended(target):
    class Looping:
        def __init__(self):
            self.results = []

        def take(self, count):
            return [GenerationRequest(0, [5, 6, 7], 400)] if not self.results else []

        def give(self, result):
            self.results.append(result)

    source = Looping()
    Generator(engine_over(target, 1, 512), [EOS]).run(source)
    (result,) = source.results
    assert not result.ended and loop_end(result.tokens) is not None and len(result.tokens) < 400


def test_a_loop_is_cut_after_the_third_repetition_of_a_long_enough_span():
    head = list(range(100, 120))
    assert loop_end([*head, *list(range(20)) * 5]) == 20 + 60
    assert loop_end([*head, *[7, 8] * 40]) == 20 + 48  # a span of 16 made of the pair, three times
    assert loop_end([*head, *list(range(20)) * 2, 5, 6]) is None
    assert loop_end(list(range(300))) is None
