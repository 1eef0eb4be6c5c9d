"""The eight steps end to end: two users, one GPU slot, a process per turn that is killed afterwards, and the trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.errors import NoSession
from tests.client.turn import EVERY, PAGE, SLOT_BYTES, TOKEN_BYTES, TOKENS, pieces
from tests.conftest import small_client

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess

ROOT = Path(__file__).resolve().parent.parent.parent
WAIT_S = 60.0


def turn(node: NodeProcess, slot: Path, user: str, number: int) -> dict[str, Any]:
    """Run one turn in a separate process, which is killed once it has reported."""
    arguments = [node.target, user, "chat", str(slot), str(number), str((number - 1) * TOKENS)]
    command = [sys.executable, "-m", "tests.client.turn", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.kill()
        _, errors = process.communicate(timeout=WAIT_S)
        assert line, errors
        said: dict[str, Any] = json.loads(line)
        return said
    finally:
        process.kill()


def traced(node: NodeProcess, user: str, *more: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "kvstore", "trace", "chat", "--node", node.target]
    done = subprocess.run(
        [*command, "--user", user, "--tenant", "acme", *more],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout


def test_two_users_share_one_slot_and_resume_exactly_in_other_processes_with_all_eight_steps_traced(
    node: NodeProcess, tmp_path: Path
) -> None:
    slot = tmp_path / "slot"
    slot.write_bytes(bytes(PAGE + SLOT_BYTES + PAGE))
    for number in (1, 2, 3):
        for user in ("ada", "bob"):
            said = turn(node, slot, user, number)
            assert said.pop("exact"), "what was resumed is all of it, and nothing beside it was touched"
            assert said.pop("mine")
            assert said.pop("errors") == []
            if number > 1:
                assert said == {"prefetched": True, "whole": True, "tokens": (number - 1) * TOKENS}

    seen = json.loads(traced(node, "ada", "--json"))
    assert [one["unix_ms"] for one in seen] == sorted(one["unix_ms"] for one in seen)
    numbers = [one["step"] for one in seen]
    assert list(dict.fromkeys(numbers)) == [1, 2, 3, 4, 5, 6, 7, 8], (
        "each of the eight comes first in its order"
    )
    a_turn(seen[: numbers.index(7)])
    later = seen[numbers.index(7) :]
    second = later[: [one["seen"] for one in later].index("slot_given") + 1]
    a_resumed_turn(second, blocks=3)
    a_resumed_turn(later[len(second) :], blocks=6)

    shown = traced(node, "bob").splitlines()
    assert shown[0].split() == ["step", "at", "ms", "seen", "by", "what", "blocks", "bytes"]
    assert any("threshold 4, landed after" in line for line in shown)
    assert sum("puts armed" in line for line in shown) == 3


def of(seen: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [one for one in seen if one["seen"] == name]


def a_turn(seen: list[dict[str, Any]]) -> None:
    """A turn: four tokens, four, and a flush of two; landed, written, appended, and acknowledged in time."""
    sizes = [TOKEN_BYTES * len(tokens) for tokens in pieces(0)]
    assert sizes == [TOKEN_BYTES * EVERY, TOKEN_BYTES * EVERY, TOKEN_BYTES * 2]
    (armed,) = of(seen, "armed")
    assert (armed["blocks"], armed["bytes"]) == (3, TOKENS * TOKEN_BYTES)
    assert "one counter, thresholds" in armed["detail"]
    fired = of(seen, "fired")
    assert [(one["blocks"], one["bytes"]) for one in fired] == [(1, size) for size in sizes]
    for name in ("landed", "kept"):  # as the node saw them, which may be two at a time
        assert sum(one["blocks"] for one in of(seen, name)) == len(sizes)
        assert sum(one["bytes"] for one in of(seen, name)) == sum(sizes)
        assert fired[0]["unix_ms"] <= of(seen, name)[0]["unix_ms"]
    (appended,) = of(seen, "appended")
    (answered,) = of(seen, "answered")
    (given,) = of(seen, "slot_given")
    assert answered["unix_ms"] <= appended["unix_ms"] <= given["unix_ms"]
    assert appended["tokens"] == TOKENS


def a_resumed_turn(seen: list[dict[str, Any]], blocks: int) -> None:
    """Recognised, prefetched while the user thought, and so resumed without the drive; then a turn like the first."""
    arrived, again = of(seen, "arrived")
    assert arrived["detail"] == "rule ada's own: prefetch"
    (began,), (ended,) = of(seen, "prefetching"), of(seen, "prefetched")
    assert arrived["unix_ms"] <= began["unix_ms"] <= ended["unix_ms"] <= again["unix_ms"]
    assert (began["blocks"], ended["blocks"]) == (blocks, blocks)
    assert of(seen, "read") == [], "the think time was longer than the fetch: no stall"
    (fetching,), (sent,) = of(seen, "fetching"), of(seen, "sent")
    (whole,), (computed,) = of(seen, "whole"), of(seen, "computed")
    assert sent["detail"] == f"{blocks} from memory"
    # The node learns that its sends are complete after the bytes have come, and so maybe after the client saw them.
    assert again["unix_ms"] <= fetching["unix_ms"] <= sent["unix_ms"]
    assert fetching["unix_ms"] <= whole["unix_ms"] <= computed["unix_ms"]
    assert (whole["blocks"], computed["tokens"]) == (blocks, TOKENS), "only the new prompt is computed"
    a_turn(seen)


def test_the_trace_of_an_unknown_session(node: NodeProcess) -> None:
    with small_client(node.target) as client, pytest.raises(NoSession):
        client.session("ada", "chat").trace()
    with small_client(node.target, tenant="acme") as client:
        client.put_inline(bytes(32), b"x")
        client.session("ada", "chat").append([bytes(32)], 16)
    assert "named as a turn" in traced(node, "ada")
    node.kill()
    node.start()
    assert traced(node, "ada", status=3).startswith("The node has no events of this session")
    assert json.loads(traced(node, "ada", "--json", status=3)) == []
    with small_client(node.target) as client, pytest.raises(NoSession):
        client.session("ada", "chat").trace()  # another tenant's is none
