"""`slipstream generate`: answer one prompt or a file of them."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from slipstream.cli import options
from slipstream.cli.chat import statistics_line
from slipstream.cli.progress import Phases

if TYPE_CHECKING:
    from slipstream import LLM, AsyncLLM, Completion, Emission, SamplingParams
    from slipstream.engine.prompt import Prompt


def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; '-' reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file with one prompt a line, answered together.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    model: options.Model = "embedded",
    draft: options.Draft = "auto",
    depth: options.AutoDepth = None,
    width: options.Width = 1,
    budget: options.Budget = 0,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = None,
    max_context: options.MaxContext = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernels: options.Kernels = "auto",
    tp: options.Tp = 1,
    ep: options.Ep = 1,
    draft_tp: options.DraftTp = 1,
) -> None:
    """Answer a prompt as it comes, or a file of prompts together, and say what speculation did.

    The answer goes to standard output, everything else to standard error.

    Examples:
      slipstream generate "Why is the sky blue?"

      slipstream generate --draft ngram --temperature 0.8 --seed 7 "Hello"

      slipstream generate -m path/to/target -d path/to/draft --depth 5 "Hello"
    """
    from slipstream import LLM, AsyncLLM, SamplingParams
    from slipstream.engine.settings import Settings

    console = Console(stderr=True, markup=False)
    questions = _questions(prompt, file)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    tree = options.auto_tree(depth, width, budget)
    settings = Settings(
        dtype=dtype, kernels=options.kernel_choice(kernels), max_context=max_context, tp=tp, ep=ep, draft_tp=draft_tp
    )
    options.fetch_if_embedded(model, console)
    prompts: list[Prompt] = [text if raw else [{"role": "user", "content": text}] for text in questions]
    with console.status("loading"):
        llm = (LLM if file is None else AsyncLLM)(model, draft, tree=tree, device=device, **settings)
    for line in llm.summary:
        console.print(Text(line, style="dim"))
    if isinstance(llm, LLM):
        with llm:
            _answer(console, llm, prompts[0], params)
    else:
        asyncio.run(_answer_all(console, llm, prompts, params))


def _answer(console: Console, llm: "LLM", prompt: "Prompt", params: "SamplingParams") -> None:
    """Show an answer as it comes, then a line on it."""
    started = time.perf_counter()
    for piece in llm.stream(prompt, params):
        typer.echo(piece.text, nl=False)
        last = piece
    typer.echo()
    console.print(Text(_line(last, time.perf_counter() - started, params), style="dim"))


async def _answer_all(console: Console, llm: "AsyncLLM", prompts: "list[Prompt]", params: "SamplingParams") -> None:
    """Answer prompts together, and show them in order when all are there."""
    from slipstream.speculation.statistics import AcceptanceStats

    started = time.perf_counter()
    async with llm:
        with Phases(console) as phases:
            phase = phases.start("answers", len(prompts), "answers")

            async def answer(prompt: "Prompt") -> "Completion":
                completion = await llm.generate(prompt, params)
                phase.advance()
                return completion

            completions = await asyncio.gather(*map(answer, prompts))
    seconds = time.perf_counter() - started
    total = AcceptanceStats()
    for completion in completions:
        typer.echo(completion.text)
        console.print(Text(_line(completion, None, params), style="dim"))
        total.add(completion.stats)
    console.print(Text(f"all {len(prompts)}: {statistics_line(total, seconds)}", style="dim"))


def _line(answer: "Completion | Emission", seconds: float | None, params: "SamplingParams") -> str:
    """Say in a line what speculation did, and what to know to have the answer again or to have it longer."""
    words = [statistics_line(answer.stats, seconds)]
    if params.temperature > 0:
        words.append(f"seed {answer.seed}")
    if answer.finish_reason is not None and answer.finish_reason.value == "length":
        words.append(f"cut at its limit (--max-tokens {params.max_tokens})")
    return "; ".join(words)


def _questions(prompt: str | None, file: Path | None) -> list[str]:
    if (prompt is None) == (file is None):
        raise typer.BadParameter("Give a prompt or --file, one of the two.")
    try:
        if file is not None:
            questions = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
            if not questions:
                raise typer.BadParameter(f"--file {file}: holds no prompt; write one a line.")
            return questions
        assert prompt is not None
        return [typer.get_text_stream("stdin").read() if prompt == "-" else prompt]
    except OSError as error:
        raise typer.BadParameter(f"--file {file}: cannot be read ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{file or 'Standard input'}: is not text in UTF-8 ({error}).") from error
