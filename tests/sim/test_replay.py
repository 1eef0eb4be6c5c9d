"""A replay against what can be added up by hand, one request after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from sim.replay.run import Terms, prefill_tokens_per_s
from sim.replay.simulate import Result, simulate
from sim.replay.workload import Chats, Request, chats
from sim.units import OutOfRange
from tests.sim.replay_rig import ONE, TINY, requests

if TYPE_CHECKING:
    from sim.replay.cluster_hardware import Cluster, PathName

TOKEN_BYTES = 2 * 125 * 2 * 4  # K and V, 2 bytes, 4 layers


def _run(
    work: list[Request], cluster: Cluster = ONE, path: PathName = "triggered", **terms: object
) -> Result:
    return simulate(work, TINY, cluster, path, Terms(**terms))  # type: ignore[arg-type]


def _put_message_s(
    size_bytes: float, cluster: Cluster = ONE, path: PathName = "triggered", pages: int = 2
) -> float:
    """The time of one message to an idle drive."""
    pcie_s = size_bytes / cluster.pcie_bytes_per_s + cluster.pcie_latency_s
    if path == "cpu":
        host_s = pages * cluster.cpu_message_s + size_bytes / cluster.host_copy_bytes_per_s
        wire_s = 2 * pcie_s + host_s + pages * cluster.nic_message_s
    else:
        wire_s = pcie_s + pages * (cluster.nic_message_s + cluster.trigger_message_s)
    wire_s += size_bytes * 8 / cluster.link_bits_per_s + cluster.link_latency_s
    node_s = size_bytes / cluster.node_memory_bytes_per_s
    drive_s = pages * cluster.drive_message_s + size_bytes / cluster.drive_write_bytes_per_s
    return wire_s + node_s + drive_s + cluster.drive_write_latency_s


def test_prefill_speed_follows_from_model_and_gpus() -> None:
    assert prefill_tokens_per_s(TINY, ONE) == 1000
    assert prefill_tokens_per_s(TINY, replace(ONE, gpus_per_engine=4, gpus_per_root=4)) == 4000


@pytest.mark.parametrize("path", ["cpu", "triggered", "recompute"])
def test_a_first_request_waits_for_its_prefill_only(path: PathName) -> None:
    result = _run(requests((0, 1000, 0, [1, 2])), path=path)
    assert result.ttft_s.tolist() == [1.0]
    assert (result.block_hits, result.get_bytes) == (0, 0)


@pytest.mark.parametrize("path", ["cpu", "triggered"])
def test_layers_are_put_while_later_ones_are_computed(path: PathName) -> None:
    """The puts of all layers but the last end before the prefill does; the lag is one message's time."""
    result = _run(requests((0, 1024, 0, [1, 2])), path=path)
    assert result.put_bytes == 1024 * TOKEN_BYTES
    message_s = _put_message_s(1024 * TOKEN_BYTES / 4, path=path)
    assert message_s < 1.024 / 4
    assert result.put_lag_s.tolist() == [pytest.approx(message_s)]
    assert result.backlog_bytes.max() == 1024 * TOKEN_BYTES / 4, "never more than one layer under way"


def test_an_answer_is_put_every_few_tokens() -> None:
    result = _run(requests((0, 512, 10, [1])), decode_put_tokens=4)
    # 10 tokens in 3 messages; the last ends with the answer.
    assert result.put_bytes == 522 * TOKEN_BYTES
    assert result.put_lag_s[-1] == pytest.approx(_put_message_s(10 / 3 * TOKEN_BYTES, pages=4))
    assert result.duration_s == pytest.approx(0.512 + 0.1 + result.put_lag_s[-1])


def test_a_follow_up_fetches_stored_blocks_and_computes_the_rest() -> None:
    result = _run(requests((0, 1024, 0, [1, 2]), (10, 1100, 0, [1, 2, 3])))
    assert result.block_hits == 2
    assert result.fetched_tokens == 1024
    assert result.get_bytes == 1024 * TOKEN_BYTES
    assert result.put_bytes == 1100 * TOKEN_BYTES, "what is stored is not put again"
    assert result.ttft_s[1] == pytest.approx(result.fetch_s[1] + 76 / 1000)
    # Four layers' messages pipeline through; the narrowest stop, the drive, sets the pace.
    layer_bytes = 1024 * TOKEN_BYTES / 4
    drive_s = ONE.drive_message_s + layer_bytes / ONE.drive_read_bytes_per_s
    assert result.fetch_s[1] > 4 * drive_s
    assert result.fetch_s[1] < 4 * drive_s + 4e-4


def test_the_last_token_is_computed_even_if_all_is_stored() -> None:
    result = _run(requests((0, 1024, 0, [1, 2]), (10, 1024, 0, [1, 2])))
    assert result.fetched_tokens == 1023
    assert result.ttft_s[1] == pytest.approx(result.fetch_s[1] + 0.001)
    assert result.put_bytes == 1024 * TOKEN_BYTES


def test_a_block_is_found_once_it_is_on_a_drive_and_no_earlier() -> None:
    early = _run(requests((0, 1024, 0, [1, 2]), (1.0239, 1024, 0, [1, 2])))
    late = _run(requests((0, 1024, 0, [1, 2]), (1.0260, 1024, 0, [1, 2])))
    assert (early.block_hits, late.block_hits) == (0, 2)
    assert early.put_bytes == 1024 * TOKEN_BYTES, "what is being put is not put twice"


def test_a_shorter_put_does_not_complete_before_another_of_its_name() -> None:
    two = replace(ONE, engines=2, gpus_per_engine=1, gpus_per_root=1, decode_slots=8)
    long, short = [1, 2, 3, 4, 5, 6, 7, 8], [1, 9]
    work = requests((0, 4096, 0, long), (0.1, 1024, 0, short), (2.0, 1024, 0, short), (6.0, 1024, 0, short))
    result = _run(work, two)
    # At 2 s the short one's own block is on a drive, the one before it is still being made by the long one.
    assert result.block_hits == 2
    assert result.fetched_tokens == 1023


def test_computing_is_chosen_where_fetching_is_slower() -> None:
    work = requests((0, 1024, 0, [1, 2]), (10, 1100, 0, [1, 2, 3]))
    slow = replace(ONE, drive_read_bytes_per_s=1e6)  # 500 tokens a second, the engine makes 1,000
    result = _run(work, slow)
    assert (result.found_tokens, result.fetched_tokens) == (1024, 0)
    assert result.ttft_s[1] == pytest.approx(1.1)
    assert _run(work, slow, always_get=True).fetched_tokens == 1024


def test_the_dram_tier_answers_without_the_drive() -> None:
    work = requests((0, 1024, 0, [1, 2]), (10, 1100, 0, [1, 2, 3]))
    cold = _run(work)
    warm = _run(work, replace(ONE, node_memory_bytes=512 * TOKEN_BYTES * 10))
    small = _run(work, replace(ONE, node_memory_bytes=512 * TOKEN_BYTES))  # one block
    assert warm.hot_bytes == warm.get_bytes == 1024 * TOKEN_BYTES
    assert small.hot_bytes == small.get_bytes / 2
    assert warm.fetch_s[1] < small.fetch_s[1] < cold.fetch_s[1]
    assert warm.usage["drives"][0].served == 4 + 4, "the puts of two requests, no reads"


def test_blocks_beyond_the_capacity_are_evicted_from_the_tail() -> None:
    two_blocks = replace(ONE, drive_capacity_bytes=2.5 * 512 * TOKEN_BYTES)
    work = requests((0, 1536, 0, [1, 2, 3]), (10, 1536, 0, [1, 2, 3]))
    result = _run(work, two_blocks)
    assert result.block_hits == 2, "1 and 2 are left: a prefix that can be used"
    # Of the second request, 3 comes in again and 2 goes: the oldest of what is not its head.
    assert result.evicted == 2


def test_the_cpu_path_costs_its_extra_steps() -> None:
    work = requests((0, 1024, 0, [1, 2]), (10, 1100, 0, [1, 2, 3]))
    cpu, triggered = _run(work, path="cpu"), _run(work)
    assert cpu.fetch_s[1] > triggered.fetch_s[1]
    assert cpu.usage["host copies"][0].served == 4 + 4 + 4
    assert "host copies" not in triggered.usage
    assert cpu.usage["PCIe, out"][0].units == 2 * triggered.usage["PCIe, out"][0].units
    # The very same bytes reach the drives.
    assert cpu.usage["drives"][0].units == triggered.usage["drives"][0].units


def test_engines_share_the_work_and_drives_share_the_bytes() -> None:
    many = replace(ONE, engines=2, gpus_per_engine=2, gpus_per_root=2, nodes=2, drives_per_node=2)
    work = [Request(0.0, 512, 0, (i,), user=i) for i in range(20)]
    result = _run(work, many)
    assert [one.served for one in result.usage["prefill"]] == [10, 10]
    # The pages of 20 users' blocks are spread by chance over nodes and drives, and evenly over an engine's GPUs.
    put = 20 * 512 * TOKEN_BYTES
    shares = [one.units / put for one in result.usage["drives"]]
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx([0.25] * 4, abs=0.12)
    assert [one.units for one in result.usage["NICs, out"]] == pytest.approx([put / 4] * 4)


def test_an_engine_that_waits_for_a_fetch_is_not_considered_idle() -> None:
    """Concurrent follow-ups go to the least loaded engine, even before any engine computes."""
    two = replace(ONE, engines=2, gpus_per_engine=1, gpus_per_root=1)
    follow_ups = [(10.0, 2024, [1, 2, 3, 4]), (10.0, 1034, [1, 2, 5]), (10.0, 1034, [1, 2, 6])]
    before = [(0.0, 1024, [1, 2]), (0.0, 1536, [7, 8, 9])]
    work = requests(*((at, tokens, 0, blocks) for at, tokens, blocks in before + follow_ups))
    result = _run(work, two)
    assert result.block_hits == 6
    assert result.queued_s[:4].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert result.queued_s[4] < 0.011, "behind ten tokens, not behind a thousand"


def test_a_fetch_passes_every_stop_on_its_way() -> None:
    result = _run(requests((0, 1024, 0, [1, 2]), (10, 1100, 0, [1, 2, 3])))
    for name in ("node memory", "node links, out", "NICs, in", "PCIe, in"):
        fetched = result.usage[name][0].units - (result.put_bytes if name == "node memory" else 0)
        assert fetched == pytest.approx(result.get_bytes), name


def test_decode_waits_for_a_slot_and_delays_no_first_token() -> None:
    result = _run(requests(*((0.0, 10, 100, [i]) for i in range(5))))
    assert result.ttft_s.tolist() == pytest.approx([0.01 * (i + 1) for i in range(5)])
    assert result.usage["decode"][0].waited_s == pytest.approx(1.01 - 0.05), "the fifth waits for the first"


def test_the_same_seed_gives_the_same_result_and_another_seed_another() -> None:
    def ttft(seed: int) -> bytes:
        return _run(chats(Chats(sessions=40, seed=seed))).ttft_s.tobytes()

    assert ttft(1) == ttft(1)
    assert ttft(1) != ttft(2)


def test_nothing_is_lost_on_the_way() -> None:
    """Every stop serves everything put exactly once, in messages and in bytes."""
    result = _run(chats(Chats(sessions=60, sessions_per_s=0.2, seed=3)))
    (drive,), (link_in,), (link_out,) = (
        result.usage[name] for name in ("drives", "node links, in", "node links, out")
    )
    assert link_in.units == pytest.approx(result.put_bytes)
    assert link_out.units == pytest.approx(result.get_bytes)
    assert drive.units == pytest.approx(result.put_bytes + result.get_bytes)
    assert drive.served == link_in.served + link_out.served
    assert result.block_hits > 0


def test_a_request_waits_until_an_engine_has_room_for_its_kv() -> None:
    """Room for one request at a time: the second starts when the first's answer is complete."""
    weights = 2 * TINY.parameters
    room = 1.5 * 612 * TOKEN_BYTES
    tight = replace(ONE, gpu_memory_bytes=(weights + room) / 0.9)
    work = requests((0, 512, 100, [1]), (0.1, 512, 100, [2]), (0.2, 512, 0, [3]))
    result = _run(work, tight, "recompute")
    assert result.ttft_s.tolist() == pytest.approx([0.512, 1.512 + 0.512 - 0.1, 3.024 + 0.512 - 0.2])
    assert result.queued_s[1] == pytest.approx(1.512 - 0.1)
    with pytest.raises(
        OutOfRange, match=r"a request is of 1512 tokens, 0.0 GB of KV; it takes a request, within"
    ):
        _run(requests((0, 1412, 100, [1, 2, 3])), tight)


def test_with_overlap_a_layer_is_computed_while_later_ones_are_fetched() -> None:
    slow = replace(ONE, drive_read_bytes_per_s=2e6)
    work = requests((0, 1024, 0, [1, 2]), (10, 1424, 0, [1, 2, 3]))
    apart, together = (_run(work, slow, always_get=True, overlap=flag).ttft_s[1] for flag in (False, True))
    layer_s, computed_s = 1024 * TOKEN_BYTES / 4 / 2e6, 0.4 / 4
    assert apart == pytest.approx(4 * layer_s + 4 * computed_s, rel=0.01)
    assert together == pytest.approx(4 * layer_s + computed_s, rel=0.01), "the last layer waits for its KV"


def test_blocks_may_have_any_size() -> None:
    work = requests((0, 64, 0, [1, 2, 3, 4]), (10, 80, 0, [1, 2, 3, 4, 5]))
    result = _run(work, block_tokens=16, always_get=True)
    assert (result.block_hits, result.fetched_tokens) == (4, 64)


def test_attention_to_earlier_tokens_takes_its_operations() -> None:
    looking = replace(TINY, plain_widths=None)
    flops = 1000 * 2e9 + (1000 * 500 + 1000**2 / 2) * 2 * 4 * (125 + 125)
    assert looking.prefill_flops(1000, 500) == pytest.approx(flops)
    assert looking.prefill_flops(500) + looking.prefill_flops(1000, 500) == pytest.approx(
        looking.prefill_flops(1500)
    )
