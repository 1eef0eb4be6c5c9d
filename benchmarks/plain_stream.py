"""The speed of a one-way gRPC stream without any of our code: chunks of bytes to another process, which counts them."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import grpc

from kvstore.limits import INLINE_CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PlainStream"]

_METHOD = "/plain.Stream/Sink"
_WAIT_S = 60.0


def sink() -> None:
    """Run in the other process: count the received bytes, until standard input ends."""

    def count(chunks: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        return sum(map(len, chunks)).to_bytes(8)

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(count)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("plain.Stream", {"Sink": handler}),)
    )
    sys.stdout.write(f"{server.add_insecure_port('127.0.0.1:0')}\n")
    sys.stdout.flush()
    server.start()
    select.select([sys.stdin], [], [])
    server.stop(None).wait(_WAIT_S)


class PlainStream:
    """A channel to such a process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from benchmarks.plain_stream import sink; sink()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self._process.stdout.readline().strip()}")
        self._call: grpc.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(_METHOD)

    def gbps(self, data: bytes, times: int) -> float:
        """Send the same bytes this many times, in chunks as large as ours."""
        chunks = [
            data[at : at + INLINE_CHUNK_BYTES] for at in range(0, len(data), INLINE_CHUNK_BYTES)
        ] * times
        start_ns = time.monotonic_ns()
        came = self._call(iter(chunks), timeout=_WAIT_S)
        spent_ns = time.monotonic_ns() - start_ns
        assert int.from_bytes(came) == times * len(data)
        return times * len(data) / spent_ns

    def close(self) -> None:
        """End both."""
        self._channel.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(_WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
