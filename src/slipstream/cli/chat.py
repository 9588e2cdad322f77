"""`slipstream chat`: talk to a model; tokens the draft guessed are tinted."""

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from slipstream.cli import options
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream import LLM, SamplingParams
    from slipstream.speculation.statistics import AcceptanceStats

DRAFTED_STYLE = "green"


def chat(
    model: options.Model = "embedded",
    draft: options.Draft = "auto",
    depth: options.AutoDepth = None,
    width: options.Width = 1,
    budget: options.Budget = 0,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = None,
    max_context: options.MaxContext = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernels: options.Kernels = "auto",
) -> None:
    """Chat with a model. Green tokens were guessed by the draft and confirmed by the target.

    Lines that start with a slash are commands: /reset forgets the conversation, /quit ends it.

    Examples:
      slipstream chat

      slipstream chat --model path/to/target --draft path/to/draft --temperature 0.7
    """
    from slipstream import LLM, SamplingParams

    console = Console()
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    tree, chosen = options.auto_tree(depth, width, budget), options.kernel_choice(kernels)
    options.fetch_if_embedded(model, console)
    with console.status("loading"):
        llm = LLM(model, draft, tree=tree, device=device, dtype=dtype, kernels=chosen, max_context=max_context)
    for line in llm.summary:
        console.print(Text(line, style="dim"))
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = console.input("[bold cyan]you>[/bold cyan] ").strip()
        except EOFError:
            console.print()
            break
        if line in ("/quit", "/exit"):
            break
        if line == "/reset":
            messages.clear()
        elif line.startswith("/"):
            console.print(Text(f"There is no {line.split()[0]}; there are /reset and /quit.", style="yellow"))
        elif line:
            asked = {"role": "user", "content": line}
            try:
                answer = _answer(console, llm, [*messages, asked], params)
            except RequestError as error:
                console.print(Text(f"{error} Or forget what was said so far: /reset", style="yellow"))
                continue
            messages += [asked, {"role": "assistant", "content": answer}]
    llm.close()


def _answer(console: Console, llm: "LLM", messages: list[dict[str, str]], params: "SamplingParams") -> str:
    """Stream one answer, then a line of statistics; Ctrl-C ends the answer, not the chat."""
    started = time.perf_counter()
    pieces: list[str] = []
    stats: AcceptanceStats | None = None
    try:
        for emission in llm.stream(messages, params):
            for token in emission.tokens:
                console.print(Text(token.text, style=DRAFTED_STYLE if token.draft_position else ""), end="")
            console.print(Text(emission.tail), end="")
            pieces.append(emission.text)
            stats = emission.stats
    except KeyboardInterrupt:
        console.print(Text(" (stopped)", style="dim"), end="")
    console.print()
    if stats is not None:
        console.print(Text(statistics_line(stats, time.perf_counter() - started), style="dim"))
    return "".join(pieces)


def statistics_line(stats: "AcceptanceStats", seconds: float | None) -> str:
    """Say in one line what speculation did, and how fast where that was measured."""
    line = f"{stats.emitted} tokens"
    if seconds is not None:
        line += f" in {seconds:.1f} s, {stats.emitted / seconds:.1f} tokens/s"
    if stats.rates:
        rates = " ".join(f"{rate:.0%}" for rate in stats.rates)
        line += f"; {stats.acceptance_length:.2f} tokens a pass; accepted by position: {rates}"
    return line
