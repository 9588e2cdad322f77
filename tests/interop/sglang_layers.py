"""The scheme SGLang's own Quark config gives layers. Arguments: folder, joined layers (JSON), prefixes.

SGLang's package imports image and CUDA libraries that its configuration code does not use; they are stood in for.
"""

import importlib.abc
import importlib.machinery
import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

from transformers import AutoProcessor, ProcessorMixin  # noqa: F401  (before torchvision seems to be there)
from transformers.utils import is_torchvision_available

is_torchvision_available()


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    absent = frozenset({"torchvision", "torchaudio", "torchcodec", "sgl_kernel", "flashinfer", "aiter"})

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in self.absent:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(StandIn())
from sglang.srt.layers.quantization.quark.quark import QuarkConfig  # noqa: E402

folder, joined, *prefixes = sys.argv[1:]
quantization = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
quantization["packed_modules_mapping"] = json.loads(joined)  # as its model loader does
config = QuarkConfig.from_config(quantization)


def scheme(prefix: str) -> str:
    if config.is_linear_unquantized(prefix):
        return "dense"
    spec = config._find_matched_config(prefix, MagicMock())
    weight, inputs = spec["weight"], spec["input_tensors"]
    if config._is_fp8_w8a8(weight, inputs):
        return "QuarkW8A8Fp8"
    return "QuarkW4A4MXFP4" if config._is_mx_fp4(weight, inputs) else "unsupported"


sys.stdout.write("\n" + json.dumps({prefix: scheme(prefix) for prefix in prefixes}) + "\n")
