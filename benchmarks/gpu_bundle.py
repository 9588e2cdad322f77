"""Pack the embedded model, its draft and questions as token ids, for a GPU machine that has torch and nothing else.

    python benchmarks/gpu_bundle.py --questions ../shared/data/gsm8k/test.jsonl.xz --count 200 --out bundle.pt
    split -b 60M bundle.pt bundle.part.        # where a transfer takes no large files; `cat bundle.part.* > bundle.pt`

The target's weights stay in the GGUF's own blocks; `gpu.py --bundle bundle.pt` expands them on the device.
"""

import argparse
from pathlib import Path

import torch

from gpu_models import Bundle, weights_of
from slipstream.checkpoint.embedded import embedded_draft, embedded_model
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.kernels import select
from slipstream.models.load import captured_layers, load_draft, load_target
from slipstream.train.data.prompts import read_prompts


def main() -> None:
    """Write the bundle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, action="append", help="repeatable: as many of each")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cpu")
    ops = select(device, "reference")
    model = embedded_model()
    target = load_target(open_checkpoint(model), torch.float32, device, ops=ops)
    draft = load_draft(open_checkpoint(embedded_draft()), target, torch.bfloat16, target.spec.max_position)
    tokenizer = Tokenizer.load(model)
    share = -(-args.count // len(args.questions))
    chats = [messages for path in args.questions for messages in read_prompts(path)[:share]]
    prompts = [tokenizer.encode_chat(messages) for messages in chats[: args.count]]
    bundle = Bundle(
        target_spec=target.spec,
        target_weights=weights_of(target),
        draft_spec=draft.spec,
        draft_weights={n: w for n, w in weights_of(draft).items() if not n.startswith("embed_tokens")},
        draft_tokens=draft.token_ids_V,
        captured_layers=captured_layers(draft.spec, target.spec),
        prompts=prompts,
        end_tokens=tuple(tokenizer.eos_token_ids),
    )
    torch.save(bundle, args.out)
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.1f} MiB, {len(prompts)} prompts")


if __name__ == "__main__":
    main()
