"""Requests that name a session: each is appended to it as a turn.

A request names its session in `kv_transfer_params` (`{"session": ..., "user": ...}`), or with the header X-Session-ID.
The header names no user; such sessions belong to the user `anonymous`.

When a request arrives, the node reads its user's blocks into memory if the rules say so (`request_rules`); when it
ends, its blocks are appended. A cluster, whose blocks are spread over all nodes, has no sessions.

What always holds: the engine never waits for it, and it doesn't affect which bytes a request gets: the blocks' own
names decide that. If a conversation's past was changed, the session is truncated to the common prefix.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvstore.engines.vllm.request_rules import ANONYMOUS, session_of
from kvstore.errors import InvalidArgument, KvError, NoSession, SessionRefused
from kvstore.limits import VLLM_TURN_AGAIN_MS, VLLM_TURN_TRIES, VLLM_TURNS_QUEUED_MAX
from kvstore.names import SHARED, UNSAID, domain_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.client import Matched, Session
    from kvstore.engines.vllm.groups import Group
    from kvstore.engines.vllm.request_rules import RequestRules

__all__ = ["Turns", "domain_named"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's

_TRY_WAIT_S = VLLM_TURN_AGAIN_MS / 1000


def domain_named(request: Any, default: bytes) -> bytes:
    """The erase domain that a request names; only requests of the same domain find its blocks.

    An invalid name (empty or too long, or a `shared` that is not a boolean) counts as none, which a node that encrypts
    refuses: no user's block is shared by mistake.
    """
    given = request.kv_transfer_params or {}
    named, shared = given.get("domain"), given.get("shared")
    if named is not None:
        try:
            return domain_of(str(named))
        except InvalidArgument:
            return UNSAID
    if shared is None or shared is False:
        return default
    return SHARED if shared is True else UNSAID


class Turns:
    """The turns of sessions, in an engine's scheduler."""

    def __init__(self, rules: RequestRules, groups: Sequence[Group], domain: bytes) -> None:
        """`domain` is that of requests that name none."""
        self._rules, self._groups, self._domain = rules, groups, domain
        self._thread = ThreadPoolExecutor(1, "kvstore-turns")
        self._room = threading.BoundedSemaphore(VLLM_TURNS_QUEUED_MAX)
        self._never = threading.Event()

    def arrived(self, request: Any, matched: Matched) -> None:
        """Prefetch its user's blocks if it names a session, and the rule that it matched says so.

        A request that names no user has its session prefetched alone: others' have the same user.
        """
        named = session_of(request)
        if named is None or not matched.fetches:
            return
        if named[0] != ANONYMOUS:
            self._later(lambda: self._rules.fetch(matched))
        elif (session := self._rules.session(*named)) is not None:
            self._later(session.prefetch)

    def finished(self, request: Any, digests_of: Callable[[], Sequence[Sequence[bytes]]]) -> None:
        """Append the blocks that its session lacks; the digests are of saved blocks, group by group.

        They are asked for only if it names a session.
        """
        session = self._session(request)
        if session is None or not all(digests := digests_of()):
            return
        tokens = min(
            len(of_group) * group.block_tokens for of_group, group in zip(digests, self._groups, strict=True)
        )
        domain = domain_named(request, self._domain)
        blocks = [
            one
            for group, of_group in zip(self._groups, digests, strict=True)
            for one in group.sized_objects(of_group[: tokens // group.block_tokens], domain)
        ]
        self._later(lambda: self._append(session, blocks, tokens))

    def _session(self, request: Any) -> Session | None:
        named = session_of(request)
        return None if named is None else self._rules.session(*named)

    def _later(self, work: Any) -> None:
        if not self._room.acquire(blocking=False):
            return

        def run() -> None:
            try:
                work()
            except KvError as error:
                log.debug("A turn was not added to a session: %s", error)
            except Exception:  # no error may stop the engine
                log.exception("Adding a turn to a session failed.")
            finally:
                self._room.release()

        self._thread.submit(run)

    def _append(self, session: Session, blocks: Sequence[tuple[bytes, int]], tokens: int) -> None:
        for _ in range(VLLM_TURN_TRIES):
            try:
                self._append_once(session, blocks, tokens)
            except SessionRefused as error:
                log.debug("Retrying: %s", error)
                self._never.wait(_TRY_WAIT_S)
                continue
            return

    def _append_once(self, session: Session, blocks: Sequence[tuple[bytes, int]], tokens: int) -> None:
        keys = [key for key, _ in blocks]
        there: list[bytes] = []
        there_tokens = 0
        with suppress(NoSession):
            there, there_tokens = session.keys(), session.info().tokens
        common = next(
            (at for at, (one, other) in enumerate(zip(there, keys, strict=False)) if one != other),
            min(len(there), len(keys)),
        )
        if common < len(there):
            session.truncate(common)
            there_tokens = session.info().tokens
        if common < len(keys):
            session.append(keys[common:], max(0, tokens - there_tokens))
        self._rules.appended(session.user, blocks[common:], was_changed=common < len(there))
