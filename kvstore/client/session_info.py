"""Descriptions of a session: its size and its turns. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ListedSession", "SessionInfo", "TurnInfo"]


@dataclass(frozen=True, slots=True)
class TurnInfo:
    """A turn: the range of its blocks and of its tokens."""

    blocks: range
    tokens: range
    began_unix_ms: int


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session's blocks, tokens and turns."""

    blocks: int
    tokens: int
    turns: tuple[TurnInfo, ...]
    expires_unix_ms: int = 0  # 0: it does not expire


@dataclass(frozen=True, slots=True)
class ListedSession:
    """A session in a list."""

    session: str
    blocks: int
    turns: int
    tokens: int
    last_turn_unix_ms: int  # 0: it has no turns
    expires_unix_ms: int = 0  # 0: it does not expire
