"""A cluster: its parts, the speed of each, and the routes that KV takes through it.

GPUs sit in engines (one model each, spread over its GPUs) and under PCIe roots, each with a NIC of its own;
storage nodes have links, memory and drives. What always holds: both paths go through the same NICs, links, nodes
and drives. The CPU's path also has a second pass over PCIe, a copy in the host's memory and a cost per message;
the triggered path has the cost of a trigger. All of these are numbers here, with the unit in the name.

KV is placed as in the product (`sim.replay.kv_homes`): a user's KV on one node, each page of it on one of that
node's drives. A page is a block's KV of one layer and one GPU. A byte passes the NIC and the node's link at once; at
every other stop a message must have arrived whole before it goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from sim.hardware import HARDWARE, accepted, changed
from sim.parameter_files import read_toml
from sim.replay.events import Step
from sim.units import OutOfRange, require

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sim.replay.events import Events

__all__ = ["PATHS", "Cluster", "PathName", "Plant", "read_cluster"]

PathName = Literal["cpu", "triggered", "recompute"]
PATHS: tuple[PathName, ...] = ("cpu", "triggered", "recompute")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Counts, speeds and prices. Defaults: H100-like GPUs, and the speeds of `sim.hardware`."""

    engines: int = 2
    gpus_per_engine: int = 8
    gpus_per_root: int = 2
    nodes: int = 4
    links_per_node: int = 2
    drives_per_node: int = 8
    prefill_engines: int = 0  # engines that only compute prompts; 0: each does both (engines in steps)
    decode_slots: int = 256  # answers that an engine generates at a time
    step_tokens: int = 8192  # the most that a step takes (engines in steps)
    step_overhead_s: float = 0.002  # of a step, beside the roofline
    gpu_flops_per_s: float = 989e12
    gpu_mfu: float = 0.5  # share of them that a prefill achieves
    gpu_memory_bytes: float = 80e9
    gpu_memory_bytes_per_s: float = 2.7e12  # that reading weights and KV achieves
    decode_token_s: float = 0.03
    pcie_bytes_per_s: float = HARDWARE.pcie_bytes_per_s  # each direction, by root
    pcie_latency_s: float = HARDWARE.pcie_latency_s
    trigger_message_s: float = HARDWARE.trigger_message_s
    nic_message_s: float = HARDWARE.nic_message_s
    link_bits_per_s: float = HARDWARE.link_bits_per_s
    link_latency_s: float = HARDWARE.link_latency_s
    cpu_message_s: float = HARDWARE.cpu_message_s  # CPU path: the software of one message
    host_copy_bytes_per_s: float = HARDWARE.host_copy_bytes_per_s  # CPU path: one thread's copy
    host_copy_threads: int = 2  # of a root
    node_memory_bytes_per_s: float = HARDWARE.node_memory_bytes_per_s
    node_memory_bytes: float = 0.0  # of the DRAM tier; 0: none
    drive_write_bytes_per_s: float = HARDWARE.drive_write_bytes_per_s
    drive_read_bytes_per_s: float = HARDWARE.drive_read_bytes_per_s
    drive_message_s: float = HARDWARE.drive_message_s
    drive_write_latency_s: float = HARDWARE.drive_write_latency_s
    drive_read_latency_s: float = HARDWARE.drive_read_latency_s
    drive_capacity_bytes: float = 3.84e12
    gpu_usd_per_hour: float = 2.5
    node_usd_per_hour: float = 1.0
    link_usd_per_hour: float = 0.05  # of a node: a port of its NIC and one of a switch
    drive_usd_per_hour: float = 0.02
    memory_gb_usd_per_hour: float = 0.003  # of the DRAM tier, per GB

    def __post_init__(self) -> None:
        for field in fields(self):
            unit, low, high = accepted(field.name)
            require(field.name, getattr(self, field.name), unit, low, high)
        if self.gpus % self.gpus_per_root:
            raise OutOfRange(
                "gpus_per_root", self.gpus_per_root, "GPUs", f"a divisor of all {self.gpus} GPUs"
            )

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.engines * self.gpus_per_engine

    @property
    def drives(self) -> int:
        """All of them."""
        return self.nodes * self.drives_per_node

    def engine_bytes_per_s(self, path: PathName) -> float:
        """The rate of an engine's NICs and PCIe roots, in one direction; on the CPU's path, of its copies too."""
        roots = max(1, self.gpus_per_engine // self.gpus_per_root)
        nics = self.gpus_per_engine * self.link_bits_per_s / 8
        if path != "cpu":
            return min(nics, roots * self.pcie_bytes_per_s)
        copies = roots * self.host_copy_threads * self.host_copy_bytes_per_s
        return min(nics, roots * self.pcie_bytes_per_s / 2, copies)

    @property
    def node_get_bytes_per_s(self) -> float:
        """The rate that the drives and links of a node can send."""
        return min(
            self.drives_per_node * self.drive_read_bytes_per_s, self.links_per_node * self.link_bits_per_s / 8
        )

    @property
    def gpus_usd_per_hour(self) -> float:
        """The cost of the GPUs."""
        return self.gpus * self.gpu_usd_per_hour

    @property
    def storage_usd_per_hour(self) -> float:
        """The cost of storage."""
        of_a_node = self.node_usd_per_hour + self.links_per_node * self.link_usd_per_hour
        of_a_node += self.node_memory_bytes / 1e9 * self.memory_gb_usd_per_hour
        return self.nodes * of_a_node + self.drives * self.drive_usd_per_hour


def read_cluster(path: Path) -> Cluster:
    """Read the table [cluster] of a TOML file; numbers that it doesn't name keep their defaults."""
    table = read_toml("--cluster", path).get("cluster")
    if not isinstance(table, dict):
        raise OutOfRange("--cluster", str(path), "a TOML file", "with a table [cluster]")
    return changed(Cluster(), table.items(), "--cluster")


class Plant:
    """The cluster's resources in an event core, and the routes to and from each GPU, node and drive."""

    def __init__(self, events: Events, cluster: Cluster, path: PathName) -> None:
        self._cluster, self._cpu = cluster, path == "cpu"
        roots = cluster.gpus // cluster.gpus_per_root

        def some(count: int, servers: int = 1) -> list[int]:
            return [events.add_resource(servers) for _ in range(count)]

        self.prefill = some(cluster.engines)
        self.decode = some(cluster.engines, cluster.decode_slots)
        self._pcie_out, self._pcie_in = some(roots), some(roots)
        self._host = some(roots, cluster.host_copy_threads) if self._cpu else []
        self._nic_out, self._nic_in = some(cluster.gpus), some(cluster.gpus)
        self._link_in = some(cluster.nodes, cluster.links_per_node)
        self._link_out = some(cluster.nodes, cluster.links_per_node)
        self._memory, self._drives = some(cluster.nodes), some(cluster.drives)
        self.groups = {
            "prefill": self.prefill,
            "decode": self.decode,
            "PCIe, out": self._pcie_out,
            "PCIe, in": self._pcie_in,
            "host copies": self._host,
            "NICs, out": self._nic_out,
            "NICs, in": self._nic_in,
            "node links, in": self._link_in,
            "node links, out": self._link_out,
            "node memory": self._memory,
            "drives": self._drives,
        }

        def first_of(make: Callable[[int], list[Step]], count: int) -> int:
            """Add a route for each number; they are numbered consecutively."""
            return [events.add_route(make(number)) for number in range(count)][-1] - count + 1

        self.put_first = first_of(self._out_of_gpu, cluster.gpus)
        self.put_then = first_of(self._onto_drive, cluster.drives)  # of all nodes, one after the other
        self.get_first = first_of(self._off_drive, cluster.drives)
        self.get_hot_first = first_of(self._off_node, cluster.nodes)
        self.read_first = first_of(self._into_memory, cluster.drives)
        self.get_then = first_of(self._into_gpu, cluster.gpus)
        self.timer = events.add_route([Step(events.add_resource())])  # a message that takes no time

    def _out_of_gpu(self, gpu: int) -> list[Step]:
        cluster, root = self._cluster, gpu // self._cluster.gpus_per_root
        pcie = Step(self._pcie_out[root], 0.0, 1 / cluster.pcie_bytes_per_s, cluster.pcie_latency_s)
        wire = Step(self._nic_out[gpu], self._nic_page_s, 8 / cluster.link_bits_per_s, cluster.link_latency_s)
        return [pcie, self._host_copy(root), pcie, wire] if self._cpu else [pcie, wire]

    def _into_gpu(self, gpu: int) -> list[Step]:
        cluster, root = self._cluster, gpu // self._cluster.gpus_per_root
        pcie = Step(self._pcie_in[root], 0.0, 1 / cluster.pcie_bytes_per_s, cluster.pcie_latency_s)
        wire = Step(self._nic_in[gpu], self._nic_page_s, 8 / cluster.link_bits_per_s, cuts_through=True)
        return [wire, pcie, self._host_copy(root), pcie] if self._cpu else [wire, pcie]

    def _host_copy(self, root: int) -> Step:
        return Step(self._host[root], self._cluster.cpu_message_s, 1 / self._cluster.host_copy_bytes_per_s)

    @property
    def _nic_page_s(self) -> float:
        return self._cluster.nic_message_s + (0.0 if self._cpu else self._cluster.trigger_message_s)

    def _onto_drive(self, drive: int) -> list[Step]:
        cluster, node = self._cluster, drive // self._cluster.drives_per_node
        return [
            Step(self._link_in[node], 0.0, 8 / cluster.link_bits_per_s, cuts_through=True),
            Step(self._memory[node], 0.0, 1 / cluster.node_memory_bytes_per_s),
            Step(
                self._drives[drive],
                cluster.drive_message_s,
                1 / cluster.drive_write_bytes_per_s,
                cluster.drive_write_latency_s,
            ),
        ]

    def _off_node(self, node: int) -> list[Step]:
        cluster = self._cluster
        return [
            Step(self._memory[node], 0.0, 1 / cluster.node_memory_bytes_per_s),
            Step(self._link_out[node], 0.0, 8 / cluster.link_bits_per_s, cluster.link_latency_s),
        ]

    def _read(self, drive: int) -> Step:
        cluster = self._cluster
        return Step(
            self._drives[drive],
            cluster.drive_message_s,
            1 / cluster.drive_read_bytes_per_s,
            cluster.drive_read_latency_s,
        )

    def _off_drive(self, drive: int) -> list[Step]:
        return [self._read(drive), *self._off_node(drive // self._cluster.drives_per_node)]

    def _into_memory(self, drive: int) -> list[Step]:
        memory = self._memory[drive // self._cluster.drives_per_node]
        return [self._read(drive), Step(memory, 0.0, 1 / self._cluster.node_memory_bytes_per_s)]
