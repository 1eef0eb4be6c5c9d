"""Sets the attacks' durations and their tests' timeouts; the tests of a module share a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hostile.beside import SECONDS, SHORT_S, Beside, Neighbour
from tests.hostile.sessions import make_large_sessions

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "hostile":
            item.add_marker(pytest.mark.timeout(120 + 4 * SECONDS))


@pytest.fixture(scope="module")
def one_beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    """The node of a module, attacked in one test after the other."""
    with Beside(tmp_path_factory.mktemp("beside")) as beside:
        yield beside


def seconds_of(request: pytest.FixtureRequest) -> float:
    """How long an attack goes on: those of one test, if they are more than two, have the time of two.

    So all of them, a minute each, take less than an hour.
    """
    test = request.function
    many = sum(getattr(one, "function", None) is test for one in request.session.items)
    return max(SECONDS * min(1.0, 2 / many), min(SECONDS, SHORT_S))


@pytest.fixture
def beside(one_beside: Beside, request: pytest.FixtureRequest) -> Beside:
    """A neighbour that gets blocks over gRPC."""
    return one_beside.begin(Neighbour.get_inline, seconds_of(request))


@pytest.fixture
def putting(one_beside: Beside, request: pytest.FixtureRequest) -> Beside:
    """A neighbour that puts and gets over the fabric."""
    return one_beside.begin(Neighbour.put_and_get, seconds_of(request))


@pytest.fixture(scope="module")
def large_sessions(one_beside: Beside) -> None:
    """Give the attacker sessions of the maximum length."""
    make_large_sessions({"port": one_beside.port, "token": "evil"})
