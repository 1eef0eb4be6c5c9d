"""The demo: flag, landed, written; SIGKILL; every byte read back and compared."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.client import Block, Client, Hit
from kvstore.client.transfer_watch import watched_by
from kvstore.commands.trace_command import table as trace_table
from kvstore.config import show_size
from kvstore.demo.node_process import NodeProcess
from kvstore.demo.terminal import Progress, say, table
from kvstore.limits import DRIVE_CAPACITY_BYTES_DEFAULT
from kvstore.names import block_key
from kvstore.reach import FABRIC
from kvstore.serve_options import check_room
from kvstore.writable_folder import writable_folder
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nic_offload.fabric import Region

__all__ = ["run"]

_BLOCKS = 64
_BLOCK_BYTES = 1 << 20
_TOKEN_MS = 10
_ROUNDS = 3
_INLINE_THREADS = 4
_WAIT_S = 60.0
_TOTAL = _BLOCKS * _BLOCK_BYTES


class _Difference(Exception):
    """A byte differs."""


@dataclass
class _Figures:
    landed_ms: list[float] = field(default_factory=list)
    written_ms: list[float] = field(default_factory=list)
    inline_ms: list[float] = field(default_factory=list)
    put_landed: list[float] = field(default_factory=list)  # GB/s, as the three below
    put_written: list[float] = field(default_factory=list)
    put_inline: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    get_inline: list[float] = field(default_factory=list)
    calls: int = 0


def _gbps(size_bytes: int, duration_ns: int) -> float:
    return size_bytes / duration_ns


class _SharedBuffer:
    """The KV buffer: memory shared with the token process, freed when both have ended."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("triggerkv-demo", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _TOTAL)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.memory = mmap.mmap(self._fd, _TOTAL)

    def close(self) -> None:
        self.memory.close()
        os.close(self._fd)


def _blocks(region: Region, run_id: bytes, name: str) -> list[Block]:
    return [
        Block(
            block_key(run_id, name.encode(), i.to_bytes(4)),
            region,
            i * _BLOCK_BYTES,
            _BLOCK_BYTES,
            threshold=i + 1,
        )
        for i in range(_BLOCKS)
    ]


def _token_by_token(
    client: Client, kv: _SharedBuffer, blocks: Sequence[Block], flags: FlagWords, figures: _Figures
) -> list[str]:
    puts = client.arm(blocks, flags[0])
    before = client.calls
    command = [sys.executable, "-m", "kvstore.demo.tokens", flags.path, kv.path]
    command += [str(number) for number in (_BLOCKS, _BLOCK_BYTES, _TOKEN_MS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            progress = Progress(_BLOCKS)
            until = time.monotonic() + _WAIT_S
            while True:
                fired, landed, ended = puts.progress()
                progress.show(fired, landed, ended)
                if ended == _BLOCKS or time.monotonic() > until:
                    break
                time.sleep(0.02)
            said, _ = process.communicate(timeout=_WAIT_S)
        finally:  # after Ctrl-C its output has no reader
            process.kill()
    figures.calls = client.calls - before
    story = json.loads(said)
    for result, stored_ns in zip(puts.wait(1.0), story["stored_ns"], strict=True):
        if result.error is not None:
            raise result.error
        figures.landed_ms.append((result.landed_ns - stored_ns) / 1e6)
        figures.written_ms.append((result.durable_ns - stored_ns) / 1e6)
    digests: list[str] = story["digests"]
    return digests


def _all_at_once(client: Client, blocks: Sequence[Block], flags: FlagWords, figures: _Figures) -> None:
    flags[0].store(0)
    puts = client.arm(blocks, flags[0])
    start_ns = time.monotonic_ns()
    flags[0].store(_BLOCKS)
    results = puts.wait(_WAIT_S)
    for result in results:
        if result.error is not None:
            raise result.error
    figures.put_landed.append(_gbps(_TOTAL, max(result.landed_ns for result in results) - start_ns))
    figures.put_written.append(_gbps(_TOTAL, max(result.durable_ns for result in results) - start_ns))


def _by_cpu(client: Client, memory: mmap.mmap, blocks: Sequence[Block], figures: _Figures) -> None:
    """The baseline: the CPU copies each block to host staging and sends it over gRPC."""

    def put(block: Block) -> float:
        start_ns = time.monotonic_ns()
        staged = bytearray(memory[block.offset : block.offset + block.length])
        client.put_inline(block.key, staged, timeout_s=_WAIT_S)
        return (time.monotonic_ns() - start_ns) / 1e6

    start_ns = time.monotonic_ns()
    with ThreadPoolExecutor(_INLINE_THREADS) as threads:
        figures.inline_ms += threads.map(put, blocks)
    figures.put_inline.append(_gbps(_TOTAL, time.monotonic_ns() - start_ns))


def _read_back(client: Client, blocks: Sequence[Block], into: Region) -> float:
    wanted = [Block(block.key, into, block.offset, block.length) for block in blocks]
    start_ns = time.monotonic_ns()
    outcomes = client.get(wanted, timeout_s=_WAIT_S)
    took_ns = time.monotonic_ns() - start_ns
    for i, outcome in enumerate(outcomes):
        if not isinstance(outcome, Hit):
            raise _Difference(f"block {i} is missing: {outcome}")
    return _gbps(_TOTAL, took_ns)


def _read_back_by_cpu(client: Client, blocks: Sequence[Block], memory: mmap.mmap) -> float:
    def get(block: Block) -> None:
        data = client.get_inline(block.key, block.length, timeout_s=_WAIT_S)
        if not isinstance(data, bytes):
            raise _Difference(f"a block is missing: {data}")
        memory[block.offset : block.offset + block.length] = data

    start_ns = time.monotonic_ns()
    with ThreadPoolExecutor(_INLINE_THREADS) as threads:
        list(threads.map(get, blocks))
    return _gbps(_TOTAL, time.monotonic_ns() - start_ns)


def _resume(client: Client, blocks: Sequence[Block], memory: mmap.mmap, digests: Sequence[str]) -> None:
    chat = client.session("somebody", "demo")
    chat.append([block.key for block in blocks], tokens=len(blocks))
    with watched_by(chat.notes):
        client.prefetch([block.key for block in blocks])
    memory[:] = bytes(_TOTAL)
    resumed = chat.resume(lambda i, _: blocks[i], timeout_s=_WAIT_S)
    if not resumed.is_whole:
        raise _Difference(f"only {resumed.usable_blocks} blocks arrived: {resumed.miss}")
    _compare(memory, digests, "after the resume")
    chat.report()
    say("\n".join(f"   {line}" for line in trace_table(chat.trace()).splitlines()))


def _compare(memory: mmap.mmap, digests: Sequence[str], after: str) -> None:
    for i, digest in enumerate(digests):
        found = blake2b(memory[i * _BLOCK_BYTES : (i + 1) * _BLOCK_BYTES]).hexdigest()
        if found != digest:
            raise _Difference(f"block {i} differs {after}")
    say(f"   all {len(digests)} blocks are exact {after}")


def _show(figures: _Figures) -> None:
    def spread(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} / {max(values):.2f}" if values else "-"

    def rate(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f}" if values else "-"

    rows = [
        ("bytes", show_size(_TOTAL), show_size(_TOTAL)),
        ("flag to landed, ms, median / worst", spread(figures.landed_ms), "-"),
        (
            "flag (or call) to written, ms, median / worst",
            spread(figures.written_ms),
            spread(figures.inline_ms),
        ),
        ("put, landed, GB/s", rate(figures.put_landed), "-"),
        ("put, written, GB/s", rate(figures.put_written), rate(figures.put_inline)),
        ("get after the restart, GB/s", rate(figures.get), rate(figures.get_inline)),
        ("application's calls from arming to the last ack", str(figures.calls), str(_BLOCKS)),
    ]
    say("")
    say(table(("", "triggered", "CPU copy + gRPC"), rows))


def _story(data: Path) -> None:
    figures = _Figures()
    run_id = secrets.token_bytes(16)
    kv = _SharedBuffer()
    back = allocate(_TOTAL)
    say(f"1. a storage node over {data}")
    with (
        NodeProcess(data) as node,
        Client(
            node.target, shared=True, transport=FABRIC, slots=_BLOCKS, block_bytes_max=_BLOCK_BYTES
        ) as client,
    ):
        say(f"   process {node.pid} on {node.target}, fabric {client.fabric.provider}")
        source, target = client.register(kv.memory), client.register(back)
        with FlagWords.create(1) as flags:
            say(
                f"2. {_BLOCKS} blocks of {show_size(_BLOCK_BYTES)} armed; a third process writes KV and stores the flag"
            )
            blocks = _blocks(source, run_id, "tokens")
            digests = _token_by_token(client, kv, blocks, flags, figures)
            say(
                f"3. the same bytes again: {_ROUNDS} times by one flag store, {_ROUNDS} times by CPU copy and gRPC"
            )
            for i in range(_ROUNDS):
                _all_at_once(client, _blocks(source, run_id, f"fast {i}"), flags, figures)
                by_cpu = _blocks(source, run_id, f"inline {i}")
                _by_cpu(client, kv.memory, by_cpu, figures)
        say(f"4. SIGKILL to the node, process {node.pid}")
        node.kill()
        node.start()
        state = client.status(wait_s=_WAIT_S)
        say(f"   back as process {node.pid}, with {state.blocks} blocks")
        say("5. all bytes are read back and compared")
        for name in ("tokens", *(f"fast {i}" for i in range(_ROUNDS))):
            back[:] = bytes(_TOTAL)
            figures.get.append(_read_back(client, _blocks(source, run_id, name), target))
            _compare(back, digests, f"after a get of '{name}'")
        back[:] = bytes(_TOTAL)
        figures.get_inline.append(_read_back_by_cpu(client, by_cpu, back))
        _compare(back, digests, "after an inline get")
        say("6. the blocks become a chat's turn; the user pauses, and returns")
        _resume(client, _blocks(target, run_id, "tokens"), back, digests)
        target.close()
        source.close()
    kv.close()
    back.close()
    _show(figures)


def run(data: Path | None) -> int:
    """Run the demo; 1 if a single byte differs."""
    writable_folder(Path.cwd() if data is None else data, parents=True)
    home = Path(tempfile.mkdtemp(prefix="kvstore-demo-", dir=Path.cwd())) if data is None else data
    begun_s = time.monotonic()
    try:
        check_room(home / "node", DRIVE_CAPACITY_BYTES_DEFAULT, "name a folder elsewhere with --data")
        _story(home / "node")
    except _Difference as difference:
        say(f"\nDIFFERENT: {difference}")
        return 1
    finally:
        if data is None:
            shutil.rmtree(home)
    say(f"\nevery byte came back exact; {time.monotonic() - begun_s:.1f} s")
    return 0
