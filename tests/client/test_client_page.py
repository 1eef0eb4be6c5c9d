"""The example in `docs/client.md`, run as printed, and what `docs/eight-steps.md` says about the steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.steps import Step

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def fenced(page: str, kind: str) -> list[str]:
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def printed_by(example: str) -> str:
    """The output of a program, run with warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", [0, 1], ids=["put and get", "a returning user"])
def test_an_example_of_the_page_runs_as_printed_and_prints_what_it_says(
    number: int, node: NodeProcess
) -> None:
    example, printed = (fenced("client.md", kind)[number] for kind in ("python", "text"))
    assert printed_by(example.replace("127.0.0.1:7070", node.target)) == printed


def test_the_example_with_asyncio_runs_as_printed(node: NodeProcess) -> None:
    example = fenced("client.md", "python")[2]
    assert printed_by(example.replace("127.0.0.1:7070", node.target)) == ""


def test_the_examples_of_a_users_own_tests_run_as_printed() -> None:
    *_, in_memory, in_a_process = fenced("client.md", "python")
    *_, printed = fenced("client.md", "text")
    assert printed_by(in_memory) == printed
    assert printed_by(in_a_process) == ""


def test_the_page_of_the_eight_steps_names_every_step_with_its_number() -> None:
    text = (DOCS / "eight-steps.md").read_text()
    rows = dict(re.findall(r"^\| (\d) \|(.*)\|$", text, re.MULTILINE))
    assert sorted(rows) == list("12345678")
    for step in Step:
        assert f"`{step.sentence}`" in rows[str(step.number)]
