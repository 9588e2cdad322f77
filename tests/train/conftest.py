import numpy as np
import pytest
import torch

from slipstream.checkpoint.spec import ModelSpec, RopeSpec
from slipstream.models.llama import LlamaDecoder
from slipstream.train.corpus import Text, join
from slipstream.train.objective import DraftShape, Objective, new_draft
from slipstream.train.vocab import choose_vocab

EOS = 2


def tiny_spec(vocab_size=96):
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_eps=1e-5,
        rope=RopeSpec(theta=10_000.0, rotary_dim=8),
        max_position=256,
        tie_embeddings=True,
        eos_token_ids=(EOS,),
    )


def tiny_target(seed=0, scale=0.2, vocab_size=96):
    model = LlamaDecoder(tiny_spec(vocab_size))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, scale, generator=generator)
    return model.requires_grad_(False).eval()


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def target():
    return tiny_target()


def random_texts(count, seed=0, low=12, high=40, vocab_size=96):
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        length = int(rng.integers(low, high))
        start = int(rng.integers(3, length - 6))
        texts.append(Text(rng.integers(3, vocab_size, length).tolist(), [(start, length)]))
    return texts


def objective_for(target, texts, draft_vocab=48, seed=0, **shape):
    corpus = join(texts)
    vocab = choose_vocab(corpus, target.spec.vocab_size, draft_vocab, forced=[0, 1, EOS])
    spec = DraftShape(vocab_size=draft_vocab, **shape).spec(target.spec)
    draft = new_draft(spec, target, vocab, seed)
    return Objective(target, draft, vocab), corpus, vocab
