"""The errors a user can meet: each is a sentence that says what is wrong, where, and what to do."""

from collections.abc import Sequence


class SlipstreamError(Exception):
    """Something the user can mend; caught once, at the edge (cli, serve)."""


class CheckpointError(SlipstreamError):
    """A checkpoint, draft or tokenizer file cannot be read as what it claims to be."""


class DraftMismatchError(CheckpointError):
    """A draft cannot belong to this target."""


class ConfigError(SlipstreamError):
    """A setting is impossible, alone or together with another."""


class DataError(SlipstreamError):
    """Training data cannot be made, read or written."""


class TrainingError(SlipstreamError):
    """A training run cannot go on."""


class RequestError(SlipstreamError):
    """A request asks for something the engine cannot do."""


class KernelError(SlipstreamError):
    """A kernel path was asked for that this machine cannot run."""


class RankLostError(SlipstreamError):
    """A process that holds part of the model died or failed; what is left of the group cannot go on."""


class StepError(SlipstreamError):
    """A step failed; the requests in it were ended and their pages taken back. The engine lives on."""

    def __init__(self, request_ids: Sequence[int], cause: Exception) -> None:
        super().__init__(f"A step failed ({type(cause).__name__}: {cause}); {len(request_ids)} requests were ended.")
        self.request_ids = tuple(request_ids)
