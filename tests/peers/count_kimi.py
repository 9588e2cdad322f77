"""Prints the prompt tokens that Kimi's own tokenizer code makes of chats; run by a Python that has tiktoken.

    python count_kimi.py FOLDER TEMPLATE CHATS

Every line of CHATS is a request. What is printed of each: the tokens of the prompt as that code makes it, which takes
control tokens for what they are wherever they stand; and those where only the template's own count as such, and marks
of thoughts in what an assistant said.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

Json = dict[str, Any]
BROKEN = "\ue000"  # private use: put into control tokens that texts spell, and taken out again
THOUGHTS = ("<think>", "</think>")


def main(folder: str, template: str, chats: str) -> None:
    """Print two lists of tokens a line."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    control = re.compile("(" + "|".join(map(re.escape, sorted(tokenizer.special_tokens, key=len, reverse=True))) + ")")
    for line in Path(chats).read_text(encoding="utf-8").splitlines():
        request = json.loads(line)
        prompts = [prompt(tokenizer, asked) for asked in (request, broken(request, control))]
        parts = control.split(prompts[1])
        texts = [
            [tokenizer.special_tokens[part]]
            if index % 2
            else tokenizer.encode(part.replace(BROKEN, ""), allow_special_tokens=False)
            for index, part in enumerate(parts)
        ]
        both = {"plain": tokenizer.encode(prompts[0]), "kept": [token for text in texts for token in text]}
        sys.stdout.write(f"#{json.dumps(both)}\n")


def prompt(tokenizer: Any, request: Json) -> str:
    """Return a request's prompt."""
    text = tokenizer.apply_chat_template(
        request["messages"], tools=request.get("tools"), thinking=request["thinking"], tokenize=False
    )
    assert isinstance(text, str)
    return text


def broken(value: Any, control: "re.Pattern[str]", kept: tuple[str, ...] = ()) -> Any:
    """Return a request in whose texts no control token is spelled; assistants did write their thoughts' marks."""
    if isinstance(value, dict):
        kept = THOUGHTS if value.get("role") == "assistant" else kept
        return {key: broken(item, control, kept) for key, item in value.items()}
    if isinstance(value, list):
        return [broken(item, control, kept) for item in value]
    if isinstance(value, str):
        return control.sub(lambda found: found[0] if found[0] in kept else found[0][0] + BROKEN + found[0][1:], value)
    return value


if __name__ == "__main__":
    main(*sys.argv[1:])
