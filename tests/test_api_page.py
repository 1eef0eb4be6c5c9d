"""docs/api.md matches the docstrings, and covers everything that users import."""

from __future__ import annotations

import pydoc
import subprocess
import sys

import pytest

import kvstore
from kvcli.version import VERSION
from kvstore import client, errors, testing
from nic_offload.flags import FlagWords
from tools.generate_api import PAGE, page, public_classes

TEXT = PAGE.read_text()


def test_the_page_matches_the_docstrings() -> None:
    assert page() == TEXT, "run `make api`"


def test_help_shows_no_plumbing() -> None:
    for kind, maker in (
        (client.ArmedPuts, "`Client.arm`"),
        (client.Session, "`Client.session`"),
        (FlagWords, "`FlagWords.create` or `FlagWords.open`"),
    ):
        text = pydoc.plain(pydoc.render_doc(kind))
        assert f" |  __init__(self, /)\n |      {maker} makes it.\n" in text
    for name in ("event", "lost", "told", "wait_ended"):
        assert not hasattr(client.ArmedPuts, name)
    fields = pydoc.plain(pydoc.render_doc(client.Block)).partition("__init__")[0]
    assert all(f"\n |      {one}  " in fields for one in client.Block.__annotations__)


@pytest.mark.parametrize(("name", "kind"), list(public_classes()))
def test_help_of_a_class_shows_no_plumbing(name: str, kind: type) -> None:
    text = pydoc.plain(pydoc.render_doc(kind))
    for inner in ("__abstractmethods__", "abc.ABC", "follower", "tk_", "watch:"):
        assert inner not in text, name


def test_dir_and_help_of_the_package_list_its_exports() -> None:
    assert set(kvstore.__all__) < set(dir(kvstore))
    text = pydoc.plain(pydoc.render_doc(kvstore))
    assert all(f"    class {name}(" in text for name in kvstore.__all__ if name != "block_key")
    assert "__getattr__" not in text


def test_everything_that_users_import_is_on_the_page() -> None:
    for name in (*client.__all__, *testing.__all__):
        assert f"\n### {name}\n" in TEXT
    for name in errors.__all__:
        assert name in TEXT


@pytest.mark.parametrize("name", kvstore.__all__)
def test_common_modules_are_loaded_on_first_use(name: str) -> None:
    code = f"""
import sys, kvstore
assert not [one for one in sys.modules if one.startswith(("kvstore.", "nic_offload", "grpc"))]
from kvstore import {name}
assert kvstore.{name} is {name}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_any_other_name_is_an_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Cleint' from 'kvstore'"):
        exec("from kvstore import Cleint")


def test_the_version_is_available() -> None:
    assert kvstore.__version__ == VERSION
