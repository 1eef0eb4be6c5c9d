"""Names of users and sessions from callers: checked, and converted to the names on the drive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import NoSession, ProtocolError
from kvstore.limits import SESSION_LABEL_BYTES_MAX
from kvstore.names import session_name, user_name
from kvstore.storage.manifests import SessionName
from nic_offload.errors import shown

if TYPE_CHECKING:
    from kvstore.node.node import Node
    from kvstore.node.tenants import Tenants
    from kvstore.wire import sessions_pb2 as pb

__all__ = ["check_text", "home_elsewhere", "name_of", "no_session"]


def name_of(tenant: bytes, user: str, session: str) -> SessionName:
    """A session of a user of this tenant."""
    check_text("user", user)
    check_text("session", session)
    named = user_name(tenant, user)
    return SessionName(tenant, named, session_name(named, session))


def no_session(name: pb.SessionName, elsewhere: str) -> NoSession:
    """The error of a call for a session that doesn't exist; it names the user's home if that is elsewhere."""
    missing = f"The user {shown(name.user)} has no session {shown(name.session)}"
    return NoSession(
        f"{missing} here: their home in the cluster is {elsewhere}." if elsewhere else f"{missing}."
    )


def home_elsewhere(node: Node, tenants: Tenants, name: pb.SessionName) -> str:
    """The user's home, if that is another node, and the caller doesn't use the cluster's map; else ""."""
    membership = node.membership
    if name.map_revision or membership is None:
        return ""
    home = membership.map.home(tenants.placed_as(name.tenant), name.user)
    return "" if home is None or home.name == membership.name else home.node


def check_text(what: str, text: str) -> None:
    """Refuse a name that is empty or too long."""
    if not 1 <= len(text.encode()) <= SESSION_LABEL_BYTES_MAX:
        raise ProtocolError(
            f"A {what}'s name has 1 to {SESSION_LABEL_BYTES_MAX} bytes, not {len(text.encode())}."
        )
