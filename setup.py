"""Build wheels and the CPU kernels: a plain library, one object per instruction set, no Python or torch headers.

The library is optional: without a C++ compiler the package installs and the torch path is used.
`python setup.py build_ext --inplace` builds it into the source tree; `--sanitize` adds address and
undefined-behaviour checks. The library knows nothing of Python, so a wheel serves every Python 3; one without the
library serves every platform, too. Recipes and documentation lie at the top of the clone, and inside the package in a
wheel.
"""

import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # a setuptools older than pyproject.toml asks for: enough to build in place, not to make wheels
    bdist_wheel = object

NATIVE = "src/slipstream/kernels/cpu/native"
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
# GCC 12 warns of uninitialised values inside its own header for these.
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-Wno-maybe-uninitialized"]
AVX512 += ["-Wno-uninitialized"]
# Binds to versions of the C and C++ libraries that older systems have, too; see the header.
OLD_SYSTEMS = ["-include", f"{NATIVE}/glibc.h"] if platform.system() == "Linux" else []
# Objects of the plain instruction set come first: where objects share a function, the linker keeps the first.
UNITS: dict[str, list[str]] = {"library": [], "pool": [], "repack": [], "text": [], "copies": [], "isa_portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    UNITS |= {"isa_avx2": AVX2, "isa_avx512": AVX512}
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-g0"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1"]


class BuildKernels(build_ext):
    """Compile each unit with the flags of its instruction set and link them into one library."""

    user_options: ClassVar = [*build_ext.user_options, ("sanitize", None, "add address and undefined-behaviour checks")]
    boolean_options: ClassVar = [*build_ext.boolean_options, "sanitize"]

    def initialize_options(self) -> None:
        """Leave the checks off unless they are asked for."""
        super().initialize_options()
        self.sanitize = False

    def get_ext_filename(self, fullname: str) -> str:
        """Name the library without a Python version: it knows nothing of Python."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Compile and link."""
        checks = SANITIZE if self.sanitize else []

        def compile_unit(unit: str) -> str:
            [built] = self.compiler.compile(
                [f"{NATIVE}/{unit}.cpp"],
                output_dir=self.build_temp,
                extra_postargs=[*FLAGS, *OLD_SYSTEMS, *UNITS[unit], *checks],
            )
            return built

        with ThreadPoolExecutor(os.cpu_count()) as workers:
            objects = list(workers.map(compile_unit, UNITS))
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=["-pthread", *checks],
            target_lang="c++",
        )


class BuildPackage(build_py):
    """Put recipes and documentation beside the modules, where `slipstream recipes` finds them without a clone."""

    def run(self) -> None:
        """Copy them, unless the package stays in the clone."""
        super().run()
        if self.editable_mode:
            return
        for folder in ("recipes", "docs"):
            target = Path(self.build_lib) / "slipstream" / folder
            shutil.copytree(folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("images", "*.pyc"))


class TagWheel(bdist_wheel):
    """Name a wheel for every Python 3, and for every platform where no compiler built the library."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags for Python, its binary interface, and the platform."""
        built = any(Path(self.bdist_dir or "build").rglob("libslipstream_cpu.so"))
        return "py3", "none", super().get_tag()[2] if built else "any"


setup(
    ext_modules=[Extension("slipstream.kernels.cpu.libslipstream_cpu", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage, "bdist_wheel": TagWheel},
)
