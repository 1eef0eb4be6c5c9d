"""Tests with real engines; they need .venv-engines, and are not collected without it (`make test-engines`)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.engines.chats import Chats
from tests.engines.engine import Engine
from tests.engines.model import make_gemma, make_llama
from tests.engines.node import GuardedNode, Node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

collect_ignore_glob = ["test_vllm*.py"] if find_spec("vllm") is None else []


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def model(place: Path) -> Path:
    return make_llama(place / "llama")


@pytest.fixture(scope="session")
def node(place: Path) -> Iterator[Node]:
    with Node(place / "node") as node:
        yield node


@pytest.fixture(scope="session")
def guarded(place: Path) -> Iterator[GuardedNode]:
    with GuardedNode(place / "guarded") as node:
        yield node


@pytest.fixture(scope="session")
def chats(place: Path, model: Path) -> Chats:
    """Conversations with an engine without our store."""
    with Engine(place, "plain", model) as plain:
        return Chats.held_with(plain)


@pytest.fixture(scope="session")
def gemma(place: Path) -> tuple[Path, Chats]:
    """A model with two kinds of layers, and the conversations with it."""
    model = make_gemma(place / "gemma")
    with Engine(place, "plain gemma", model) as plain:
        return model, Chats.held_with(plain)
