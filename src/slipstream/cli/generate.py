"""`slipstream generate`: answer one prompt or a file of them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from slipstream.cli import options


def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; '-' reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file with one prompt a line, answered together.")] = None,
    raw: Annotated[bool, typer.Option(help="Continue the text as it is, without the chat template.")] = False,
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
    """Answer a prompt (or a file of prompts) and show what speculation did.

    Examples:
      slipstream generate "Why is the sky blue?"

      slipstream generate --draft ngram --temperature 0.8 --seed 7 "Tell me a story."

      slipstream generate --model path/to/target --draft path/to/draft --depth 5 --width 4 --budget 16 "..."
    """
    from slipstream.engine.llm import LLM
    from slipstream.engine.loading import LoadOptions
    from slipstream.models.topology import Topology
    from slipstream.speculation.sampling import SamplingParams

    console = Console(stderr=True)
    questions = _questions(prompt, file)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    if model == "embedded":
        options.fetch_embedded(console)
    tree = options.auto_tree(depth, width, budget)
    chosen = options.kernel_choice(kernels)
    llm = LLM(LoadOptions(model, draft, tree, device, dtype, chosen, max_context, topology=Topology(tp, ep, draft_tp)))
    for line in llm.summary:
        console.print(Text(line, style="dim"))
    prompts = questions if raw else [[{"role": "user", "content": question}] for question in questions]
    for completion in llm.generate(prompts, params):
        typer.echo(completion.text)
        stats = completion.stats
        console.print(
            f"{len(completion.token_ids)} tokens, {completion.finish_reason.value}, seed {completion.seed}, "
            f"acceptance length {stats.acceptance_length:.2f}"
            + (f" (by position {', '.join(f'{rate:.0%}' for rate in stats.rates)})" if stats.rates else ""),
            style="dim",
        )
    llm.close()


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
