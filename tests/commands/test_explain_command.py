"""`kvstore explain` against a real node: its output when a request was slow or missed."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Client, as_request
from kvstore.client.observing import LookedUp
from kvstore.commands.explain_command import document, page
from kvstore.config import show_time
from kvstore.lookups import HITS, Kind, Lookup, Outcome, Run
from kvstore.names import block_key
from kvstore.wire.observing_pb2 import StatisticsResponse
from nic_offload.memory import allocate
from tests.commands.here import run_here
from tests.conftest import small_client

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from kvstore.demo.node_process import NodeProcess

WAIT_S = 20.0
PAGE = 4096
KEYS = [block_key(b"explain", bytes([number])) for number in range(8)]


def run(node: NodeProcess, *more: str) -> subprocess.CompletedProcess[str]:
    return run_here("explain", "--node", node.target, "--tenant", "acme", *more)


@pytest.fixture
def client(node: NodeProcess) -> Iterator[Client]:
    with small_client(node.target, tenant="acme") as client:
        yield client


def test_a_node_without_look_ups_says_so(node: NodeProcess) -> None:
    done = run(node, "--last", "1")
    assert done.returncode == 3
    assert "remembers no look-up of this tenant, which has not requested" in done.stderr
    assert "remembers no look-up of none, nor any other of this tenant, which" in run(node, "none").stderr


def test_a_request_that_missed_is_explained_run_by_run(node: NodeProcess, client: Client) -> None:
    client.put_many_inline([(key, bytes(PAGE)) for key in KEYS[:4]])
    client.delete([KEYS[2]])
    kv = client.register(allocate(8 * PAGE))
    with as_request("cmpl-7"):
        client.prefix(KEYS)
        client.get([Block(key, kv, at * PAGE, PAGE) for at, key in enumerate(KEYS[:4])], timeout_s=WAIT_S)
    done = run(node, "cmpl-7")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [
        re.sub(r"\d+\.\d\d ms", "# ms", re.sub(r"\d+ (ms|s) ago.*", "# ago", line))
        for line in done.stdout.splitlines()
    ]
    assert lines[0] == "request cmpl-7"
    assert lines[1].endswith(" UTC  counted how many of 8 blocks are stored, up to the first gap")
    assert lines[2:6] == [
        "    blocks 0-1  hit   stored",
        "    block 2     MISS  deleted # ago",
        "    blocks 3-7  -     not examined",
        "    took # ms",
    ]
    assert lines[6].endswith(" UTC  fetched 4 blocks")
    assert lines[7:11] == [
        "    blocks 0-1  hit   read from a drive",
        "    block 2     MISS  deleted # ago",
        "    block 3     hit   read from a drive",
        "    took # ms: queued # ms, drive # ms, delivery and the rest # ms, 12 KiB delivered",
    ]
    assert lines[12] == "What to do: The blocks were deleted; put them again if that was a mistake."
    told = json.loads(run(node, "cmpl-7", "--json").stdout)
    assert [one["kind"] for one in told["lookups"]] == ["prefix", "fetch"]
    assert told["lookups"][0]["runs"][1]["outcome"] == "deleted"
    assert told["lookups"][0]["examined"] == 3
    assert told["lookups"][1]["bytes"] == 3 * PAGE
    assert json.loads(run(node, "--last", "1", "--json").stdout)["lookups"] == told["lookups"][1:]


def test_a_resume_is_explained_by_its_session(node: NodeProcess, client: Client) -> None:
    client.put_many_inline([(key, bytes(PAGE)) for key in KEYS])
    chat = client.session("ada", "a/chat")
    chat.append(KEYS, 128)
    kv = client.register(allocate(8 * PAGE))
    assert chat.resume(lambda at, key: Block(key, kv, at * PAGE, PAGE), timeout_s=WAIT_S).is_whole
    done = run(node, "--session", "ada/a/chat")
    assert done.returncode == 0, done.stderr
    assert "    blocks 0-7  hit   named by the session\n" in done.stdout
    assert "    blocks 0-7  hit   read from a drive\n" in done.stdout
    assert "What to do: Nothing was missed." in done.stdout


def test_unknown_requests_and_mistakes_are_one_sentence(node: NodeProcess, client: Client) -> None:
    client.exists(KEYS[:1])
    for more, why in (
        (["no-such"], "remembers no look-up of no-such, but 1 of this tenant since 20"),
        ([], "Give a request"),
        (["--session", "ada"], "USER/NAME"),
        (["--last", "-1"], "--last must be"),
        (["no-such", "--last", "99999999999"], "remembers no look-up of no-such"),
        (["--last", "1", "--ca", "none.pem"], "none.pem"),
    ):
        done = run(node, *more)
        assert (done.returncode, done.stdout) == (3 if "no look-up" in why else 2, "")
        assert why in done.stderr
        assert len(done.stderr.splitlines()) == 1


def looked_up(*lookups: Lookup) -> LookedUp:
    return LookedUp(lookups, 10_000_000, 1, 1, 0)


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - HITS))
def test_each_kind_of_miss_has_its_explanation_and_advice(outcome: Outcome) -> None:
    lookup = Lookup(
        "r", Kind.FETCH, 9_000_000, 5000, 70, [Run(64, Outcome.MEMORY), Run(6, outcome, 1_000_000, 7_200_000)]
    )
    said = page(looked_up(lookup), StatisticsResponse(capacity_bytes=1 << 30, free_bytes=1 << 20))
    assert "blocks 64-69  MISS  " in said
    assert "idle for 2 h" in said
    assert "the first of them 2 h ago, 2 h before this look-up" in said
    told: Any = document(looked_up(lookup), StatisticsResponse())
    advice = told["advice"][0]
    assert advice.endswith(".")
    assert "{" not in advice


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ({"queued_us": 40_000}, "queueing behind other fetches"),
        ({"drive_us": 40_000}, "spent on the drive"),
        ({"size_bytes": 9}, "spent sending"),
    ],
)
def test_a_slow_request_without_misses_is_explained_by_where_its_time_went(
    times: dict[str, int], why: str
) -> None:
    lookup = Lookup("r", Kind.FETCH, 1, 50_000, 1, [Run(1, Outcome.DRIVE)], **times)  # type: ignore[arg-type]
    assert why in page(looked_up(lookup), StatisticsResponse())


def test_the_fetches_of_a_resume_are_numbered_consecutively() -> None:
    session = Lookup("r", Kind.SESSION, 1, 5, 300, [Run(300, Outcome.NAMED)])
    fetches = [Lookup("r", Kind.FETCH, 2, 5, 128, [Run(128, Outcome.MEMORY)]) for _ in range(2)]
    said = page(looked_up(session, *fetches), StatisticsResponse())
    assert "blocks 0-127  hit " in said
    assert "blocks 128-255  hit " in said


def test_a_shortened_answer_says_so() -> None:
    lookup = Lookup("r", Kind.EXISTS, 1, 5, 1, [Run(1, Outcome.STORED)])
    assert "There may be more: the last 256 are shown." in page(
        looked_up(*[lookup] * 256), StatisticsResponse()
    )
    assert "There may be more" not in page(looked_up(lookup), StatisticsResponse())


def test_request_ids_cannot_send_terminal_escapes() -> None:
    lookup = Lookup("r\x1b[31m", Kind.FETCH, 1, 5, 1, [Run(1, Outcome.BUSY)], by_caller=True, detail="\x1b")
    assert "\x1b" not in page(looked_up(lookup), StatisticsResponse())


def test_times_are_printed_in_readable_units() -> None:
    assert [show_time(one) for one in (-5, 1999, 2000, 119_000, 180_000, 7_200_000, 200_000_000)] == [
        "0 ms", "1999 ms", "2 s", "119 s", "3 min", "2 h", "2 days",
    ]  # fmt: skip
