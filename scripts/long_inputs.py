"""Make the long inputs: documents from texts in the public domain, an evaluation set of some, the rest for training.

    python scripts/long_inputs.py --sources MIRRORS --evaluate recipes/eval/long --documents documents.jsonl.xz
    python scripts/long_inputs.py --sources MIRRORS --develop prompts --documents prompts/documents.jsonl.xz

MIRRORS holds git directories of the repositories in `SOURCES`, each at the commit named there, as OWNER+NAME. A
document goes to the evaluation set or to training by the hash of its name, once and for all: no text is in both.
With `--develop` a part of the latter is not trained on but makes a smaller set of the same kind, to choose settings by.
"""

import argparse
import hashlib
import html
import json
import lzma
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.checkpoint.embedded import embedded_model
from slipstream.checkpoint.tokenizer import Tokenizer

SOURCES = {
    "GSA+digitalgov.gov": "4979583206d90ff1707b097454a9b169ca9e95e4",  # works of the US government, CC0
    "18F+18f.gsa.gov": "0a55c75e6d9bc71c80136a3867dac52356177443",  # works of the US government, CC0
    "factbook+factbook.json": "8662a8b17a784841ab4528631b04090eb2f183eb",  # CIA World Factbook, public domain
    # Julian Street, American Adventures, 1917, public domain
    "GITenberg+American-AdventuresA-Second-Trip-Abroad-at-home-_18304": "748434ca594b6997cc8e8ff6af53cb9d343071bd",
}
HELD_BACK, DEVELOPED_ON = 0.12, 0.17
COUNTS = {"articles": 60, "passages": 60, "deep": 30}
DEVELOP_COUNTS = {"articles": 24, "passages": 24, "deep": 8}
_SUMMARISE = (
    "Summarize the article below.",
    "Write a summary of this text in about five sentences.",
    "What is this article about? Give the main points.",
    "Please read the following and tell me what matters in it.",
)
_QUESTIONS = {
    "Background": "Using the passages, tell me about the history of {}.",
    "Climate": "What is the climate of {} like?",
    "Natural hazards": "Which natural hazards does {} face?",
    "Economic overview": "What does the text say about the economy of {}?",
    "Terrain": "Describe the terrain of {}.",
    "Flag": "What does the flag of {} look like, and what does it stand for?",
    "Executive branch": "Who leads {}, and how do they come into office?",
    "Broadcast media": "What radio and television is there in {}?",
    "Constitution": "How did the constitution of {} come about?",
    "Military - note": "What are the main tasks of the armed forces of {}?",
    "Space program overview": "What does {} do in space?",
}
_TOGETHER = (
    "Summarize each of these texts in two sentences.",
    "What do the texts above have in common?",
    "Read all of it, then explain the first text in your own words.",
    "Which of these texts would you recommend to a beginner, and why?",
    "Give the most important facts of the last text.",
)


@dataclass(frozen=True)
class Document:
    """A text with its title; `kind` is article or passage."""

    source: str
    name: str
    kind: str
    title: str
    text: str

    @property
    def share(self) -> float:
        """Where it lies in [0, 1), which tells its set: by its name, or of a country's passages by the country."""
        digest = hashlib.sha256(self.name.split("#")[0].encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64


def main() -> None:
    """Write the evaluation set and the training documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--evaluate", type=Path)
    parser.add_argument("--develop", type=Path)
    parser.add_argument("--documents", type=Path)
    args = parser.parse_args()
    documents = [document for name, commit in SOURCES.items() for document in read(args.sources, name, commit)]
    kept_from = HELD_BACK if args.develop is None else DEVELOPED_ON
    if args.documents is not None:
        kept = [d for d in documents if d.share >= kept_from]
        lines = [json.dumps({"kind": d.kind, "title": d.title, "text": d.text, "source": d.source}) for d in kept]
        args.documents.write_bytes(lzma.compress(("\n".join(lines) + "\n").encode(), preset=9))
        print(f"{args.documents}: {len(kept)} documents, {sum(len(d.text) for d in kept):,} characters")
    if args.evaluate is not None:
        write_sets([d for d in documents if d.share < HELD_BACK], COUNTS, args.evaluate)
    if args.develop is not None:
        write_sets([d for d in documents if HELD_BACK <= d.share < DEVELOPED_ON], DEVELOP_COUNTS, args.develop, "dev_")


def write_sets(documents: list[Document], counts: dict[str, int], folder: Path, prefix: str = "") -> None:
    """Write the three sets of prompts made from documents."""
    tokenizer = Tokenizer.load(embedded_model())
    for name, prompts in evaluation(documents, tokenizer, counts).items():
        lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
        path = folder / f"{prefix}{name}.jsonl.xz"
        content = ("\n".join(lines) + "\n").encode()
        path.write_bytes(lzma.compress(content, preset=9))
        tokens = sorted(len(tokenizer.encode(prompt, add_special=False)) for prompt in prompts)
        print(
            f"{path}: {len(prompts)} prompts of {tokens[0]} to {tokens[-1]} tokens (median "
            f"{tokens[len(tokens) // 2]}); SHA-256 of the text {hashlib.sha256(content).hexdigest()}"
        )


def read(mirrors: Path, name: str, commit: str) -> Iterator[Document]:
    """Yield a repository's documents."""
    place = mirrors / name / "repo"
    place = place / ".git" if (place / ".git").exists() else place

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(place), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace").stdout

    paths = git("ls-tree", "-r", "--name-only", commit).splitlines()
    if name.startswith("factbook"):
        for path in paths:
            if path.count("/") == 1 and path.endswith(".json") and not path.startswith("meta"):
                yield from _country(path, json.loads(git("show", f"{commit}:{path}")))
    elif name.startswith(("GSA", "18F")):
        folder = "content/news/" if name.startswith("GSA") else "content/posts/"
        for path in paths:
            if path.startswith(folder) and path.endswith(".md"):
                yield from _post(name, path, git("show", f"{commit}:{path}"))
    else:
        body = git("show", f"{commit}:18304-8.txt").partition("*** START")[2].partition("*** END")[0]
        for number, chapter in enumerate(re.split(r"\n\s*CHAPTER [IVXLC]+\s*\n", body)[2:]):
            title, _, text = chapter.strip().partition("\n")
            paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
            yield from _cut(
                name, f"chapter-{number}", title.strip().capitalize(), "\n\n".join(filter(None, paragraphs))
            )


def _country(path: str, content: dict[str, dict[str, dict[str, object]]]) -> Iterator[Document]:
    names = content.get("Government", {}).get("Country name", {})
    short = names.get("conventional short form", names.get("conventional long form", {}))
    country = plain(str(short.get("text", ""))) if isinstance(short, dict) else ""
    if not country or country == "none":
        return
    for section in content.values():
        for field, value in section.items():
            said = {
                key.strip(): part.get("text", "") if isinstance(part, dict) else part for key, part in value.items()
            }
            parts = [plain(str(part)) if key == "text" else f"{key}: {plain(str(part))}" for key, part in said.items()]
            text = "; ".join(part for part in parts if part)
            if len(text) > 240:
                yield Document("factbook", f"{path}#{field}", "passage", f"{country}: {field}", text)


def _post(source: str, path: str, text: str) -> Iterator[Document]:
    _, _, rest = text.partition("---\n")
    head, _, body = rest.partition("\n---\n")
    title = re.search(r"^title:\s*(.+)$", head, re.M)
    body = re.sub(r"\{\{.*?\}\}|\{%.*?%\}|\{:.*?\}", "", body, flags=re.S)
    body = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", body)
    body = re.sub(r"<[^>]+>|https?://\S+|[*_`>]{1,3}|^#+ ", "", body, flags=re.M)
    body = html.unescape(body)
    lines = [" ".join(line.split()) for line in body.splitlines()]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    if title and len(text) > 1200:
        name = plain(title.group(1).strip().strip("\"'"))
        yield from _cut(source, path, name, text)


def _cut(source: str, path: str, title: str, text: str) -> Iterator[Document]:
    """Cut a long text at paragraphs into articles of some 6,000 characters at most."""
    parts: list[str] = []
    for paragraph in text.split("\n\n"):
        if not parts or len(parts[-1]) + len(paragraph) > 6000:
            parts.append(paragraph)
        else:
            parts[-1] += "\n\n" + paragraph
    for number, part in enumerate(parts):
        if len(part) > 1200:
            yield Document(source, f"{path}#{number}", "article", title, part)


def plain(text: str) -> str:
    """Return text without markup."""
    text = re.sub(r"<(/p|br|/h\d)[^>]*>", "\n\n", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def evaluation(held: list[Document], tokenizer: Tokenizer, counts: dict[str, int]) -> dict[str, list[str]]:
    """Return the three sets of prompts, made from the documents held back."""
    rng = random.Random(28)
    articles = [d for d in held if d.kind == "article"]
    sized = [(len(tokenizer.encode(d.text, add_special=False)), d) for d in articles]
    rng.shuffle(sized)
    alone = [d for size, d in sized if 500 <= size <= 1500][: counts["articles"]]
    summaries = []
    for d in alone:
        task = rng.choice(_SUMMARISE)
        text = f"{d.title}\n\n{d.text}"
        summaries.append(f"{text}\n\n{task}" if rng.random() < 0.3 else f"{task}\n\n{text}")
    passages = [d for d in held if d.kind == "passage" and len(d.text) <= 1600]
    asked = [d for d in passages if d.title.partition(": ")[2] in _QUESTIONS]
    rng.shuffle(asked)
    questions = []
    for d in asked[: counts["passages"]]:
        country, _, field = d.title.partition(": ")
        others = [
            o for o in passages if o.title != d.title and (o.title.startswith(f"{country}:") or rng.random() < 0.1)
        ]
        five = [d, *rng.sample(others, 4)]
        rng.shuffle(five)
        shown = "\n\n".join(f"[{i}] {p.title}\n{p.text}" for i, p in enumerate(five, 1))
        question = _QUESTIONS[field].format(country)
        questions.append(f"{shown}\n\nQuestion: {question}" if rng.random() < 0.7 else f"{question}\n\n{shown}")
    deep = []
    rest = [d for size, d in sized if d not in alone] + [d for size, d in sized if d in alone]
    goals = [2000 + 4000 * i // (counts["deep"] - 1) for i in range(counts["deep"])]
    for goal in goals:
        texts: list[str] = []
        while len(tokenizer.encode("\n\n".join(texts), add_special=False)) < goal - 300:
            d = rest.pop(0)
            rest.append(d)
            texts.append(f"{d.title}\n\n{d.text}")
        deep.append("\n\n---\n\n".join(texts) + "\n\n" + rng.choice(_TOGETHER))
    return {"articles": summaries, "passages": questions, "deep": deep}


if __name__ == "__main__":
    main()
