"""Calls about sessions to one node, and what its client knows of a user's home.

What always holds: a call ends within its time. While the node, as the user's home, doesn't order their sessions yet, it
is made again.
What it doesn't do: find the home (`kvstore.client.nodes`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from kvstore.client.checks import check_name
from kvstore.client.session_export import import_session
from kvstore.client.session_info import ListedSession
from kvstore.clock import SystemClock
from kvstore.errors import NodeUnavailable, WrongEpoch
from kvstore.limits import SESSIONS_LAST_TRY_MS, SESSIONS_RETRY_MS
from kvstore.wire import sessions_pb2 as pb
from kvstore.wire import sessions_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.client.client import Client
    from kvstore.client.core import Core
    from kvstore.client.nodes import Nodes
    from kvstore.client.session_export import Progress
    from kvstore.client.sessions import Session
    from kvstore.client.step_calls import StepCalls
    from kvstore.durability import Durability

_CLOCK = SystemClock()
T = TypeVar("T")

__all__ = ["AnyHome", "SessionCalls", "asked"]


def asked(
    find: Callable[[], SessionCalls],
    doing: str,
    user: str,
    ask: Callable[[float], T],
    timeout_s: float | None = None,
    *,
    waits: bool = True,
) -> T:
    """Make a call; retry it while the node, as the user's home, doesn't order their sessions yet."""
    until_ns = _CLOCK.monotonic_ns() + int(1e9 * (find().timeout_s if timeout_s is None else timeout_s))
    while True:
        calls = find()
        try:
            with calls.calling(doing):
                return ask(max(0.001, (until_ns - _CLOCK.monotonic_ns()) / 1e9))
        except WrongEpoch as error:
            is_late = _CLOCK.monotonic_ns() + SESSIONS_LAST_TRY_MS * 1_000_000 >= until_ns
            if not waits or is_late or not find().home.is_here(user):
                raise NodeUnavailable(f"{doing} was not done, and nothing has changed. {error}") from error
        threading.Event().wait(SESSIONS_RETRY_MS / 1000)


class AnyHome:
    """The view of a client that was given one node: it uses that node, whatever a map says."""

    def revision(self) -> int:
        """The revision of the map in use; 0 if there is none."""
        return 0

    def is_here(self, user: str) -> bool:
        """Whether its node is the user's home."""
        del user
        return True

    @property
    def nodes(self) -> Nodes | None:
        """The nodes among which the user's home is found; None if there is this one only."""
        return None

    @property
    def has_standby(self) -> bool:
        """Whether the user's blocks have to be on a second node too."""
        return False


class SessionCalls:
    """The calls of one client. Any thread."""

    def __init__(self, client: Client, core: Core, steps: StepCalls) -> None:
        self.client, self.core, self.steps = client, core, steps
        self.calling, self.timeout_s = core.calling, core.reach.call_timeout_s
        self.stub = sessions_pb2_grpc.SessionsStub(core.channel)  # type: ignore[no-untyped-call]
        self.home = AnyHome()

    def of_user(self, user: str) -> Iterator[ListedSession]:
        """As `Client.sessions`."""
        check_name("A user", user)  # now, not at the first session
        return self._each_of(user)

    def _each_of(self, user: str) -> Iterator[ListedSession]:
        token = b""
        while True:
            request = pb.ListSessionsRequest(tenant=self.client.tenant, user=user, page_token=token)

            def ask(timeout_s: float, request: pb.ListSessionsRequest = request) -> pb.ListSessionsResponse:
                request.map_revision = self.home.revision()
                page: pb.ListSessionsResponse = self.stub.ListSessions(request, timeout=timeout_s)
                return page

            page = asked(lambda: self, "Listing sessions", user, ask)
            for one in page.sessions:
                yield ListedSession(
                    one.session,
                    one.blocks,
                    one.turns,
                    one.tokens,
                    one.last_turn_unix_ms,
                    one.expires_unix_ms,
                )
            token = page.next_page_token
            if not token:
                return

    def import_one(
        self, file: BinaryIO, user: str, name: str, durability: Durability, progress: Progress | None
    ) -> Session:
        """As `Client.import_session`."""
        return import_session(self.client, file, user, name, durability, progress, self.home.is_here)
