"""The recipes of docs/engines.md for vLLM work as printed, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engines.node import Node

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def recipe(connector: str, node: Node) -> str:
    """The page's program that configures vLLM with this connector."""
    text = (ROOT / "docs" / "engines.md").read_text()
    (found,) = [
        one for one in re.findall(r"```python\n(import sys.*?)```", text, re.DOTALL) if connector in one
    ]
    return str(found).replace("127.0.0.1:7070", node.target)


def run(program: str, folder: Path, model: Path, **environment: str) -> str:
    (folder / "recipe.py").write_text(program)
    small = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **environment}
    ended = subprocess.run(
        [sys.executable, "recipe.py", str(model)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        env=os.environ | small | {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_the_recipe_for_vllm_s_connector(tmp_path: Path, model: Path, node: Node) -> None:
    said = run(recipe('"TriggerKvConnector"', node), tmp_path, model, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert "640 tokens came from the node" in said


@pytest.mark.timeout(240)
def test_the_recipe_for_a_tier(tmp_path: Path, model: Path, node: Node) -> None:
    """As printed; but vLLM's worker would copy with CUDA, and another one takes its place."""
    for_gpus = '"cpu_bytes_to_use": 1 << 30,'
    for_cpus = '"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.cpu_pool",' + for_gpus
    program = recipe('"TriggerKvTieringConnector"', node)
    assert for_gpus in program
    program = program.replace(for_gpus, for_cpus)
    program = program.replace(
        "model=sys.argv[1],", "model=sys.argv[1], enforce_eager=True,"
    )  # to compile takes long
    before = _pools()
    first, second = (run(program, tmp_path, model, PYTHONPATH=str(ROOT)) for _ in range(2))
    answers = [re.search(r"(\d+) tokens came from the node; (.*)", said) for said in (first, second)]
    assert answers[0] is not None
    assert answers[1] is not None
    assert (answers[0][1], answers[1][1]) == ("0", "640")
    assert answers[0][2] == answers[1][2]
    assert _pools() <= before  # it ends in order: vLLM's pool goes, once nothing of ours uses it


def _pools() -> set[Path]:
    return set(Path("/dev/shm").glob("vllm_offload_*"))
