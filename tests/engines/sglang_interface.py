"""SGLang's real storage interface out of its wheel, without the rest of SGLang.

`import sglang` needs Triton and the CUDA stack, and changes transformers while it is at it. The files that define the
interface and load its backends need neither, so the packages around them are put up bare: with their folder, and
without running their `__init__`.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

_BARE = ("sglang", "sglang.srt", "sglang.srt.mem_cache")


def load() -> None:
    """Make the files of the interface importable; skips where the wheel is not installed."""
    if "sglang" in sys.modules:
        return
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is in .venv-engines only: make test-engines", allow_module_level=True)
    root = Path(spec.submodule_search_locations[0]).parent
    for name in _BARE:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        package.__spec__ = ModuleSpec(name, None, is_package=True)  # others may look for it
        sys.modules[name] = package
