"""`kvstore serve`: opens the store and the fabric, serves until it is told to stop, closes in order.

The first line on standard output is `ready HOST:PORT` and comes when the node takes calls; everything
else goes to standard error. SIGTERM and SIGINT stop it cleanly; SIGKILL is survived by what was
acknowledged as written.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import TYPE_CHECKING

import grpc

from kvstore.clock import SystemClock
from kvstore.config import show_size
from kvstore.errors import ConfigError
from kvstore.node.node import Node
from kvstore.node.service import KvStoreService
from kvstore.storage.store import Store
from kvstore.wire import kvstore_pb2_grpc
from nic_offload.fabric import Fabric

if TYPE_CHECKING:
    from kvstore.clock import Clock
    from kvstore.config import NodeConfig
    from kvstore.storage.disk import Progress

__all__ = ["serve"]

log = logging.getLogger(__name__)

_STOP_GRACE_S = 1.0
_PROGRESS_NS = 1_000_000_000
_GRPC_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second node on the same port is an error, not a lottery
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)


def _progress_shown_by(clock: Clock) -> Progress:
    """Report long work, at its beginning, its end, and once a second between."""
    shown: dict[str, int] = {}

    def show(doing: str, done: int, total: int) -> None:
        now_ns = clock.monotonic_ns()
        if done < total and now_ns - shown.get(doing, -_PROGRESS_NS) < _PROGRESS_NS:
            return
        shown[doing] = now_ns
        log.info("%s: %s of %s", doing, show_size(done), show_size(total))

    return show


def _drives_shown(store: Store) -> str:
    states = store.drive_states()
    away = [str(state.number) for state in states if state.statistics is None]
    shown = "1 drive" if len(states) == 1 else f"{len(states)} drives"
    return f"{shown} without drive {' and '.join(away)}" if away else shown


async def _serve(config: NodeConfig) -> None:
    clock = SystemClock()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if config.tied:
        loop.add_reader(sys.stdin.fileno(), stop.set)
    with (
        Store.open(
            config.data,
            capacity_bytes=config.capacity_bytes,
            clock=clock,
            drives=config.drives,
            without=config.without,
            progress=_progress_shown_by(clock),
        ) as store,
        Fabric(config.provider, address=config.host) as fabric,
    ):
        node = Node(store, fabric, clock, config.hot_bytes)
        server = grpc.aio.server(options=_GRPC_OPTIONS)
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(KvStoreService(node, store.name), server)  # type: ignore[no-untyped-call]
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            port = server.add_insecure_port(f"{host}:{config.port}")
        except RuntimeError as error:
            raise ConfigError(
                f"The node could not listen on {host}:{config.port}; is the port taken?"
            ) from error
        await server.start()
        statistics = store.statistics()
        log.info(
            "node %s: %s, %d blocks, %s free of %s%s, fabric %s",
            store.name,
            _drives_shown(store),
            statistics.blocks,
            show_size(statistics.free_bytes),
            show_size(statistics.capacity_bytes),
            ", an index rebuilt from its drive" if statistics.rebuilt else "",
            fabric.provider,
        )
        print(f"ready {host}:{port}", flush=True)  # noqa: T201 - what starts a node waits for this line
        await stop.wait()
        log.info("stopping")
        await node.close()
        await server.stop(_STOP_GRACE_S)


def serve(config: NodeConfig) -> int:
    """Run a node until a signal; the exit status."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="kvstore: %(message)s")
    asyncio.run(_serve(config))
    return 0
