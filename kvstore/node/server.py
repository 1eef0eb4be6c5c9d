"""`kvstore serve`: opens the store and the fabric, serves until it is stopped, closes in order.

The first line on standard output is `ready HOST:PORT`, printed when the node accepts calls and has reached itself at
the fabric address that it gives to clients (`kvstore.node.readiness`); everything else goes to standard error. SIGTERM
and SIGINT stop it cleanly; blocks acknowledged as written survive SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

import grpc

from kvcli.version import VERSION
from kvstore.clock import SystemClock
from kvstore.cluster.map import Member
from kvstore.config import counted, show_size
from kvstore.config_files import read_pem
from kvstore.endpoints import ONE_CONNECTION
from kvstore.errors import ConfigError, KvError
from kvstore.limits import (
    CALLS_PENDING_MAX,
    GUARD_HANDSHAKE_MS,
    GUARD_STREAMS_MAX,
    MESSAGE_AHEAD_BYTES,
    MESSAGE_BYTES_MAX,
    READINESS_RETRY_MS,
    START_PROGRESS_MS,
    STOP_GRACE_MS,
)
from kvstore.node import fail_stop
from kvstore.node.audit import Audit
from kvstore.node.authentication import Authenticator
from kvstore.node.authorization import Gate
from kvstore.node.batches_service import add_batches
from kvstore.node.blocks_service import BlocksService
from kvstore.node.cluster_service import ClusterService
from kvstore.node.connection_guard import ConnectionGuard
from kvstore.node.core_dumps import keep_out_of_dumps
from kvstore.node.erasing_service import ErasingService
from kvstore.node.fabric_address import FabricAddress
from kvstore.node.health import add_standard_services
from kvstore.node.keys_socket import ControlSocket
from kvstore.node.listening import Certificates, check_port, listen
from kvstore.node.logs import begin_logging
from kvstore.node.lookup_log import LookupLog
from kvstore.node.lookups_service import LookupsService
from kvstore.node.node import Node
from kvstore.node.observing_service import ObservingService
from kvstore.node.readiness import reach_itself
from kvstore.node.same_machine import Sharing
from kvstore.node.service import KvStoreService
from kvstore.node.sessions_service import SessionsService
from kvstore.node.steps_service import StepsService
from kvstore.node.tenants import Tenants, token_digest
from kvstore.node.upkeep_service import UpkeepService
from kvstore.node.warm_up import WarmUp
from kvstore.sealing.keyring_file import keyring_path
from kvstore.sealing.masters import open_master
from kvstore.sealing.store_keys import StoreKeys, keys_opener
from kvstore.serve_options import Settings
from kvstore.storage.store import Store
from kvstore.wire import (
    blocks_pb2_grpc,
    cluster_pb2_grpc,
    erasing_pb2_grpc,
    kvstore_pb2_grpc,
    lookups_pb2_grpc,
    observing_pb2_grpc,
    sessions_pb2_grpc,
    steps_pb2_grpc,
    upkeep_pb2_grpc,
)
from kvstore.wire.dropped_calls import drop_calls
from kvstore.wire.failed_batches import free_failed_batches
from kvstore.wire.keepalive import server_keepalive_options
from nic_offload.fabric import Fabric
from nic_offload.library import expect_no_messages, load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvstore.clock import Clock
    from kvstore.config import ClusterConfig, EventsConfig, NodeConfig
    from kvstore.node.fabric_address import Network
    from kvstore.node.health import Health
    from kvstore.node.http import HttpServer
    from kvstore.node.kv_events import KvEvents
    from kvstore.node.otel import Collector
    from kvstore.storage.disk import Progress
    from nic_offload.fabric import Endpoint
    from nic_offload.sockaddr import Ip

__all__ = ["add_services", "open_server", "serve"]

log = logging.getLogger(__name__)

_STOP_GRACE_S = STOP_GRACE_MS / 1000
_NS_PER_MS = 1_000_000
_GRPC_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second node on the same port is an error
    *server_keepalive_options(),
    ("grpc.max_concurrent_streams", GUARD_STREAMS_MAX),
    ("grpc.http2.max_requests_per_read", 1),  # a flood of one connection doesn't starve the others
    # Fix the bytes buffered of a message that is not awaited yet; a sender can't increase them.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", MESSAGE_AHEAD_BYTES),
    # Beyond this gRPC ends random calls, including those of other tenants.
    ("grpc.server.max_pending_requests", CALLS_PENDING_MAX),
    ("grpc.server.max_pending_requests_hard_limit", CALLS_PENDING_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.server_handshake_timeout_ms", GUARD_HANDSHAKE_MS),
)


def add_services(server: grpc.aio.Server, node: Node, gate: Gate) -> Health:
    """Add a node's services to a server."""
    gate.before, gate.on_call = node.catch_up, node.turns.note_call
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(KvStoreService(node, gate), server)  # type: ignore[no-untyped-call]
    erasing_pb2_grpc.add_ErasingServicer_to_server(ErasingService(node, gate), server)  # type: ignore[no-untyped-call]
    blocks_pb2_grpc.add_BlocksServicer_to_server(BlocksService(node, gate), server)  # type: ignore[no-untyped-call]
    add_batches(server, node, gate)
    cluster_pb2_grpc.add_ClusterServicer_to_server(ClusterService(node, gate), server)  # type: ignore[no-untyped-call]
    lookups_pb2_grpc.add_LookupsServicer_to_server(LookupsService(node, gate), server)  # type: ignore[no-untyped-call]
    observing_pb2_grpc.add_ObservingServicer_to_server(ObservingService(node, gate), server)  # type: ignore[no-untyped-call]
    sessions_pb2_grpc.add_SessionsServicer_to_server(SessionsService(node, gate), server)  # type: ignore[no-untyped-call]
    steps_pb2_grpc.add_StepsServicer_to_server(StepsService(node, gate), server)  # type: ignore[no-untyped-call]
    upkeep_pb2_grpc.add_UpkeepServicer_to_server(UpkeepService(node, gate), server)  # type: ignore[no-untyped-call]
    return add_standard_services(server, gate, node.turns)


def open_server(node: Node, gate: Gate) -> tuple[grpc.aio.Server, Health]:
    """Open a node's server with its interceptor; it doesn't listen yet."""
    free_failed_batches()
    drop_calls()
    server = grpc.aio.server(
        options=_GRPC_OPTIONS, interceptors=(Authenticator(gate, node.counters, node.timings),)
    )
    return server, add_services(server, node, gate)


def _progress_shown_by(clock: Clock) -> Progress:
    """Report long work at its beginning, its end, and once a second in between, with the remaining time."""
    begun: dict[str, tuple[int, int]] = {}
    shown: dict[str, int] = {}
    every_ns = START_PROGRESS_MS * _NS_PER_MS

    def show(doing: str, done: int, total: int) -> None:
        now_ns = clock.monotonic_ns()
        if done < total and now_ns - shown.get(doing, -every_ns) < every_ns:
            return
        shown[doing] = now_ns
        begun_ns, at = begun.setdefault(doing, (now_ns, done))
        left = ""
        if at < done < total:
            left = f", {(now_ns - begun_ns) * (total - done) / (done - at) / 1e9:,.0f} s left"
        log.info("%s: %s of %s%s", doing, show_size(done), show_size(total), left)

    return show


def _reload(
    settings: Settings,
    read_again: Callable[[], Settings],
    node: Node,
    gate: Gate,
    certificates: Certificates | None,
) -> Settings:
    """Read settings, tenants and certificates again; returns the settings that apply now.

    Invalid settings, and those that need a restart, change nothing. Opening or closing a node needs a restart: an open
    node has unauthenticated callers, and one with tenants must never accept any.
    """
    try:
        later = read_again()
        later.node()
    except ConfigError as error:
        log.warning("%s The settings are unchanged.", error)
        return settings
    now, at_a_start = settings.changed(later)
    if "tenants" in now and settings.values["tenants"] is None:
        now.remove("tenants")
        log.warning(
            "The node was started without tenants, and stays open to all callers until it is restarted."
        )
    elif "tenants" in now and later.values["tenants"] is None:
        now.remove("tenants")
        log.warning("The node was started with tenants, and keeps its current ones until it is restarted.")
    if at_a_start:
        log.warning("%s changed; a restart is needed to apply this.", ", ".join(at_a_start))
    counts = Settings(settings.values | {name: later.values[name] for name in now}, later.file)
    config = counts.node()
    logging.getLogger().setLevel(config.log_level.upper())
    log.info("The settings were reloaded: %s changed.", ", ".join(now) or "nothing")
    if config.tenants is not None:
        _reload_tenants(node, gate, config.tenants)
    if certificates is not None:
        _reload_certificates(certificates, config)
    elif config.tls_certificate is not None:
        log.warning("Turning TLS on or off needs a restart.")
    return counts


def _reload_certificates(certificates: Certificates, config: NodeConfig) -> None:
    try:
        certificates.renew(config)
    except ConfigError as error:
        log.warning("%s The certificates are unchanged.", error)
    else:
        log.info("The certificates were reloaded, for new connections.")


def _reload_tenants(node: Node, gate: Gate, path: Path) -> None:
    tenants = gate.tenants
    try:
        log.info("%d tenants", tenants.load(path))
        node.store.change_quotas(tenants.quotas())
        node.granted.quotas_changed()
    except ConfigError as error:
        log.warning("%s The tenants are unchanged.", error)
        return
    node.fabric_calls.limits_changed()
    gate.recheck()


def _serve_http(
    node: Node, gate: Gate, config: NodeConfig, certificates: Certificates | None, host: str, port: int
) -> HttpServer:
    # These, and the metrics, would take a tenth of the start time of a node that serves none of them.
    from kvstore.node.pages import http_server  # noqa: PLC0415

    http = http_server(node, gate, certificates, ui=config.ui)
    log.info("metrics%s at %s", " and the page" if config.ui else "", http.listen(host, port))
    return http


def _guard_connections(node: Node, gate: Gate, port: int, clients: Sequence[Network]) -> ConnectionGuard:
    loop = asyncio.get_running_loop()

    def turned_away(source: str, why: str, connections: int) -> None:
        said = f"{why} ({connections})"
        loop.call_soon_threadsafe(lambda: gate.audit.refused("connect", tenant="", peer=source, why=said))

    def at_endpoint(endpoint: Endpoint, client: Ip) -> None:
        listener = endpoint.listener()
        if listener is not None:
            guard.expects(listener, client, shuts=node.fabric.provider in ONE_CONNECTION)

    guard = ConnectionGuard(node.clock, port, turned_away, clients)
    gate.let_in, gate.turned_away, gate.reads_nothing = guard.proved, guard.refused, guard.reads_nothing
    gate.repeats, gate.floods, gate.brought = guard.repeats, guard.floods, guard.brought
    gate.has_closed = guard.has_closed
    node.at_endpoint = at_endpoint
    guard.start()
    return guard


def _drives_shown(store: Store) -> str:
    states = store.drive_states()
    away = [str(state.number) for state in states if state.statistics is None]
    shown = counted(len(states), "drive")
    return f"{shown} without drive {' and '.join(away)}" if away else shown


def _shown_to_nodes(config: NodeConfig) -> dict[str, bytes]:
    """The node's own certificate, where the others require one of each caller."""
    key, certificate = config.tls_key, config.tls_certificate
    if config.tls_clients is None or key is None or certificate is None:
        return {}
    return {"private_key": read_pem(key), "certificate_chain": read_pem(certificate)}


def _join_cluster(node: Node, gate: Gate, config: NodeConfig) -> None:
    """Follow the map and maintain copies, if the node is configured for a cluster."""
    if (cluster := config.cluster) is None:
        return
    from kvstore.cluster.etcd import Etcd  # noqa: PLC0415 - needed only in a cluster
    from kvstore.cluster.etcd_history import EtcdMemory  # noqa: PLC0415 - the same
    from kvstore.cluster.membership import Membership  # noqa: PLC0415 - the same
    from kvstore.cluster.takeovers import Takeovers  # noqa: PLC0415 - the same

    memory = EtcdMemory(cluster.etcd.cluster, config.data / "cluster.json")
    takeovers = Takeovers(cluster.etcd.cluster, config.data / "takeovers")
    node.membership = Membership(Etcd(cluster.etcd), node.clock, memory, takeovers)
    if (upkeep := cluster.upkeep) is None:
        return
    from kvstore.node.peers import Peers  # noqa: PLC0415 - the same
    from kvstore.node.upkeep import Upkeep  # noqa: PLC0415 - the same

    secret, ca = upkeep.secret, upkeep.ca
    if secret is not None:
        gate.tenants.node_sha256 = token_digest(secret)
        if upkeep.is_secret_open:
            log.warning("Any user of this machine can read or write %s: chmod 600 it.", upkeep.secret_path)
    credentials = None if ca is None else grpc.ssl_channel_credentials(ca, **_shown_to_nodes(config))
    node.upkeep = Upkeep(node, gate.tenants, node.membership, upkeep.replicas, Peers(secret, credentials))


def _member(store: Store, cluster: ClusterConfig, address: str) -> Member:
    """Return the node's entry on the map."""
    weight = max(1, store.statistics().capacity_bytes >> 30)
    replicas = 0 if cluster.upkeep is None else cluster.upkeep.replicas
    return Member(
        store.name, cluster.address or address, weight, VERSION, "", cluster.zone, replicas, standbys=1
    )


async def _leave_cluster(node: Node) -> None:
    has_drained = False
    if node.upkeep is not None:
        has_drained = node.upkeep.has_drained
        await node.upkeep.close()
    if node.membership is not None:
        await node.membership.close(for_good=has_drained)


def _control(store: Store, config: NodeConfig, gate: Gate) -> ControlSocket | None:
    """Open the socket for `kvstore keys`, if the node has keys."""
    if not isinstance(store.keys, StoreKeys):
        return None

    def clear() -> dict[int, tuple[int, str]]:
        here = ((one.number, one.statistics) for one in store.drive_states())
        return {number: (one.clear_bytes, one.clear_why) for number, one in here if one is not None}

    return ControlSocket(config.data, store.keys, gate.audit, clear)


async def _end(control: ControlSocket | None) -> None:
    if control is not None:
        await control.close()


def _publish(config: EventsConfig, clock: Clock) -> KvEvents:
    try:
        from kvstore.node.kv_events import KvEvents  # noqa: PLC0415 - its packages are an extra
    except ImportError as error:
        raise ConfigError(
            "Events need pyzmq and msgspec: install triggerkv with the extra events."
        ) from error
    events = KvEvents(config, clock)
    log.info("KV events on %s", " and ".join(events.endpoints))
    return events


def _collector_kind() -> type[Collector]:
    try:
        from kvstore.node.otel import Collector  # noqa: PLC0415 - its packages are an extra
    except ImportError as error:
        raise ConfigError("Spans need OpenTelemetry: install triggerkv with the extra otel.") from error
    return Collector


def _check_before(config: NodeConfig) -> None:
    """Check what the start uses later, before anything is created."""
    check_port(config.host, config.port)
    if config.http is not None:
        check_port(*config.http)
    if (cluster := config.cluster) is not None:
        _ = cluster.etcd.pem(), cluster.etcd.secret()
        if cluster.upkeep is not None:
            _ = cluster.upkeep.secret, cluster.upkeep.ca
    if config.master_key is not None and not keyring_path(config.data).exists():
        open_master(config.master_key).close()


async def _become_ready(node: Node, health: Health, address: str, stop: asyncio.Event) -> None:
    """Print `ready` once the node has reached itself at the address given to clients; retry until `stop`."""
    loop, readiness = asyncio.get_running_loop(), node.readiness
    while not stop.is_set():
        try:
            await loop.run_in_executor(None, reach_itself, node.fabric, node.address)
        except KvError as error:
            readiness.why = str(error)
            log.warning("not ready: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), READINESS_RETRY_MS / 1000)
        else:
            readiness.why = ""
            await health.begin(ready=True)
            print(f"ready {address}", flush=True)  # noqa: T201 - the process that starts the node waits for this line
            return


async def _serve_node(
    settings: Settings,
    read_again: Callable[[], Settings],
    node: Node,
    gate: Gate,
    certificates: Certificates | None,
    stop: asyncio.Event,
) -> None:
    """Serve until it is stopped, then close in order."""
    config = settings.node()
    store = node.store
    store.change_quotas(gate.tenants.quotas())

    def reload() -> None:
        nonlocal settings
        settings = _reload(settings, read_again, node, gate, certificates)

    _at_signals(reload, signal.SIGHUP)
    _join_cluster(node, gate, config)
    membership = node.membership
    server, health = open_server(node, gate)
    http = guard = control = None
    try:
        await health.begin(ready=False)
        address = listen(server, config, certificates)
        await WarmUp(node).run()
        guard = _guard_connections(node, gate, int(address.rpartition(":")[2]), config.fabric_clients)
        await server.start()
        statistics = store.statistics()
        log.info(
            "node %s: %s%s, %d blocks, %s free of %s%s, fabric %s",
            store.name,
            _drives_shown(store),
            ", encrypted" if store.keys is not None else "",
            statistics.blocks,
            show_size(statistics.free_bytes),
            show_size(statistics.capacity_bytes),
            ", an index rebuilt from its drive" if statistics.rebuilt else "",
            node.fabric.provider,
        )
        control = _control(store, config, gate)
        if config.http is not None:
            http = _serve_http(node, gate, config, certificates, *config.http)
            guard.also_at(http.port)
        if membership is not None:
            membership.start()
        if node.upkeep is not None:
            node.upkeep.start()
        await _become_ready(node, health, address, stop)
        if membership is not None and config.cluster is not None and not stop.is_set():
            membership.join(_member(store, config.cluster, address))
        await stop.wait()
        log.info("stopping")
    finally:  # also after a failed start: at interpreter exit, an open server ends in a traceback
        await _leave_cluster(node)
        await _end(control)
        await health.enter_graceful_shutdown()
        if http is not None:
            await http.close()
        await node.close()
        await server.stop(_STOP_GRACE_S)
        if guard is not None:
            guard.close()


def _at_signals(do: Callable[[], object], *numbers: signal.Signals) -> None:
    """Have the running loop call it at these signals, which do nothing once the loop is closed.

    asyncio's own handlers are removed with the loop: a second signal would then kill a node that is ending.
    """
    loop = asyncio.get_running_loop()

    def handle(_number: int, _frame: object) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(do)

    for number in numbers:
        signal.signal(number, handle)
    # With any handler of its own the loop wakes for all signals; this one is ignored by default. Python's warning that
    # more came than it has room for takes a lock inside the signal's handler, and the next signal's waits for it.
    loop.add_signal_handler(signal.SIGURG, lambda: None)
    signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)


async def _serve(settings: Settings, read_again: Callable[[], Settings]) -> None:
    clock, loop, stop = SystemClock(), asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        stop.set()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a flood of them would hold the end up
            signal.signal(number, signal.SIG_IGN)

    _at_signals(end, signal.SIGTERM, signal.SIGINT)
    config = settings.node()
    begin_logging(clock, config.log_level, config.log_format)
    keep_out_of_dumps()
    fail_stop.arm()
    certificates, tenants = Certificates.of(config), Tenants(b"", clock)  # the salt is set from the store
    if config.tenants is not None:
        tenants.load(config.tenants)
    _check_before(config)
    collector_kind = None if config.otel is None else _collector_kind()
    open_keys = keys_opener(config.data, config.master_key)
    if config.tied:
        try:
            loop.add_reader(sys.stdin.fileno(), stop.set)
        except PermissionError as error:  # standard input may be a file, which can't be watched
            raise ConfigError("--tied needs a pipe or a terminal as standard input.") from error
    expect_no_messages()
    address = FabricAddress(config.host, config.fabric_address, config.fabric_ports, config.fabric_clients)
    provider = config.provider or load().best_provider()
    with (
        Fabric(config.provider, address=address.fabric_opens_at(provider)) as fabric,
        Audit(clock, config.audit) as audit,
        nullcontext() if config.events is None else closing(_publish(config.events, clock)) as events,
        Store.open(
            config.data,
            capacity_bytes=config.capacity_bytes,
            clock=clock,
            drives=config.drives,
            without=config.without,
            progress=_progress_shown_by(clock),
            policy=config.eviction,
            open_keys=open_keys,
        ) as store,
        fabric,  # closed before the store
    ):
        collector = None
        if collector_kind is not None and config.otel is not None:
            log.info("spans to %s", config.otel)
            collector = collector_kind(config.otel, store.name, clock)
        spans = None if collector is None else collector.spans
        lookup_log = LookupLog(config.data / "lookups")
        tenants.salt = store.salt
        node = Node(store, fabric, clock, config.hot_bytes, lookup_log, spans, address, tenants.known)
        if events is not None:
            node.block_listeners.append(events.blocks)
        node.sharing = Sharing(
            node.hot if config.tenants is None else None,
            tenants.known,
            has_directory=config.cluster is None,  # a cluster confirms deletions without a node that hangs
        )
        try:
            await _serve_node(settings, read_again, node, Gate(tenants, audit), certificates, stop)
        finally:  # in any case: its timer must not use a closed drive
            await node.close()
            if node.sharing is not None:
                node.sharing.close()
            if collector is not None:
                await loop.run_in_executor(None, collector.close)


def serve(settings: Settings, read_again: Callable[[], Settings]) -> int:
    """Run a node until a signal; returns the exit status. `read_again` returns the current settings, for SIGHUP."""
    asyncio.run(_serve(settings, read_again))
    return 0
