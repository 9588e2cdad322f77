"""What running servers do for a training run, and whether they can: texts of the very target, and its states."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.models.target import Target
from slipstream.train.data.generate import GenerationRequest
from slipstream.train.data.servers import Server, Servers
from slipstream.train.data.speaker import Speaker, encode_prompt
from slipstream.train.draft.server_states import ServerStates, check_agreement
from slipstream.train.draft.target import last_states
from slipstream.train.run.recipe import Recipe

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
