"""Small requests and clusters for the replay's tests."""

from __future__ import annotations

from sim.models import Model
from sim.replay.cluster_hardware import Cluster
from sim.replay.workload import Request

__all__ = ["ONE", "TINY", "requests"]

# 4 layers, 1 KV head of 125 numbers: 2,000 B a token at 16 bit, 500 B a layer. Attention costs it nothing, so a prefill
# is as long as its new tokens.
TINY = Model("tiny", 4, 1, 1, 125, 1e9, plain_widths=(0, 0))

# One of everything, 1,000 tokens a second to prefill (2e9 operations a token), round numbers everywhere.
ONE = Cluster(
    engines=1,
    gpus_per_engine=1,
    gpus_per_root=1,
    nodes=1,
    links_per_node=1,
    drives_per_node=1,
    decode_slots=4,
    gpu_flops_per_s=4e12,
    gpu_mfu=0.5,
    decode_token_s=0.01,
)


def requests(*rows: tuple[float, int, int, list[int]]) -> list[Request]:
    """Requests from (arrival in s, prompt tokens, answer tokens, blocks)."""
    return [Request(arrival_s, tokens, answer, tuple(blocks)) for arrival_s, tokens, answer, blocks in rows]
