"""Traces: bounded, per tenant, in the node's time whichever side recorded a step; and invalid steps of callers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvstore.errors import ProtocolError
from kvstore.limits import (
    RPC_TIMEOUT_MS,
    SHARES,
    STEP_DETAIL_BYTES_MAX,
    STEPS_REPORTED_MAX,
    TRACE_STEPS_MAX,
    TRACES_MAX,
)
from kvstore.names import block_key
from kvstore.node.session_names import name_of
from kvstore.node.session_traces import SeenGet, Traces
from kvstore.steps import Step
from kvstore.wire import steps_pb2 as pb
from kvstore.wire import steps_pb2_grpc
from kvstore.wire.step_messages import STEPS_HEADER, machine_clock
from tests.node.in_process import NodeInProcess
from tests.node.test_tenants import HeldClock

MS = 1_000_000
ONE, OTHER = b"1" * 16, b"2" * 16


def told(*at_ns: int, clock: bytes = b"", sent_ns: int = 0, session: str = "chat") -> pb.SeenByCaller:
    seen = [pb.Seen(step=pb.STEP_FIRED, at_ns=one, detail="x") for one in at_ns]
    return pb.SeenByCaller(user="ada", session=session, clock=clock, sent_ns=sent_ns, seen=seen)


def call(value: bytes) -> Any:
    return SimpleNamespace(invocation_metadata=lambda: (("other", "x"), (STEPS_HEADER, value)))


def test_steps_from_another_machine_count_from_the_arrival_of_their_report() -> None:
    clock = HeldClock()
    traces = Traces(clock)
    trace = traces.add_reported(ONE, told(5 * MS, 8 * MS, 99 * MS, clock=b"elsewhere", sent_ns=10 * MS))
    assert [one.at_ns for one in trace.in_order()] == [
        clock.now_ns - 5 * MS,
        clock.now_ns - 2 * MS,
        clock.now_ns,
    ]
    assert not any(one.by_node for one in trace.in_order())


def test_steps_from_this_machine_keep_their_times_if_possible() -> None:
    clock = HeldClock()
    traces = Traces(clock)
    same = told(clock.now_ns - 7 * MS, clock=machine_clock(), sent_ns=clock.now_ns - 3 * MS)
    assert [one.at_ns for one in traces.add_reported(ONE, same).in_order()] == [clock.now_ns - 7 * MS]
    for sent_ns in (clock.now_ns + 1, clock.now_ns - (RPC_TIMEOUT_MS + 1) * MS):
        other = traces.add_reported(
            ONE, told(sent_ns - MS, clock=machine_clock(), sent_ns=sent_ns, session="x")
        )
        assert [one.at_ns for one in other.in_order()] == [clock.now_ns - MS]
        traces.forget(name_of(ONE, "ada", "x"))


def test_a_trace_keeps_its_last_steps_and_a_node_its_last_traces() -> None:
    traces = Traces(HeldClock())
    trace = traces.of(name_of(ONE, "ada", "chat"))
    for blocks in range(TRACE_STEPS_MAX + 5):
        trace.saw(Step.SENT, blocks)
    assert [one.blocks for one in trace.in_order()] == list(range(5, TRACE_STEPS_MAX + 5))
    for number in range(TRACES_MAX + 5):
        traces.of(name_of(ONE, "ada", f"{number}"))
    assert len(traces) == TRACES_MAX
    assert traces.find(name_of(ONE, "ada", "chat")) is None
    assert traces.find(name_of(ONE, "ada", f"{TRACES_MAX + 4}")) is not None


def test_traces_of_a_tenant_with_many_are_dropped_before_those_of_one_with_few() -> None:
    traces = Traces(HeldClock())
    for number in range(TRACES_MAX // SHARES):
        traces.of(name_of(OTHER, "ben", f"{number}"))
    for number in range(2 * TRACES_MAX):
        traces.of(name_of(ONE, "ada", f"{number}"))
    assert len(traces) == TRACES_MAX
    assert all(traces.find(name_of(OTHER, "ben", f"{number}")) for number in range(TRACES_MAX // SHARES))
    assert traces.find(name_of(OTHER, "ada", "5")) is None, "another tenant's session of the same name"
    for number in range(TRACES_MAX + 5):
        traces.of(name_of(number.to_bytes(16), "one", "each"))
    assert len(traces) == TRACES_MAX
    for number in range(TRACES_MAX):  # each wants a second one, and the first who has one gives way
        assert traces.of(name_of(number.to_bytes(16), "one", "more")) is not None
        assert traces.find(name_of(number.to_bytes(16), "one", "more")) is not None
    assert len(traces) == sum(map(len, traces._of.values())) == TRACES_MAX
    assert all(traces._of.values()), "who has none is not remembered"


def test_a_foreign_header_is_refused_and_a_step_of_a_later_version_is_skipped() -> None:
    traces = Traces(HeldClock())
    many = told(*range(STEPS_REPORTED_MAX + 1))
    long = told(1)
    long.seen[0].detail = "x" * (STEP_DETAIL_BYTES_MAX + 1)
    nameless = told(1, session="")
    for value in (b"\xff\xff", *(one.SerializeToString() for one in (many, long, nameless))):
        with pytest.raises(ProtocolError):
            traces.of_call(call(value), ONE)
    assert len(traces) == 0
    later = told(1)
    later.seen.append(pb.Seen(step=9999))  # type: ignore[arg-type]
    trace = traces.of_call(call(later.SerializeToString()), ONE)
    assert trace is not None
    assert [one.step for one in trace.in_order()] == [Step.FIRED]
    assert traces.of_call(SimpleNamespace(invocation_metadata=lambda: None), ONE) is None


def test_a_get_is_reported_when_its_last_block_has_ended() -> None:
    clock = HeldClock()
    trace = Traces(clock).of(name_of(ONE, "ada", "chat"))
    get = SeenGet(trace, 4, 40, clock)
    get.found()
    get.over()
    get.read(10)
    clock.now_ns += 3 * MS
    get.read(10)
    get.over()
    get.over()
    assert [one.step for one in trace.in_order()] == [Step.FETCHING]
    get.over()  # it missed
    fetching, read, sent = trace.in_order()
    assert (fetching.step, fetching.blocks, fetching.size_bytes) == (Step.FETCHING, 4, 40)
    assert (read.step, read.blocks, read.size_bytes, read.detail) == (
        Step.READ,
        2,
        20,
        "the first 3.00 ms earlier",
    )
    assert (sent.step, sent.blocks, sent.detail) == (Step.SENT, 3, "1 from memory")


def test_every_step_has_the_number_of_one_of_the_eight_and_the_protos_name_it() -> None:
    assert {step.number for step in Step} == set(range(1, 9))
    names = {value.name: value.number for value in pb.Step.DESCRIPTOR.values if value.number}
    assert names == {f"STEP_{step.name}": int(step) for step in Step}
    assert [step.number for step in Step] == sorted(step.number for step in Step)


def test_an_invalid_header_is_refused_and_the_call_is_not_executed(tmp_path: Any) -> None:
    with NodeInProcess(tmp_path / "data") as node, grpc.insecure_channel(node.target) as channel:
        stub: Any = steps_pb2_grpc.StepsStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            stub.PrefetchBlocks(
                pb.PrefetchBlocksRequest(keys=[block_key(b"x")]),
                timeout=20,
                metadata=[(STEPS_HEADER, b"\xff")],
            )
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
