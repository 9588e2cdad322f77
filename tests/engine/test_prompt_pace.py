"""Prompts beside requests that decode: as much as the executor measured that a share of a step's time pays for."""

from slipstream.engine.config import EngineConfig
from slipstream.engine.prompt_pace import PromptPace
from slipstream.engine.request import Request
from slipstream.executors.interface import RowOutput, StepOutput
from slipstream.speculation.sampling import SamplingParams


class Measured:
    """An executor whose steps cost 10 ms, and 1 ms more for each 16 tokens of prompts."""

    def __init__(self, knows=True):
        self.knows = knows

    def prompt_tokens_beside(self, num_decoding, share):
        return int(16 * 10 * share) if self.knows else None


def requests(num_decoding, num_beginning):
    made = [Request(number, (1, 2, 3), SamplingParams(), 0) for number in range(num_decoding + num_beginning)]
    for request in made[:num_decoding]:
        request.num_sent = 2
    return made


def test_nobody_waits_so_prompts_take_all_there_is():
    assert PromptPace(EngineConfig(max_batch_tokens=4096), Measured()).budget(requests(0, 3)) == 4096


def test_beside_requests_that_decode_a_share_of_the_step_pays_for_prompts():
    for share, tokens in ((0.5, 80), (0.1, 16)):
        pace = PromptPace(EngineConfig(max_batch_tokens=4096, prefill_share=share), Measured())
        assert pace.budget(requests(5, 3)) == 5 + tokens


def test_where_nothing_was_measured_prompts_are_held_to_a_tenth_of_a_second_by_what_they_took():
    pace = PromptPace(EngineConfig(max_batch_tokens=8192), Measured(knows=False))
    assert pace.budget(requests(2, 1)) == 8192
    pace.note(StepOutput([RowOutput(0, 0, 1000)], {"prefill": 0.05}))
    assert pace.budget(requests(2, 1)) == 2000
