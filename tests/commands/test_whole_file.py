"""A command's output file: complete or absent, and never instead of a device, a pipe or a link."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from kvstore.commands.whole_file import whole_file
from kvstore.errors import ConfigError


def write(path: Path, data: bytes) -> None:
    with whole_file(path) as file:
        file.write(data)


def test_a_file_exists_only_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(path, b"old")

    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"new, but not")
            file.flush()
            assert path.read_bytes() == b"old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"old"
    write(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """So is a device: `kvstore get KEY /dev/null` once turned it into a file, for all users of the machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    came: list[bytes] = []
    reader = threading.Thread(target=lambda: came.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write(pipe, b"KV")
    reader.join(20)
    assert came == [b"KV"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    write(link, b"KV")
    assert link.is_symlink()
    assert target.read_bytes() == b"KV"


def test_a_full_drive_is_a_failure_with_the_files_name() -> None:
    with pytest.raises(OSError, match="No space left") as raised:
        write(Path("/dev/full"), b"KV")
    assert raised.value.filename == "/dev/full"


def test_unwritable_output_is_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no folder" / "out"):
        with pytest.raises(ConfigError, match="could not be written"):
            write(path, b"KV")
    assert not list(tmp_path.iterdir())
