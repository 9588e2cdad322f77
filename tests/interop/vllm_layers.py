"""The scheme vLLM's own Quark config gives layers. Arguments: folder, joined layers (JSON), prefixes."""

import json
import sys
from pathlib import Path

from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig

folder, joined, *prefixes = sys.argv[1:]
config = QuarkConfig.from_config(json.loads((Path(folder) / "config.json").read_text())["quantization_config"])
config.packed_modules_mapping = json.loads(joined)  # as its model loader does


def scheme(prefix: str) -> str:
    try:
        _, _, method = config.get_quant_method_target(prefix, LinearBase)
        if method is UnquantizedLinearMethod:
            return "dense"
        return config.get_scheme_cls(LinearBase, prefix)[2].__name__
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


sys.stdout.write("\n" + json.dumps({prefix: scheme(prefix) for prefix in prefixes}) + "\n")
