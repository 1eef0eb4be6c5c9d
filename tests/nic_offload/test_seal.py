"""Seals: writes of a forger with valid memory keys are rejected, and the peer's are accepted."""

from __future__ import annotations

import errno
import os
import struct
from typing import TYPE_CHECKING

import pytest

from nic_offload.checksum import crc32c
from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from nic_offload.trigger import AckWatch, Landing, WordPut, put_words, watch_acks, watch_landings
from tests.nic_offload import test_granted as granted
from tests.nic_offload import test_shelf as shelf
from tests.nic_offload.rig import PAGE, PROVIDERS, Pair, after_ms, wait_until
from tests.nic_offload.sealing import TO_CLIENT, TO_NODE, Forger, Spot, seal, siphash, tag_of, word_of

if TYPE_CHECKING:
    from collections.abc import Iterator

GENERATION, TAG = 1 << 40, 7
LANDED, WRITTEN, SYNCED = 1, 2, 3
MIB = 1 << 20


@pytest.fixture(params=PROVIDERS)
def sealed(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with Pair(request.param) as pair:
        pair.there.fence()
        pair.back.fence()
        seal(pair)
        yield pair


@pytest.fixture
def net() -> Iterator[Pair]:
    with Pair("net", 16 * MIB) as pair:
        pair.there.fence()
        pair.back.fence()
        seal(pair)
        yield pair


def ack_spot(pair: Pair, index: int) -> Spot:
    """The node's address of a word of its client."""
    return Spot(pair.back.word_target(index), pair.back.key)


def flag_spot(pair: Pair, index: int) -> Spot:
    """A client's address of a word of its node."""
    return Spot(pair.there.word_target(index), pair.there.key)


def watch_ack(pair: Pair, index: int, generation: int, final: int) -> None:
    near = pair.near
    watch_acks(near.fabric, [AckWatch(TAG, near.endpoint, near.word(index).address, generation, 0, final)])


def stale(pair: Pair) -> int:
    return pair.near.fabric.statistics().stale_words + pair.far.fabric.statistics().stale_words


def landing(pair: Pair, index: int, generation: int) -> Landing:
    far = pair.far
    return Landing(
        tag=TAG,
        endpoint=far.endpoint,
        word=far.word(index).address,
        generation=generation,
        payload=far.region.address,
        peer=pair.back.peer,
        ack_target=pair.back.word_target(index),
        ack_key=pair.back.key,
        ack_value=generation << 8 | LANDED,
        deadline_ns=0,
        length=100,
        region=far.region,
    )


def test_the_hash_in_these_tests_is_the_authors() -> None:
    assert siphash(bytes(range(16)), bytes(range(15))) == 0xA129CA6149BE45E5


def test_flag_and_acknowledgement_arrive_as_specified(sealed: Pair) -> None:
    """With any provider; `test_a_flag_fired_by_a_nic_is_tagged_too` covers deferred work of a NIC."""
    far, near = sealed.far, sealed.near
    watch_landings(far.fabric, [landing(sealed, 3, GENERATION)])
    watch_ack(sealed, 3, GENERATION, LANDED)
    near.fill(0, b"x" * 100)
    sealed.there.arm(sealed.there.put(1, 100, flag=(3, GENERATION)))
    event = far.final(TAG)
    assert (event.kind, event.value) == (EventKind.LANDED, crc32c(b"x" * 100))
    assert far.word(3).load() == word_of(TO_NODE, flag_spot(sealed, 3), GENERATION)
    near.wait(lambda: bool(near.of(TAG)), "the acknowledgement")
    assert near.of(TAG)[0].value == GENERATION << 8 | LANDED
    assert near.word(3).load() == word_of(TO_CLIENT, ack_spot(sealed, 3), GENERATION << 8 | LANDED)
    assert stale(sealed) == 0


def test_a_flag_fired_by_a_nic_is_tagged_too() -> None:
    with Pair("sockets", deferred_work=True) as pair:
        pair.there.fence()
        seal(pair)
        watch_landings(pair.far.fabric, [landing(pair, 3, GENERATION)])
        flag = pair.flags[0]
        pair.there.arm(pair.there.put(1, 100, flag=(3, GENERATION), fires=(flag, 1)))
        wait_until(lambda: pair.near.fabric.statistics().held == 1, "the NIC has it")
        flag.store(1)
        assert pair.far.final(TAG).kind == EventKind.LANDED


def forged_flags(pair: Pair) -> dict[str, int]:
    """Forged flags for word 3, whose generation is due."""
    spot = flag_spot(pair, 3)
    return {
        "plain": GENERATION,
        "of another generation": word_of(TO_NODE, spot, GENERATION - 1),
        "of another word": word_of(TO_NODE, flag_spot(pair, 4), GENERATION),
        "of other memory": word_of(TO_NODE, Spot(spot.address, spot.key ^ 1), GENERATION),
        "of the other direction": word_of(TO_CLIENT, spot, GENERATION),
        "with another last byte": word_of(TO_NODE, spot, GENERATION) ^ 1,
    }


def forged_acks(pair: Pair) -> dict[str, int]:
    """Forged acknowledgements for word 3, which waits for `synced`."""
    spot, said = ack_spot(pair, 3), GENERATION << 8 | SYNCED
    return {
        "plain": said,
        "of another generation": word_of(TO_CLIENT, spot, (GENERATION - 1) << 8 | SYNCED),
        "of another word": word_of(TO_CLIENT, ack_spot(pair, 4), said),
        "of other memory": word_of(TO_CLIENT, Spot(spot.address, spot.key ^ 1), said),
        "of the other direction": word_of(TO_NODE, spot, said),
        "with another code": word_of(TO_CLIENT, spot, GENERATION << 8 | WRITTEN) + 1,
    }


def test_forged_flags_are_rejected(net: Pair) -> None:
    watch_landings(net.far.fabric, [landing(net, 3, GENERATION)])
    with Forger("net", net.far) as forger:
        for number, (name, word) in enumerate(forged_flags(net).items(), 1):
            forger.word(net.there.word_target(3), word)
            wait_until(lambda number=number: stale(net) == number, name)  # type: ignore[misc]
            net.far.reap()
            assert not net.far.of(TAG), name
        forger.word(net.there.word_target(3), word_of(TO_NODE, flag_spot(net, 3), GENERATION))
    assert net.far.final(TAG).kind == EventKind.LANDED, "the true one is"


def test_forged_acknowledgements_are_rejected(net: Pair) -> None:
    watch_ack(net, 3, GENERATION, SYNCED)
    with Forger("net", net.near) as forger:
        for number, (name, word) in enumerate(forged_acks(net).items(), 1):
            forger.word(net.back.word_target(3), word)
            wait_until(lambda number=number: stale(net) == number, name)  # type: ignore[misc]
            net.near.reap()
            assert not net.near.of(TAG), name
        forger.word(net.back.word_target(3), word_of(TO_CLIENT, ack_spot(net, 3), GENERATION << 8 | SYNCED))
    net.near.wait(lambda: bool(net.near.of(TAG)), "the true one")
    assert net.near.of(TAG)[0].value == GENERATION << 8 | SYNCED


def test_a_repeated_acknowledgement_is_reported_once(net: Pair) -> None:
    watch_ack(net, 3, GENERATION, SYNCED)
    landed, written = (
        word_of(TO_CLIENT, ack_spot(net, 3), GENERATION << 8 | code) for code in (LANDED, WRITTEN)
    )
    with Forger("net", net.near) as forger:
        for told, word in ((1, landed), (2, written)):
            forger.word(net.back.word_target(3), word)
            net.near.wait(lambda told=told: len(net.near.of(TAG)) == told, "a code")  # type: ignore[misc]
        for number, word in ((1, landed), (2, written), (3, landed)):
            forger.word(net.back.word_target(3), word)
            wait_until(lambda number=number: stale(net) == number, "a replay")  # type: ignore[misc]
    net.near.reap()
    assert [event.value & 0xFF for event in net.near.of(TAG)] == [LANDED, WRITTEN]


def test_a_forged_word_does_not_extend_a_deadline(net: Pair) -> None:
    near = net.near
    watch = AckWatch(TAG, near.endpoint, near.word(3).address, GENERATION, after_ms(100), SYNCED)
    watch_acks(near.fabric, [watch])
    with Forger("net", near) as forger:
        forger.word(net.back.word_target(3), GENERATION << 8 | SYNCED)
        event = near.final(TAG)
    assert (event.kind, event.status) == (EventKind.WATCH_FAILED, -errno.ETIMEDOUT)


def test_an_acknowledgement_that_arrived_before_its_watch_counts(net: Pair) -> None:
    put_words(
        net.far.fabric,
        [
            WordPut(net.far.endpoint, net.back.peer, *ack_spot(net, 3), GENERATION << 8 | SYNCED),
        ],
    )
    wait_until(lambda: net.near.word(3).load() != 0, "the word")
    watch_ack(net, 3, GENERATION, SYNCED)
    net.near.wait(lambda: bool(net.near.of(TAG)), "the acknowledgement")


def test_a_sealed_endpoint_watches_only_where_it_knows_the_peers_name_for_it(net: Pair) -> None:
    elsewhere = net.far.word(3).address
    with pytest.raises(FabricError):
        watch_acks(net.near.fabric, [AckWatch(TAG, net.near.endpoint, elsewhere, GENERATION, 0, 1)])
    for region in (None, net.near.region):
        with pytest.raises(FabricError):
            watch_landings(net.far.fabric, [landing(net, 3, GENERATION)._replace(region=region)])
    with pytest.raises(FabricError):
        seal(net)


# --- puts by grants


@pytest.fixture(params=PROVIDERS)
def puts(request: pytest.FixtureRequest) -> Iterator[granted.GrantRig]:
    with Pair(request.param, 16 * MIB) as pair:
        pair.there.fence()
        seal(pair)
        yield granted.GrantRig(pair)


def slot_spot(pair: Pair, slot: int) -> Spot:
    """A client's address of a slot's flag."""
    return Spot(pair.there.base + 8 * slot, pair.there.key)


def test_granted_puts_land_over_a_sealed_connection(puts: granted.GrantRig) -> None:
    """More than there are slots, so that each has several generations; with metadata and without."""
    puts.feed(20, pages=3)
    for metadata in (b"", b"who wants it"):
        _, group = puts.put(list(range(8)), metadata=metadata)
        assert puts.codes(group, 8) == [LANDED] * 8
    puts.wait_came(16)
    assert [puts.payload(came) for came in puts.came[:8]] == [
        puts.data(int.from_bytes(came.key, "little"), 5000) for came in puts.came[:8]
    ]


def put_bytes(
    pair: Pair,
    payload: bytes,
    *,
    slot: int = 2,
    generation: int = granted.FIRST,
    metadata: bytes = b"",
    key: bytes = TO_NODE,
    spot: Spot | None = None,
    tagged_generation: int | None = None,
    spoil: int | None = None,
) -> bytes:
    """Metadata, head and payload of a put with its tag; the byte at `spoil`, counted from the head's end, is wrong."""
    summed = granted.head_of(payload, generation=generation, metadata=metadata)[:-8]
    if spoil is not None:
        changed = bytearray(summed)
        changed[spoil] ^= 1
        rest = bytes(changed[len(metadata) + 4 :]) + bytes(8)
        crc = crc32c(bytes(changed[: len(metadata)]) + rest).to_bytes(4, "little")
        forged = bytes(changed[: len(metadata)]) + crc + rest[:-8]
    else:
        forged = summed
    tagged = generation if tagged_generation is None else tagged_generation
    tag = tag_of(key, slot_spot(pair, slot) if spot is None else spot, tagged, summed)
    return forged + tag + payload


def write_put(forger: Forger, pair: Pair, data: bytes, payload: bytes, flag: int, slot: int = 2) -> None:
    forger.write(PAGE + slot * granted.SLOT + PAGE - (len(data) - len(payload)), data)
    forger.word(slot_spot(pair, slot).address, flag)


def true_flag(pair: Pair, slot: int = 2, generation: int = granted.FIRST) -> int:
    return word_of(TO_NODE, slot_spot(pair, slot), generation)


def test_a_put_is_tagged_as_specified(net: Pair) -> None:
    """The forger here has the key, and is accepted."""
    rig, payload = granted.GrantRig(net), os.urandom(500)
    rig.feed(2)
    with Forger("net", net.far) as forger:
        data = put_bytes(net, payload, metadata=b"12345678")
        write_put(forger, net, data, payload, true_flag(net))
        rig.wait_came(1)
        assert rig.payload(rig.came[0]) == payload
        next_one = put_bytes(net, payload, generation=granted.FIRST + 1)
        write_put(forger, net, next_one, payload, true_flag(net, generation=granted.FIRST + 1))
        rig.wait_came(2)


def test_a_put_with_a_forged_flag_is_ignored(net: Pair) -> None:
    """Whatever a forger writes beside the connection's own puts, these continue."""
    rig, payload = granted.GrantRig(net), os.urandom(500)
    rig.feed(8, pages=3)
    flags = {
        "plain": granted.FIRST,
        "of another slot": true_flag(net, 3),
        "of another generation": true_flag(net, generation=granted.FIRST + 1),
        "of the other direction": word_of(TO_CLIENT, slot_spot(net, 2), granted.FIRST),
    }
    with Forger("net", net.far) as forger:
        for number, (name, flag) in enumerate(flags.items(), 1):
            write_put(forger, net, granted.head_of(payload) + payload, payload, flag)
            wait_until(lambda number=number: stale(net) == number, name)  # type: ignore[misc]
            _, group = rig.put([1])
            assert rig.codes(group, 1) == [LANDED], name
    rig.wait_came(4)
    assert {came.key for came in rig.came} == {granted.key_of(1)}
    assert rig.take().broken == 0


@pytest.mark.parametrize(
    "slip",
    [
        {"key": TO_CLIENT},
        {"key": bytes(16)},
        {"tagged_generation": granted.FIRST + 1},
        {"spot": "another slot"},
        {"spot": "other memory"},
        *({"spoil": at} for at in (-120 + 24, -120 + 44, -120 + 45, -120 + 50, -120 + 85, 3)),
    ],
    ids=str,
)
def test_a_foreign_header_ends_the_connection_and_nothing_of_it_is_kept(
    net: Pair, slip: dict[str, object]
) -> None:
    """Under a valid flag, as when a header is overwritten in flight."""
    rig, payload = granted.GrantRig(net), os.urandom(500)
    rig.feed(1)
    there = slot_spot(net, 2)
    spots = {"another slot": slot_spot(net, 1), "other memory": Spot(there.address, there.key ^ 1)}
    if "spot" in slip:
        slip = {"spot": spots[str(slip["spot"])]}
    data = put_bytes(net, payload, metadata=b"12345678", **slip)  # type: ignore[arg-type]
    with Forger("net", net.far) as forger:
        write_put(forger, net, data, payload, true_flag(net))
        wait_until(lambda: rig.take().broken == -errno.EPROTO, "the end")
    assert (rig.came, len(rig.shelf), net.near.word(3).load()) == ([], 0, 0)


def test_a_put_of_an_earlier_generation_is_not_accepted_again(net: Pair) -> None:
    """A header recorded on the wire is put again, under the flag that is expected now."""
    rig, payload = granted.GrantRig(net), os.urandom(500)
    rig.feed(2)
    with Forger("net", net.far) as forger:
        data = put_bytes(net, payload)
        write_put(forger, net, data, payload, true_flag(net))
        rig.wait_came(1)
        write_put(forger, net, data, payload, true_flag(net))  # with its own flag: nothing is due there
        write_put(forger, net, data, payload, true_flag(net, generation=granted.FIRST + 1))
        wait_until(lambda: rig.take().broken == -errno.EPROTO, "the end")
    assert len(rig.came) == 1


# --- calls


def call_bytes(pair: Pair, generation: int = shelf.FIRST) -> bytes:
    """A fetch of block 1 in the format of wire.md, without its tag."""
    row = struct.pack("<32sIIQQQ", shelf.key_of(1), 5000, 10, 3, pair.back.base + PAGE, pair.back.key)
    head = struct.pack(
        "<IQBBBBIIIIIQ16s", 128, generation, 1, 0, 0, 0, 0, 1, shelf.ANSWER_WORD, 0, 0, 0, shelf.FINGERPRINT
    )
    return crc32c(head + row).to_bytes(4, "little") + head + row


def call_spot(pair: Pair, word: int = shelf.CALL_WORD) -> Spot:
    return flag_spot(pair, word)


def write_call(forger: Forger, pair: Pair, data: bytes, generation: int = shelf.FIRST) -> None:
    forger.write(shelf.CALL_AT, data)
    forger.word(call_spot(pair).address, word_of(TO_NODE, call_spot(pair), generation))


def test_a_call_is_tagged_as_specified_and_answered_at_the_desk(net: Pair) -> None:
    rig = shelf.ShelfRig(net)
    rig.store(1, 0, 5000)
    with Forger("net", net.far) as forger:
        for generation in (shelf.FIRST, shelf.FIRST + 1):
            data = call_bytes(net, generation)
            tag = tag_of(TO_NODE, call_spot(net), generation, data)
            write_call(forger, net, data + tag, generation)
            done = word_of(TO_CLIENT, ack_spot(net, shelf.ANSWER_WORD), generation << 8 | shelf.DONE)
            wait_until(lambda done=done: net.near.word(shelf.ANSWER_WORD).load() == done, "the answer")  # type: ignore[misc]
    assert net.near.word(10).load() == word_of(TO_CLIENT, ack_spot(net, 10), 3 << 8 | shelf.SERVED)
    assert rig.got(1, 5000) == rig.blocks[1]


@pytest.mark.parametrize("slip", ["none", "direction", "place", "generation", "memory", "changed"])
def test_a_foreign_call_is_not_answered(net: Pair, slip: str) -> None:
    """It is left to the application, which ends the connection: `tests/client/test_seal.py`."""
    rig = shelf.ShelfRig(net)
    rig.store(1, 0, 5000)
    data, spot = call_bytes(net), call_spot(net)
    tag = {
        "none": b"",
        "direction": tag_of(TO_CLIENT, spot, shelf.FIRST, data),
        "place": tag_of(TO_NODE, call_spot(net, 1), shelf.FIRST, data),
        "generation": tag_of(TO_NODE, spot, shelf.FIRST - 1, data),
        "memory": tag_of(TO_NODE, Spot(spot.address, spot.key ^ 1), shelf.FIRST, data),
        "changed": tag_of(TO_NODE, spot, shelf.FIRST, data[:-1] + bytes([data[-1] ^ 1])),
    }[slip]
    with Forger("net", net.far) as forger:
        write_call(forger, net, data + tag)
        event = net.far.final(shelf.TAG)
    assert (event.kind, event.value) == (EventKind.LANDED, shelf.FIRST)
    there = net.far.bytes_at(shelf.CALL_AT, len(data) + 8)
    flag = net.far.word(shelf.CALL_WORD).address
    assert not net.far.endpoint.believes(net.far.region, flag, shelf.FIRST, there[:-8], there[-8:])
    assert net.near.bytes_at(PAGE, 5000) == bytes(5000)
    assert net.near.word(shelf.ANSWER_WORD).load() == 0
    assert net.far.fabric.statistics().served == 0


def test_only_bytes_from_the_other_end_are_accepted(net: Pair) -> None:
    """As for answers: tagged at one end, checked at the other."""
    data, place = os.urandom(33), net.near.region.address + 512
    spot = Spot(net.back.base + 512, net.back.key)
    tag = net.far.endpoint.tag(*spot, 9, data)
    assert tag == tag_of(TO_CLIENT, spot, 9, data)
    near = net.near.endpoint
    assert near.believes(net.near.region, place, 9, data, tag)
    assert not near.believes(net.near.region, place, 8, data, tag)
    assert not near.believes(net.near.region, place + 8, 9, data, tag)
    assert not near.believes(net.near.region, place, 9, data[:-1], tag)
    assert not near.believes(net.near.region, place, 9, data, tag[:-1])
    assert not near.believes(net.near.region, place, 9, data, near.tag(*spot, 9, data))
