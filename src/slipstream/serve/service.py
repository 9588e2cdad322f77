"""What the routes share: the engine and its thread, the tokenizer, and what turns requests into answers."""

from dataclasses import dataclass

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.engine import Engine
from slipstream.serve.config import ServeConfig
from slipstream.serve.convert import Converter
from slipstream.serve.generate import Generator
from slipstream.serve.grammar import GrammarCompiler
from slipstream.serve.metrics import Metrics
from slipstream.serve.threads import Threads
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
