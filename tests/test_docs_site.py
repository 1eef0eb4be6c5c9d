"""The docs site: every page in a menu, every link good, and nothing fetched when it is read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.node.browser import BROWSER
from tests.readme import clean_copy
from tools.docs_site import PAGES, build

ROOT = Path(__file__).resolve().parents[1]
FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)"
)
SEARCH = "docs/sessions.html?q=rendezvous"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the site's sources, with the site built in it."""
    copy = clean_copy(ROOT, tmp_path_factory.mktemp("docs") / "copy")
    done = build(copy)
    assert done.returncode == 0, done.stderr
    return copy


def test_every_page_exists_and_can_be_searched(tree: Path) -> None:
    site = tree / "build/site"
    (index,) = (site / "search").glob("search_index.js")
    found = json.loads(index.read_text().removeprefix("var __index = "))
    places = {one["location"].partition("#")[0] for one in found["docs"]}
    for page in (page for pattern in PAGES for page in ROOT.glob(pattern)):
        name = page.relative_to(ROOT).with_suffix(".html").as_posix()
        name = name.replace("README.html", "index.html")
        assert (site / name).is_file(), name
        assert name in places, name


def test_reading_loads_nothing_from_the_network(tree: Path) -> None:
    assert FETCHED.findall('<link rel="x" href="https://a/b"><script src=//c/d></script>') == [
        "https://a/b",
        "//c/d",
    ]
    pages = sorted((tree / "build/site").rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        assert FETCHED.findall(page.read_text()) == [], page.name
    for style in (tree / "build/site").rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text()), style.name


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("docs/client.md", "[x](nowhere.md)"),
        ("docs/client.md", "[x](sessions.md#nowhere)"),
        ("docs/orphan.md", "# In no menu"),
    ],
)
def test_mistakes_fail_the_build(tree: Path, tmp_path: Path, page: str, text: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(
        tree, copy, ignore=shutil.ignore_patterns("build", "tests", "kvstore", "nic_offload", "sim")
    )
    (copy / "kvstore").mkdir()
    shutil.copy(ROOT / "kvstore/miss.py", copy / "kvstore")
    whole = copy / page
    whole.write_text(f"{whole.read_text() if whole.exists() else ''}\n\n{text}\n")
    done = build(copy)
    assert done.returncode == 1, done.stderr
    assert "warnings in strict mode" in done.stdout + done.stderr


def test_the_search_works_on_pages_opened_as_files(tree: Path) -> None:
    if BROWSER is None:
        pytest.skip("there is no Chromium: make browser")
    page = f"file://{tree}/build/site/{SEARCH}"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    done = subprocess.run(
        [BROWSER, *flags, "--virtual-time-budget=20000", "--dump-dom", page],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    results = re.findall(r'href="([^"]*)" class="md-search-result__link"', done.stdout)
    assert any("cluster.html" in one for one in results), done.stderr[-2000:]
