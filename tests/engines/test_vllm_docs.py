"""The recipes of docs/engines.md for vLLM work as printed, in an empty folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Client
from tests.engines.node import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engines.node import Node

ROOT = Path(__file__).resolve().parent.parent.parent

# A busy machine needs minutes to import vLLM, to compile and to store.
RUN_S, END_S = 300.0, 20.0
ENGINE = f"recipe {uuid.uuid4()}"  # names the pool of host memory
TOKENS_OF_BLOCK = 128  # by default, for CPUs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(RUN_S + 60)]


def recipe(connector: str, node: Node) -> str:
    """The page's program that configures vLLM with this connector."""
    text = (ROOT / "docs" / "engines.md").read_text()
    (found,) = [
        one for one in re.findall(r"```python\n(import sys.*?)```", text, re.DOTALL) if connector in one
    ]
    return str(found).replace("127.0.0.1:7070", node.target)


def run(
    program: str, folder: Path, model: Path, may_end: Callable[[], bool] = lambda: True, **environment: str
) -> str:
    """Run it, and press Enter once it may end. Whatever it leaves is ended and removed, also if it fails."""
    (folder / "recipe.py").write_text(program)
    small = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **environment}
    said, log = folder / "said", folder / "log"
    with said.open("w") as output, log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "recipe.py", str(model)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            text=True,
            cwd=folder,
            env=os.environ | small | {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"},
            start_new_session=True,
        )
    try:
        until(lambda: process.poll() is not None or may_end(), "the blocks are stored", RUN_S)
        process.communicate("\n", RUN_S)
        assert process.returncode == 0, log.read_text()[-3000:]
        assert not pools()  # it ends in order: vLLM's pool goes, once nothing of ours uses it
    finally:
        end(process)
        for pool in pools():
            pool.unlink()
    return said.read_text()


def end(process: subprocess.Popen[str]) -> None:
    """End it with all that it has started. Python's own helper outlives SIGTERM, and removes shared memory last."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, AssertionError):
            os.killpg(process.pid, number)
            until(lambda: has_ended(process), "all have ended", END_S)
    process.communicate()


def has_ended(process: subprocess.Popen[str]) -> bool:
    process.poll()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 0)
        return False
    return True


def test_the_recipe_for_vllm_s_connector(tmp_path: Path, model: Path, node: Node) -> None:
    said = run(recipe('"TriggerKvConnector"', node), tmp_path, model, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert "640 tokens came from the node" in said


@pytest.mark.timeout(2 * RUN_S + 60)
def test_the_recipe_for_a_tier(tmp_path: Path, model: Path, node: Node) -> None:
    """As printed; but vLLM's worker would copy with CUDA, and another one takes its place."""
    for_gpus = '"cpu_bytes_to_use": 1 << 30,'
    for_cpus = '"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.cpu_pool",' + for_gpus
    program = recipe('"TriggerKvTieringConnector"', node)
    assert for_gpus in program
    program = program.replace(for_gpus, for_cpus)
    for before, after in (
        ("model=sys.argv[1],", "model=sys.argv[1], enforce_eager=True,"),  # to compile takes long
        ('"kv_role"', f'"engine_id": "{ENGINE}", "kv_role"'),
    ):
        assert before in program
        program = program.replace(before, after)
    with Client(node.target, layout=b"only counts") as client:
        stored = client.status().blocks

        def is_stored() -> bool:
            return client.status().blocks >= stored + 640 // TOKENS_OF_BLOCK

        first = run(program, tmp_path, model, is_stored, PYTHONPATH=str(ROOT))
    second = run(program, tmp_path, model, PYTHONPATH=str(ROOT))
    answers = [re.search(r"(\d+) tokens came from the node; (.*)", said) for said in (first, second)]
    assert answers[0] is not None
    assert answers[1] is not None
    assert (answers[0][1], answers[1][1]) == ("0", "640")
    assert answers[0][2] == answers[1][2]


def pools() -> list[Path]:
    return list(Path("/dev/shm").glob(f"vllm_offload_{ENGINE}*"))
