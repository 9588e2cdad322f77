"""What can go wrong in training and be mended by the user."""

from slipstream.errors import SlipstreamError


class DataError(SlipstreamError):
    """Training data cannot be made, read or written."""


class TrainingError(SlipstreamError):
    """A training run cannot go on."""
