"""Reads a node's objects by their keys, and compares them with those that a clean engine has computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.client import Client

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

OBJECT_BYTES = 4 * 2 * 32 * 4 * 32 * 4  # of 4 layers, K and V of 32 tokens, 4 heads of 32 numbers each
WAIT_S = 30.0
# Here a page has the same bytes in batches and chunks of any size; elsewhere these may round otherwise, in the last
# digits. What is computed from lost blocks differs in the first.
TOLERANCE = 1e-3


def layout_of(digests: Path) -> bytes:
    """The layout of an engine whose pages were recorded in this file."""
    words = next(line.split() for line in digests.read_text().splitlines() if line.startswith("layout"))
    return bytes.fromhex(words[1])


def read_pages(target: str, layout: bytes, keys: Collection[str]) -> dict[str, bytes]:
    """The node's bytes under these keys."""
    names = sorted(keys)
    with Client(target, layout=layout) as client:
        client.status(wait_s=WAIT_S)
        wanted = [(bytes.fromhex(key), OBJECT_BYTES) for key in names]
        got = client.get_many_inline(wanted, timeout_s=WAIT_S)
        return {key: page for key, page in zip(names, got, strict=True) if isinstance(page, bytes)}


def difference(one: bytes, other: bytes) -> float:
    """The largest difference between two pages, relative to the largest number in the second one."""
    numbers, others = np.frombuffer(one, np.float32), np.frombuffer(other, np.float32)
    with np.errstate(invalid="ignore"):
        return float(np.abs(numbers - others).max() / np.abs(others).max())


def check_pages(stored: Mapping[str, bytes], clean: Mapping[str, bytes]) -> float:
    """Every stored page is the clean one of its key; returns the largest difference."""
    strange = stored.keys() - clean.keys()
    assert not strange, f"{len(strange)} of {len(stored)} pages are of no tokens that a clean engine has seen"
    far = [difference(page, clean[key]) for key, page in stored.items()]
    wrong = [by for by in far if not by < TOLERANCE]
    assert not wrong, f"{len(wrong)} of {len(stored)} pages are {min(wrong):.1e} to {max(wrong):.1e} off"
    return max(far, default=0.0)
