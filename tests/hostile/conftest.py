"""Attacks take as long as they are told to, and their tests may."""

from __future__ import annotations

import pytest

from tests.hostile.beside import SECONDS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "hostile":
            item.add_marker(pytest.mark.timeout(120 + 4 * SECONDS))
