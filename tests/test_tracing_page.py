"""`docs/tracing.md`: its example is run as printed, against a collector; its names and bounds are the real ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvstore.limits import SPAN_GROUPS_MAX, SPANS_QUEUED_MAX, SPANS_WAITING_MAX, STEP_FIRINGS_MAX
from tests.node.test_otel import Receiver, start

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs/tracing.md").read_text()
STAYS_S = 0.5
SOURCES = [ROOT / "kvstore/client/spans.py", ROOT / "kvstore/node/call_spans.py"]


def test_the_example_runs_and_its_trace_matches_the_page(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (drawing,) = re.findall(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    receiver = Receiver()
    with start(tmp_path, receiver.endpoint) as node:
        example = example.replace("127.0.0.1:7070", node.target)
        example = example.replace("http://127.0.0.1:4317", receiver.endpoint)
        # A client that leaves as soon as it has its bytes may leave before the node has noted that they were sent.
        end = "\nprovider.shutdown()"
        assert example.count(end) == 1
        example = example.replace(end, f"\n    __import__('time').sleep({STAYS_S}){end}")
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", example],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "whole: True\n", "")
    receiver.close()
    spans = [span for _, span in receiver.spans]
    by_id = {span.span_id: span for span in spans}
    parents = {(by_id[span.parent_span_id].name if span.parent_span_id else "", span.name) for span in spans}
    assert parents == drawn(drawing)
    assert len({span.trace_id for span in spans}) == 2  # the prefill's, and the next prompt's


def drawn(drawing: str) -> set[tuple[str, str]]:
    """Parents and children, by the indentation of each line."""
    pairs, above = set(), {-1: ""}
    for line in drawing.splitlines():
        name = re.split(r"\s{2,}", line.lstrip(" │├└─"))[0]
        depth = (len(line) - len(line.lstrip(" │├└─"))) // 3
        above[depth] = name
        pairs.add((above[depth - 1], name))
    return pairs


def test_every_exported_name_and_attribute_is_on_the_page() -> None:
    code = "\n".join(path.read_text() for path in SOURCES)
    names = set(re.findall(r'"(kvstore\.[a-z_.]+[a-z])"', code))
    assert len(names) > 20
    written = TEXT.replace("`.prefix`", "`kvstore.node.prefix`")
    missing = {
        name for name in names if name not in written and f"`.{name.rpartition('.')[2]}`" not in written
    }
    assert missing == set()


def test_the_page_states_the_actual_bounds() -> None:
    assert f"{SPANS_WAITING_MAX:,} batches behind" in TEXT
    assert f"a queue of {SPANS_QUEUED_MAX:,}" in TEXT
    assert SPAN_GROUPS_MAX == STEP_FIRINGS_MAX == 8
