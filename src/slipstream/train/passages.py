"""Tasks on a given text: user turns that put an instruction beside a passage the target wrote in another conversation.

A small target that invents its user turns seldom writes one that brings its own material, yet such turns are common,
and a draft for them must have learned to copy from the prompt.
"""

import numpy as np

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
