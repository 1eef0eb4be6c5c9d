"""Exports a session into a file, and imports one: bytes, keys and turns.

Keys of blocks are the application's own, and a node separates tenants by itself. So a file belongs to no tenant, and
an imported session belongs to the importing client's tenant.

What always holds: an unfinished export can't be imported; an imported session appears whole, at once and under a
free name, or not at all. On a node that encrypts its blocks are put into the erase domain of its user, including those
without a domain, unless the client asked for `shared`; their keys are then those of `in_domain`. Blocks that were put
before a failure stay until they are evicted. One block at a time is in memory.

What it doesn't do: keep the start of turns (it is the import's), protection, or times to live.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from kvstore.client.session_file import Content, Reader, Writer
from kvstore.errors import KvError, LayoutError, NoSession, SessionFileError, SessionRefused
from kvstore.limits import BATCH_BLOCKS_MAX, IMPORT_UNFINISHED_MS
from kvstore.miss import Miss
from kvstore.names import UNSAID, domain_of, in_domain, is_in_domain
from kvstore.wire.manifest import Turn

if TYPE_CHECKING:
    from kvstore.client.client import Client
    from kvstore.client.sessions import Session
    from kvstore.durability import Durability

__all__ = ["Progress", "export_session", "import_session"]

Progress = Callable[[int, int], None]  # how many blocks are done, of how many


def export_session(client: Client, session: Session, file: BinaryIO, progress: Progress | None) -> int:
    """Write a session with all its blocks; returns the number of different blocks.

    SessionFileError if one of them can't be read; the file is then invalid.
    """
    info, keys = session.info(), session.keys()
    turns = [Turn(one.blocks.start, len(one.tokens), one.began_unix_ms) for one in info.turns]
    content = Content(client.fingerprint, turns, keys)
    if len(keys) != info.blocks:
        raise SessionRefused("The session changed during the export; export it again.")
    writer = Writer(file, content)
    places = content.places()
    for first in range(0, len(places), BATCH_BLOCKS_MAX):
        some = places[first : first + BATCH_BLOCKS_MAX]
        states = client.exists([keys[place] for place in some])
        for number, (place, found) in enumerate(zip(some, states, strict=True), first + 1):
            payload = found if isinstance(found, Miss) else client.get_inline(keys[place], found.length)
            if isinstance(payload, Miss):
                raise SessionFileError(f"Block {place} of the session can't be exported: {payload}.")
            writer.block(place, payload)
            if progress is not None:
                progress(number, len(places))
    writer.end()
    return len(places)


def import_session(
    client: Client,
    file: BinaryIO,
    user: str,
    name: str,
    durability: Durability,
    progress: Progress | None,
    is_here: Callable[[str], bool],
) -> Session:
    """Import a session from a file under this name, which must be free.

    SessionFileError if the file is incomplete, LayoutError if its blocks have another layout than this client's,
    SessionRefused if a session of this name exists. In these cases no session is created.
    """
    session = client.session(user, name)
    _refuse_known(session)
    reader = Reader(file)
    content = reader.content
    if content.fingerprint != client.fingerprint:
        raise LayoutError("The session's blocks have another layout than this client's.")
    if not content.keys:
        raise SessionFileError("The session in the file has no blocks, so there is nothing to import.")
    count = len(content.places())
    domain, owns_all = domain_of(user), not client.reach.shared and client.status().encrypted

    def own_key(key: bytes) -> bytes:
        return in_domain(key, domain) if owns_all or is_in_domain(key) else key

    for number, (key, payload) in enumerate(reader.blocks(), 1):
        own = own_key(key)
        client.put_inline(own, payload, durability=durability, domain=domain if is_in_domain(own) else UNSAID)
        if progress is not None:
            progress(number, count)
    reader.read_end()
    # Turns are appended one by one, under a hidden name, and then renamed in one step. Its user is the same for all
    # imports to a node: a node that encrypts makes a key for each user.
    nobodies = (f"import {number}" for number in itertools.count())
    gathered = client.session(
        next(one for one in nobodies if is_here(one)), f"unfinished {secrets.token_hex(16)}"
    )
    ends = [*(turn.first_block for turn in content.turns), len(content.keys)][1:]
    try:
        for turn, end in zip(content.turns, ends, strict=True):
            gathered.append(
                [own_key(key) for key in content.keys[turn.first_block : end]],
                turn.tokens,
                time_to_live_ms=IMPORT_UNFINISHED_MS,
            )
        return gathered.fork(name, user=user, durability=durability)
    finally:
        with suppress(KvError):  # it ends by itself
            gathered.remove()


def _refuse_known(session: Session) -> None:
    try:
        session.info()
    except NoSession:
        return
    raise SessionRefused(f"There is a session {session.name!r} of this user already.")
