"""Failures of a cluster, one at a time: no wrong byte, no lost block, no deletion undone.

Five rounds in `make test-hosts`, 300 in `make test-cluster`, in clusters of three, four and five nodes.
`TRIGGERKV_CHAOS_SEED` is the first cluster's seed; a failed test prints its seed and the failures it caused.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.cluster.history import Call, End, Kind, faults
from tests.cluster.real_etcd import program
from tests.hosts.chaos import Chaos
from tests.hosts.conftest import make_secrets
from tests.hosts.network import Network

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ROUNDS = int(os.environ.get("TRIGGERKV_CHAOS_ROUNDS", "5"))
SEED = int(os.environ.get("TRIGGERKV_CHAOS_SEED", "1"))
KINDS = os.environ.get("TRIGGERKV_CHAOS_KINDS", "").split()  # these, one after the other, not by the seed
A_WORLD = 15
WORLDS = range(SEED, SEED + -(-ROUNDS // A_WORLD))


def counted(history: Iterable[Call]) -> str:
    count = Counter((call.kind, call.end, call.value is None) for call in history)
    puts, deletions = (
        f"{count[kind, End.DONE, kind is Kind.DELETE]} of {sum(n for (one, *_), n in count.items() if one is kind)}"
        for kind in (Kind.PUT, Kind.DELETE)
    )
    hits, misses = count[Kind.GET, End.DONE, False], count[Kind.GET, End.DONE, True]
    silent = count[Kind.GET, End.FAILED, False]
    appended, resumed = (count[kind, End.DONE, False] for kind in (Kind.APPEND, Kind.RESUME))
    return (
        f"puts {puts}, deletions {deletions}, hits {hits}, misses {misses}, gets that say nothing {silent},"
        f" appends to sessions {appended}, reads of them {resumed}"
    )


@pytest.mark.timeout(300 + 120 * A_WORLD)
@pytest.mark.parametrize("seed", WORLDS)
def test_failures_lose_nothing_and_undo_no_deletion(seed: int, tmp_path: Path) -> None:
    program()  # or there is none, and the test is skipped
    rounds = min(A_WORLD, ROUNDS - (seed - SEED) * A_WORLD)
    done = [f"seed {seed}"]
    network = Network(tmp_path)
    try:
        chaos = Chaos(network, seed, 3 + seed % 3, make_secrets)
        done.append(f"{len(chaos.nodes)} nodes")
        chaos.settled()
        for number in range(rounds):
            done.append(chaos.harm(KINDS[number % len(KINDS)] if KINDS else None))
            print(done[-1], flush=True)  # noqa: T201 - seen when it fails, and with -s
        chaos.finish()
        history = chaos.history()
    except BaseException as error:
        error.add_note("; ".join(done))
        raise
    finally:
        network.close()
    found = faults(history)
    assert not found, f"{'; '.join(done)}\n" + "\n".join(found[:10])
    print(f"{done[0]}, {done[1]}: {counted(history)}", flush=True)  # noqa: T201
    acknowledged = Counter(call.kind for call in history if call.end is End.DONE)
    assert acknowledged[Kind.PUT] > 5 * rounds
    assert acknowledged[Kind.GET] > 10 * rounds
    assert acknowledged[Kind.DELETE] > rounds // 2  # none while a node is away,
    assert acknowledged[Kind.APPEND] > rounds // 2  # nor these while etcd is
