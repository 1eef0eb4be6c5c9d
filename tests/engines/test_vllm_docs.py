"""The recipe of docs/engines.md does what it says, in an empty folder, as it stands there."""

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


def test_the_recipe_for_vllm(tmp_path: Path, model: Path, node: Node) -> None:
    text = (ROOT / "docs" / "engines.md").read_text()
    recipe = re.search(r"```python\n(import sys.*?)```", text, re.DOTALL)
    assert recipe is not None
    (tmp_path / "recipe.py").write_text(recipe[1].replace("127.0.0.1:7070", node.target))
    small = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = subprocess.run(
        [sys.executable, "recipe.py", str(model)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env=os.environ | small | {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "640 tokens came from the node" in run.stdout
