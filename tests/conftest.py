"""For all tests: the slow ones run last, in the order wheel, then README."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_collection_modifyitems"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move what takes long behind everything else; README's commands come last of all."""

    def rank(item: pytest.Item) -> int:
        if item.get_closest_marker("slow") is None:
            return 0
        return 2 if item.path.name == "test_readme.py" else 1

    items.sort(key=rank)
