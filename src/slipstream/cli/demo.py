"""`slipstream demo`: the main job in miniature. A race between plain and speculative decoding, with proof."""

import shutil
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from slipstream.cli import options
from slipstream.cli.chat import DRAFTED_STYLE
from slipstream.cli.tables import narrow_table
from slipstream.engine.config import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from slipstream.checkpoint.tokenizer import Tokenizer
    from slipstream.cli.beside import LlamaArm
    from slipstream.engine.engine import Engine
    from slipstream.kernels import KernelChoice
    from slipstream.models.eagle3 import Eagle3Draft

PROMPTS = (
    "A baker makes 12 trays of 8 rolls each and sells two thirds of them before noon. "
    "How many rolls are left for the afternoon?",
    "Explain in a few sentences why leaves change colour in autumn.",
    "Write a Python function that returns the n-th Fibonacci number.",
)

NGRAM = "n-gram"
_PROMPT_ROOM = 512
_TURN_S = 0.1  # threads of one program spin for a while after their work, at the next one's cost: few changes of turn


@dataclass
class Arm:
    """One way of decoding, with its own engine over the same weights."""

    name: str
    engine: "Engine"
    seconds: float = 0.0
    num_tokens: int = 0
    answers: list[list[int]] = field(default_factory=list)
    shown: Text = field(default_factory=Text)
    request_id: int | None = None

    def start(self, prompt: list[int], tokenizer: "Tokenizer", max_tokens: int, temperature: float) -> None:
        """Queue the next prompt."""
        from slipstream.speculation.sampling import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
        self.shown = Text()
        self.answers.append([])
        self.request_id = self.engine.add(prompt, params, 0, tokenizer.eos_token_ids, tokenizer.detokenizer())

    @property
    def has_work(self) -> bool:
        """Whether the answer is still going on."""
        return self.engine.has_work

    def reset(self) -> None:
        """Forget what was measured so far."""
        self.answers.clear()
        self.seconds, self.num_tokens = 0.0, 0
        self.engine.stats.acceptance = type(self.engine.stats.acceptance)()

    def advance(self) -> None:
        """Run a step, as long as a server's, on this arm's own clock."""
        started = time.perf_counter()
        emissions = self.engine.step(PATIENCE_S)
        self.seconds += time.perf_counter() - started
        for emission in emissions:
            self.num_tokens += len(emission.tokens)
            self.answers[-1] += [token.token_id for token in emission.tokens]
            for token in emission.tokens:
                self.shown.append(token.text, style=DRAFTED_STYLE if token.draft_position else "")
            self.shown.append(emission.tail)


def demo(
    max_tokens: options.MaxTokens = 96,
    temperature: options.Temperature = 0.0,
    prompts: Annotated[int, typer.Option(min=1, max=len(PROMPTS), help="How many of the prompts to answer.")] = 3,
    kernels: options.Kernels = "auto",
    beside: Annotated[
        Literal["auto", "llama.cpp", "none"],
        typer.Option(help="Race llama.cpp as well: built on demand (minutes), or 'auto', if it is here already."),
    ] = "auto",
) -> None:
    """Answer a few prompts with and without speculation, side by side, prove the texts equal, and show the gain.

    Green tokens were guessed by a draft and confirmed by the target in a pass it had to make anyway.

    Examples:
      slipstream demo

      slipstream demo --beside llama.cpp --max-tokens 200
    """
    from slipstream.speculation.sampling import SamplingParams

    console = Console()
    SamplingParams(max_tokens=max_tokens, temperature=temperature)  # refuses what cannot be, before anything is loaded
    model = options.fetch_embedded(console)
    with console.status("loading the embedded model"):
        arms, tokenizer, summary = _arms(options.kernel_choice(kernels), max_tokens)
    others = _others(console, beside, model, max_tokens, temperature)
    if others:
        arms = [arm for arm in arms if arm.name != NGRAM]  # a screen holds four columns
    runners: list[Arm | LlamaArm] = [*arms, *others]
    with console.status("warming up"):
        _warm_up(runners, tokenizer)
    for line in summary:
        if not line.startswith("draft:"):  # the target alone was loaded; each runner below has its own
            console.print(Text(line, style="dim"))
    for question in PROMPTS[:prompts]:
        console.print(f"\n[bold cyan]you>[/bold cyan] {question}")
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
        _race(console, runners, prompt, tokenizer, (max_tokens, temperature))
        equal = all(arm.answers[-1] == arms[0].answers[-1] for arm in arms)
        console.print("[green]identical, token for token[/green]" if equal else "[red]the texts differ[/red]")
    console.print()
    console.print(_table(arms, others))
    for other in others:
        other.peer.close()
    if any(arm.answers != arms[0].answers for arm in arms):
        raise typer.Exit(1)
    console.print(_next_steps(), soft_wrap=True)


def _others(console: Console, beside: str, model: "Path", max_tokens: int, temperature: float) -> "list[LlamaArm]":
    """Start llama.cpp for the race if it is wanted, and otherwise say how to have it."""
    from slipstream.bench.peers.environments import has_llama

    if beside == "none" or (beside == "auto" and temperature > 0):
        return []
    if temperature > 0:
        raise typer.BadParameter("llama.cpp shares no noise with us, so the race is greedy: leave out --temperature.")
    if beside == "auto" and not has_llama():
        console.print(Text("llama.cpp beside it: slipstream demo --beside llama.cpp (compiles it once)", style="dim"))
        return []
    import torch

    from slipstream.cli.beside import llama_arms

    with console.status("loading llama.cpp (the first time it is compiled: minutes)"):
        return llama_arms(model, torch.get_num_threads(), _PROMPT_ROOM + max_tokens)


def _arms(kernels: "KernelChoice", max_tokens: int) -> tuple[list[Arm], "Tokenizer", tuple[str, ...]]:
    """Load the target once and build an engine for each way of decoding."""
    from slipstream.checkpoint.embedded import embedded_draft
    from slipstream.engine.build import build_engine
    from slipstream.engine.loading import LoadOptions, load
    from slipstream.engine.read_draft import read_draft
    from slipstream.speculation.tree import TreeShape

    loaded = load(
        LoadOptions(draft="none", device="cpu", kernels=kernels, max_context=_PROMPT_ROOM + max_tokens, max_requests=1)
    )
    ways: list[tuple[str, Eagle3Draft | Literal["ngram"]]] = [(NGRAM, "ngram")]
    if (shipped := embedded_draft()) is not None:
        ways.append(("EAGLE-3", read_draft(shipped, loaded.target, None, loaded.ops)))
    arms = [Arm("no draft", loaded.engine)]
    for name, draft in ways:
        engine = build_engine(loaded.target, draft, TreeShape.chain(3), loaded.engine.config, loaded.ops)
        arms.append(Arm(name, engine))
    return arms, loaded.tokenizer, loaded.summary


def _warm_up(arms: "Sequence[Arm | LlamaArm]", tokenizer: "Tokenizer") -> None:
    """Let every arm run once, so that first-use costs fall on nobody's clock."""
    for arm in arms:
        arm.start(tokenizer.encode_chat([{"role": "user", "content": "Hello"}]), tokenizer, 8, 0.0)
        while arm.has_work:
            arm.advance()
        arm.reset()


def _race(
    console: Console,
    arms: "Sequence[Arm | LlamaArm]",
    prompt: list[int],
    tokenizer: "Tokenizer",
    settings: tuple[int, float],
) -> None:
    """Answer one prompt on every arm; whoever has used least time steps next, so the screen shows a fair race."""
    before = {arm.name: arm.seconds for arm in arms}
    for arm in arms:
        arm.start(prompt, tokenizer, *settings)

    def spent(arm: "Arm | LlamaArm") -> float:
        return arm.seconds - before[arm.name]

    def screen() -> Columns:
        width = max(24, (console.width - 2 * len(arms)) // len(arms))
        return Columns([Panel(arm.shown, title=f"{arm.name} {spent(arm):.1f} s", width=width) for arm in arms])

    # Where output is no terminal, a Live would leave out its last line break.
    with Live(screen(), console=console, refresh_per_second=10, transient=not console.is_terminal) as live:
        while running := [arm for arm in arms if arm.has_work]:
            arm = min(running, key=spent)
            until = arm.seconds + _TURN_S
            while arm.has_work and arm.seconds < until:
                arm.advance()
            live.update(screen())
    if not console.is_terminal:
        console.print(screen())


def _table(arms: list[Arm], others: "list[LlamaArm]") -> Table:
    """One row for each way of decoding that was raced; ratios are of tokens a second, prompts included."""
    ratios_to = [f"/ {other.name.replace('.cpp, ', chr(10))}" for other in others]  # two lines: a screen is narrow
    headings = ("", "tokens/s", "speed-up", *ratios_to, "tokens\na pass", "accepted\nby position")
    table = narrow_table("what speculation did", headings)
    plain = arms[0].num_tokens / arms[0].seconds
    speeds = [other.num_tokens / other.seconds for other in others]
    for arm in arms:
        stats, speed = arm.engine.stats.acceptance, arm.num_tokens / arm.seconds
        ratios = [f"{speed / other:.2f}x" for other in (plain, *speeds)]
        rates = " ".join(f"{rate:.0%}" for rate in stats.rates) or "-"
        table.add_row(arm.name, f"{speed:.1f}", *ratios, f"{stats.acceptance_length:.2f}", rates)
    for other, speed in zip(others, speeds, strict=True):
        ratios = [f"{speed / reference:.2f}x" for reference in (plain, *speeds)]
        table.add_row(other.name, f"{speed:.1f}", *ratios, "1.00", "-")
    return table


def _next_steps() -> Text:
    """Say what to try next, with the program as this person calls it."""
    called = sys.argv[0]
    program = "slipstream" if shutil.which("slipstream") or not called.endswith("slipstream") else called
    lines = Text("try next")
    for arguments, what in (
        ("chat", "talk to this model"),
        ("serve", "the same over HTTP, with a playground"),
        ('generate -m MODEL "Hello"', "your own: a folder, .gguf file or hub id"),
        ("train MODEL --out draft", "a draft for it"),
        ("--help", "everything else"),
    ):
        lines.append(f"\n{program} {arguments:<27}", style="bold").append(what)
    return lines
