"""Training on a target that is split over two processes."""

import torch

from slipstream.train.data.corpus import Text, join
from slipstream.train.draft.packing import Packer
from slipstream.train.run.phases import Paths, TrainingRun
from slipstream.train.run.plan import Plan, Speeds
from slipstream.train.run.recipe import make_recipe
from slipstream.train.run.trial import with_sizes
from training import RECIPE, write_target_folder


def losses(run, corpus):
    draft, vocab = run.start(corpus)
    objective = run.objective(draft, vocab)
    batch = Packer(corpus, 64, 2, 3, 0).batch(0)
    out = objective(batch)
    out.loss.backward()
    gradients = {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}
    return out, gradients


def test_a_split_target_writes_the_same_texts_and_teaches_the_same(tmp_path):
    write_target_folder(tmp_path / "target", unused_tokens=1)
    (tmp_path / "train.jsonl").write_text('{"question": "How many is 3 and 4?"}\n{"question": "And 5 and 6?"}\n')
    content = {
        **RECIPE,
        "files": {"prompts": ["train.jsonl"]},
        "data": {**RECIPE["data"], "magpie": 0.0, "maths": 0.0, "second_turn": 0.0, "file_repeats": 3},
        "generate": {"rows": 4, "max_length": 360},
    }
    generator = torch.Generator().manual_seed(0)
    corpus = join(Text(torch.randint(3, 96, (30,), generator=generator).tolist(), [(8, 30)]) for _ in range(4))
    found, memory = {}, {}
    for tp in (1, 2):
        recipe, paths = make_recipe(content, "test"), Paths(tmp_path, tmp_path / f"work-{tp}")
        run = TrainingRun(tmp_path / "target", recipe, paths, torch.device("cpu"), tp)
        try:
            found[tp] = (run.generate(lambda *_: None), *losses(run, corpus))
            plan = Plan({}, recipe, Speeds(800.0, 0.9, 1.4, 0.5, 0.4, 0.7), False, 3000, {})
            memory[tp] = with_sizes(plan, run).memory_bytes
        finally:
            run.close()
    assert memory[2] < memory[1], "each device holds its part"
    (whole, one, gradients), (parts, two, split_gradients) = found[1], found[2]
    assert whole.ids.tolist() == parts.ids.tolist()
    torch.testing.assert_close(one.loss, two.loss, rtol=1e-5, atol=0)
    assert torch.equal(one.agreed_J, two.agreed_J)
    assert gradients.keys() == split_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(split_gradients[name], gradient, rtol=1e-3, atol=1e-6)
