"""A request's text in the library, which its rounds read and extend."""

import weakref
from array import array
from collections.abc import Sequence

from slipstream.errors import KernelError
from slipstream.kernels.cpu.library import NativeEngine, check
from slipstream.kernels.texts import MATCH_LENGTHS, CopiedRun, Learned

_MAX_NODES = 64  # native/copies.h


class NativeText:
    """What reference/text.py specifies."""

    def __init__(self, engine: NativeEngine, prior: Sequence[float]) -> None:
        assert len(prior) == len(MATCH_LENGTHS)
        self._library = engine.library
        hopes = array("d", prior)
        self.handle: int = self._library.slip_text_create(_address(hopes))
        if not self.handle:
            raise KernelError("A CPU kernel ran out of memory.")
        weakref.finalize(self, self._library.slip_text_destroy, self.handle).atexit = False  # as the engine's

    @property
    def num_tokens(self) -> int:
        """Tokens taken in."""
        return int(self._library.slip_text_size(self.handle))

    def extend(self, tokens: Sequence[int], learns: bool) -> None:
        """Take in tokens that follow."""
        new = array("q", tokens)
        check(self._library.slip_text_extend(self.handle, _address(new), len(new), learns))

    def copy(self, path: Sequence[int], most: int, least: float) -> CopiedRun:
        """Return what followed the last earlier occurrence of the text's ending and then `path`."""
        tokens, chances = array("q", bytes(8 * _MAX_NODES)), array("d", bytes(8 * _MAX_NODES))
        before, addresses = array("q", path), (_address(tokens), _address(chances))
        most = min(most, _MAX_NODES)
        count = self._library.slip_text_copy(self.handle, _address(before), len(before), most, least, *addresses)
        return CopiedRun(tokens[:count].tolist(), chances[:count].tolist())

    def learned(self) -> Learned:
        """Return what answers have said of guesses."""
        counts = array("d", bytes(16 * len(MATCH_LENGTHS)))
        self._library.slip_text_learned(self.handle, _address(counts))
        return Learned(counts[: len(MATCH_LENGTHS)].tolist(), counts[len(MATCH_LENGTHS) :].tolist())


def _address(values: "array[int] | array[float]") -> int:
    return values.buffer_info()[0]
