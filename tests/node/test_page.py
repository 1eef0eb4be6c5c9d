"""The node's web page in a browser: what it shows, that it runs under its own policy, and that names stay text."""

from __future__ import annotations

import json
import os
import re
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cluster.map import Map, Member
from kvstore.errors import KeyTaken
from kvstore.limits import UI_MEMBERS_MAX, UI_SESSIONS_MAX
from kvstore.names import block_key
from kvstore.node.tenants import token_digest
from kvstore.node.ui_state import cluster
from tests.conftest import ClientWithBuffers, small_client, small_node
from tests.node.browser import BROWSER, Browser
from tests.node.test_http import ask, bearer, http_url
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

pytestmark = pytest.mark.node(arguments=("--http", "127.0.0.1:0", "--ui"))

WAIT_S = 20.0
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: make browser")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser
        assert browser.complaints == []


@in_a_browser
def test_an_idle_node_says_so(node: NodeProcess, browser: Browser) -> None:
    browser.open(http_url(node))
    page = browser.text("main")
    for sentence in ("No put has ended yet", "No block has been requested yet", "No session has been"):
        assert sentence in page
    assert browser.text("#status") == "● serving"


@in_a_browser
def test_all_work_is_shown_and_names_stay_text(node: NodeProcess, browser: Browser) -> None:
    rig = ClientWithBuffers(node)
    evil = "<script>document.title='run'</script><img src=x onerror=alert(1)>"
    chat = rig.client.session("ada", evil)
    blocks = [rig.block(number) for number in range(3)]
    puts = chat.arm(blocks, rig.flags[0])
    rig.flags[0].store(3)
    assert all(result.error is None for result in puts.wait(WAIT_S))
    chat.append([block.key for block in blocks], 48)
    rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S)
    rig.client.get([rig.wanted(rig.block(9))], timeout_s=WAIT_S)
    browser.open(http_url(node))
    assert evil in browser.text("#sessions")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.title") == f"kvstore {browser.text('#node')}"
    assert "3 blocks, 3.0 MiB" in browser.text("#puts")
    assert browser.run("document.querySelectorAll('#puts i.a').length") == 1, "it begins at its flag"
    assert "put, landed to written\t≤" in browser.text("#times")
    assert "fired, as far as reported\t3" in browser.text("#triggers")
    assert "75 %\nhits · of 4" in browser.text("#figures")

    # A click on the session shows its steps, and one on the reason of a miss what became of the block.
    browser.click("document.querySelector('#sessions button')")
    browser.wait("document.querySelector('#more-of').open")
    trace = browser.text("#more-body")
    assert all(step in trace for step in ("buffer registered", "flag reached a threshold", "named as a turn"))
    browser.click("document.querySelector('#close')")
    browser.click("document.querySelector('#asked button')")
    browser.wait("document.querySelector('#more-of').open")
    why = browser.text("#more-body")
    assert "Nothing was put under these keys" in why
    assert "block 0\tMISS\tnever stored by this tenant under this key" in why
    rig.close()

    assert browser.run("document.querySelector('main').className") == ""
    node.kill()
    browser.wait("document.querySelector('main').className === 'stale'")
    assert "no answer" in browser.text("#status")


@in_a_browser
def test_a_hanging_node_dims_the_page_until_it_answers(node: NodeProcess, browser: Browser) -> None:
    browser.open(http_url(node))
    stop(node.pid)
    try:
        browser.wait("document.querySelector('main').className === 'stale'")
        status = browser.text("#status")
    finally:
        os.kill(node.pid, signal.SIGCONT)
    assert re.match(r"● no answer for \d+ s: nothing came within 4 s; the node may be hung", status)
    browser.wait("document.querySelector('main').className === ''")
    assert browser.text("#status") == "● serving"


@in_a_browser
def test_clicks_while_an_answer_is_pending_leave_one_polling_loop(
    node: NodeProcess, browser: Browser
) -> None:
    browser.open(http_url(node))
    browser.run("let polls = 0; const real = fetch; fetch = (...all) => { polls++; return real(...all); }; 0")
    browser.run("for (let n = 0; n < 6; n++) turn('')")
    browser.wait("polls >= 6")
    browser.run("new Promise(done => setTimeout(done, 1000))")
    browser.run("polls = 0")
    browser.run("new Promise(done => setTimeout(done, 2 * POLL_MS))")
    assert 1 <= browser.run("polls") <= 3


@in_a_browser
def test_many_sessions_are_listed_in_pages(node: NodeProcess, browser: Browser) -> None:
    with small_client(node.target) as client:
        key = block_key(b"page")
        client.put_inline(key, b"abc")
        for number in range(UI_SESSIONS_MAX + 5):
            client.session("ada", f"chat {number}").append([key], 16)
    browser.open(http_url(node))
    assert browser.text("#sessions-title").lower() == f"sessions, {UI_SESSIONS_MAX + 5}"
    assert len(re.findall(r"chat \d+", browser.text("#sessions"))) == UI_SESSIONS_MAX
    browser.click("document.querySelector('#more')")
    browser.wait("document.querySelectorAll('#sessions button').length === 5")


@in_a_browser
def test_an_observer_selects_a_tenant_and_a_failed_put_has_a_row(node: NodeProcess, browser: Browser) -> None:
    key = block_key(b"taken")
    for name in ("acme", "emca"):
        with small_client(node.target, tenant=name) as client:
            client.put_inline(key, b"abc")
            client.session("ada", f"of {name}").append([key], 16)
            with pytest.raises(KeyTaken):
                client.put_inline(key, b"abd")
    browser.open(http_url(node))
    assert browser.text("#puts").count("1 block failed: KeyTaken") == 2
    assert len(re.findall("of (acme|emca)", browser.text("#sessions"))) == 2
    browser.click("[...document.querySelectorAll('#tenants button')].find(one => one.textContent === 'acme')")
    browser.wait("document.querySelectorAll('#sessions button').length === 1")
    assert "of acme" in browser.text("#sessions")
    assert browser.text("#puts").count("1 block failed: KeyTaken") == 1


def test_the_page_of_a_node_in_a_cluster_lists_its_members() -> None:
    members = [Member("a", "10.0.0.1:7070", 3), Member("b", "10.0.0.2:7070", state="draining")]
    now = Map.of(7, members, absent=[Member("c", "10.0.0.3:7070")])
    membership: Any = SimpleNamespace(map=now, away_ms=1500, outside="")
    upkeep: Any = SimpleNamespace(known=SimpleNamespace(one_copy=5))
    assert cluster(membership, SimpleNamespace(known=None), "a")["one_copy"] is None  # type: ignore[arg-type]
    told = cluster(membership, upkeep, "a")
    assert [(one["node"], one["draining"], one["share"], one["is_this"]) for one in told["members"]] == [
        ("10.0.0.1:7070", False, 1.0, True),
        ("10.0.0.2:7070", True, 0.0, False),
    ]
    assert told["absent"] == [{"name": "c", "node": "10.0.0.3:7070"}]
    assert (told["total"], told["etcd_away_ms"], told["one_copy"]) == (2, 1500, 5)


def test_a_large_cluster_is_listed_in_part() -> None:
    members = [Member(f"n{number}", f"10.0.0.1:{7000 + number}") for number in range(UI_MEMBERS_MAX + 9)]
    membership: Any = SimpleNamespace(map=Map.of(7, members), away_ms=0, outside="")
    told = cluster(membership, None, "n0")
    assert (told["total"], len(told["members"])) == (UI_MEMBERS_MAX + 9, UI_MEMBERS_MAX)


@in_a_browser
def test_a_node_without_a_cluster_shows_none(node: NodeProcess, browser: Browser) -> None:
    browser.open(http_url(node))
    assert browser.run("document.querySelector('#cluster-section').hidden") is True


def test_a_tenant_sees_its_own_figures_and_an_observer_selects(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(
        "".join(
            f'[{name}]\ntokens_sha256 = ["{token_digest(name)}"]\n{more}\n'
            for name, more in (("acme", ""), ("emca", ""), ("watch", "observer = true"))
        )
    )
    more = ("--http", "127.0.0.1:0", "--ui", "--tenants", str(tenants))
    with small_node(tmp_path / "node", arguments=more) as node:
        for name in ("acme", "emca"):
            with small_client(node.target, token=name) as client:
                key = block_key(b"page")
                client.put_inline(key, b"abc")
                client.session("ada", name).append([key], 16)
                client.get_inline(block_key(b"nothing"), 3)

        def told(path: str, token: str) -> tuple[int, Any]:
            status, _, body = ask(http_url(node) + path, bearer(token))
            return status, json.loads(body) if status == 200 else body

        def shown(token: str, chosen: str = "") -> set[str]:
            _, state = told(f"/ui/state.json?tenant={chosen}", token)
            return {one["session"] for one in state["sessions"]["page"]}

        assert shown("acme") == {"acme"}
        assert shown("watch") == {"acme", "emca"}
        assert shown("watch", "emca") == {"emca"}
        assert told("/ui/state.json?tenant=emca", "acme")[0] == 403
        assert told("/ui/state.json", "acme")[1]["tenants"] == []
        uses = {
            (one["used_bytes"], one["quota_bytes"]) for one in told("/ui/state.json", "watch")[1]["tenants"]
        }
        assert uses == {(None, 0)}, "without a quota, use is not counted"
        (other,) = told("/ui/state.json", "emca")[1]["sessions"]["page"]
        assert told(f"/ui/trace.json?session={other['name']}", "emca")[1]["seen"] != []
        assert told(f"/ui/trace.json?session={other['name']}", "watch")[1]["seen"] != []
        assert told(f"/ui/trace.json?session={other['name']}", "acme")[0] == 400
        assert len(told("/ui/misses.json?reason=unknown", "acme")[1]["lookups"]) == 1
        assert len(told("/ui/misses.json?reason=unknown", "watch")[1]["lookups"]) == 2
        assert told("/ui/misses.json?reason=evicted", "watch")[1]["lookups"] == []
        assert told("/ui/misses.json?tenant=emca", "acme")[0] == 403
        assert told("/ui/misses.json?reason=no", "acme")[0] == 400


def test_the_page_loads_nothing_from_elsewhere(node: NodeProcess) -> None:
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
        assert b"--ui" in ask(url)[2], "it says how to have one"
