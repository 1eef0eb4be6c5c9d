"""Clusters that tests use up, one each: the next is made while a test runs with the one before.

A cluster orders no sessions for its first five seconds, and etcd and nodes take a second or two: tests would spend
these waiting.

What always holds: a test's cluster is its own, and is ended after the test. As many are made as tests ask for, each in
a folder of its own.
What it doesn't do: keep what a test changes in this process, such as its environment, from the next one.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

__all__ = ["Ahead", "made_ahead"]


T = TypeVar("T")


class Ahead(Generic[T]):
    """What a module's tests get by a fixture, made by `make` in a folder and with a stack of its own."""

    def __init__(
        self,
        request: pytest.FixtureRequest,
        folders: pytest.TempPathFactory,
        fixture: str,
        make: Callable[[Path, ExitStack], T],
    ) -> None:
        """Make none yet; `fixture` is the name by which the tests of `request`'s module ask for one."""
        self._folders, self._name, self._make = folders, fixture, make
        self._left = sum(
            fixture in getattr(item, "fixturenames", ()) and item.path == request.path
            for item in request.session.items
        )
        self._thread = ThreadPoolExecutor(1)
        self._next: Future[tuple[T, ExitStack]] | None = None

    def _made(self) -> tuple[T, ExitStack]:
        folder, stack = self._folders.mktemp(self._name), ExitStack()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)  # a module's drives would be gigabytes
        try:
            return self._make(folder, stack), stack  # which tests add nodes to
        except BaseException:
            stack.close()
            raise

    def _begin(self) -> Future[tuple[T, ExitStack]]:
        self._left -= 1
        return self._thread.submit(self._made)

    @contextmanager
    def one(self) -> Iterator[T]:
        """A new one, until the test has ended."""
        made, stack = (self._next or self._begin()).result()
        self._next = self._begin() if self._left > 0 else None
        with stack:
            yield made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._next is not None:
            self._next.result()[1].close()
        self._thread.shutdown()


def made_ahead(fixture: str, make: Callable[[Path, ExitStack], T]) -> Any:
    """A module's fixture that has one for each of its tests which ask for `fixture`."""

    @pytest.fixture(scope="module")
    def ahead(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead[T]]:
        with Ahead(request, tmp_path_factory, fixture, make) as made:
            yield made

    return ahead
