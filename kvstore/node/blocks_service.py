"""The service Blocks: look-ups, pins and deletions of stored blocks. It moves no payloads.

What always holds: a call sees only blocks of its caller's tenant; `Exists` and `Prefix` report what a get would have
found at that moment, except for a record that fails its checks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

from kvstore.errors import ProtocolError
from kvstore.limits import PINS_OF_TENANT_MAX, TURN_STEP_BLOCKS
from kvstore.lookups import Kind, Outcome
from kvstore.miss import MissReason
from kvstore.node.calls import Ends, check_keys, kept_durability_of, refusals
from kvstore.node.connection import check_fingerprint
from kvstore.node.pins import Pin
from kvstore.node.session_names import check_text, name_of
from kvstore.node.stored_blocks import StoredBlocks
from kvstore.storage.eviction.types import Reason
from kvstore.storage.items import DeleteItem
from kvstore.wire import blocks_pb2 as pb
from kvstore.wire import blocks_pb2_grpc, kvstore_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.node.authorization import Gate
    from kvstore.node.calls import Context
    from kvstore.node.node import Node
    from kvstore.node.pins import Pinned
    from kvstore.node.time_slices import Turn
    from kvstore.storage.eviction_events import Explanation
    from kvstore.storage.items import DeleteDone
    from kvstore.storage.manifests import SessionName

__all__ = ["BlocksService"]


class BlocksService(blocks_pb2_grpc.BlocksServicer):
    """The node's service for blocks."""

    def __init__(self, node: Node, gate: Gate) -> None:
        self._node = node
        self._gate = gate
        self._stored = StoredBlocks(node)

    async def Exists(self, request: pb.ExistsRequest, context: Context) -> pb.ExistsResponse:  # noqa: N802 - the proto's name
        """Return for each block whether a get would find it."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("exists", context, request.tenant, len(request.blocks))
            check_keys([block.key for block in request.blocks])
            for block in request.blocks:
                if block.fingerprint:
                    check_fingerprint(block.fingerprint)
            looking = self._node.lookups.begin(context, tenant.id, Kind.EXISTS, len(request.blocks))
            looking.all_are(Outcome.STORED)
            states: list[pb.BlockState] = []
            async with self._node.turns.of(tenant.id) as turn:
                for first in range(0, len(request.blocks), TURN_STEP_BLOCKS):
                    if first:
                        await turn.next()
                    states += self._stored.states(tenant.id, request.blocks[first : first + TURN_STEP_BLOCKS])
                    for at, state in enumerate(states[first:], first):
                        if not state.stored:
                            looking.missed(at, request.blocks[at].key, MissReason(state.miss.reason))
            if any(block.fingerprint for block in request.blocks):
                looking.over()
            return pb.ExistsResponse(blocks=states)
        raise AssertionError

    async def Prefix(self, request: pb.PrefixRequest, context: Context) -> pb.PrefixResponse:  # noqa: N802
        """Return how many blocks a get would find before the first miss."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("prefix", context, request.tenant, len(request.keys))
            check_keys(request.keys)
            check_fingerprint(request.fingerprint)
            looking = self._node.lookups.begin(context, tenant.id, Kind.PREFIX, len(request.keys))
            stored, miss = await self._prefix(tenant.id, request)
            looking.all_are(Outcome.STORED, stored)
            if miss is not None:
                looking.missed(stored, request.keys[stored], MissReason(miss.reason))
            looking.over()
            return pb.PrefixResponse(blocks=stored, miss=miss)
        raise AssertionError

    async def _prefix(
        self, tenant: bytes, request: pb.PrefixRequest
    ) -> tuple[int, kvstore_pb2.GetMiss | None]:
        """The number of blocks that a get would find before the first miss, and that miss."""
        stored = 0
        async with self._node.turns.of(tenant) as turn:
            for first in range(0, len(request.keys), TURN_STEP_BLOCKS):
                if first:
                    await turn.next()
                keys = request.keys[first : first + TURN_STEP_BLOCKS]
                some, miss = self._stored.prefix(tenant, request.fingerprint, keys)
                stored += some
                if miss is not None:
                    return stored, miss
        return stored, None

    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteResponse:  # noqa: N802
        """Forget blocks for good."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("delete", context, request.tenant, len(request.keys))
            check_keys(request.keys)
            durability = kept_durability_of(request.durability)
            items = [DeleteItem(tenant.id, key, durability, at) for at, key in enumerate(request.keys)]
            if request.session:
                check_text("user", request.user)
                items = await self._unlisted(name_of(tenant.id, request.user, request.session), items)
            found = [False] * len(request.keys)
            ends: Ends[DeleteDone] = Ends(len(items))
            async with self._node.turns.of(tenant.id) as turn:
                for first in range(0, len(items), TURN_STEP_BLOCKS):
                    if first:
                        await turn.next()
                    self._delete(items[first : first + TURN_STEP_BLOCKS], ends)
                membership = self._node.membership
                digest = 0 if membership is None else membership.reported_digest
            for one in await ends.all():
                if one.error is not None:
                    raise one.error
                found[one.tag] = one.found
            if (upkeep := self._node.upkeep) is not None:
                await upkeep.moves.standbys.delete(tenant, [item.key for item in items])
            self._gate.audit.removed(
                "delete",
                tenant=tenant.name,
                peer=context.peer(),
                names=[item.key for item in items],
                found=sum(found),
            )
            return pb.DeleteResponse(found=found, members_digest=digest, node=self._node.store.name)
        raise AssertionError

    async def _unlisted(self, session: SessionName, items: list[DeleteItem]) -> list[DeleteItem]:
        """Those of these blocks that only this session lists here, or none."""
        manifests, own = self._node.store.manifests, Counter[bytes]()
        async with self._node.turns.of(session.tenant) as turn:
            for some in manifests.own_keys(session):
                own.update(some)
                await turn.next()
        counts = manifests.references([(item.tenant, item.key) for item in items])
        return [item for item, count in zip(items, counts, strict=True) if count <= own[item.key]]

    def _delete(self, items: Sequence[DeleteItem], ends: Ends[DeleteDone]) -> None:
        names = [(item.tenant, item.key) for item in items]
        self._node.granted.delete(names)
        self._node.store.delete(items, ends.collect)
        self._node.deletions.note(names)
        if (upkeep := self._node.upkeep) is not None:
            upkeep.waited.cancel(names)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:  # noqa: N802
        """Explain where blocks are, or why they were removed."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("explain", context, request.tenant, len(request.keys))
            check_keys(request.keys)
            explanations = []
            async with self._node.turns.of(tenant.id) as turn:
                for first in range(0, len(request.keys), TURN_STEP_BLOCKS):
                    if first:
                        await turn.next()
                    some = request.keys[first : first + TURN_STEP_BLOCKS]
                    explained = self._node.store.explain_all(tenant.id, some)
                    explanations += [
                        self._explain(tenant.id, *one) for one in zip(some, explained, strict=True)
                    ]
            return pb.ExplainResponse(explanations=explanations)
        raise AssertionError

    def _explain(self, tenant: bytes, key: bytes, explained: Explanation) -> pb.Explanation:
        over_ms = self._stored.never_landed_ms(tenant, key, explained)
        if over_ms:
            ago_s = (explained.now_ms - over_ms) / 1000
            sentence = f"The block was to be put, but its lease ended {ago_s:.1f} s ago and it had not landed by then."
            return pb.Explanation(gone_unix_ms=over_ms, sentence=sentence)
        return _explanation(explained)

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:  # noqa: N802
        """Protect blocks from eviction for a time."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("pin", context, request.tenant, len(request.keys))
            check_keys(request.keys)
            await self._node.granted.just_landed.stored(tenant.id, request.keys)
            async with self._node.turns.of(tenant.id) as turn:
                pinned = await self._pin(turn, tenant.id, request)
            return pb.PinResponse(
                pin=pinned.pin, time_to_live_ms=pinned.time_to_live_ms, pinned=pinned.pinned
            )
        raise AssertionError

    async def _pin(self, turn: Turn, tenant: bytes, request: pb.PinRequest) -> Pinned:
        """Pin blocks, a few in each turn."""
        pins, pin = self._node.pins, Pin(tenant)
        sizes: list[list[int]] = []
        pinned: list[bool] = []
        steps = [
            request.keys[at : at + TURN_STEP_BLOCKS] for at in range(0, len(request.keys), TURN_STEP_BLOCKS)
        ]
        for step in steps:
            sizes.append(pins.sizes(tenant, step))
            await turn.next()
        pins.refuse_too_much(tenant, sum(map(sum, sizes)))
        try:
            for step, of_step in zip(steps, sizes, strict=True):
                pinned += pins.hold(pin, step, of_step)
                await turn.next()
            return pins.pin(pin, pinned, request.time_to_live_ms)
        except BaseException:
            pins.release(pin)
            raise

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:  # noqa: N802
        """End pins."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("unpin", context, request.tenant, len(request.pins))
            if len(request.pins) > PINS_OF_TENANT_MAX:
                raise ProtocolError(
                    f"A call may end at most {PINS_OF_TENANT_MAX} pins, not {len(request.pins)}."
                )
            ended = 0
            async with self._node.turns.of(tenant.id) as turn:
                for at, pin in enumerate(request.pins):
                    if at:
                        await turn.next()  # each may have a thousand blocks
                    ended += self._node.pins.unpin(tenant.id, pin)
            return pb.UnpinResponse(ended=ended)
        raise AssertionError


def _explanation(explained: Explanation) -> pb.Explanation:
    gone = explained.gone
    if explained.erased_ms is not None:
        reason = cast("pb.GoneReason", int(Reason.ERASED))
        return pb.Explanation(gone=reason, gone_unix_ms=explained.erased_ms, sentence=str(explained))
    if explained.stored or gone is None:
        return pb.Explanation(stored=explained.stored, sentence=str(explained))
    return pb.Explanation(
        gone=cast("pb.GoneReason", int(gone.reason)),
        gone_unix_ms=gone.at_ms,
        idle_ms=gone.idle_ms,
        sentence=str(explained),
    )
