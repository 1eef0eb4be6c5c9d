"""The index by itself: growth, failures, and its callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.errors import ReadOnly, StorageError
from kvstore.storage import index as index_module
from kvstore.storage.completion_queue import CompletionQueue
from kvstore.storage.doubts import Doubts
from kvstore.storage.index import Entry, Index
from tests.storage.rig import FINGERPRINT, TENANT, StoreRig, key

if TYPE_CHECKING:
    from pathlib import Path


def entry(number: int) -> Entry:
    return Entry(number * 4096, 1, 0, number, 0, FINGERPRINT)


def test_a_full_map_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "INDEX_MAP_BYTES_MIN", 256 << 10)
    index = Index.empty(tmp_path / "index", 1)
    value = bytes(1000)
    for first in range(0, 1000, 100):

        def put(transaction: Any, first: int = first) -> None:
            for number in range(first, first + 100):
                transaction.put(key(number), value, db=index.sessions)

        index.write(put)
    with index.reading() as transaction:
        assert transaction.stat(index.sessions)["entries"] == 1000
        assert transaction.get(key(999), db=index.sessions) == value
    index.abandon()


def test_a_batch_too_large_for_any_growth_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "INDEX_MAP_BYTES_MIN", 64 << 10)
    index = Index.empty(tmp_path / "index", 1)

    def put(transaction: Any) -> None:
        for number in range(2000):
            transaction.put(key(number), bytes(1000), db=index.sessions)

    with pytest.raises(StorageError, match="does not fit"):
        index.write(put)
    with index.reading() as transaction:
        assert transaction.stat(index.sessions)["entries"] == 0
    index.abandon()


def test_an_unwritable_index_stops_puts_and_not_gets(fake: StoreRig, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.put(1, b"before")

    def fail(*_: object) -> None:
        raise StorageError("The index could not be written.")

    monkeypatch.setattr(Index, "publish_rows", fail)
    monkeypatch.setattr(Index, "write", fail)
    assert isinstance(fake.put(2, b"during").error, ReadOnly)
    assert isinstance(fake.put(3, b"after").error, ReadOnly)
    assert fake.get(1)[1] == b"before"
    fake.store.quarantine(TENANT, key(1), fake.get(1)[0].generation)  # cannot be recorded, and doesn't raise


class KilledError(Exception):
    """The process was killed."""


@pytest.mark.parametrize("what", ["remove", "publish"])
def test_a_place_is_noted_before_its_block_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    index = Index.empty(tmp_path / "index", 1)
    block, before, after = (TENANT, key(1)), entry(1), entry(2)
    index.publish([(block, before)])

    def die(*_: object) -> None:
        raise KilledError

    for change in ("put", "remove"):
        monkeypatch.setattr(index._table, change, die)
    with pytest.raises(KilledError):
        index.remove([block], spared=[]) if what == "remove" else index.publish(
            [(block, after)], left=[before]
        )
    with index.reading() as transaction:
        assert transaction.stat(index.erased)["entries"] == 1
    assert index.lookup([block]) == [before]
    index.abandon()


def test_doubts_are_removed_with_their_blocks(tmp_path: Path) -> None:
    index = Index.empty(tmp_path / "index", 1)
    doubts = Doubts(index)
    blocks = [((TENANT, key(number)), entry(number)) for number in range(1, 5)]
    index.publish(blocks)
    doubts.add(range(1, 5))
    index.publish([(blocks[0][0], entry(11)), blocks[1]])
    assert doubts.of(range(20)) == {2, 3, 4}
    index.remove([blocks[2][0], (TENANT, key(100))])
    assert doubts.of(range(20)) == {2, 4}
    index.remove_generations([4])
    assert doubts.of(range(20)) == {2}
    assert len(doubts) == 1
    index.abandon()


def test_a_callback_that_raises_loses_no_results_of_others() -> None:
    completions: CompletionQueue[int] = CompletionQueue()
    heard: list[int] = []

    def raising(_: object) -> None:
        raise RuntimeError("the callback's own fault")

    completions.promised = 3
    completions.add(raising, 1)
    completions.add(heard.extend, 2)
    completions.add(heard.extend, 3)
    with pytest.raises(RuntimeError):
        completions.deliver()
    completions.deliver()
    assert heard == [2, 3]
    assert completions.promised == 0
    assert not completions


def test_the_file_is_as_long_as_it_says_whatever_a_transaction_freed(tmp_path: Path) -> None:
    index = Index.empty(tmp_path / "index", 1)

    def put_and_take_back(transaction: Any) -> None:
        for number in range(50):
            transaction.put(key(number), bytes(3000), db=index.sessions)
        for number in range(50):
            transaction.delete(key(number), db=index.sessions)

    index.write(put_and_take_back)
    used = (index._env.info()["last_pgno"] + 1) * index._env.stat()["psize"]
    assert (tmp_path / "index" / "data.mdb").stat().st_size >= used
    index.abandon()
    Index(tmp_path / "index", 1).abandon()
