"""What the ranks are asked to run; importable, because the processes look these up by name."""

import dataclasses
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from slipstream.checkpoint.reader import CheckpointReader
from slipstream.engine.build import build_engine, build_other_rank
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.errors import ConfigError
from slipstream.executors.distributed import follow
from slipstream.kernels import RowSampling, select
from slipstream.models.load import load_draft, load_target
from slipstream.models.parallel import Ranks
from slipstream.ranks.channel import Leader, connect
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

DraftFolder = Path | Literal["ngram"] | None
CPU = torch.device("cpu")
OPS = select(CPU, "reference")
CONFIG = EngineConfig(max_context=96, page_size=4, max_requests=8, max_batch_tokens=24)
TREE = TreeShape(depth=3, width=2, budget=5)
PROMPTS = [[3, 14, 15, 9, 2, 6], [5, 35, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 33], [38], [41, 9, 7, 16]]
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.9),
    SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, top_k=20, frequency_penalty=0.5, logit_bias={7: 2.0}),
    SamplingParams(max_tokens=20, logprobs=3, prompt_logprobs=2),
]


class CountingReader(CheckpointReader):
    """A reader that counts the bytes it is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.num_bytes = 0

    def tensor(self, name, device="cpu"):
        return self._counted(super().tensor(name, device))

    def part(self, name, window):
        return self._counted(super().part(name, window))

    def _counted(self, tensor):
        self.num_bytes += tensor.nbytes
        return tensor


class Started(NamedTuple):
    """The first rank's engine, and its way to the others."""

    engine: Engine
    channel: Leader | None

    def add(self) -> list[int]:
        """Ask for every prompt; return the requests."""
        pairs = zip(PROMPTS, PARAMS, strict=True)
        return [self.engine.add(prompt, params, seed) for seed, (prompt, params) in enumerate(pairs)]

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()


def start(ranks: Ranks, target_folder: Path, draft_folder: DraftFolder, split_draft: bool = False) -> Started | None:
    """Start an engine on the first rank; the others do what it says until it is closed, and get None."""
    target = load_target(CheckpointReader(target_folder), torch.float32, CPU, ops=OPS, ranks=ranks)
    draft = "ngram" if draft_folder == "ngram" and ranks.rank == 0 else None
    if isinstance(draft_folder, Path) and (ranks.rank == 0 or split_draft):
        draft = load_draft(CheckpointReader(draft_folder), target, torch.float32, ops=OPS, split=split_draft)
    channel = connect(ranks) if ranks.size > 1 else None
    if ranks.rank > 0:
        config = dataclasses.replace(CONFIG, num_pages=channel.receive())
        follow(channel, build_other_rank(target, draft, TREE, config, OPS, channel))
        return None
    return Started(build_engine(target, draft, TREE, CONFIG, OPS, channel), channel)


def answers(ranks: Ranks, target_folder: Path, draft_folder: DraftFolder, split_draft: bool = False):
    """Answer the prompts together; return tokens, log probabilities and how many tokens were accepted drafts."""
    started = start(ranks, target_folder, draft_folder, split_draft)
    if started is None:
        return None
    engine, ids = started.engine, started.add()
    emitted = {request_id: [] for request_id in ids}
    prompt_logprobs = {}
    while engine.has_work:
        for emission in engine.step():
            emitted[emission.request_id] += emission.tokens
            prompt_logprobs[emission.request_id] = emission.prompt_logprobs or prompt_logprobs.get(emission.request_id)
        engine.check_invariants()
    started.close()
    tokens = [[token.token_id for token in emitted[i]] for i in ids]
    scores = [token.logprob.logprob for token in emitted[ids[3]]]
    scores += [entry.logprob for entry in prompt_logprobs[ids[3]][1:]]
    return tokens, scores, engine.stats.acceptance.acceptance_length


def reshaped(ranks: Ranks, target_folder: Path, draft_folder: DraftFolder, split_draft: bool, shapes: list[TreeShape]):
    """Answer the prompts while the tree changes; return their tokens, and why changes were refused."""
    started = start(ranks, target_folder, draft_folder, split_draft)
    if started is None:
        return None
    engine, refusals = started.engine, []
    emitted = {request_id: [] for request_id in started.add()}
    while engine.has_work:
        try:
            if shapes:
                engine.set_tree(shapes.pop(0))
        except ConfigError as error:
            refusals.append(str(error))
        for emission in engine.step():
            emitted[emission.request_id] += [token.token_id for token in emission.tokens]
        engine.check_invariants()
    started.close()
    return list(emitted.values()), refusals


class BrokenGrammar:
    """A grammar that no answer can begin with."""

    def start(self):
        raise ValueError("no first rule")


def beside_a_broken_grammar(ranks: Ranks, target_folder: Path):
    """Answer two prompts and one whose grammar fails as it joins, and then one more; return tokens and the error."""
    started = start(ranks, target_folder, None)
    if started is None:
        return None
    engine, emitted, errors = started.engine, {}, []
    params = [PARAMS[0], SamplingParams(grammar=BrokenGrammar()), PARAMS[1], PARAMS[0]]
    for seed, prompt, own in zip((0, 0, 1, 0), (0, 2, 1, 0), params, strict=True):
        emitted[engine.add(PROMPTS[prompt], own, seed)] = []
        while engine.has_work and len(emitted) >= 3:
            for emission in engine.step():
                emitted[emission.request_id] += [token.token_id for token in emission.tokens]
                errors += [] if emission.error is None else [str(emission.error)]
            engine.check_invariants()
    started.close()
    return list(emitted.values()), errors


def bytes_read(ranks: Ranks, folder: Path) -> int:
    reader = CountingReader(folder)
    load_target(reader, torch.float32, CPU, ops=OPS, ranks=ranks)
    return reader.num_bytes


def sums(ranks: Ranks, dtype: torch.dtype, num_rows: int):
    """Add up one tensor that every rank fills from its own seed; return the sum, and that of its first row alone."""
    x = torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(ranks.rank)).to(dtype)
    return ranks.sum(x), ranks.sum(x[:1])


def best_entries(ranks: Ranks, logits_LV: torch.Tensor, sampling: RowSampling, k: int):
    """Return the best of logits of which every rank has its columns only."""
    span = ranks.cut(logits_LV.shape[1])
    mine_LW = logits_LV[:, span.start : span.stop].contiguous()
    token_ids_V = torch.arange(logits_LV.shape[1])
    best = ranks.top_k(mine_LW, token_ids_V, sampling, OPS, k)
    return best.scores_LK, best.tokens_LK
