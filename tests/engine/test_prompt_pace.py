"""Prompts beside requests that decode: few where the batch is full, many where that fills it."""

from slipstream.engine.config import EngineConfig
from slipstream.engine.prompt_pace import PromptPace
from slipstream.engine.request import Request
from slipstream.executors.interface import RowOutput, StepCosts, StepOutput
from slipstream.speculation.sampling import SamplingParams


class Measured:
    """An executor whose steps cost 4 ms, half a millisecond more for each ten requests, and what prompts take."""

    def __init__(self, knows=True):
        self.knows = knows

    def costs(self, num_decoding):
        beside = {32: 0.001, 96: 0.0025, 576: 0.02}
        return StepCosts(0.004 + 0.00005 * num_decoding, beside, 0.00005) if self.knows else None


def requests(num_decoding, num_beginning):
    made = [Request(number, (1, 2, 3), SamplingParams(), 0) for number in range(num_decoding + num_beginning)]
    for request in made[:num_decoding]:
        request.num_sent = 2
    return made


def budget(num_decoding, num_beginning, num_waiting, knows=True, **config):
    config = EngineConfig(max_batch_tokens=8192, max_requests=64, **config)
    return PromptPace(config, Measured(knows)).budget(requests(num_decoding, num_beginning), num_waiting)


def test_nobody_waits_so_prompts_take_all_there_is():
    assert budget(0, 3, 2) == 8192


def test_a_full_batch_lets_prompts_have_a_share_of_its_time():
    assert budget(40, 1, 0) == 40 + 96
    assert budget(40, 1, 0, prefill_share=0.2) == 40 + 32
    assert budget(40, 1, 0, prefill_share=0) == 40 + 32, "prompts always go on"


def test_a_batch_far_from_full_computes_prompts_first_as_long_as_a_pause_may_be():
    assert budget(2, 8, 30) == 2 + 2000


def test_where_nothing_was_measured_prompts_are_held_to_a_tenth_of_a_second_by_what_they_took():
    pace = PromptPace(EngineConfig(max_batch_tokens=8192), Measured(knows=False))
    assert pace.budget(requests(2, 1), 0) == 8192
    pace.note(StepOutput([RowOutput(0, 0, 1000)], {"prefill": 0.05}))
    assert pace.budget(requests(2, 1), 0) == 2000
