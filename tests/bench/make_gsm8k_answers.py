"""Makes data/gsm8k_answers.json: 200 answers of every shape, with the scores and prompts of lm-eval itself.

Run in an environment that has lm-eval (this file was made with 0.4.13): `python make_gsm8k_answers.py`.
"""

import json
import random
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

OUT = Path(__file__).parent / "data" / "gsm8k_answers.json"
SHAPES = [
    "{a} and {b} make {n}.\n#### {n}",
    "#### {n}",
    "The total is {n}. #### {n}.",
    "The answer is {n}.",
    "The answer is **{n}**",
    "She pays ${n}.00 in all.\n#### {n}.00",
    "It costs ${n}",
    "#### ${n}",
    "#### {n} apples",
    "#### {c}",
    "In total {c} people came.",
    "####{n}",
    "#### -{n}",
    "The change is -{n}",
    "#### {n}\n\n#### {a}",
    "First {n}, then {a}",
    "{a} + {b} = {n}\n#### {a}",
    "I do not know.",
    "",
    "...",
    "$",
    "#### ",
    "####  {n}",
    "#### {n},",
    "#### {n}..",
    "#### .{n}",
    "Answer: {n}%",
    "so {n}/{a} of them, which is {n}",
    "{n}, {n}, {n}.",
    "\n\n{n}\n",
    "#### {n}\n#### {n}\n",
    "It is {n} o'clock, 1,2,3",
    "#### N{n}",
    "$1,0{n}.50",
    "minus - {n}",
    "#### \u0664\u0662",
    "Result: {n}\u00a0\u20ac",
    "#### {n} #### {b}",
    "THE ANSWER IS {n}.",
    "<b>{n}</b>",
]


class Stored(LM):
    """Answers from a list, and remembers what it was asked."""

    def __init__(self, answers, chat):
        super().__init__()
        self.answers, self.asked, self.chat = answers, [], chat

    def generate_until(self, requests, disable_tqdm=False):
        self.asked = [request.args[0] for request in requests]
        return [self.answers[request.doc_id] for request in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood

    @property
    def tokenizer_name(self):
        return "stored"

    def chat_template(self, chat_template=False):
        return ""

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return json.dumps([{"role": m["role"], "content": m["content"]} for m in chat_history])


def documents(rng, count):
    made = []
    for _ in range(count):
        a, b = rng.randrange(2, 900), rng.randrange(2, 900)
        gold = rng.choice([str(a + b), f"{(a + b) * 10:,}", str(-(a + b)), f"{a + b}.5"])
        question = f"A shop sold {a} pens and then {b} more. How many is that?"
        made.append({"question": question, "answer": f"{a} and {b} are added.\n#### {gold}"})
    return made


def main():
    rng = random.Random(7)
    train, test = documents(rng, 40), documents(rng, 200)
    answers = []
    for index, document in enumerate(test):
        gold = document["answer"].split("#### ")[1]
        plain = gold.replace(",", "")
        value = plain if rng.random() < 0.8 else str(rng.randrange(1, 5000))
        comma = f"{int(value):,}" if value.lstrip("-").isdigit() else value
        shape = SHAPES[index % len(SHAPES)]
        answers.append(shape.format(n=value, c=comma, a=rng.randrange(100), b=rng.randrange(100)))
    yaml = Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml"
    prompts = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in (("train", train), ("test", test)):
            (Path(folder) / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {name: str(Path(folder) / f"{name}.jsonl") for name in ("train", "test")}
        task = {"include": str(yaml), "task": "gsm8k_stored", "dataset_path": "json", "dataset_name": None}
        task |= {"dataset_kwargs": {"data_files": files}}
        (Path(folder) / "task.yaml").write_text(json.dumps(task))
        manager = TaskManager(include_path=folder)
        for shots, chat in ((5, False), (10, False), (5, True)):
            model = Stored(answers, chat)
            result = lm_eval.simple_evaluate(
                model=model,
                tasks=["gsm8k_stored"],
                num_fewshot=shots,
                apply_chat_template=chat,
                task_manager=manager,
                bootstrap_iters=0,
            )
            prompts[f"{shots}-{'chat' if chat else 'text'}"] = model.asked[:3]
    samples = result["samples"]["gsm8k_stored"]
    scores = {name: [None] * len(test) for name in ("strict-match", "flexible-extract")}
    taken = {name: [None] * len(test) for name in scores}
    for sample in samples:
        scores[sample["filter"]][sample["doc_id"]] = bool(sample["exact_match"])
        taken[sample["filter"]][sample["doc_id"]] = sample["filtered_resps"][0]
    OUT.parent.mkdir(exist_ok=True)
    content = {
        "lm_eval": lm_eval.__version__,
        "train": train,
        "test": test,
        "answers": answers,
        "scores": scores,
        "extracted": taken,
        "prompts": prompts,
        "totals": {name: result["results"]["gsm8k_stored"][f"exact_match,{name}"] for name in scores},
    }
    OUT.write_text(json.dumps(content, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
