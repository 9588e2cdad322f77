"""`slipstream demo`: the main job in miniature. A race between plain and speculative decoding, with proof."""

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

if TYPE_CHECKING:
    from slipstream.checkpoint.tokenizer import Tokenizer
    from slipstream.engine.engine import Engine
    from slipstream.kernels import KernelChoice
    from slipstream.models.eagle3 import Eagle3Draft

PROMPTS = (
    "A baker makes 12 trays of 8 rolls each and sells two thirds of them before noon. "
    "How many rolls are left for the afternoon?",
    "Explain in a few sentences why leaves change colour in autumn.",
    "Write a Python function that returns the n-th Fibonacci number.",
)


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

    def advance(self) -> None:
        """Run one step, on this arm's own clock."""
        started = time.perf_counter()
        emissions = self.engine.step()
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
) -> None:
    """Answer a few prompts with and without speculation, side by side, prove the texts equal, and show the gain.

    Green tokens were guessed by a draft and confirmed by the target in a pass it had to make anyway.
    """
    console = Console()
    options.fetch_embedded(console)
    with console.status("loading the embedded model"):
        arms, tokenizer, summary = _arms(options.kernel_choice(kernels), max_tokens)
        _warm_up(arms, tokenizer)
    for line in summary:
        console.print(Text(line, style="dim"))
    for question in PROMPTS[:prompts]:
        console.print(f"\n[bold cyan]you>[/bold cyan] {question}")
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
        _race(console, arms, prompt, tokenizer, (max_tokens, temperature))
        equal = all(arm.answers[-1] == arms[0].answers[-1] for arm in arms)
        console.print("[green]identical, token for token[/green]" if equal else "[red]the texts differ[/red]")
    console.print(_table(arms))
    if any(arm.answers != arms[0].answers for arm in arms):
        raise typer.Exit(1)


def _arms(kernels: "KernelChoice", max_tokens: int) -> tuple[list[Arm], "Tokenizer", tuple[str, ...]]:
    """Load the target once and build an engine for each way of decoding."""
    from slipstream.checkpoint.embedded import embedded_draft
    from slipstream.engine.build import build_engine
    from slipstream.engine.config import EngineConfig
    from slipstream.engine.loading import LoadOptions, load, read_draft
    from slipstream.speculation.tree import TreeShape

    config = EngineConfig(max_requests=1)
    loaded = load(LoadOptions(draft="none", device="cpu", kernels=kernels, max_context=512 + max_tokens, engine=config))
    ways: list[tuple[str, Eagle3Draft | Literal["ngram"]]] = [("n-gram", "ngram")]
    if (shipped := embedded_draft()) is not None:
        ways.append(("EAGLE-3", read_draft(shipped, loaded.target, None, loaded.ops)))
    arms = [Arm("no draft", loaded.engine)]
    for name, draft in ways:
        engine = build_engine(loaded.target, draft, TreeShape.chain(3), loaded.engine.config, loaded.ops)
        arms.append(Arm(name, engine))
    return arms, loaded.tokenizer, loaded.summary


def _warm_up(arms: list[Arm], tokenizer: "Tokenizer") -> None:
    """Let every arm run once, so that first-use costs fall on nobody's clock."""
    for arm in arms:
        arm.start(tokenizer.encode_chat([{"role": "user", "content": "Hello"}]), tokenizer, 8, 0.0)
        while arm.engine.has_work:
            arm.advance()
        arm.answers.clear()
        arm.seconds, arm.num_tokens = 0.0, 0
        arm.engine.stats.acceptance = type(arm.engine.stats.acceptance)()


def _race(
    console: Console, arms: list[Arm], prompt: list[int], tokenizer: "Tokenizer", settings: tuple[int, float]
) -> None:
    """Answer one prompt on every arm; whoever has used least time steps next, so the screen shows a fair race."""
    before = {arm.name: arm.seconds for arm in arms}
    for arm in arms:
        arm.start(prompt, tokenizer, *settings)

    def spent(arm: Arm) -> float:
        return arm.seconds - before[arm.name]

    def screen() -> Columns:
        width = max(24, (console.width - 2 * len(arms)) // len(arms))
        return Columns([Panel(arm.shown, title=f"{arm.name} {spent(arm):.1f} s", width=width) for arm in arms])

    with Live(screen(), console=console, refresh_per_second=10) as live:
        while running := [arm for arm in arms if arm.engine.has_work]:
            min(running, key=spent).advance()
            live.update(screen())


def _table(arms: list[Arm]) -> Table:
    table = Table(title="what speculation did", title_justify="left")
    for name in ("", "tokens/s", "speed-up", "tokens a pass", "accepted by position"):
        table.add_column(name, justify="left" if not name else "right")
    plain = arms[0].num_tokens / arms[0].seconds
    for arm in arms:
        stats = arm.engine.stats.acceptance
        speed = arm.num_tokens / arm.seconds
        rates = " ".join(f"{rate:.0%}" for rate in stats.rates) or "-"
        table.add_row(arm.name, f"{speed:.1f}", f"{speed / plain:.2f}x", f"{stats.acceptance_length:.2f}", rates)
    return table
