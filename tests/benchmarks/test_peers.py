"""The benchmark beside Redis with a few blocks: every goal has a line, and a client that fails is reported."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks import bench_peers
from benchmarks.form import Form
from benchmarks.peers import cells, client_process, redis
from benchmarks.peers.cells import Shape
from benchmarks.peers.client_process import Timed, Worker, WorkerFailed
from benchmarks.peers.redis import Redis
from kvstore.demo.node_process import NodeProcess

if TYPE_CHECKING:
    from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20
needs_redis = pytest.mark.skipif(not redis.is_here(), reason="there is no Redis: make peers")


def _tiny(size: int) -> tuple[Shape, ...]:
    return (
        Shape("one", size, 1, 1, 2),
        Shape("eight", size, 1, 8, 8),
        Shape("batch", size, 4, 1, 2),
    )


@needs_redis
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_whole_run_gives_every_goal_its_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for size in cells.SHAPES:
        monkeypatch.setitem(cells.SHAPES, size, _tiny(size))
    for size in (256 * KIB, 4 * MIB, 16 * MIB):
        monkeypatch.delitem(cells.SHAPES, size)
    for name, value in {
        "_CADENCE_US": 1000,
        "_AHEAD": 4,
        "_KILLS": 1,
        "_KILL_BATCH": 4,
        "_IDLE_S": 0.1,
    }.items():
        monkeypatch.setattr(bench_peers, name, value)
    monkeypatch.setattr(bench_peers, "_CAPACITY", "512MiB")
    monkeypatch.setenv("TRIGGERKV_PEERS_ROUNDS", "1")
    form = Form("peers", tmp_path)
    bench_peers.run(form, tmp_path)
    found = {point.metric: point for point in form.points}
    assert all(point.value >= 0 for point in form.points)
    assert found["against Redis: 1M, batches of 4, hot"].goal == 1.3
    assert found["one 32K, landed, p50"].goal == 60
    assert found["4 x 32K armed ahead, back to back, store to told, p99"].goal == 300
    assert found["kill -9: us, written, are there"].value == 1
    assert found["kill -9: redis, always, are there"].value == 1
    listed = json.loads((tmp_path / "peers.cells.json").read_text())
    assert {one["contender"] for one in listed} == set(cells.CONTENDERS)
    assert {one["kind"] for one in listed} == set(cells.KINDS)


@needs_redis
def test_a_value_lost_by_redis_is_an_error_and_not_a_time(tmp_path: Path) -> None:
    with Redis(tmp_path / "redis", "nothing kept") as server, server.client() as client:
        client.ask("open", 32 * KIB, 4)
        timed = client.timed("put", "one", "landed", 2, 1, 2)
        assert len(timed.calls_ns) == 2
        assert client.ask("check", "one") == "4"
        server.kill()
        server.start()
        client.ask("ready")
        assert client.ask("check", "one") == "0"
        with pytest.raises(WorkerFailed, match="block 0 of one did not come back"):
            client.timed("get", "one", 2, 1)


def test_a_block_missing_on_our_node_is_an_error_and_not_a_time(tmp_path: Path) -> None:
    with (
        NodeProcess(tmp_path / "node", capacity="64MiB") as node,
        Worker([sys.executable, "-m", "benchmarks.peers.ours", node.target]) as client,
    ):
        client.ask("open", 32 * KIB, 4)
        assert len(client.timed("put", "one", "written", 2, 1, 2).calls_ns) == 2
        assert len(client.timed("get", "one", 1, 4).calls_ns) == 4
        assert client.ask("check", "one") == "4"
        client.ask("keep", "one", "gone")
        client.ask("forget", "one")
        assert client.ask("check", "gone") == "0"
        with pytest.raises(WorkerFailed, match="a block of gone did not come back"):
            client.timed("get", "gone", 2, 1)


def test_a_cell_has_medians_of_rounds_and_quantiles_of_calls() -> None:
    cell = cells.Cell()
    for calls_ns in ([1000, 2000], [3000, 94_000], [4000, 6000]):
        cell.took(1000, Timed(0, sum(calls_ns), 500, calls_ns), 2000)
    assert cell.summary() == {
        "gbps": 0.1,
        "p50_us": 4.0,
        "p99_us": 94.0,
        "client_cpu_s_per_gb": 0.5,
        "server_cpu_s_per_gb": 2.0,
    }


def test_the_table_has_a_line_for_each_contender() -> None:
    found = cells.Cells()
    shape = Shape("eight", MIB, 1, 8, 8)
    found.at("us", shape, "hot").took(shape.bytes, Timed(0, shape.bytes, 0, [2000]), None)
    found.at("redis", shape, "hot").gbps.append(0.5)
    assert cells.table(found, [shape]).splitlines() == [
        "                          GB/s  p50 us  p99 us  CPU client  server, s/GB",
        "1M, eight in flight, hot",
        "  us                         1       2       2           0             -",
        "  redis                    0.5       -       -           -             -",
    ]


def test_the_benchmark_waits_until_a_server_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter([0, 9_000_000, 12_000_000, 12_100_000, 99_000_000])
    monkeypatch.setattr(client_process, "cpu_ns", lambda _: next(spent))
    assert client_process.settled_cpu_ns(1) == 12_100_000
