"""What the routes share: the engine and its thread, the tokenizer, and what turns requests into answers."""

import hashlib
from dataclasses import dataclass

from starlette.requests import Request

import slipstream
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.engine import Engine
from slipstream.serve.config import ServeConfig
from slipstream.serve.convert import Converter
from slipstream.serve.errors import HttpError
from slipstream.serve.generate import Generator
from slipstream.serve.grammar import GrammarCompiler
from slipstream.serve.metrics import Metrics
from slipstream.serve.protocol import ChatRequest, CompletionRequest
from slipstream.serve.structured import Constraint, constraint_of
from slipstream.serve.threads import Threads
from slipstream.serve.ticket import Job
from slipstream.serve.tools.form import PLAIN
from slipstream.serve.tools.protocol import Choice
from slipstream.serve.tools.reasoning import Opening
from slipstream.serve.worker import EngineWorker


@dataclass(frozen=True)
class Service:
    """One server.

    Args:
        threads: read and convert requests that are long.
        token_threads: do the work of /tokenize and /detokenize, which may take seconds.
        started: in seconds since 1970.
    """

    engine: Engine
    tokenizer: Tokenizer
    worker: EngineWorker
    config: ServeConfig
    grammars: GrammarCompiler
    threads: Threads
    token_threads: Threads
    converter: Converter
    generator: Generator
    metrics: Metrics
    started: int

    @property
    def fingerprint(self) -> str:
        """What OpenAI's API calls system_fingerprint: it changes when the same seed may give another text."""
        kind = (slipstream.__version__, self.config.model_name, self.engine.simulated_acceptance)
        return f"fp_{hashlib.sha256(repr(kind).encode()).hexdigest()[:12]}"

    async def jobs(
        self, request: Request, body: ChatRequest | CompletionRequest, inside_reasoning: bool = False
    ) -> list[Job]:
        """Return the answers a request asks for, whichever API it came by; raises HttpError that names the field.

        Args:
            inside_reasoning: a text to go on from ends inside the model's reasoning, if it reasons.
        """
        self.converter.check(body)
        constraint = constraint_of(body)
        size = len(await request.body())
        dialect = self.converter.dialect
        if isinstance(body, CompletionRequest):
            begins: Opening = "inside" if inside_reasoning and dialect.reasoning is not None else "outside"
            grammar = await self.grammars.compile(dialect.constraint(constraint, Choice(), begins))
            form = PLAIN if begins == "outside" else dialect.form(Choice(), begins)
            return await self.threads.run(
                size, lambda: self.converter.completion(body, grammar, form), _is_tokenized(body)
            )
        prompt = await self.threads.run(size, lambda: self.converter.prompt(body))
        for schema in dialect.schemas(prompt.choice):
            await self._check_tool(schema)
        grammar = await self.grammars.compile(dialect.constraint(constraint, prompt.choice, prompt.begins))
        return self.converter.chat(body, prompt, grammar)

    async def _check_tool(self, schema: Constraint) -> None:
        """Raise unless calls of a tool can follow its schema, in words that SGLang's clients look for, too."""
        try:
            await self.grammars.check(schema)
        except HttpError as error:
            if error.status != 400:
                raise
            raise HttpError(400, f"A tool has an invalid 'parameters' schema: {error}", param=error.param) from error


def _is_tokenized(body: CompletionRequest) -> bool:
    """Tell whether a request brings tokens instead of text."""
    return isinstance(body.prompt, list) and not any(isinstance(part, str) for part in body.prompt[:1])
