"""The load of a cluster: requests with their prefix blocks, read from a trace or generated.

What always holds: requests are ordered by time, which begins at 0; a request has a block for each `block_tokens` of its
prompt, the last one perhaps not full; equal numbers mean equal prefixes. The generator gives the same chats for the
same seed.

Formats: Mooncake's (JSON lines: timestamp in ms, input_length, output_length, hash_ids, and optionally user),
BurstGPT's (CSV: Timestamp in s, Request tokens, Response tokens; with a Session ID, a follow-up begins with the whole
session so far; without one, no request shares anything), and Azure's of 2023 and 2024 (CSV: TIMESTAMP as a
date and time, ContextTokens, GeneratedTokens; no request shares anything).

The user of a request decides which node keeps its KV. If a trace has no users, a request that continues an earlier
prompt of at least two whole blocks belongs to the same user; any other belongs to a new one.
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from sim.output import counted
from sim.parameter_files import open_text
from sim.units import OutOfRange, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["BLOCK_TOKENS", "Chats", "Request", "chats", "read_trace", "write_mooncake"]

BLOCK_TOKENS = 512
_TOKENS_MAX = 10**8
_TIMESTAMP_S_MAX = 10**9
_NUMBERS = 2**63  # of blocks and users
_OWN_BLOCKS_MIN = 2  # whole ones: a first block is often a system prompt that all users share


class Request(NamedTuple):
    """One prompt and the length of its answer."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    user: int = 0  # this user's node keeps the KV


def _bad(path: Path, line: int, what: str, accepted: str) -> OutOfRange:
    return OutOfRange(f"{path.name}:{line}", what, "a request", accepted)


def _checked(path: Path, line: int, arrival_s: float, input_tokens: int, output_tokens: int) -> None:
    where = f"{path.name}:{line}"
    require(f"{where} timestamp", arrival_s, "seconds", 0, _TIMESTAMP_S_MAX)
    require(f"{where} input length", input_tokens, "tokens", 1, _TOKENS_MAX)
    require(f"{where} output length", output_tokens, "tokens", 0, _TOKENS_MAX)


def _mooncake(path: Path, block_tokens: int) -> Iterator[Request]:
    users: dict[int, int] = {}  # by the last whole block of a prompt of theirs
    fresh = count()
    with open_text("TRACE", path) as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
                arrival_s, tokens = float(row["timestamp"]) / 1000, int(row["input_length"])
                blocks = tuple(map(int, row["hash_ids"]))
                user = None if row.get("user") is None else int(row["user"])
                request = Request(arrival_s, tokens, int(row["output_length"]), blocks)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError) as error:
                accepted = "an object with timestamp (ms), input_length, output_length and hash_ids"
                raise _bad(path, line, f"unreadable ({error!r})", accepted) from error
            _checked(path, line, *request[:3])
            if not all(0 <= number < _NUMBERS for number in (*blocks, user or 0)):
                raise _bad(
                    path, line, "with a block or a user out of range", f"with numbers from 0 to {_NUMBERS:g}"
                )
            if len(blocks) != -(-tokens // block_tokens):
                what = f"of {counted(tokens, 'token')} in {counted(len(blocks), 'block')}"
                accepted = f"with one of hash_ids for every {block_tokens} tokens (--block-tokens)"
                raise _bad(path, line, what, accepted)
            whole = tokens // block_tokens
            if user is None:
                user = next((users[block] for block in reversed(blocks) if block in users), None)
                user = next(fresh) if user is None else user
                if whole >= _OWN_BLOCKS_MIN:
                    users[blocks[whole - 1]] = user
            yield request._replace(user=user)


def _rows(
    path: Path, accepted: str, read: Callable[[dict[str, str]], _Fields]
) -> Iterator[tuple[int, _Fields]]:
    """The lines of a CSV file, with the fields read from each."""
    with open_text("TRACE", path) as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            try:
                fields = read(row)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise _bad(path, line, f"unreadable ({error!r})", accepted) from error
            if fields.input_tokens:  # requests that failed are kept with no tokens
                _checked(path, line, *fields[:3])
                yield line, fields


class _Fields(NamedTuple):
    """The fields of a line of a CSV trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    session: str


def _burstgpt(path: Path, block_tokens: int) -> Iterator[Request]:
    fresh, users = count(), count()
    said: dict[str, tuple[int, int, list[int]]] = {}  # user, tokens and blocks of each session so far

    def read(row: dict[str, str]) -> _Fields:
        tokens = int(row["Request tokens"]), int(row["Response tokens"])
        return _Fields(float(row["Timestamp"]), *tokens, row.get("Session ID") or "")

    accepted = "a line with Timestamp (s), Request tokens and Response tokens"
    for _, (arrival_s, input_tokens, output_tokens, session) in _rows(path, accepted, read):
        user, tokens, blocks = said[session] if session in said else (next(users), 0, [])
        shared = min(tokens, input_tokens) // block_tokens
        wanted = -(-input_tokens // block_tokens)
        blocks = blocks[:shared] + [next(fresh) for _ in range(wanted - shared)]
        if session:
            total = input_tokens + output_tokens
            whole = input_tokens // block_tokens  # a partial block becomes a different block once it is full
            answered = [next(fresh) for _ in range(total // block_tokens - whole)]
            said[session] = (user, total, blocks[:whole] + answered)
        yield Request(arrival_s, input_tokens, output_tokens, tuple(blocks), user)


def _azure(path: Path, block_tokens: int) -> Iterator[Request]:
    fresh = 0

    def read(row: dict[str, str]) -> _Fields:
        # The trace has seven digits of a second, and the standard library reads six.
        when = re.sub(r"(\.\d{6})\d+", r"\1", row["TIMESTAMP"].strip())
        arrival = datetime.fromisoformat(when)
        if arrival.tzinfo is None:
            arrival = arrival.replace(tzinfo=UTC)
        since_s = (arrival - datetime(2000, 1, 1, tzinfo=UTC)).total_seconds()
        return _Fields(since_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]), "")

    accepted = "a line with TIMESTAMP (a date and time), ContextTokens and GeneratedTokens"
    for user, (_, fields) in enumerate(_rows(path, accepted, read)):
        wanted = -(-fields.input_tokens // block_tokens)
        yield Request(*fields[:3], tuple(range(fresh, fresh + wanted)), user)
        fresh += wanted


def _csv(path: Path, block_tokens: int) -> Iterator[Request]:
    with open_text("TRACE", path) as file:
        head = next(csv.reader(file), [])
    return (_azure if "ContextTokens" in head else _burstgpt)(path, block_tokens)


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS) -> list[Request]:
    """All requests, in order of time; the name's suffix and the head determine the format."""
    require("--block-tokens", block_tokens, "tokens a block", 1, 10**6)
    readers = {".jsonl": _mooncake, ".csv": _csv}
    if path.suffix not in readers:
        accepted = "named *.jsonl (Mooncake's format) or *.csv (BurstGPT's or Azure's)"
        raise OutOfRange("TRACE", str(path), "a file of requests", accepted)
    requests = list(readers[path.suffix](path, block_tokens))
    if not requests:
        raise OutOfRange("TRACE", f"{path}, which is empty", "a file of requests", "at least one")
    requests.sort(key=lambda request: request.arrival_s)
    begin_s = requests[0].arrival_s
    return [request._replace(arrival_s=request.arrival_s - begin_s) for request in requests]


@dataclass(frozen=True, slots=True)
class Chats:
    """The parameters of generated chats; means, where they vary."""

    sessions: int = 1000
    sessions_per_s: float = 1.0
    turns: float = 5.0
    think_s: float = 40.0
    system_tokens: int = 1024  # one of `systems` prompts that sessions share
    systems: int = 8
    turn_tokens: float = 600.0
    answer_tokens: float = 300.0
    token_s: float = 0.03
    seed: int = 1

    def __post_init__(self) -> None:
        require("--sessions", self.sessions, "a number of sessions", 1, 10**7)
        require("--sessions-per-s", self.sessions_per_s, "sessions that begin a second", 1e-6, 1e6)
        require("--turns", self.turns, "turns of a session", 1, 1000)
        require("--think-s", self.think_s, "seconds", 0, 1e6)
        require("--system-tokens", self.system_tokens, "tokens", 0, _TOKENS_MAX)
        require("--systems", self.systems, "a number of system prompts", 1, 10**6)
        require("--turn-tokens", self.turn_tokens, "tokens of a turn", 1, 1e6)
        require("--answer-tokens", self.answer_tokens, "tokens of an answer", 1, 1e6)
        require("--token-s", self.token_s, "seconds a token", 0, 100)
        require("--seed", self.seed, "a whole number", 0, 2**63)


_SIGMA = 0.8  # of the lengths, which are lognormal: many short, few long


def _length(rng: random.Random, mean: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA)))


def chats(terms: Chats) -> list[Request]:
    """Sessions that begin at random times; each turn begins with everything that was said before."""
    rng = random.Random(terms.seed)  # noqa: S311 - a load, not a secret
    shared = terms.system_tokens // BLOCK_TOKENS
    fresh = count(terms.systems * shared)
    requests = []
    begin_s = 0.0
    for user in range(terms.sessions):
        begin_s += rng.expovariate(terms.sessions_per_s)
        system = rng.randrange(terms.systems)
        blocks = [system * shared + i for i in range(shared)]
        now_s, tokens = begin_s, terms.system_tokens
        while True:
            tokens += _length(rng, terms.turn_tokens)
            answer = _length(rng, terms.answer_tokens)
            wanted = -(-tokens // BLOCK_TOKENS)
            blocks = [*blocks, *(next(fresh) for _ in range(wanted - len(blocks)))]
            requests.append(Request(now_s, tokens, answer, tuple(blocks), user))
            if rng.random() < 1 / terms.turns:
                break
            # A block is whole, and so can be shared, only once all of its tokens have been said.
            blocks = list(requests[-1].blocks[: tokens // BLOCK_TOKENS])
            tokens += answer
            blocks += [next(fresh) for _ in range(tokens // BLOCK_TOKENS - len(blocks))]
            now_s += answer * terms.token_s
            now_s += rng.expovariate(1 / terms.think_s) if terms.think_s else 0.0
    requests.sort(key=lambda request: request.arrival_s)
    first_s = requests[0].arrival_s
    return [request._replace(arrival_s=request.arrival_s - first_s) for request in requests]


def write_mooncake(requests: list[Request]) -> Iterator[str]:
    """Lines in Mooncake's format."""
    for request in requests:
        yield json.dumps(
            {
                "timestamp": round(request.arrival_s * 1000),
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(request.blocks),
                "user": request.user,
            }
        )
