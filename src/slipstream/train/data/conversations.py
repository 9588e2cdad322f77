"""The data plan: which conversations to ask the target for, turn by turn, and what of its writing is kept.

Conversations are numbered. What is asked in one follows from the seed and its number (and, of a passage, from texts a
fixed distance before it), and texts are kept in the order of numbers, whichever finish first: a run that was stopped
goes on from the first number that is not settled, and its corpus is the one it would have made in one go.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.errors import ConfigError
from slipstream.train.data.corpus import Text
from slipstream.train.data.generate import GenerationRequest, GenerationResult, loop_end
from slipstream.train.data.mixture import DataConfig, Document, document_turn, passage_turn
from slipstream.train.data.prompts import OPENINGS, SYSTEM_PROMPTS, Messages, normalized
from slipstream.train.data.speaker import ChatFrame, ChatTokenizer, chat_frame, encode_prompt

MIN_ANSWER = 8
MAX_TURN = 128
_MIN_TURN = 4
_MIN_EXAMPLES = 8
_FREELY, _CAREFULLY = (0.9, 1.0), (0.7, 1.0)  # a user turn's temperature and top-p
_FORCED_OPENING = 0.6  # share of free user turns whose first words are given
_PASSAGES_KEPT = 4096
WINDOW = 4
"""Conversations begun and not settled, for each text written at once: one that takes long holds up those behind it."""
_PASSAGE_TOKENS = (16, 144)


@dataclass
class _Conversation:
    """One in the making: what is written so far, and whether the turn being written is the user's."""

    number: int
    rng: np.random.Generator
    frame: ChatFrame
    ids: list[int]
    spans: list[tuple[int, int]] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    writes_user: bool = False
    answers_in: ChatFrame | None = None
    more_turns: int = 0


@dataclass
class Tally:
    """What became of the conversations."""

    kept: int = 0
    answer_tokens: int = 0
    loops_cut: int = 0
    duplicates: int = 0
    excluded: int = 0
    malformed: int = 0


@dataclass(frozen=True)
class Shown:
    """What user turns are made from: prompts for the target to imitate (`maths`, or the files'), and documents."""

    examples: Sequence[Messages] = ()
    maths: Sequence[Messages] = ()
    documents: Sequence[Document] = ()


NOTHING_SHOWN = Shown()


class ConversationSource:
    """A `RequestSource` that plays conversations with the target; settled ones wait in `texts`, in order.

    `numbers` are those of their conversations.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        config: DataConfig,
        prompts: Sequence[Messages],
        excluded: frozenset[str],
        shown: Shown = NOTHING_SHOWN,
        window: int = 256,
    ) -> None:
        """Prepare a mixture; `prompts` come from files, `excluded` is normalised text never to be used.

        At most `window` conversations are under way at once.
        """
        self._tokenizer, self._config, self._excluded, self._window = tokenizer, config, excluded, window
        examples, maths, self._documents = shown.examples, shown.maths, shown.documents
        samples_turns = config.sampled > 0 or config.second_turn > 0
        self._frames = [chat_frame(tokenizer, system) for system in SYSTEM_PROMPTS] if samples_turns else []
        self._openings = [tokenizer.encode(opening, add_special=False) for opening in OPENINGS]
        self._short_reply = tokenizer.encode("Next question.", add_special=False)
        self._encoded: dict[tuple[tuple[str, str], ...], list[int]] = {}
        self._file_prompts = self._encode(prompts, excluded)
        self._questions = self._short_ones(self._encode(maths, excluded) if maths else self._file_prompts)
        if config.maths > 0 and len(self._questions) < _MIN_EXAMPLES:
            raise ConfigError(
                f"data.maths is {config.maths}, and maths questions are sampled after at least {_MIN_EXAMPLES} "
                f"examples from {'files.maths' if maths else 'files.prompts'}; {len(self._questions)} of "
                f"{len(maths or prompts)} prompts will do (no longer than data.max_prompt, and in none of the files to "
                "be left out). Name such files, or set data.maths to 0."
            )
        self._tasks = self._short_ones(self._encode(examples, frozenset()))
        if config.tasks > 0 and len(self._tasks) < _MIN_EXAMPLES:
            raise ConfigError(
                f"data.tasks is {config.tasks}, and tasks are sampled after at least {_MIN_EXAMPLES} examples from "
                f"files.examples; {len(self._tasks)} of {len(examples)} prompts will do. Name such files there, or set "
                "data.tasks to 0."
            )
        if not self._file_prompts and config.sampled < 1 - 1e-9:
            raise ConfigError("No prompt files are given, so the shares of the other conversations must add up to 1.")
        if config.documents > 0 and not self._documents:
            raise ConfigError(f"data.documents is {config.documents}, and files.documents names none.")
        self._files_left = self._shuffled_files()
        self._retry: deque[GenerationRequest] = deque()
        self._passages: deque[tuple[int, Sequence[int]]] = deque(maxlen=_PASSAGES_KEPT + window)
        self._open: dict[int, _Conversation] = {}
        self._next_key = 0
        self._begun = 0
        self._outcomes: dict[int, Text | None] = {}
        self._seen: set[bytes] = set()
        self.num_settled = 0
        self.tally = Tally()
        self.texts: list[Text] = []
        self.numbers: list[int] = []

    def resume(self, texts: Sequence[tuple[int, Text]], num_settled: int) -> None:
        """Go on after an earlier run: its texts with their conversations' numbers, and how many were settled."""
        assert self._begun == 0, "a source goes on before it begins"
        for number, text in texts:
            self._keep(number, text)
        self.texts.clear()
        self.numbers.clear()
        for number in range(num_settled):  # prompts of files are used in turn
            if self._files_left and self._rng(number).random() >= self._config.sampled:
                self._files_left.pop()
        self._begun = self.num_settled = num_settled

    @property
    def finished(self) -> bool:
        """Whether the answers are as many as asked for."""
        return self.tally.answer_tokens >= self._config.answer_tokens

    def take(self, count: int) -> list[GenerationRequest]:
        """Return requests: turns that go on first, then new conversations."""
        requests: list[GenerationRequest] = []
        while len(requests) < count and not self.finished:
            if self._retry:
                requests.append(self._retry.popleft())
                continue
            request = self._new(self._begun) if self._begun - self.num_settled < self._window else None
            if request is None:
                break
            self._begun += 1
            requests.append(request)
        return requests

    def give(self, result: GenerationResult) -> None:
        """Continue a conversation with a finished turn, or drop it."""
        conversation = self._open.pop(result.request.key)
        if conversation.writes_user:
            self._end_user_turn(conversation, result)
        else:
            self._end_answer(conversation, result)

    def _rng(self, number: int) -> np.random.Generator:
        return np.random.default_rng([self._config.seed, number])

    def _new(self, number: int) -> GenerationRequest | None:
        config, rng = self._config, self._rng(number)
        draw = rng.random()
        frame = self._frames[0] if self._frames else ChatFrame([], [], [])
        talk = _Conversation(number, rng, frame, list(frame.before_user))
        talk.more_turns = int(rng.random() < config.second_turn) if self._frames else 0
        if draw < config.magpie:
            return self._free_turn(talk)
        if draw < config.magpie + config.maths:
            return self._turn_like(self._questions, talk, _FREELY)
        if draw < config.magpie + config.maths + config.tasks:
            return self._turn_like(self._tasks, talk, _CAREFULLY)
        if draw < config.magpie + config.maths + config.tasks + config.documents:
            return self._document_turn(talk) or self._free_turn(talk)
        if draw < config.sampled:
            return self._passage_turn(talk) or self._free_turn(talk)
        if not self._files_left:
            return self._free_turn(talk) if config.sampled > 0 else None
        prompt, again = self._files_left.pop()
        talk.ids = list(prompt)
        return self._answer(talk, again)

    def _free_turn(self, talk: _Conversation) -> GenerationRequest:
        rng = talk.rng
        default = rng.random() < self._config.default_system
        talk.frame = self._frames[0 if default else int(rng.integers(1, len(self._frames)))]
        talk.ids = list(talk.frame.before_user)
        if rng.random() < _FORCED_OPENING:
            talk.turn = list(self._openings[int(rng.integers(len(self._openings)))])
        return self._user(talk)

    def _turn_like(self, examples: list[list[int]], talk: _Conversation, how: tuple[float, float]) -> GenerationRequest:
        """Show the target a few prompts as earlier user turns; it writes the next one."""
        frame = talk.frame
        reply = [*self._short_reply, self._tokenizer.eos_token_ids[0], *frame.to_next_user]
        for index in talk.rng.integers(len(examples), size=3).tolist():
            shown = [*examples[index][len(frame.before_user) :], *reply]
            if len(talk.ids) + len(shown) <= self._config.max_prompt:
                talk.ids += shown
        talk.answers_in = frame
        return self._user(talk, how)

    def _passage_turn(self, talk: _Conversation) -> GenerationRequest | None:
        """Ask for something to be done with a passage; None if there is none yet, or it does not fit a prompt.

        Passages come from conversations that are settled whenever this one begins, however fast the others are.
        """
        answers = [answer for number, answer in self._passages if number < talk.number - self._window]
        if not answers:
            return None
        answer = answers[-_PASSAGES_KEPT:][int(talk.rng.integers(min(len(answers), _PASSAGES_KEPT)))]
        length = int(talk.rng.integers(*_PASSAGE_TOKENS))
        turn = passage_turn(self._tokenizer.decode(answer[:length]), talk.rng)
        ids = encode_prompt(self._tokenizer, [{"role": "user", "content": turn}])
        if len(ids) > self._config.max_prompt or normalized(turn) in self._excluded:
            return None
        talk.ids = ids
        return self._answer(talk)

    def _document_turn(self, talk: _Conversation) -> GenerationRequest | None:
        """Ask for something to be done with documents; None if it came out too long, or spells a control token."""
        turn = document_turn(self._documents, self._config.max_document, talk.rng)
        ids = encode_prompt(self._tokenizer, [{"role": "user", "content": turn}])
        if len(ids) > self._config.max_document or normalized(turn) in self._excluded:
            return None
        talk.ids, talk.more_turns = ids, 0
        return self._answer(talk)

    def _user(self, conversation: _Conversation, how: tuple[float, float] = _FREELY) -> GenerationRequest:
        conversation.writes_user = True
        return self._request(conversation, [*conversation.ids, *conversation.turn], MAX_TURN, how)

    def _answer(self, conversation: _Conversation, again: bool = False) -> GenerationRequest:
        conversation.writes_user = False
        low, high = self._config.temperature
        rng = conversation.rng
        warm = rng.random() >= self._config.greedy or again  # a second greedy answer would be the first one
        how = (float(rng.uniform(low, high)), self._config.top_p) if warm else (0.0, 1.0)
        return self._request(conversation, conversation.ids, self._config.max_answer, how)

    def _request(
        self, conversation: _Conversation, prompt: list[int], max_new: int, how: tuple[float, float]
    ) -> GenerationRequest:
        key, self._next_key = self._next_key, self._next_key + 1
        self._open[key] = conversation
        return GenerationRequest(key, prompt, max_new, *how, seed=int(conversation.rng.integers(2**63)))

    def _end_user_turn(self, conversation: _Conversation, result: GenerationResult) -> None:
        special = self._tokenizer.special_token_ids
        turn = [*conversation.turn, *result.tokens[:-1]]
        sane = result.ended and _MIN_TURN <= len(turn) <= MAX_TURN and loop_end(result.tokens) is None
        if not sane or special.intersection(turn):
            self.tally.malformed += 1
            self._finish(conversation)
            return
        if normalized(self._tokenizer.decode(turn)) in self._excluded:
            self.tally.excluded += 1
            self._finish(conversation)
            return
        frame = conversation.frame
        if conversation.answers_in is not None:  # the examples were only there to be imitated
            conversation.ids, conversation.answers_in = list(frame.before_user), None
        ids = [*conversation.ids, *turn, result.tokens[-1], *self._after_end(frame)]
        if len(ids) > self._limit(conversation):
            self._finish(conversation)
            return
        conversation.ids, conversation.turn = ids, []
        self._retry.append(self._answer(conversation))

    def _end_answer(self, conversation: _Conversation, result: GenerationResult) -> None:
        tokens, loops = result.tokens, loop_end(result.tokens)
        if loops is not None:
            tokens = tokens[:loops]
            self.tally.loops_cut += 1
        if len(tokens) < MIN_ANSWER:
            self.tally.malformed += 1
            self._finish(conversation)
            return
        start = len(conversation.ids)
        conversation.ids = [*conversation.ids, *tokens]
        conversation.spans.append((start, len(conversation.ids)))
        room = self._limit(conversation) - len(conversation.ids) - 64
        if conversation.more_turns > 0 and result.ended and loops is None and room > 0:
            conversation.more_turns -= 1
            conversation.ids = [*conversation.ids, *conversation.frame.to_next_user]
            self._retry.append(self._user(conversation))
            return
        self._finish(conversation)

    def _finish(self, conversation: _Conversation) -> None:
        """Take the conversation up to its last answer, if it has one, and settle what can be settled in order."""
        text = None
        if conversation.spans:
            text = Text(conversation.ids[: conversation.spans[-1][1]], list(conversation.spans))
        self._outcomes[conversation.number] = text
        while self.num_settled in self._outcomes and not self.finished:
            outcome = self._outcomes.pop(self.num_settled)
            if outcome is not None:
                self._keep(self.num_settled, outcome)
            self.num_settled += 1

    def _keep(self, number: int, text: Text) -> None:
        if not self._is_new(text):
            self.tally.duplicates += 1
            return
        self.tally.kept += 1
        self.tally.answer_tokens += sum(end - start for start, end in text.spans)
        self.texts.append(text)
        self.numbers.append(number)
        self._passages.append((number, text.ids[slice(*text.spans[0])]))

    def _is_new(self, text: Text) -> bool:
        digest = hashlib.blake2b(np.asarray(text.ids, np.uint32).tobytes(), digest_size=12).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True

    def _limit(self, conversation: _Conversation) -> int:
        """Return the longest prompt allowed: a second turn may build on a first one."""
        return self._config.max_prompt + (self._config.max_answer // 2 if conversation.spans else 0)

    def _after_end(self, frame: ChatFrame) -> list[int]:
        """Return what follows the end token of a user turn; the template's own text starts with that token."""
        return frame.to_answer[1:] if frame.to_answer[0] in self._tokenizer.eos_token_ids else frame.to_answer

    def _encode(self, prompts: Sequence[Messages], excluded: frozenset[str]) -> list[list[int]]:
        encoded = []
        for messages in prompts:
            users = [normalized(message["content"]) for message in messages if message["role"] == "user"]
            if excluded.intersection(users):
                continue
            turns = tuple((message["role"], message["content"]) for message in messages)
            if turns not in self._encoded:  # a file may be named as prompts and as examples
                self._encoded[turns] = encode_prompt(self._tokenizer, messages)
            ids = self._encoded[turns]
            if len(ids) <= self._config.max_prompt:
                encoded.append(ids)
        return encoded

    def _short_ones(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the prompts short enough to show several of, and that start as the default frame does."""
        before = self._frames[0].before_user if self._frames else []
        return [p for p in prompts if 24 <= len(p) <= 160 and p[: len(before)] == before]

    def _shuffled_files(self) -> list[tuple[list[int], bool]]:
        """Return the prompts as often as they are used, and whether each has been used before."""
        repeated = [(prompt, use > 0) for prompt in self._file_prompts for use in range(self._config.file_repeats)]
        order = np.random.default_rng(self._config.seed).permutation(len(repeated))
        return [repeated[i] for i in order.tolist()]
