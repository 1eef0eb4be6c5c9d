"""A client for etcd: a lease, records under it, and a list that is followed.

    etcd = Etcd(EtcdReach(("10.0.0.2:2379", "10.0.0.3:2379")))
    lease = await etcd.grant(5)
    await etcd.put(b"/triggerkv/chat/nodes/7f", b"...", lease)
    async for listed in etcd.follow(b"/triggerkv/chat/nodes/"):
        ...

Why not a library: those for asyncio stay with their first endpoint, and wait for one that hangs. This is twelve calls
of a documented interface, each with a deadline.

What always holds: a call is answered or raises `EtcdAway` within its time, whatever etcd does; then the next one starts
with another endpoint. A list is complete as of one revision, and each later one has a higher revision.
What it doesn't do: retry, which is its caller's decision. It runs in one event loop.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import grpc
import grpc.aio

from kvstore.errors import ConfigError, KvError
from kvstore.limits import ETCD_CALL_MS, ETCD_KEEPALIVE_MS, ETCD_RELIST_MS
from kvstore.wire import etcd_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from google.protobuf.message import Message

    from kvstore.cluster.etcd_options import EtcdReach

__all__ = ["Etcd", "EtcdAway", "Found", "Listed"]

_DELETED: Final = 1
_CREATED: Final = 1
_WRITTEN: Final = 2  # compare and sort by a key's last modification
_GREATER: Final = 1
_LESS: Final = 2
_SORT_WRITTEN: Final = 3
_HIGHEST_FIRST: Final = 2
_AUTHENTICATE: Final = "Auth/Authenticate"
_CALL_S: Final = ETCD_CALL_MS / 1000
_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", ETCD_KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", ETCD_CALL_MS),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
T = TypeVar("T", bound="Message")


class EtcdAway(KvError):
    """etcd has not answered, or its answer can't be used."""


class Listed(NamedTuple):
    """A list as of a revision: values and their leases, by key."""

    revision: int
    values: Mapping[bytes, tuple[bytes, int]]
    written: Mapping[bytes, int]  # the revision that wrote each
    is_told: bool = (
        False  # it is the previous list and one change; else there may have been others in between
    )

    @property
    def top(self) -> int:
        """The revision of the latest of these values."""
        return max(self.written.values(), default=0)

    def may_follow(self, earlier: Listed) -> bool:
        """Whether it can be a later list of the same history: all records written by then are those of that list."""
        return self.revision >= earlier.revision and all(
            at > earlier.revision
            or (earlier.written.get(key), earlier.values.get(key)) == (at, self.values[key])
            for key, at in self.written.items()
        )


class Found(NamedTuple):
    """A value and the revision that wrote it; empty and 0 if there is no such key."""

    value: bytes
    revision: int


def _credentials(reach: EtcdReach) -> grpc.ChannelCredentials | None:
    files = reach.pem()
    return None if files is None else grpc.ssl_channel_credentials(*files)


def _end_of(prefix: bytes) -> bytes:
    """The first key after all with this prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


class Etcd:
    """A client of one etcd."""

    def __init__(self, reach: EtcdReach) -> None:
        self.reach = reach
        self._credentials = _credentials(reach)
        self._at = 0  # index of the endpoint
        self._channel: grpc.aio.Channel | None = None
        self._token: str | None = None
        self._closing: set[asyncio.Future[None]] = set()

    async def grant(self, ttl_s: int) -> int:
        """Grant a lease that ends this long after its last keep-alive."""
        request = pb.EtcdLeaseGrantRequest(ttl_s=ttl_s)
        return (await self._call("Lease/LeaseGrant", request, pb.EtcdLeaseGrantResponse)).id

    async def keep(self, lease: int) -> bool:
        """Keep a lease from ending; False if it has ended."""
        channel = self._open()
        call = self._stream(channel, "Lease/LeaseKeepAlive", pb.EtcdLeaseKeepAliveResponse)
        try:
            await self._within(channel, call.write(pb.EtcdLeaseKeepAliveRequest(id=lease)))
            answer = await self._within(channel, call.read())
        finally:
            call.cancel()
        if answer is grpc.aio.EOF:
            raise self._failed(channel, "it ended a call without an answer")
        return bool(answer.ttl_s > 0)

    async def revoke(self, lease: int) -> None:
        """Revoke a lease, and with it the records under it."""
        await self._call("Lease/LeaseRevoke", pb.EtcdLeaseRevokeRequest(id=lease), pb.EtcdLeaseRevokeResponse)

    async def put(
        self,
        key: bytes,
        value: bytes,
        lease: int,
        *,
        only_new: bool = False,
        lasting: bytes = b"",
        unless: bytes = b"",
        was: int = 0,
        lasting_was: int = 0,
    ) -> int:
        """Write a record under a lease; returns its revision, or 0 if a record existed and was kept.

        The same value is also written under the key `lasting`, without a lease. Nothing is written, and 0 returned, if
        the key `unless` has a value, or a record is not the one that the revision `was`, or `lasting_was`, wrote.
        """
        request = pb.EtcdTxnRequest()
        request.success.add(request_put=pb.EtcdPutRequest(key=key, value=value, lease=lease))
        if lasting:
            request.success.add(request_put=pb.EtcdPutRequest(key=lasting, value=value))
        if only_new:
            request.compare.add(key=key, create_revision=0, target=_CREATED)
        if was:
            request.compare.add(key=key, mod_revision=was, target=_WRITTEN)
        if lasting_was:
            request.compare.add(key=lasting, mod_revision=lasting_was, target=_WRITTEN)
        if unless:
            request.compare.add(key=unless, create_revision=0, target=_CREATED)
        answer = await self._call("KV/Txn", request, pb.EtcdTxnResponse)
        return answer.header.revision if answer.succeeded else 0

    async def replace(self, key: bytes, by: bytes, value: bytes, *, unless: bytes) -> bool:
        """Remove a record and write another; False, and no change, if the third key has a value."""
        request = pb.EtcdTxnRequest()
        request.compare.add(key=unless, create_revision=0, target=_CREATED)
        request.success.add(request_delete_range=pb.EtcdDeleteRangeRequest(key=key))
        request.success.add(request_put=pb.EtcdPutRequest(key=by, value=value))
        return bool((await self._call("KV/Txn", request, pb.EtcdTxnResponse)).succeeded)

    async def listed(self, prefix: bytes) -> Listed:
        """All records with a prefix."""
        request = pb.EtcdRangeRequest(key=prefix, range_end=_end_of(prefix))
        found = await self._call("KV/Range", request, pb.EtcdRangeResponse)
        values = {one.key: (one.value, one.lease) for one in found.kvs}
        written = {one.key: one.mod_revision for one in found.kvs}
        return Listed(found.header.revision, values, written)

    async def latest(self, prefix: bytes, there: bytes) -> tuple[int, int] | None:
        """The revision of the latest value below a prefix, and how many there are: equal, and the list is the same.

        None if the key `there` doesn't exist.
        """
        wanted = pb.EtcdRangeRequest(
            key=prefix,
            range_end=_end_of(prefix),
            limit=1,
            sort_order=_HIGHEST_FIRST,
            sort_target=_SORT_WRITTEN,
            keys_only=True,
        )
        request = pb.EtcdTxnRequest()
        request.compare.add(key=there, create_revision=0, result=_GREATER, target=_CREATED)
        request.success.add(request_range=wanted)
        answer = await self._call("KV/Txn", request, pb.EtcdTxnResponse)
        if not answer.succeeded:
            return None
        found = answer.responses[0].response_range
        return max((one.mod_revision for one in found.kvs), default=0), found.count

    async def value(self, key: bytes) -> Found:
        """A key's current value."""
        found = await self._call("KV/Range", pb.EtcdRangeRequest(key=key), pb.EtcdRangeResponse)
        return Found(found.kvs[0].value, found.kvs[0].mod_revision) if found.kvs else Found(b"", 0)

    async def claim(
        self, key: bytes, value: bytes, was: int, *, within: bytes, top: int, there: Sequence[bytes]
    ) -> bool:
        """Write a record whose revision is `was` (0: it doesn't exist).

        False, and no change, if its revision differs, a value below `within` is later than `top`, or a key of `there`
        doesn't exist.
        """
        request = pb.EtcdTxnRequest()
        request.compare.add(key=key, mod_revision=was, target=_WRITTEN)
        request.compare.add(
            key=within, range_end=_end_of(within), mod_revision=top + 1, result=_LESS, target=_WRITTEN
        )
        for one in there:
            request.compare.add(key=one, create_revision=0, result=_GREATER, target=_CREATED)
        request.success.add(request_put=pb.EtcdPutRequest(key=key, value=value))
        return bool((await self._call("KV/Txn", request, pb.EtcdTxnResponse)).succeeded)

    async def follow(
        self, prefix: bytes, again_s: Callable[[], float] = lambda: 0.0
    ) -> AsyncGenerator[Listed, None]:
        """Yield all records with a prefix, at each change, and now and then: a watch may have died unnoticed.

        After each list `again_s` may return a time of the event loop at which all are listed again at the latest.
        """
        while True:
            now = await self.listed(prefix)
            yield now
            async with aclosing(self._watched(prefix, now, again_s)) as lists:
                async for later in lists:
                    yield later

    async def _watched(
        self, prefix: bytes, now: Listed, again_s: Callable[[], float]
    ) -> AsyncGenerator[Listed, None]:
        """Yield a list after each change, for a while."""
        loop, values, written = asyncio.get_running_loop(), dict(now.values), dict(now.written)
        until_s = loop.time() + ETCD_RELIST_MS / 1000
        create = pb.EtcdWatchCreateRequest(
            key=prefix, range_end=_end_of(prefix), start_revision=now.revision + 1
        )
        channel = self._open()
        call = self._stream(channel, "Watch/Watch", pb.EtcdWatchResponse)
        try:
            await self._within(channel, call.write(pb.EtcdWatchRequest(create_request=create)))
            while (left_s := until_s - loop.time()) > 0:
                if (soon_s := again_s() - loop.time()) > 0:
                    left_s = min(left_s, soon_s)
                reading = asyncio.ensure_future(call.read())
                done, _ = await asyncio.wait([reading], timeout=left_s)
                if not done:
                    return
                response = await self._within(channel, reading)
                if response is grpc.aio.EOF or response.canceled:
                    raise self._failed(channel, "it ended the watch of the list")
                for revision, events in groupby(response.events, lambda event: event.kv.mod_revision):
                    for event in events:
                        if event.type == _DELETED:
                            values.pop(event.kv.key, None)
                            written.pop(event.kv.key, None)
                        else:
                            values[event.kv.key] = (event.kv.value, event.kv.lease)
                            written[event.kv.key] = revision
                    yield Listed(revision, dict(values), dict(written), is_told=True)
        finally:
            call.cancel()

    async def close(self) -> None:
        """Leave it."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    # --- calls

    async def _call(self, name: str, request: Message, kind: type[T]) -> T:
        if self._token is None and self.reach.user is not None and name != _AUTHENTICATE:
            await self._authenticate(self.reach.user)
        channel = self._open()  # the one so far may have been closed meanwhile
        call: Any = channel.unary_unary(
            f"/etcdserverpb.{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=kind.FromString,
        )
        answer: T = await self._within(channel, call(request, metadata=self._metadata()))
        return answer

    async def _authenticate(self, user: str) -> None:
        try:
            password = self.reach.secret()
        except ConfigError as error:  # perhaps it is being replaced
            raise EtcdAway(f"etcd: {str(error).rstrip('.')}") from error
        request = pb.EtcdAuthenticateRequest(name=user, password=password)
        self._token = (await self._call(_AUTHENTICATE, request, pb.EtcdAuthenticateResponse)).token

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self._token is None else (("token", self._token),)

    def _stream(self, channel: grpc.aio.Channel, name: str, kind: type[Message]) -> Any:
        call: Any = channel.stream_stream(
            f"/etcdserverpb.{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=kind.FromString,
        )
        return call(metadata=self._metadata())

    async def _within(self, channel: grpc.aio.Channel, asked: Awaitable[Any]) -> Any:
        task = asyncio.current_task()
        try:
            async with asyncio.timeout(_CALL_S):
                return await asked
        except grpc.aio.AioRpcError as error:
            raise self._failed(channel, error.details() or error.code().name.lower()) from error
        except (TimeoutError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise self._failed(channel, f"no answer within {_CALL_S:g} s") from error
        except asyncio.CancelledError as error:
            if task is None or task.cancelling():
                raise
            raise self._failed(
                channel, "its connection was closed because another call had no answer"
            ) from error

    def _failed(self, channel: grpc.aio.Channel, why: str) -> EtcdAway:
        """Switch to the next endpoint, with a new token, unless another call already has."""
        why = why.rstrip(".")
        if channel is not self._channel:
            return EtcdAway(f"etcd: {why}")
        endpoint = self.reach.endpoints[self._at]
        self._at = (self._at + 1) % len(self.reach.endpoints)
        self._token = self._channel = None
        self._closing.add(closing := asyncio.ensure_future(channel.close()))
        closing.add_done_callback(self._closing.discard)
        return EtcdAway(f"etcd at {endpoint}: {why}")

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            endpoint = self.reach.endpoints[self._at]
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(endpoint, self._credentials, options=_OPTIONS)
        return self._channel
