"""Deleting blocks by name.

Always holds: a block that is being deleted is not found from the call on; a deletion is reported when no header of
its name is left on the drive and, if requested, this is synced; a block whose put is in progress is deleted after it.
An erased block is reported when its bytes are overwritten as well, unless their key is destroyed.

It doesn't check references to a block: sessions keep listing deleted blocks, and find them gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.durability import Durability
from kvstore.errors import StorageError
from kvstore.limits import PAGE_BYTES
from kvstore.storage.completion_queue import CompletionQueue
from kvstore.storage.eviction.types import Reason
from kvstore.storage.index_layout import record_pages
from kvstore.storage.items import DeleteDone, DeleteItem, DeletesDone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.storage.block_writes import Puts
    from kvstore.storage.eviction_events import Keeping
    from kvstore.storage.scrubs import Scrubs
    from kvstore.storage.writes import Writes

__all__ = ["Deletes"]


class Deletes:
    """All deletions that have not been reported yet."""

    def __init__(self, writes: Writes, scrubs: Scrubs, keeping: Keeping, puts: Puts) -> None:
        self._scrubs = scrubs
        self._writes = writes
        self._keeping = keeping
        self._puts = puts
        self.completions: CompletionQueue[DeleteDone] = CompletionQueue()

    def accept(self, items: Sequence[DeleteItem], done: DeletesDone) -> None:
        """Accept deletions; each is reported through the completions."""
        self.completions.promised += len(items)
        self._delete([item for item in items if not self._is_deferred(item, done)], done)

    def _is_deferred(self, item: DeleteItem, done: DeletesDone) -> bool:
        return self._puts.after((item.tenant, item.key), lambda: self._delete([item], done))

    def _delete(self, items: Sequence[DeleteItem], done: DeletesDone) -> None:
        if not items:
            return
        names = [(item.tenant, item.key) for item in items]
        erased = items[0].erased  # the same for all items of one call
        try:
            if erased is None:
                gone = self._keeping.drop(names, Reason.DELETED)
            else:
                gone = self._keeping.drop(names, Reason.ERASED, spared=erased)
        except StorageError as error:
            for item in items:
                self.completions.add(done, DeleteDone(item.tag, error, found=False))
            return
        synced = any(item.durability is Durability.SYNCED for item in items)

        def wiped(error: StorageError | None) -> None:
            if error is None and erased is not None:
                self._scrubs.after_all(overwritten)
            else:
                overwritten(error)

        def overwritten(error: StorageError | None) -> None:
            if error is None and synced:
                self._writes.after_sync(lambda error: self._report(items, gone, done, error))
            else:
                self._report(items, gone, done, error)

        # After earlier wipes, too: an older record of a name may be among them.
        self._keeping.leaving.when_gone(names, wiped)

    def _report(
        self, items: Sequence[DeleteItem], gone: NDArray[Any], done: DeletesDone, error: StorageError | None
    ) -> None:
        found = gone["generation"] > 0
        sizes = np.where(found, record_pages(gone["length"]) * PAGE_BYTES, 0)
        columns = zip(items, found.tolist(), sizes.tolist(), gone["domain"].tolist(), strict=True)
        results = [
            DeleteDone(
                item.tag,
                error,
                was_stored,
                size_bytes,
                was_stored and item.erased is not None and domain not in item.erased,
            )
            for item, was_stored, size_bytes, domain in columns
        ]
        self.completions.add_all(done, results)
