"""The mixture of conversations a corpus is made of, how answers are sampled, and the tasks set on passages of text.

A small target that invents its user turns seldom writes one that brings its own material, yet such turns are common,
and a draft for them must have learned to copy from the prompt.

Long user turns are made here too: whole articles to work on, several passages with a question, many texts at once.
"""

import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.errors import ConfigError, DataError


@dataclass(frozen=True)
class DataConfig:
    """The mixture and its sampling.

    Args:
        answer_tokens: stop once the answers hold this many.
        magpie, maths: shares of conversations whose user turn the target samples itself, freely or after examples of
            maths questions (`files.maths`, or `files.prompts`).
        passages: share whose user turn is a task on a passage of an earlier answer.
        documents: share whose user turn works on documents of `files.documents`, of `max_document` tokens at most.
        tasks: share whose user turn the target samples after examples of `files.examples`; what the five shares leave
            are prompts from files, each used `file_repeats` times at most, and answered greedily once at most.
        second_turn: share of conversations that go on.
        greedy: share of greedy answers; the others use `temperature` (drawn between the two) and `top_p`.
        max_prompt, max_answer: in tokens.
    """

    answer_tokens: int = 30_000_000
    magpie: float = 0.65
    maths: float = 0.2
    passages: float = 0.0
    tasks: float = 0.0
    documents: float = 0.0
    file_repeats: int = 4
    default_system: float = 0.6
    second_turn: float = 0.2
    greedy: float = 0.5
    temperature: tuple[float, float] = (0.6, 0.7)
    top_p: float = 1.0
    max_prompt: int = 256
    max_document: int = 4096
    max_answer: int = 320
    shard_texts: int = 16_384
    seed: int = 0

    def __post_init__(self) -> None:
        shares = ("magpie", "maths", "passages", "tasks", "documents", "default_system", "second_turn", "greedy")
        for name in shares:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; a share lies between 0 and 1.")
        for name in ("answer_tokens", "file_repeats", "max_prompt", "max_document", "max_answer", "shard_texts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.sampled > 1 + 1e-9:
            raise ConfigError(
                "magpie, maths, passages, tasks and documents are shares of all conversations; together they exceed 1."
            )

    @property
    def sampled(self) -> float:
        """Share of conversations that need no prompt from a file."""
        return self.magpie + self.maths + self.passages + self.tasks + self.documents


_TASKS: tuple[str, ...] = tuple(
    task.strip()
    for task in """
    Summarize the text below in one sentence.
    Give me the gist of this in two or three sentences.
    Condense this paragraph without losing the facts.
    Turn the following into bullet points.
    Make a numbered list out of the passage below.
    Rewrite this so that a child can follow it.
    Reword the following politely.
    Make this sound more formal.
    Make this sound friendlier and less stiff.
    Say the same thing with fewer words.
    Expand this into a longer paragraph.
    Correct any mistakes in spelling and grammar in this text.
    Proofread the passage and return the corrected version.
    Rewrite the passage in the past tense.
    Rewrite the passage in the first person.
    Change the passage from passive to active voice where you can.
    Translate this into French.
    Translate the following into Spanish.
    What is the main idea of this text?
    Which claims are made here? List them.
    List every person, place and organisation that is mentioned.
    List all numbers and dates in the text and say what each refers to.
    Pull out the five most important keywords.
    Is the tone of this text positive, negative or neutral? Explain briefly.
    Who might have written this, and for whom?
    Write a title for the following text.
    Suggest three headlines for this article.
    Write a short reply to this message.
    Answer the following message as a customer service agent would.
    Draft an email to a colleague that passes on this information.
    Write a tweet that tells people about this.
    Write a question that this text answers.
    Make up three quiz questions about this text, with answers.
    What is missing from this explanation? Add it.
    Continue the text below.
    Write an ending for this.
    Write the next paragraph.
    Explain the following step by step.
    What does this mean, in plain words?
    Give an example for what is said here.
    Give two arguments against what is said here.
    Do you agree with this? Give reasons.
    Compare this with the opposite view.
    Sort the items in the following text alphabetically.
    Put the information below into a table.
    Write this as a dialogue between two friends.
    Turn this into a short story.
    Turn this into a poem of four lines.
    Fill in what a beginner would need to know to understand this text.
    Find the most important sentence and repeat it word for word.
    Copy the first two sentences, then explain them.
    Replace difficult words in the text by simple ones.
    Split the long sentences of this text into shorter ones.
    Write a review of the following.
    Write comments that explain each part of this.
    What would you change about this, and why?
    Classify the topic of this text: science, sport, business, arts, daily life or other.
    Decide whether the following is a fact or an opinion.
    Read the passage and state its conclusion.
    Write instructions based on this text.
    """.strip().splitlines()
)
_LABELS = ("", "", "", "Text: ", "Passage: ", "Input: ", "Message: ")
_SENTENCE_ENDS = (". ", "! ", "? ", "\n")
_MIN_CHARACTERS = 24


def whole_sentences(text: str) -> str:
    """Return the text up to its last sentence that is complete, or all of it if none is."""
    end = max(text.rfind(mark) for mark in _SENTENCE_ENDS)
    return (text[: end + 1] if end >= _MIN_CHARACTERS else text).strip()


def passage_turn(passage: str, rng: np.random.Generator) -> str:
    """Return a user turn: a task, and the passage after it or, less often, before."""
    task = _TASKS[int(rng.integers(len(_TASKS)))]
    given = _LABELS[int(rng.integers(len(_LABELS)))] + whole_sentences(passage)
    return f"{given}\n\n{task}" if rng.random() < 0.2 else f"{task}\n\n{given}"


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
