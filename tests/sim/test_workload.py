"""Traces that are read and chats that are made up."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING

import pytest

from sim.replay.workload import BLOCK_TOKENS, Chats, chats, read_trace, write_mooncake
from sim.units import OutOfRange

if TYPE_CHECKING:
    from pathlib import Path

LINE = '{"timestamp": %s, "input_length": %s, "output_length": 3, "hash_ids": %s}\n'
HEAD = "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def _file(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_mooncake_milliseconds_become_seconds_from_the_first_request(tmp_path: Path) -> None:
    path = _file(tmp_path, "t.jsonl", LINE % (2500, 600, "[7, 8]") + "\n" + LINE % (1500, 512, "[7]"))
    first, second = read_trace(path)
    assert (first.arrival_s, first.input_tokens, first.blocks) == (0.0, 512, (7,))
    assert (second.arrival_s, second.output_tokens, second.blocks) == (1.0, 3, (7, 8))


def test_burstgpt_sessions_begin_with_earlier_messages(tmp_path: Path) -> None:
    rows = "5,a,m,1000,600,1600,c\n6,,m,700,1,701,c\n7,a,m,1700,10,1710,c\n8,b,m,0,0,0,c\n9,a,m,100,1,101,c\n"
    requests = read_trace(_file(tmp_path, "t.csv", HEAD + rows))
    assert [request.arrival_s for request in requests] == [0, 1, 2, 4]
    first, alone, second, short = (request.blocks for request in requests)
    assert len(first) == 2
    assert first[:1] == second[:1], "one block of the first prompt is whole"
    assert len(second) == 4
    assert second[1] != first[1], "its second block was full only with the answer"
    assert not set(alone) & {*first, *second}
    assert len(short) == 1


def test_without_sessions_nothing_is_shared(tmp_path: Path) -> None:
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    requests = read_trace(_file(tmp_path, "t.csv", head + "1,m,600,1,601,c\n2,m,600,1,601,c\n"))
    assert not set(requests[0].blocks) & set(requests[1].blocks)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.txt", "", "TRACE is "),
        ("t.jsonl", "", "which is empty; it takes a file of requests, at least one."),
        (
            "t.jsonl",
            "{}\n",
            "t.jsonl:1 is unreadable (KeyError('timestamp')); it takes a request, an object with",
        ),
        (
            "t.jsonl",
            LINE % (0, 1, "[1]") + LINE % (1, 513, "[1]"),
            "t.jsonl:2 is of 513 tokens in 1 block; it",
        ),
        (
            "t.jsonl",
            LINE % (-5, 1, "[1]"),
            "t.jsonl:1 timestamp is -0.005; it takes seconds, from 0 to 1,000,000,000.",
        ),
        (
            "t.jsonl",
            LINE % (0, 0, "[]"),
            "t.jsonl:1 input length is 0; it takes tokens, from 1 to 100,000,000.",
        ),
        (
            "t.csv",
            "Timestamp\n1\n",
            "t.csv:2 is unreadable (KeyError('Request tokens')); it takes a request, a line",
        ),
        ("t.jsonl", "[" * 100_000, "t.jsonl:1 is unreadable (RecursionError("),
        (
            "t.jsonl",
            '{"timestamp": 0, "input_length": 1e999, "output_length": 1, "hash_ids": [1]}',
            "t.jsonl:1 is unreadable (OverflowError(",
        ),
        ("t.csv", HEAD + "x,a,m,1,1,2,c\n", "t.csv:2 is unreadable (ValueError("),
    ],
)
def test_an_invalid_line_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(OutOfRange) as caught:
        read_trace(_file(tmp_path, name, text))
    assert message in str(caught.value)


def test_chats_follow_their_settings() -> None:
    terms = Chats(sessions=3000, sessions_per_s=2.0, turns=4.0, turn_tokens=400, answer_tokens=200, seed=5)
    made = chats(terms)
    assert len(made) / 3000 == pytest.approx(4.0, rel=0.05)
    assert statistics.fmean(request.output_tokens for request in made) == pytest.approx(200, rel=0.05)
    assert made[0].arrival_s == 0
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(made))
    assert all(len(request.blocks) == -(-request.input_tokens // BLOCK_TOKENS) for request in made)
    firsts = [request for request in made if len({*request.blocks}) == len(request.blocks)]
    assert len(firsts) == len(made), "no block twice in a prompt"


def test_chats_take_their_time() -> None:
    """Sessions a second, seconds of thinking, and seconds per token of the answer that the user reads."""
    firsts = chats(Chats(sessions=4000, sessions_per_s=5.0, turns=1.0, seed=3))
    assert firsts[-1].arrival_s == pytest.approx(4000 / 5.0, rel=0.05)
    one = chats(Chats(sessions=1, turns=200.0, think_s=30.0, token_s=0.1, system_tokens=0, seed=6))
    gaps = [b.arrival_s - a.arrival_s - 0.1 * a.output_tokens for a, b in itertools.pairwise(one)]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(30.0, rel=0.3)
    at_once = chats(Chats(sessions=1, turns=20.0, think_s=0, token_s=0.1, seed=2))
    for a, b in itertools.pairwise(at_once):
        assert b.arrival_s - a.arrival_s == pytest.approx(0.1 * a.output_tokens)


def test_a_turn_begins_with_everything_said_before() -> None:
    made = chats(Chats(sessions=1, turns=30.0, system_tokens=0, seed=2))
    assert len(made) > 3
    for before, after in itertools.pairwise(made):
        whole = before.input_tokens // BLOCK_TOKENS
        assert after.blocks[:whole] == before.blocks[:whole]
        # A block that was not full is another one once it is: nobody may find it by its old name.
        assert after.blocks[whole : whole + 1] != before.blocks[whole : whole + 1]
        assert after.input_tokens > before.input_tokens + before.output_tokens


def test_sessions_share_their_system_prompts() -> None:
    made = chats(Chats(sessions=50, turns=1.0, system_tokens=1100, systems=2, seed=1))
    assert len({request.blocks[:2] for request in made}) == 2
    assert len({request.blocks[2] for request in made}) == 50


def test_chats_round_trip_through_a_file(tmp_path: Path) -> None:
    made = chats(Chats(sessions=20, seed=9))
    read = read_trace(_file(tmp_path, "c.jsonl", "\n".join(write_mooncake(made))))
    assert [request[1:] for request in read] == [request[1:] for request in made]
    assert [request.arrival_s for request in read] == pytest.approx([r.arrival_s for r in made], abs=1e-3)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"sessions": 0}, "--sessions is 0; it takes a number of sessions, from 1 to 10,000,000."),
        ({"turns": 0.5}, "--turns is 0.5; it takes turns of a session, from 1 to 1,000."),
        ({"think_s": -1}, "--think-s is -1; it takes seconds, from 0 to 1,000,000."),
    ],
)
def test_settings_out_of_range_are_refused(terms: dict[str, float], message: str) -> None:
    with pytest.raises(OutOfRange) as caught:
        Chats(**terms)  # type: ignore[arg-type]
    assert str(caught.value) == message
