"""The target's states from vLLM servers, which write them to files that both can see; its blocks are not needed here.

vLLM's `extract_hidden_states` captures the layers it is told to, as the stream stands after so many blocks. The last of
them must be the stream after all blocks: its norm, and the opinion it makes with the head, are computed here.

`Remote` is what running servers do for a whole run, and whether they can: texts of the very target, and its states.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from slipstream.checkpoint.spec import ModelSpec
from slipstream.errors import ConfigError, DataError
from slipstream.kernels.training.loss import product_f32
from slipstream.kernels.training.ops import TrainOps
from slipstream.models.target import Target
from slipstream.train.data.generate import GenerationRequest
from slipstream.train.data.servers import Server, Servers, discard_states, wait_for_states
from slipstream.train.data.speaker import Speaker, encode_prompt
from slipstream.train.draft.target import SplitTarget, last_states
from slipstream.train.run.recipe import Recipe

CONNECTOR = "slipstream.train.vllm_connector"
_LEAST_AGREEMENT = 0.5


class ServerStates:
    """Fetches states of whole texts: the captured ones and the normed last one, in the target's precision."""

    def __init__(self, servers: Servers, target: Target, captured: Sequence[int]) -> None:
        """Prepare for the captured layers of a draft; `target` needs its last norm and its head only."""
        self._servers, self._target, self._captured = servers, target, tuple(captured)
        if other := [server.url for server in servers.servers if server.kind != "vllm"]:
            raise ConfigError(f"{other[0]}: states come from vLLM servers only. {start_lines(target.spec, captured)}")

    def of(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return each text's states, [tokens, L + 1, D]."""
        return self._servers.all(texts, self._of_one)

    def check(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Refuse servers of another model, or of other layers: the head must read a greedy answer off the states."""
        (states_TLD,) = self.of([[*prompt, *answer]])
        check_agreement(self._target, states_TLD[:, -1], prompt, answer, self._servers.servers[0].url)

    @torch.no_grad()
    def _of_one(self, server: Server, ids: Sequence[int]) -> Tensor:
        path = server.states_file(ids)
        written = _read(path, server.url)
        states_TLD, tokens_T = written.get("hidden_states"), written.get("token_ids")
        width, layers = self._target.spec.hidden_size, len(self._captured) + 1
        if states_TLD is None or tokens_T is None or states_TLD.shape[1:] != (layers, width):
            shape = None if states_TLD is None else list(states_TLD.shape[1:])
            raise ConfigError(
                f"{server.url}: its states are {shape} a token where {[layers, width]} are needed. "
                f"{start_lines(self._target.spec, self._captured)}"
            )
        if tokens_T.tolist() != list(ids):
            raise DataError(f"{server.url}: {path} holds the states of another text.")
        table = self._target.embed_tokens
        states_TLD = states_TLD.to(device=table.device, dtype=table.dtype)
        last_TD = self._target.norm(states_TLD[:, -1], TrainOps(table.device))
        return torch.cat([states_TLD[:, :-1], last_TD[:, None]], 1).cpu()


def check_agreement(
    target: Target | SplitTarget, last_TD: Tensor, prompt: Sequence[int], answer: Sequence[int], where: str
) -> None:
    """Raise unless the head makes of normed last states what a server has written greedily, in most places."""
    assert target.lm_head.weight is not None
    head = target.lm_head.weight
    rows_ND = last_TD[len(prompt) - 1 : len(prompt) + len(answer) - 1].to(head)
    share = (product_f32(rows_ND, head).argmax(-1).cpu() == torch.tensor(list(answer))).float().mean().item()
    if share < _LEAST_AGREEMENT:
        raise ConfigError(
            f"{where}: of its greedy answer the target's head reads {share:.0%}. Either it serves another model than "
            f"the checkpoint named here (--target), or the last layer it captures is not the last of the model."
        )


def start_lines(target: ModelSpec, captured: Sequence[int]) -> str:
    """Say how vLLM is started so that it writes states."""
    layers = {"eagle_aux_hidden_state_layer_ids": [*captured, target.num_layers]}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }
    transfer = {
        "kv_connector": "StatesConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "FOLDER"},
    }
    return (
        f"Start vLLM with --speculative-config '{json.dumps(speculative)}' --kv-transfer-config "
        f"'{json.dumps(transfer)}', slipstream on its PYTHONPATH, FOLDER being one that this machine sees too."
    )


def _read(path: Path, url: str) -> dict[str, Tensor]:
    """Wait until a file is written, read it, and delete it with its lock."""
    try:
        wait_for_states(path)
        content = load_file(path)
        discard_states(path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}). {url} writes states there: it must be a folder of this machine, or "
            "one that both share."
        ) from error
    return content


_QUESTION = "Count from one to twenty in words."
_PROBE_TOKENS = 32


@dataclass(frozen=True)
class Remote:
    """The servers of a run: they write its texts, and with `states` compute the target's states too."""

    servers: Servers | None = None
    states: bool = False

    def checked(self, speaker: Speaker, recipe: Recipe) -> ServerStates | None:
        """Return what fetches states, if servers do that; refuse those of other models, or of shorter texts."""
        if self.servers is None:
            return None
        self._check_length(self.servers, recipe.generate.max_length)
        model, ends = speaker.model, speaker.tokenizer.eos_token_ids
        prompt = encode_prompt(speaker.tokenizer, [{"role": "user", "content": _QUESTION}])
        request = GenerationRequest(0, prompt, _PROBE_TOKENS)

        def answered(server: Server) -> Sequence[int]:
            return server.write(request, ends).tokens

        answers = self.servers.each(answered)
        if not self.states:
            for server, answer in zip(self.servers.servers, answers, strict=True):
                check_agreement(model, last_states(model, [*prompt, *answer]), prompt, answer, server.url)
            return None
        assert isinstance(model, Target), "a split target has its blocks here"
        captured = recipe.draft.spec(model.spec).captured_layers
        assert captured is not None
        fetches = ServerStates(self.servers, model, captured)
        fetches.check(prompt, answers[0])
        return fetches

    def _check_length(self, servers: Servers, wanted: int) -> None:
        longest = servers.max_length
        if longest is not None and longest < wanted + self.states:
            more = ", one of it for a token after the text" if self.states else ""
            raise ConfigError(
                f"generate.max_length is {wanted}, and the servers take {longest} tokens{more}. Lower it, or start "
                "them with a longer context."
            )


ALL_HERE = Remote()
