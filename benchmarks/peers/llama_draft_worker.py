"""llama.cpp's own EAGLE-3 as a peer: its program for one text with a draft, started anew for each prompt.

Its clock is its own and runs from the end of the prompt, so loading costs it nothing. It says how many passes there
were, not when each ended: they are spread evenly here.
"""

import ctypes
import re
import subprocess
import tempfile
from pathlib import Path

import llama_cpp

_LINE = {"encoded": r"encoded\s+\d+ tokens in\s+([\d.]+)", "decoded": r"decoded\s+\d+ tokens in\s+([\d.]+)",
         "predicted": r"n_predict\s*=\s*(\d+)", "accepted": r"n_accept\s*=\s*(\d+)"}  # fmt: skip
_ANSWER_END = "\n\n\n\n"  # what the program writes after an answer


class Worker:
    """`llama-speculative-simple` over a target's GGUF and a draft's."""

    def __init__(self, program: str, model: str, draft: str, depth: int, threads: int, context: int) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_model_load_from_file(model.encode(), params))
        self._command = [
            program, "-m", model, "-md", draft, "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(depth),
            "--temp", "0", "--ignore-eos", "-t", str(threads), "-c", str(context),
        ]  # fmt: skip
        self.about = {
            "version": f"llama.cpp of llama-cpp-python {llama_cpp.__version__}, {Path(program).name}",
            "weight_bytes": Path(model).stat().st_size,
            "details": " ".join(self._command[1:]),
        }

    def run(self, prompts: list[list[int]], tokens: int) -> list[tuple[float, int, list[int]]]:
        """Answer one prompt; return (seconds since the start, prompt, tokens) of everything emitted."""
        (prompt,) = prompts
        text = b"".join(self._piece(token) for token in prompt)
        with tempfile.NamedTemporaryFile(suffix=".txt") as asked:
            asked.write(text)
            asked.flush()
            command = [*self._command, "-f", asked.name, "-n", str(tokens - 1)]
            done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.decode(errors="replace")[-500:])
        output = (done.stdout + done.stderr).decode(errors="replace")
        found = {name: float(re.search(pattern, output)[1]) for name, pattern in _LINE.items()}
        answer = done.stdout.decode(errors="replace").partition(text.decode(errors="replace"))[2]
        ids = self._tokens(answer.removesuffix(_ANSWER_END))[:tokens]
        ids += [-1] * (tokens - len(ids))  # a text may be cut into fewer tokens than it was made of
        passes = int(found["predicted"] - found["accepted"])
        ends = [round(tokens * (number + 1) / passes) for number in range(passes)]
        clock = [found["encoded"] + found["decoded"] * (number + 1) / passes for number in range(passes)]
        return [(at, 0, ids[start:end]) for at, start, end in zip(clock, [0, *ends], ends, strict=False)]

    def _piece(self, token: int) -> bytes:
        room = ctypes.create_string_buffer(256)
        size = llama_cpp.llama_token_to_piece(self._vocab, token, room, len(room), 0, True)
        return room.raw[:size]

    def _tokens(self, text: str) -> list[int]:
        data = text.encode()
        room = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), room, len(room), False, True)
        return list(room[:count])
