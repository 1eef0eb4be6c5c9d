"""The recipe for transformers in docs/engines.md works as printed, in an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("transformers", reason="transformers is in .venv-engines only: make test-engines")

from tests.engines.model import make_llama

if TYPE_CHECKING:
    from tests.engines.node import Node

_PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


@pytest.mark.timeout(240)
def test_the_recipe_for_transformers(tmp_path: Path, node: Node) -> None:
    section = _PAGE.read_text().split("\n## transformers\n")[1]
    recipe = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert recipe is not None
    (tmp_path / "recipe.py").write_text(recipe[1].replace("127.0.0.1:7070", node.target))
    model = make_llama(tmp_path / "llama")
    said = [
        subprocess.run(
            [sys.executable, "recipe.py", str(model)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert said[0].startswith("0 tokens came from the node")
    assert "error=None" in said[0]
    assert said[1].startswith("448 tokens came from the node")
