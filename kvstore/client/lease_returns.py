"""Returns leases to the node, and reuses their acknowledgement words safely.

What always holds: a word is reused only when the node will write nothing more to it for its lease. A lease may
expire at the node just before its return arrives, and then the word that reports it is in flight: it would overwrite
the acknowledgement of the word's next use. The node's answer lists such leases, and their words are awaited first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nic_offload.trigger import AckWatch, watch_acks

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection, Sequence

    from kvstore.client.link import Host, Link
    from kvstore.errors import KvError
    from kvstore.wire.fabric_call import Leased
    from nic_offload.fabric import Event

__all__ = ["GivingBack"]


class GivingBack:
    """Leases, each with its word. Begun with the client's lock held; it gets events like any operation."""

    def __init__(self, client: Host, link: Link, leases: Sequence[tuple[Leased, int]]) -> None:
        self._client = client
        self._link = link
        self._leases = leases
        self._words: dict[int, int] = {}  # awaited ones, by tag
        self.over: threading.Event = client.abort(link, [lease for lease, _ in leases], self._answered)

    def _answered(self, expired: Collection[int]) -> None:
        """The node has the leases; the words of these generations have been put."""
        link = self._link
        if link.error is not None:
            return
        link.give_back_words([word for lease, word in self._leases if lease.generation not in expired])
        watches = []
        for lease, word in self._leases:
            if lease.generation in expired:
                tag = self._client.next_tags()
                self._words[tag] = word
                link.operations[tag] = self
                watches.append(
                    AckWatch(
                        tag=tag,
                        endpoint=link.endpoint,
                        word=link.word_address(word),
                        generation=lease.generation,
                        deadline_ns=0,  # it comes, or the link ends
                        final_code=1,
                    )
                )
        if watches:
            watch_acks(self._client.fabric, watches)

    def event(self, event: Event) -> None:
        """A word has arrived."""
        self._link.operations.pop(event.tag, None)
        self._link.give_back_words([self._words.pop(event.tag)])

    def lost(self, error: KvError) -> None:
        """The link is lost, and no word will arrive."""
