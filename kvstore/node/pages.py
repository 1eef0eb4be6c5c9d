"""The node's HTTP pages: /metrics, /healthz, /readyz, and with `--ui` the web page and its state.

What always holds: nothing here changes anything; answers have a bounded size; a tenant's data is shown to that tenant
and to observers only. The page loads nothing but the state, and its policy (CSP) lists its own script and style by
their digests, so no script in a session's name can run in it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from kvcli.version import VERSION
from kvstore.errors import ProtocolError
from kvstore.limits import HEALTH_STILL_MS, SESSION_BYTES, TENANT_BYTES, USER_BYTES
from kvstore.miss import MissReason
from kvstore.node.http import Answer, HttpServer
from kvstore.node.metrics import CONTENT_TYPE, gathered, rendered
from kvstore.node.rate_history import History
from kvstore.node.ui_state import misses, state, trace, whose

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvstore.node.authorization import Gate
    from kvstore.node.http import Question
    from kvstore.node.listening import Certificates
    from kvstore.node.node import Node

__all__ = ["http_server"]

_PAGES = b"pages of "  # a queue of their own, so that a scrape delays no call of its tenant
_NAME_BYTES = TENANT_BYTES + USER_BYTES + SESSION_BYTES


def _policy(page: str) -> str:
    """Permit this page's own script and style, and requests to this node; nothing else."""

    def digests(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        shas = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
        return " ".join(f"'sha256-{sha}'" for sha in shas)

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def http_server(node: Node, gate: Gate, tls: Certificates | None, *, ui: bool) -> HttpServer:
    """Make the server for a node; `listen` starts it."""
    pages: dict[str, Callable[[Question], Awaitable[Answer]]] = {}
    history: History | None = None

    async def metrics(question: Question) -> Answer:
        taken = gathered(node, gate.tenants, question.tenant, VERSION)
        text = await asyncio.get_running_loop().run_in_executor(None, rendered, taken)
        return Answer(text, CONTENT_TYPE)

    pages["/metrics"] = metrics
    if ui:
        page = files("kvstore.node").joinpath("page.html").read_text(encoding="utf-8")
        answer = Answer(
            page.encode(), "text/html; charset=utf-8", headers={"Content-Security-Policy": _policy(page)}
        )

        history = points = History(node)

        async def show(_: Question) -> Answer:
            return answer

        async def state_page(question: Question) -> Answer:
            chosen, after = question.query.get("tenant", ""), question.query.get("after", "")
            return _json(
                state(node, gate.tenants, question.tenant, VERSION, chosen, _name(after, "after"), points)
            )

        async def trace_page(question: Question) -> Answer:
            session = _name(question.query.get("session", "?"), "session")
            return _json(trace(node, whose(gate.tenants, question.tenant, "")[0], session))

        async def misses_page(question: Question) -> Answer:
            tenant, _ = whose(gate.tenants, question.tenant, question.query.get("tenant", ""))
            return _json(misses(node, question.tenant, tenant, _reason(question.query.get("reason", ""))))

        pages["/"] = show
        pages["/ui/state.json"] = state_page
        pages["/ui/trace.json"] = trace_page
        pages["/ui/misses.json"] = misses_page
    health = {"/healthz": lambda: _health(node), "/readyz": lambda: _readiness(node.readiness.why)}
    turned = {path: _in_turn(node, page) for path, page in pages.items()}
    return HttpServer(gate, node.clock, health, turned, tls, history)


def _in_turn(
    node: Node, page: Callable[[Question], Awaitable[Answer]]
) -> Callable[[Question], Awaitable[Answer]]:
    """Answer one request of a tenant at a time; three times as long is left to all calls, its own included."""

    async def answer(question: Question) -> Answer:
        async with node.turns.whole(_PAGES + question.tenant.id):
            return await page(question)

    return answer


def _health(node: Node) -> Answer:
    """Run on the server's thread: reads only when the node's thread was last seen."""
    still_ms = (node.clock.monotonic_ns() - node.ticked_ns) // 1_000_000
    if still_ms < HEALTH_STILL_MS:
        return Answer(b"serving\n")
    return Answer(f"the node has stood still for {still_ms} ms\n".encode(), status=503)


def _readiness(why: str) -> Answer:
    return Answer(f"not ready: {why}\n".encode(), status=503) if why else Answer(b"ready\n")


def _json(document: dict[str, Any]) -> Answer:
    return Answer(json.dumps(document, separators=(",", ":")).encode(), "application/json")


def _reason(text: str) -> MissReason | None:
    try:
        return MissReason[text.upper()] if text else None
    except KeyError:
        raise ProtocolError("`reason` is a reason of a miss, in lower case.") from None


def _name(text: str, field: str) -> bytes:
    """The name of a session, from its form in the state."""
    try:
        name = bytes.fromhex(text)
    except ValueError:
        name = b"?"
    if len(name) not in (0, _NAME_BYTES):
        raise ProtocolError(f"`{field}` is the name of a session, as the page's state has it.")
    return name
