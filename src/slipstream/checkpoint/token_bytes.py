"""The bytes of a vocabulary's entry, where a token is a piece of a character and has no text of its own."""

import functools
import re

_NAMED_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def entry_bytes(entry: str) -> bytes:
    """Return the bytes an entry stands for: a byte by its name, letters that stand for bytes, or plain text."""
    if named := _NAMED_BYTE.fullmatch(entry):
        return bytes([int(named[1], 16)])
    table = _byte_of_letter()
    if all(letter in table for letter in entry):
        return bytes(table[letter] for letter in entry)
    return entry.encode()


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the others for letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
