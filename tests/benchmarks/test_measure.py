"""`kvstore bench` with a few small blocks: every part returns its points, and leaves nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.bench import bare, command, measure
from kvstore.bench.path_blocks import PathBlocks
from kvstore.cli import main
from kvstore.client import Client
from kvstore.limits import HOT_BYTES_MIN
from nic_offload.flags import FlagWords
from sim.calibrate.calibrate_command import _kvstore_bench
from sim.calibrate.profile import fit_profile
from sim.calibrate.samples import parse
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_ROUNDS", 2)
    monkeypatch.setattr(measure, "_SINGLES", 2)
    monkeypatch.setattr(measure, "_BLOCKS_MAX", 8)
    monkeypatch.setattr(measure, "_CAPACITY", "64MiB")
    monkeypatch.setattr(measure, "_HOT_BYTES", 4096 * KIB)
    monkeypatch.setattr(measure, "_DRIVE_BYTES", 4096 * KIB)
    monkeypatch.setattr(measure, "_BESIDE_BYTES", 4096 * KIB)
    monkeypatch.setattr(bare, "_OPERATION_BYTES", 1024 * KIB)
    monkeypatch.setattr(measure, "_MEMORY_SIZES", (64 * KIB, 256 * KIB))
    monkeypatch.setattr(measure, "_LINK_SIZES", (4 * KIB, 64 * KIB))
    monkeypatch.setattr(measure, "_DRIVE_SIZES", (4 * KIB, 1024 * KIB))
    monkeypatch.setattr(measure, "_NODE_SIZES", (4 * KIB, 64 * KIB))
    monkeypatch.setattr(measure, "_PATH_SIZES", (32 * KIB,))


@pytest.mark.usefixtures("small")
def test_every_part_gives_its_points_and_they_can_be_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run([], tmp_path, as_json=True) == 0
    measured = parse(capsys.readouterr().out, "bench")
    found = {(one.part, one.what, one.count) for one in measured.samples}
    assert found == {
        ("memory", "copy", 1),
        *(("link", what, count) for what, count in (("put", 1), ("put", 8), ("untriggered", 1))),
        *(("drive", what, depth) for what in ("write", "read") for depth in (1, 8, 32)),
        *(
            (part, what, n)
            for part in ("node", "path")
            for what in ("landed", "written", "get", "bare link", "bare write", "bare read")
            for n in (1, 8)
        ),
    }
    for one in measured.samples:
        assert 0 < one.seconds_min <= one.seconds <= one.seconds_max < 10
    profile = fit_profile(measured)
    assert {"link.put.train", "drive.read.8", "node.get.train"} <= set(profile.lines)
    assert list(tmp_path.iterdir()) == []


def test_the_simulator_reads_the_commands_output(tmp_path: Path) -> None:
    """As `kvsim calibrate run` does it: another process, one part."""
    measured = _kvstore_bench(["memory"], tmp_path)
    assert {one.part for one in measured.samples} == {"memory"}
    assert measured.machine["cores"]


@pytest.mark.usefixtures("small")
def test_people_get_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", "--data", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["part", "what"]
    assert lines[2].split()[:4] == ["memory", "copy", "64", "1"]


def test_an_unknown_part_or_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "disk", "--data", str(tmp_path)]) == 2
    assert "'disk' is not a part; choose from memory, link, drive" in capsys.readouterr().err
    assert main(["bench", "--data", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("part", measure.PARTS)
def test_ctrl_c_ends_a_part_and_leaves_nothing(part: str, tmp_path: Path) -> None:
    def interrupted(_what: str, _done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure.measure([part], tmp_path, interrupted)
    assert list(tmp_path.iterdir()) == []


def test_cold_gets_are_read_from_the_drive_and_hot_ones_from_memory(tmp_path: Path) -> None:
    with (
        NodeInProcess(tmp_path / "node", 1 << 30, hot_bytes=HOT_BYTES_MIN) as node,
        Client(node.target, slots=16, block_bytes_max=MIB) as client,
        FlagWords.create(1) as flags,
        PathBlocks(client, flags, MIB, 16, hot_bytes=HOT_BYTES_MIN) as path,
    ):

        def read() -> int:
            """Blocks that had to be read from the drive."""
            node.call(lambda one: one.catch_up())  # it is told of the last ones a moment later
            return int(node.call(lambda one: one.counters.hits_drive))

        path.put(16)
        for _ in range(2):
            assert path.hot_ns() > 0
        before = read()
        assert path.hot_ns() > 0
        assert read() == before
        for number in range(1, 4):
            assert path.cold_ns(16) > 0
            assert read() == before + 16 * number
