"""A chat with a model of random weights that continues in another process, after its node was killed.

Two processes have the same model (the same seed). The first chats, saves each turn, and prints what the next turn's
logits would be. Then the node is killed with SIGKILL and restarted, and the user returns to the second process: their
request is matched, their KV is read into the node's memory while they type, and the prompt resumes. The logits must be
the same, bit for bit, and the answer must be that of a process which computes everything again.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.demo.node_process import NodeProcess
from kvstore.demo.terminal import say, table
from kvstore.errors import ConfigError
from kvstore.limits import DRIVE_CAPACITY_BYTES_DEFAULT
from kvstore.serve_options import check_room

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["run"]

_TIMEOUT_S = 300.0


def run(turns: int, tokens: int, *, as_json: bool = False) -> int:
    """Run the chat; 0 if every bit is equal."""
    needed = {"torch": "torch", "transformers": "transformers", "kvstore.engines": "triggerkv-engines"}
    if missing := [name for module, name in needed.items() if importlib.util.find_spec(module) is None]:
        raise ConfigError(
            f"kvstore chat needs {', '.join(missing)}: install triggerkv-engines with the extra transformers."
        )
    with tempfile.TemporaryDirectory(prefix="triggerkv-chat-") as folder:
        home = Path(folder)
        check_room(home / "node", DRIVE_CAPACITY_BYTES_DEFAULT, "set TMPDIR to a folder elsewhere")
        show = _quiet if as_json else say
        with NodeProcess(home / "node") as node:
            show(f"1. A chat of {turns} turns of {tokens} tokens, each saved at its end")
            first = _process("begin", node.target, home, turns, tokens)
            show(_indented(_turns(first["turns"])))
            show("2. The node is killed with SIGKILL and restarted; the user returns to another process")
            node.kill()
            node.start()
            second = _process("resume", node.target, home, turns, tokens)
    right = second["logits"] == first["logits"] and second["answer"] == second["answer_recomputed"]
    right = right and second["spoofed_denied"]
    if as_json:
        say(json.dumps({"first": first, "second": second, "right": right}, indent=2))
    else:
        say(_indented(_matched(second)))
        say(_indented(second["trace"]))
        say(_indented(_times(second)))
        bits = "are equal, bit for bit," if second["logits"] == first["logits"] else "DIFFER"
        answers = "the same" if second["answer"] == second["answer_recomputed"] else "ANOTHER ONE"
        say(f"3. Its logits {bits} to those of the process that never stopped, and within")
        say(
            f"   {second['difference']:.1e} of the recomputed ones; the answer of {len(second['answer'])} tokens is"
        )
        say(f"   {answers}.")
    return 0 if right else 1


def _quiet(_: str) -> None:
    """Print nothing."""


def _process(what: str, node: str, home: Path, turns: int, tokens: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "kvstore.demo.chat_process",
        what,
        node,
        str(home),
        str(turns),
        str(tokens),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=True)
    story: dict[str, Any] = json.loads(done.stdout)
    return story


def _turns(turns: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            str(number),
            f"{turn['tokens']:,}",
            f"{turn['answered']:,}",
            f"{turn['computed_ms']:,.0f} ms",
            f"{turn['sent_bytes'] / 1e6:,.1f} MB",
            f"{turn['saved_ms']:,.0f} ms",
        ]
        for number, turn in enumerate(turns, 1)
    ]
    return table(["turn", "tokens so far", "answered", "computed in", "saved", "in"], rows)


def _matched(story: dict[str, Any]) -> str:
    seen = story["rules"][story["rule"]]
    read = f"after {story['read_ms']:,.0f} ms" if story["read_ahead"] else "NOT in time"
    denied = "denied" if story["spoofed_denied"] else "NOT DENIED"
    return (
        f"The request hits {story['rule']!r} ({seen['hits']} hit, {seen['bytes'] / 1e6:,.1f} MB); the same from"
        f" another address is {denied}.\nThe KV is in the node's memory {read}, while the user types for"
        f" {story['typed_s']:.0f} s:"
    )


def _times(story: dict[str, Any]) -> str:
    resumed, anew = story["resumed_ms"], story["recomputed_ms"]
    rows = [
        [
            "resumed",
            f"{story['tokens']:,}",
            f"{story['fetched_ms']:,.0f} ms",
            f"{resumed:,.0f} ms",
            f"{anew / resumed:.1f} x",
        ],
        ["recomputed", "0", "-", f"{anew:,.0f} ms", "1.0 x"],
    ]
    return table(["time to first token", "tokens brought", "brought in", "in all", "as fast"], rows)


def _indented(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.splitlines())
