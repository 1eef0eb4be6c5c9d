"""The node's web page in a browser: what it shows, that it runs under its own policy, and that names stay text."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from kvstore.limits import UI_SESSIONS_MAX
from kvstore.names import block_key
from tests.conftest import Rig, small_client, small_node
from tests.node.test_http import ask, http_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

WAIT_S = 20.0
BROWSER_S = 60.0
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_a_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here (290 MB, so that set-up does not install it)"
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    more = ("--http", "127.0.0.1:0", "--ui")
    with small_node(tmp_path / "node", arguments=more) as running:
        yield running


def browse(url: str, profile: Path, *more: str) -> tuple[str, str]:
    """The page's elements after it has asked for its state, and what the browser complained of."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",  # tests may run as root, and what is shown is our own
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--enable-logging=stderr",
            f"--user-data-dir={profile}",
            "--virtual-time-budget=900",
            *more,
            url,
        ],
        capture_output=True,
        text=True,
        timeout=BROWSER_S,
        check=True,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def text_of(dom: str, element: str) -> str:
    """The words within the element with this id, which has no like element in it."""
    found = re.search(rf'<(\w+)[^>]* id="{element}"[^>]*>(.*?)</\1>', dom, re.DOTALL)
    assert found is not None, element
    return re.sub(r"<[^>]*>", " ", found[2])


@in_a_browser
def test_a_node_that_has_done_nothing_says_so(node: NodeProcess, tmp_path: Path) -> None:
    dom, complaints = browse(http_url(node), tmp_path / "profile", "--dump-dom")
    assert complaints == ""
    for sentence in ("No put has ended yet", "No block has been asked for yet", "No session has been"):
        assert sentence in dom
    assert "serving" in text_of(dom, "status")


@in_a_browser
def test_what_was_done_is_shown_and_names_stay_text(node: NodeProcess, tmp_path: Path) -> None:
    rig = Rig(node)
    evil = "<script>document.title='run'</script><img src=x onerror=alert(1)>"
    chat = rig.client.session("ada", evil)
    blocks = [rig.block(number) for number in range(3)]
    puts = chat.arm(blocks, rig.flags[0])
    rig.flags[0].store(3)
    assert all(result.error is None for result in puts.wait(WAIT_S))
    chat.append([block.key for block in blocks], 48)
    rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S)
    rig.client.get([rig.wanted(rig.block(9))], timeout_s=WAIT_S)
    dom, complaints = browse(http_url(node), tmp_path / "profile", "--dump-dom")
    rig.close()
    assert complaints == ""
    assert evil.replace("<", "&lt;").replace(">", "&gt;") in dom
    assert "<img" not in dom
    assert "<title>run" not in dom
    assert "3 blocks, 3.0 MiB" in dom
    assert "on a drive" in dom
    assert "miss: unknown" in dom
    assert 'class="a" style="width: ' in dom, "the line begins where the flag was stored"
    assert "put, landed to written" in text_of(dom, "times")


@in_a_browser
def test_many_sessions_are_a_page_of_them(node: NodeProcess, tmp_path: Path) -> None:
    with small_client(node.target) as client:
        key = block_key(b"page")
        client.put_inline(key, b"abc")
        for number in range(UI_SESSIONS_MAX + 5):
            client.session("ada", f"chat {number}").append([key], 16)
    dom, _ = browse(http_url(node), tmp_path / "profile", "--dump-dom")
    assert text_of(dom, "sessions-title") == f"Sessions, {UI_SESSIONS_MAX + 5}"
    assert len(re.findall(r"chat \d+", text_of(dom, "sessions"))) == UI_SESSIONS_MAX
    assert re.search(r'<button id="first" disabled', dom)
    assert not re.search(r'<button id="more" disabled', dom)


def test_the_page_needs_nothing_but_itself(node: NodeProcess) -> None:
    status, headers, body = ask(http_url(node))
    page = body.decode()
    assert status == 200
    assert re.findall(r"https?://|//\w+\.\w+/", page) == []
    assert re.findall(r"\s(?:src|href)=\"(?!data:)", page) == []
    assert "innerHTML" not in page
    assert " style=" not in page
    assert len(body) < 32 << 10
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_without_ui_there_is_no_page(tmp_path: Path) -> None:
    with small_node(tmp_path / "node", arguments=("--http", "127.0.0.1:0")) as running:
        (url,) = re.findall(r"metrics at (http\S+)", running.log())
        assert [ask(url + path)[0] for path in ("/", "/ui/state.json", "/metrics")] == [404, 404, 200]
