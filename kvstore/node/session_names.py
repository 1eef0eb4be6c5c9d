"""Names of users and sessions from callers: checked, and converted to the names on the drive."""

from __future__ import annotations

from kvstore.errors import NoSession, ProtocolError
from kvstore.limits import SESSION_LABEL_BYTES_MAX
from kvstore.names import session_name, user_name
from kvstore.storage.manifests import SessionName
from nic_offload.errors import shown

__all__ = ["check_text", "name_of", "no_session"]


def name_of(tenant: bytes, user: str, session: str) -> SessionName:
    """A session of a user of this tenant."""
    check_text("user", user)
    check_text("session", session)
    named = user_name(tenant, user)
    return SessionName(tenant, named, session_name(named, session))


def no_session(user: str, session: str) -> NoSession:
    """The error of a call for a session that doesn't exist."""
    return NoSession(f"The user {shown(user)} has no session {shown(session)}.")


def check_text(what: str, text: str) -> None:
    """Refuse a name that is empty or too long."""
    if not 1 <= len(text.encode()) <= SESSION_LABEL_BYTES_MAX:
        raise ProtocolError(
            f"A {what}'s name has 1 to {SESSION_LABEL_BYTES_MAX} bytes, not {len(text.encode())}."
        )
