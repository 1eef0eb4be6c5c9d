"""The examples for engines, run as printed, each with a node and, for LMCache, two servers of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.examples.printed import check, run

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch", reason="torch is in .venv-engines only: make test-engines")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "LMCACHE_TRACK_USAGE": "false",
    "TORCHDYNAMO_DISABLE": "1",  # to compile takes long; test_vllm_docs.py has an engine that does
    "VLLM_USE_AOT_COMPILE": "0",
}
NAMES = ("transformers_chat.py", "vllm_chat.py", "lmcache/chat.py")
# vLLM for CPUs fails on llvmlite, which LMCache imports; tests/engines/child.py says how.
FOR_LMCACHE = """try:
    from llvmlite.binding import ffi
except ImportError:  # of the node's environment, which needs none of it
    pass
else:
    ffi.lib._fntab["__dict__"] = {}
"""


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_as_printed(name: str, model: Path, tmp_path: Path) -> None:
    more = dict(SMALL)
    if name.startswith("lmcache"):
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(FOR_LMCACHE)
        more["PYTHONPATH"] = str(tmp_path / "site")
    check(name, run(name, tmp_path, words={"MODEL": str(model)}, timeout_s=540, **more))
