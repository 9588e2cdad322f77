"""Foreign text on a terminal: what a file or a folder is called must not move the cursor or colour the screen."""


def printable(text: str) -> str:
    """Return the text with control characters, line ends aside, as escapes; rich is to be told not to read markup."""
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )
