"""llama.cpp as a runner in `slipstream demo`'s race: a process of its own that decodes one token at a time."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from slipstream.bench.peers import llama_worker_file
from slipstream.bench.peers.environments import environments_dir, llama_environment
from slipstream.bench.peers.process import Peer

if TYPE_CHECKING:
    from slipstream.checkpoint.tokenizer import Tokenizer
    from slipstream.engine.output import Detokenizer

FORMATS = {"llama.cpp, same file": "", "llama.cpp, Q4_0": "Q4_0"}
"""The format that is usually its fastest, beside the file that our engine decodes from."""


@dataclass
class LlamaArm:
    """llama.cpp over one file; its clock runs in its own process, so pipes cost it nothing."""

    name: str
    peer: Peer
    seconds: float = 0.0
    num_tokens: int = 0
    answers: list[list[int]] = field(default_factory=list)
    shown: Text = field(default_factory=Text)
    has_work: bool = False
    _prompt: list[int] | None = None
    _left: int = 0
    _ends: frozenset[int] = frozenset()
    _text: "Detokenizer | None" = None

    def start(self, prompt: list[int], tokenizer: "Tokenizer", max_tokens: int, temperature: float) -> None:
        """Queue the next prompt; decoding is greedy."""
        assert temperature == 0, "the demo refuses other temperatures beside llama.cpp"
        self._prompt, self._left, self._ends = prompt, max_tokens, frozenset(tokenizer.eos_token_ids)
        self._text, self.shown = tokenizer.detokenizer(), Text()
        self.answers.append([])
        self.has_work = True

    def advance(self) -> None:
        """Compute the prompt, and after that one token at a time."""
        call = {"call": "step"} if self._prompt is None else {"call": "start", "prompts": [self._prompt]}
        self._prompt = None
        seconds, (token,) = self.peer.ask(**call)
        self.seconds += seconds
        self.num_tokens += 1
        self._left -= 1
        self.answers[-1].append(token)
        self.has_work = self._left > 0 and token not in self._ends
        if self._text is not None and token not in self._ends:
            self.shown.append(self._text.push([token]))

    def reset(self) -> None:
        """Forget what was measured so far."""
        self.answers.clear()
        self.seconds, self.num_tokens = 0.0, 0


def llama_arms(gguf: Path, threads: int, context: int) -> list[LlamaArm]:
    """Start llama.cpp on the file as it is and on its own Q4_0 of it; builds llama.cpp on the first call."""
    python = llama_environment() / "python"
    made = environments_dir() / "models"
    made.mkdir(parents=True, exist_ok=True)
    settings = {"model": str(gguf), "made": str(made), "threads": threads, "context": context}
    return [
        LlamaArm(name, Peer(name, python, llama_worker_file(), {**settings, "format": format}, {}))
        for name, format in FORMATS.items()
    ]
