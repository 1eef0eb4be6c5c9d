"""Flag words: shared by path, and removed with their creator."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nic_offload.errors import InvalidArgument, KvError
from nic_offload.flags import FlagWords
from nic_offload.trigger import CounterMove, arm
from tests.nic_offload.rig import Side, wait_until

MAKER = """
from nic_offload.flags import FlagWords
words = FlagWords.create(2)
print(words.path, flush=True)
input()
"""
NEXT = """
import sys
from nic_offload.flags import FlagWords
words = FlagWords.open(sys.argv[1])
words[1].store(words[0].load() + 1)
"""


def test_words_are_zero_and_hold_64_bits() -> None:
    with FlagWords.create(3) as words:
        assert len(words) == 3
        assert [words[i].load() for i in range(3)] == [0, 0, 0]
        words[1].store((1 << 64) - 1)
        assert [words[i].load() for i in range(3)] == [0, (1 << 64) - 1, 0]
        assert all(words[i].address % 8 == 0 for i in range(3))


def test_two_processes_see_each_others_stores() -> None:
    with FlagWords.create(2) as words:
        words[0].store(41)
        subprocess.run([sys.executable, "-c", NEXT, words.path], check=True, timeout=30)
        assert words[1].load() == 42


def test_the_words_vanish_when_closed() -> None:
    words = FlagWords.create(1)
    path = words.path
    assert os.path.exists(path)  # noqa: PTH110 - Path.exists follows the link to a name without a file
    words.close()
    words.close()
    with pytest.raises(KvError):
        FlagWords.open(path)


def test_the_words_vanish_when_their_creator_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        path = maker.stdout.readline().strip()
        with FlagWords.open(path) as words:
            maker.kill()
            maker.wait(30)
            words[0].store(1)  # who has them mapped keeps them
            assert words[0].load() == 1
        with pytest.raises(KvError):
            FlagWords.open(path)


@pytest.mark.parametrize("path", ["/nope", "/", "/etc/passwd", "/dev/null", "", "a\0b"])
def test_a_path_without_flag_words_is_a_usage_error(path: str) -> None:
    with pytest.raises(InvalidArgument, match=r"FlagWords\.path`") as caught:
        FlagWords.open(path)
    assert "  " not in str(caught.value)


def test_a_path_that_has_become_another_file_is_refused(tmp_path: Path) -> None:
    words = FlagWords.create(1)
    path, number = words.path, int(Path(words.path).name)
    words.close()
    other = tmp_path / "other"
    other.write_bytes(b"somebody's data")
    opened = os.open(other, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    try:
        with pytest.raises(KvError, match="not a set of flag words"):
            FlagWords.open(path)
    finally:
        os.close(number)
    assert other.read_bytes() == b"somebody's data"


CUT = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
for length in (0, 1 << 20):
    try:
        os.ftruncate(fd, length)
    except PermissionError:
        continue
    sys.exit("it was cut")
"""


def test_flag_words_cannot_be_truncated_under_their_readers() -> None:
    """Any process with the path could once end each process that had the words mapped, by SIGBUS."""
    with FlagWords.create(2) as words:
        subprocess.run([sys.executable, "-c", CUT, words.path], check=True, timeout=30)
        words[1].store(7)
        assert words[1].load() == 7
        with FlagWords.open(words.path) as opened:
            assert (len(opened), opened[1].load()) == (2, 7)


def test_words_that_could_be_truncated_are_not_opened() -> None:
    fd = os.memfd_create("triggerkv-flags")
    try:
        os.ftruncate(fd, 16)
        with pytest.raises(KvError, match="could be truncated"):
            FlagWords.open(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


def test_a_word_keeps_its_memory_alive() -> None:
    word = FlagWords.create(1)[0]
    gc.collect()
    word.store(7)
    assert word.load() == 7


def test_a_set_without_words_is_refused() -> None:
    with pytest.raises(KvError):
        FlagWords.create(0)


def test_words_closed_while_puts_wait_for_them_stay_mapped_until_none_does() -> None:
    """A put is armed on a word, then the words are closed: the fabric's thread keeps reading them safely."""
    with Side("net") as side, side.fabric.open_counter() as moved:
        for _ in range(200):
            with FlagWords.create(1) as words, side.fabric.open_counter(words[0]) as counter:
                arm(side.fabric, [CounterMove(tag=1, counter=moved, value=1, trigger=counter, threshold=1)])
        assert _mapped() >= 200
        loops = side.fabric.statistics().loops
        wait_until(
            lambda: side.fabric.statistics().loops > loops + 10, "the thread has looked at every word again"
        )
        side.fabric.cancel([1])

        def few() -> bool:  # whatever is let go makes the fabric look for what it need not keep
            with FlagWords.create(1) as words, side.fabric.open_counter(words[0]):
                return _mapped() < 200

        wait_until(few, "what nothing waits for is let go")
    del words, counter
    gc.collect()
    assert _mapped() == 0


def test_a_word_can_be_stored_to_after_its_words_are_closed() -> None:
    words = FlagWords.create(1)
    word = words[0]
    words.close()
    word.store(7)
    assert word.load() == 7


def _mapped() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:triggerkv-flags")
