"""What callers do with their keys: every way to put, get, keep and remove blocks, as functions of a caller.

`OPERATIONS` has each with its weight. An operation draws keys and arguments from its caller's dice, makes one call or a
few that belong together, and notes what it put, got and removed (`tests.mixed.callers`). It raises errors of its calls.

What it doesn't do: judge a result; `tests.mixed.key_history` does, when all calls have ended.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeAlias

from kvstore.client import Block
from kvstore.durability import Durability
from kvstore.errors import KvError, NoSession, Overloaded, Refused, StorageError
from kvstore.miss import Miss
from kvstore.names import block_key, domain_of
from tests.mixed.callers import CALL_TIMEOUT_S, Caller, end_of_error
from tests.mixed.key_history import End, Event, Kind, Way

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.client import Session
    from kvstore.client.puts import ArmedPuts

__all__ = ["OPERATIONS", "Operation", "read_everything", "weighted"]

Operation: TypeAlias = Callable[[Caller], None]

GET_TIMEOUTS_S: Final = (0.0005, 0.002, 0.005)  # too short for most gets
SESSIONS: Final = ("s1", "s2", "s3", "s4")
FABRIC: Final = (
    Durability.LANDED,
    Durability.LANDED,
    Durability.WRITTEN,
    Durability.WRITTEN,
    Durability.SYNCED,
)
GRPC: Final = (Durability.WRITTEN, Durability.WRITTEN, Durability.SYNCED)
FILLER_BYTES: Final = (20_000, 300_000, 500_000)
FILLERS: Final = 6


# --- puts


@contextmanager
def _renewed_if_unknown(caller: Caller, puts: Sequence[Event]) -> Iterator[None]:
    """Continue with a new client if the end of a put is unknown then: the old one may still send it."""
    try:
        yield
    finally:
        if any(put.end is End.UNKNOWN for put in puts):
            caller.renew()


def _put_registered(caller: Caller, way: Way) -> None:
    """Put blocks from registered memory, now and then two of one key with different bytes."""
    keys, dice = caller.some_keys(), caller.dice
    durability, expires_unix_ms = dice.choice(FABRIC), caller.expires_unix_ms()
    puts = [caller.begin_put(key, way, durability, expires_unix_ms) for key in keys]
    blocks = [caller.source(put) for put in puts]
    if dice.random() < 0.15:
        puts.append(caller.begin_put(keys[0], way, durability, expires_unix_ms))
        blocks.append(caller.source(puts[-1], is_second=True))
    with _renewed_if_unknown(caller, puts):
        try:
            sent = _sent(caller, way, puts, blocks, durability, expires_unix_ms)
            if sent is not None:
                caller.end_puts(puts, sent.wait(CALL_TIMEOUT_S))
        except Overloaded:  # the call itself was refused, and nothing of it was sent
            caller.end_all(puts, End.NEVER)
            raise


def _sent(
    caller: Caller,
    way: Way,
    puts: Sequence[Event],
    blocks: Sequence[Block],
    durability: Durability,
    expires_unix_ms: int,
) -> ArmedPuts | None:
    """Fire these puts; None if they were given up instead."""
    client, flag, dice = caller.client, caller.flags[0], caller.dice
    flag.store(0)
    if way is Way.PUT:
        return client.arm(blocks, durability=durability, expires_unix_ms=expires_unix_ms)
    if way is Way.ARM:
        armed = client.arm(blocks, flag, durability=durability, expires_unix_ms=expires_unix_ms)
    else:
        try:
            reserved = client.reserve(blocks, durability=durability, expires_unix_ms=expires_unix_ms)
        except (Overloaded, Refused, StorageError):
            caller.end_all(puts, End.NEVER)
            raise
        if dice.random() < 0.1:
            reserved.give_back()
            caller.end_all(puts, End.NEVER)
            return None
        armed = reserved.arm(flag)
        if dice.random() < 0.3:
            time.sleep(dice.random() * 0.02)
    flag.store(1)
    return armed


def put(caller: Caller) -> None:
    _put_registered(caller, Way.PUT)


def arm(caller: Caller) -> None:
    _put_registered(caller, Way.ARM)


def reserve(caller: Caller) -> None:
    if caller.kind != "gRPC":  # which has no slots
        _put_registered(caller, Way.RESERVE)


def reserve_many(caller: Caller) -> None:
    """Let so many blocks land together that the node takes some later; half of the time, delete them at once."""
    if caller.kind == "gRPC":
        return
    one = caller.begin_put(caller.key(), Way.RESERVE, Durability.LANDED, 0)
    block, crowd, domain = caller.source(one), caller.crowd(), caller.shared.filler_domain
    blocks = [Block(name, caller.region, block.offset, 64, domain=domain) for name in crowd]
    with _renewed_if_unknown(caller, [one]):
        try:
            armed = caller.client.reserve([*blocks, block], durability=Durability.LANDED).arm(None)
            caller.end_puts([one], armed.wait(CALL_TIMEOUT_S)[-1:])
        except (Overloaded, Refused, StorageError):
            caller.end_all([one], End.NEVER)
            raise
    names, removals = crowd, list[Event]()
    if caller.dice.random() < 0.5:
        names, removals = [*crowd, block.key], caller.begin_removals([one.key], "delete", [one.key])
    caller.client.delete(names)
    caller.end_all(removals, End.DONE)


def put_inline(caller: Caller) -> None:
    durability, expires_unix_ms = caller.dice.choice(GRPC), caller.expires_unix_ms()
    one = caller.begin_put(caller.key(), Way.INLINE, durability, expires_unix_ms)
    key = caller.shared.keys[one.key]
    try:
        caller.client.put_inline(
            key.name,
            caller.data(one),
            durability=durability,
            expires_unix_ms=expires_unix_ms,
            domain=key.domain,
            timeout_s=CALL_TIMEOUT_S,
        )
    except KvError as error:
        caller.end_all([one], End.NEVER if isinstance(error, Overloaded) else end_of_error(error))
        raise
    caller.end_all([one], End.DONE)


def put_many_inline(caller: Caller) -> None:
    """Put blocks of one domain in a stream, now and then two of one key."""
    of_domain: dict[bytes, list[int]] = defaultdict(list)
    for at in caller.some_keys(len(caller.shared.keys)):
        of_domain[caller.shared.keys[at].domain].append(at)
    domain, keys = caller.dice.choice(list(of_domain.items()))
    keys += caller.dice.sample(keys, caller.dice.randint(0, 1))
    durability, expires_unix_ms = caller.dice.choice(GRPC), caller.expires_unix_ms()
    puts = [caller.begin_put(key, Way.STREAM, durability, expires_unix_ms) for key in keys]
    results = caller.client.put_many_inline(
        [(caller.shared.keys[one.key].name, caller.data(one)) for one in puts],
        durability=durability,
        expires_unix_ms=expires_unix_ms,
        domain=domain,
        timeout_s=CALL_TIMEOUT_S,
    )
    caller.end_puts(puts, results)


# --- gets


def get(caller: Caller) -> None:
    keys = caller.some_keys(len(caller.shared.keys))
    blocks, began_s = caller.targets(keys), time.monotonic()
    outcomes = caller.client.get(blocks, timeout_s=CALL_TIMEOUT_S)
    data = caller.bytes_at(blocks)
    results = [one if isinstance(one, Miss) else data[at] for at, one in enumerate(outcomes)]
    caller.got("get", began_s, keys, results)


def get_with_little_time(caller: Caller) -> None:
    """Get blocks with a deadline that most miss; nothing writes to the memory afterwards."""
    keys = caller.some_keys(len(caller.shared.keys))
    blocks, began_s = caller.targets(keys, b"\x5a"), time.monotonic()
    outcomes = caller.client.get(blocks, timeout_s=caller.dice.choice(GET_TIMEOUTS_S))
    data = caller.bytes_at(blocks)
    results = [one if isinstance(one, Miss) else data[at] for at, one in enumerate(outcomes)]
    caller.got("get with little time", began_s, keys, results)
    time.sleep(0.02)
    if caller.bytes_at(blocks) != data:
        caller.trouble("memory was written after the get had ended")


def get_inline(caller: Caller) -> None:
    at, began_s = caller.key(), time.monotonic()
    key = caller.shared.keys[at]
    outcome = caller.client.get_inline(key.name, key.length, timeout_s=CALL_TIMEOUT_S)
    caller.got("get_inline", began_s, [at], [outcome])


def get_many_inline(caller: Caller) -> None:
    keys, began_s = caller.some_keys(len(caller.shared.keys)), time.monotonic()
    wanted = [(caller.shared.keys[at].name, caller.shared.keys[at].length) for at in keys]
    outcomes = list(caller.client.get_many_inline(wanted, timeout_s=CALL_TIMEOUT_S))
    caller.got("get_many_inline", began_s, keys, outcomes)


def exists(caller: Caller) -> None:
    keys, began_s = caller.some_keys(len(caller.shared.keys)), time.monotonic()
    outcomes = caller.client.exists(caller.names(keys), timeout_s=CALL_TIMEOUT_S)
    ended_s = time.monotonic()
    for key, outcome in zip(keys, outcomes, strict=True):
        if isinstance(outcome, Miss):
            event = Event(Kind.MISS, key, None, began_s, ended_s, End.DONE, reason=outcome.reason)
        else:
            event = Event(Kind.FOUND, key, None, began_s, ended_s, End.DONE)
        event.call = f"exists, {caller.name}"
        caller.shared.history.add(event)


def read_everything(caller: Caller) -> None:
    """Read all keys by each way to get and to look up."""
    for operation in (get, get_many_inline, exists) * 3:
        operation(caller)


# --- what keeps blocks, or looks at them


def pin(caller: Caller) -> None:
    dice = caller.dice
    kept = caller.client.pin(caller.names(caller.some_keys()), time_to_live_ms=dice.choice((0, 50, 2000)))
    time.sleep(dice.random() * 0.02)
    if dice.random() < 0.8:
        kept.close()


def prefetch(caller: Caller) -> None:
    caller.client.prefetch(caller.names(caller.some_keys(len(caller.shared.keys))))


def explain(caller: Caller) -> None:
    caller.client.explain([key.name for key in caller.shared.keys])


def leave(caller: Caller) -> None:
    """Close the client, and continue with another one."""
    caller.renew()


# --- sessions


def _session(caller: Caller) -> Session:
    return caller.client.session(caller.dice.choice(caller.shared.users), caller.dice.choice(SESSIONS[:3]))


def append(caller: Caller) -> None:
    session, keys = _session(caller), caller.some_keys(3)
    with suppress(NoSession):
        session.info()
    session.append(caller.names(keys), tokens=1)


def fork(caller: Caller) -> None:
    _session(caller).fork(caller.dice.choice(SESSIONS))


def truncate(caller: Caller) -> None:
    _session(caller).truncate(caller.dice.randint(0, 2))


def limit(caller: Caller) -> None:
    _session(caller).limit(caller.dice.choice((0, 50, 1000)))


def protect(caller: Caller) -> None:
    session = _session(caller)
    if caller.dice.random() < 0.5:
        session.protect()
    else:
        session.unprotect()


def resume(caller: Caller) -> None:
    session = _session(caller)
    at_of = {key.name: at for at, key in caller.every_key()}
    blocks, began_s = caller.targets(range(len(at_of))), time.monotonic()
    resumed: list[int] = []

    def place(_: int, name: bytes) -> Block:
        resumed.append(at_of[name])
        return blocks[at_of[name]]

    is_whole = session.resume(place).is_whole
    if is_whole and len(set(resumed)) == len(resumed):  # else two went to one place
        caller.got("resume", began_s, resumed, caller.bytes_at([blocks[at] for at in resumed]))


# --- removals


def delete(caller: Caller) -> None:
    keys, durability = caller.some_keys(2), caller.dice.choice((Durability.WRITTEN, Durability.SYNCED))
    removals = caller.begin_removals(keys, "delete", keys)
    caller.client.delete(caller.names(keys), durability=durability)
    caller.end_all(removals, End.DONE)


def remove_session(caller: Caller) -> None:
    """Remove a session, half of the time with the blocks that no other one has: those may be any."""
    session = _session(caller)
    if caller.dice.random() < 0.5:
        session.remove()
        return
    removals = caller.begin_removals(range(len(caller.shared.keys)), "remove")
    session.remove(delete_blocks=True)
    caller.end_all(removals, End.DONE)


def erase_user(caller: Caller) -> None:
    """Erase a user: blocks of their domain, and perhaps others in their sessions."""
    user = caller.dice.choice(caller.shared.users)
    sure = [at for at, key in caller.every_key() if key.domain == domain_of(user)]
    removals = caller.begin_removals(range(len(caller.shared.keys)), "erase_user", sure)
    caller.client.erase_user(user, timeout_s=CALL_TIMEOUT_S)
    caller.end_all(removals, End.DONE)


# --- for room


def fill(caller: Caller) -> None:
    """Put blocks that nobody reads, so that others are evicted."""
    length = caller.dice.choice(FILLER_BYTES)
    names = [block_key(b"fill", caller.dice.randbytes(16)) for _ in range(FILLERS)]
    domain = caller.shared.filler_domain
    if caller.dice.random() < 0.5:
        blocks = [Block(name, caller.region, 0, length, domain=domain) for name in names]
        caller.client.put(blocks, timeout_s=CALL_TIMEOUT_S)
    else:
        data = bytes(length)
        caller.client.put_many_inline(
            [(name, data) for name in names], domain=domain, timeout_s=CALL_TIMEOUT_S
        )


OPERATIONS: Final[dict[Operation, int]] = {
    put: 5,
    arm: 6,
    reserve: 6,
    reserve_many: 3,
    put_inline: 6,
    put_many_inline: 6,
    get: 7,
    get_with_little_time: 3,
    get_inline: 5,
    get_many_inline: 5,
    exists: 3,
    pin: 2,
    prefetch: 3,
    explain: 1,
    leave: 1,
    append: 3,
    fork: 2,
    truncate: 1,
    limit: 1,
    protect: 1,
    resume: 2,
    delete: 9,
    remove_session: 2,
    erase_user: 1,
    fill: 0,
}


def weighted(weights: dict[Operation, int]) -> list[Operation]:
    """Each operation as often as its weight, which is the usual one unless given."""
    return [one for one, weight in (OPERATIONS | weights).items() for _ in range(weight)]
