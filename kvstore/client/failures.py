"""Failed puts: an acknowledgement carries a code, and the node is asked for the error's text.

What always holds: a failed put ends with the error of its code, with the node's own text if that can be had within a
call's time. One call asks for all puts that failed at about the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.status import error_named

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from kvstore.client.link import Host, Link
    from kvstore.errors import KvError
    from kvstore.wire.kvstore_pb2_grpc import KvStoreStub

__all__ = ["Failures"]

OnError: TypeAlias = "Callable[[KvError | None], None]"


class Failures:
    """The failures of a link. All methods are called with the client's lock held."""

    def __init__(self, client: Host, link: Link, stub: KvStoreStub) -> None:
        self._client = client
        self._link = link
        self._stub = stub
        self._asking: dict[int, OnError] = {}

    def ask(self, generation: int, then: OnError) -> None:
        """Ask why a put failed; `then` is called, with the lock held, with the node's error or, if unknown, None."""
        if not self._asking:
            self._client.settle(self._call)
        self._asking[generation] = then

    def _call(self) -> None:
        asking, self._asking = self._asking, {}
        if self._link.error is not None:  # and they have ended with it
            return
        request = pb.WhyFailedRequest(connection=self._link.number, generations=list(asking))
        call = self._stub.WhyFailed.future(request, timeout=self._client.reach.call_timeout_s)

        def check(answered: grpc.Future[pb.WhyFailedResponse]) -> None:
            puts = () if answered.exception() is not None else answered.result().puts
            errors = {put.generation: error_named(put.name, put.sentence, 0) for put in puts}
            with self._client.lock:
                for generation, then in asking.items():
                    then(errors.get(generation))

        call.add_done_callback(check)
