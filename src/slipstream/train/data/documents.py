"""Long user turns: whole articles to work on, several passages with a question, and many texts at once.

A draft that has only seen short prompts fails on long ones twice over: its attention meets distances it was never
trained at, and it has not learned to copy from far back. Documents are files of the user's own choosing.
"""

import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.errors import DataError
from slipstream.train.data.mixture import passage_turn, whole_sentences

CHARACTERS_A_TOKEN = 4.4
_SHORTEST, _USUAL = 192, 1536  # tokens of a turn: most lie between the two
_FORMS = (0.5, 0.35, 0.15)  # one article, passages and a question, many texts
_PASSAGE_CHARACTERS = 1600

_QUESTIONS: tuple[str, ...] = (
    "What do the passages say about {}?",
    "Using only the texts above, tell me about {}.",
    "Question: what is known about {}?",
    "Answer from the passages: what should I know about {}?",
    "Which facts about {} are given here?",
    "Explain {} with the help of these sources.",
    "Find the passage on {} and say in your own words what it tells us.",
    "I need two or three sentences on {}, based on the material.",
    "List what the documents tell us about {}.",
    "Is there anything in these excerpts on {}? If so, what?",
)
_MANY: tuple[str, ...] = (
    "Give a short summary of every text.",
    "What is the main point of the first text?",
    "What is the main point of the last text?",
    "Name one thing that each text is about.",
    "Write a report that covers all of the above.",
    "Which of the texts mention numbers or dates? Quote them.",
    "Compare the first two texts.",
    "Make a table of contents for this material.",
    "Write an introduction to this collection.",
    "What questions do these texts leave open?",
    "Repeat the opening sentence of each text.",
    "Summarize everything in one paragraph.",
)
_HEADINGS: tuple[str, ...] = (
    "[{number}] {title}\n{text}",
    "Passage {number}: {title}\n{text}",
    "{title}\n{text}",
    "Title: {title}\n{text}",
    "Document {number}\n{text}",
    "{number}. {text}",
)


@dataclass(frozen=True)
class Document:
    """A text and its title, which may be empty."""

    title: str
    text: str


def read_documents(paths: Iterable[Path]) -> list[Document]:
    """Read JSON lines (or .xz) with a `text` and, if there is one, a `title`."""
    documents = []
    for path in paths:
        opener = lzma.open if path.suffix == ".xz" else open
        try:
            with opener(path, "rt", encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    value = json.loads(line)
                    if not isinstance(value, Mapping) or not isinstance(value.get("text"), str):
                        raise DataError(f"{path}:{number}: is no document; a line holds 'text' and perhaps 'title'.")
                    documents.append(Document(str(value.get("title", "")), value["text"].strip()))
        except (OSError, ValueError, lzma.LZMAError, EOFError) as error:
            raise DataError(f"{path}: cannot be read as JSON lines of documents ({error}).") from error
    return documents


def document_turn(documents: Sequence[Document], most_tokens: int, rng: np.random.Generator) -> str:
    """Return a user turn of about as many tokens as are drawn, `most_tokens` at most by estimate."""
    form = int(rng.choice(len(_FORMS), p=_FORMS))
    if form == 1:
        return _passages_and_question(documents, rng)
    low, high = (_SHORTEST, min(_USUAL, most_tokens)) if form == 0 else (min(_USUAL, most_tokens), most_tokens)
    tokens = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    room = int(tokens * CHARACTERS_A_TOKEN)
    first = _long(documents, rng)
    if form == 0:
        text = f"{first.title}\n\n{first.text}" if first.title and rng.random() < 0.6 else first.text
        return passage_turn(_cut(text, room), rng)
    texts = [f"{first.title}\n\n{first.text}".strip()]
    while sum(map(len, texts)) < room:
        other = _long(documents, rng)
        texts.append(f"{other.title}\n\n{other.text}".strip())
    task = _MANY[int(rng.integers(len(_MANY)))]
    given = _cut("\n\n---\n\n".join(texts) if rng.random() < 0.5 else "\n\n".join(texts), room)
    return f"{task}\n\n{given}" if rng.random() < 0.3 else f"{given}\n\n{task}"


def _passages_and_question(documents: Sequence[Document], rng: np.random.Generator) -> str:
    count = int(rng.integers(3, 8))
    chosen = [_any(documents, rng) for _ in range(count)]
    heading = _HEADINGS[int(rng.integers(len(_HEADINGS)))]
    longest = int(rng.integers(300, _PASSAGE_CHARACTERS))
    shown = [
        heading.format(number=number, title=item.title, text=_cut(item.text, longest))
        for number, item in enumerate(chosen, 1)
    ]
    titled = [item.title for item in chosen if item.title]
    subject = titled[int(rng.integers(len(titled)))] if titled else "the subject"
    question = _QUESTIONS[int(rng.integers(len(_QUESTIONS)))].format(subject)
    given = "\n\n".join(shown)
    return f"{question}\n\n{given}" if rng.random() < 0.3 else f"{given}\n\n{question}"


def _any(documents: Sequence[Document], rng: np.random.Generator) -> Document:
    return documents[int(rng.integers(len(documents)))]


def _long(documents: Sequence[Document], rng: np.random.Generator) -> Document:
    """Return the longest of a few: collections have many short documents, and whole articles are wanted."""
    return max((_any(documents, rng) for _ in range(4)), key=lambda document: len(document.text))


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else whole_sentences(text[:characters])
