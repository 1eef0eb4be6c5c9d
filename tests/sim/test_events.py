"""The event core against queueing theory, Little's law, and simpy."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.replay.events import MESSAGE, Events, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

N = 400_000


def _queue(
    load: float, service: npt.NDArray[np.float64], servers: int = 1, seed: int = 7
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Random arrivals at one queue; returns arrival and departure of each."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1 / (load * servers), len(service)))
    with Events() as events:
        route = events.add_route([Step(events.add_resource(servers), s_per_unit=1.0)])
        return arrival_s, events.stream(arrival_s, service, np.full(len(service), route, dtype=np.int32))


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_m_m_1_waits_match_theory(load: float) -> None:
    service = np.random.default_rng(1).exponential(1.0, N)
    arrival_s, done_s = _queue(load, service)
    waited_s = float((done_s - arrival_s - service).mean())
    assert waited_s == pytest.approx(load / (1 - load), rel=0.06)


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_m_d_1_waits_are_half_as_long(load: float) -> None:
    arrival_s, done_s = _queue(load, np.ones(N))
    assert float((done_s - arrival_s - 1).mean()) == pytest.approx(load / (1 - load) / 2, rel=0.06)


def test_m_m_c_waits_match_erlang() -> None:
    servers, load = 4, 0.8
    service = np.random.default_rng(2).exponential(1.0, N)
    arrival_s, done_s = _queue(load, service, servers)
    offered = servers * load
    terms = [offered**k / np.prod(range(1, k + 1)) for k in range(servers + 1)]
    waits = terms[-1] / (1 - load) / (sum(terms[:-1]) + terms[-1] / (1 - load))
    assert float((done_s - arrival_s - service).mean()) == pytest.approx(
        waits / (servers - offered), rel=0.06
    )


def test_littles_law_holds_for_the_number_in_the_system() -> None:
    """L, the mean number in the system, is counted event by event; lambda and W are measured separately."""
    service = np.random.default_rng(3).exponential(1.0, 50_000)
    arrival_s, done_s = _queue(0.8, service)
    steps = sorted([(t, 1) for t in arrival_s] + [(t, -1) for t in done_s])
    inside = area = last_s = 0.0
    for time_s, step in steps:
        area += inside * (time_s - last_s)
        inside, last_s = inside + step, time_s
    rate = len(service) / last_s
    assert area / last_s == pytest.approx(rate * float((done_s - arrival_s).mean()), rel=1e-9)
    assert inside == 0


def _simpy_stream(
    jobs: Sequence[tuple[float, float, int]], routes: Sequence[Sequence[Step]], servers: Sequence[int]
) -> list[float]:
    """The same in simpy: each message is a process that requests each resource in turn."""
    world = simpy.Environment()
    resources = [simpy.Resource(world, capacity=count) for count in servers]
    done = [0.0] * len(jobs)

    def travel(number: int, start_s: float, units: float, route: int) -> Any:
        yield world.timeout(start_s)
        for step in routes[route]:
            with resources[step.resource].request() as mine:
                yield mine
                yield world.timeout(step.overhead_s + units * step.s_per_unit)
            yield world.timeout(step.latency_s)
        done[number] = world.now

    for number, (start_s, units, route) in enumerate(jobs):
        world.process(travel(number, start_s, units, route))
    world.run()
    return done


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    servers=st.lists(st.integers(1, 3), min_size=2, max_size=6),
    count=st.integers(1, 60),
)
def test_small_networks_run_as_in_simpy(seed: int, servers: list[int], count: int) -> None:
    rng = random.Random(seed)
    numbers = range(len(servers))
    routes = [
        [
            Step(resource, rng.random(), rng.random(), rng.choice([0.0, rng.random()]))
            for resource in rng.sample(numbers, rng.randint(1, len(servers)))
        ]
        for _ in range(4)
    ]
    jobs = sorted((rng.uniform(0, 20), rng.random(), rng.randrange(4)) for _ in range(count))
    with Events() as events:
        for capacity in servers:
            events.add_resource(capacity)
        for route in routes:
            events.add_route(route)
        starts, units, taken = (np.array(column) for column in zip(*jobs, strict=True))
        ours = events.stream(starts, units, taken.astype(np.int32))
    assert ours.tolist() == pytest.approx(_simpy_stream(jobs, routes, servers), rel=1e-9)


def test_trains_run_as_single_messages_in_simpy() -> None:
    """Trains over two routes in turn, which compete for the same resources."""
    routes = [[Step(0, 0.1, 0.5, 0.2), Step(1, 0.0, 0.3)], [Step(0, 0.1, 0.5), Step(2, 0.0, 0.7, 0.1)]]
    with Events() as events:
        for _ in range(3):
            events.add_resource()
        for route in routes:
            events.add_route(route)
        first = events.add_train(0.0, 1.0, 0, count=7, interval_s=0.4, routes=2)
        second = events.add_train(0.05, 2.0, 0, count=3, interval_s=1.1, routes=2, offset=1)
        ended = {}
        while (note := events.run(float("inf"))) is not None:
            ended[note[1]] = note[0]
    jobs = [(0.4 * k, 1.0, k % 2) for k in range(7)] + [(0.05 + 1.1 * k, 2.0, (1 + k) % 2) for k in range(3)]
    done = _simpy_stream(jobs, routes, [1, 1, 1])
    assert ended == {first: pytest.approx(max(done[:7])), second: pytest.approx(max(done[7:]))}


def test_a_run_stops_at_the_requested_time_and_can_continue() -> None:
    with Events() as events:
        route = events.add_route([Step(events.add_resource(), overhead_s=1.0)])
        train = events.add_train(0.0, 0.0, route, count=3)
        assert events.run(2.5) is None
        assert events.run(3.0) == (3.0, train)
        assert events.run(float("inf")) is None


def test_a_reservation_queues_behind_earlier_work() -> None:
    with Events() as events:
        resource = events.add_resource(2)
        assert [events.reserve(resource, 1.0, 5.0) for _ in range(3)] == [(1.0, 6.0), (1.0, 6.0), (6.0, 11.0)]
        usage = events.usage(resource)
    assert (usage.busy_s, usage.waited_s, usage.waited_max_s, usage.served) == (15.0, 5.0, 5.0, 3)
    assert usage.utilisation(10.0) == 0.75


def test_bins_hold_every_second_of_service_and_the_peak_in_service() -> None:
    with Events(bin_s=1.0) as events:
        resource = events.add_resource()
        route = events.add_route([Step(resource, s_per_unit=1.0)])
        events.add_train(0.5, 2.0, route, kind=2)
        events.add_train(0.5, 1.0, route, kind=2)
        while events.run(float("inf")):
            pass
        assert events.busy_bins(resource).tolist() == [0.5, 1.0, 1.0, 0.5]
        assert events.backlog(2).tolist() == [3.0, 3.0, 3.0, 1.0]
        assert events.backlog(0).tolist() == []


def test_the_same_input_gives_the_same_times() -> None:
    service = np.random.default_rng(4).integers(0, 3, 2000).astype(float)  # many equal times
    runs = [_queue(0.9, service, servers=3)[1] for _ in range(2)]
    assert runs[0].tobytes() == runs[1].tobytes()


def test_invalid_input_is_refused() -> None:
    with Events() as events:
        resource = events.add_resource()
        route = events.add_route([Step(resource)])
        events.reserve(resource, 0.0, 1.0)
        nonsense = [
            lambda: events.add_resource(0),
            lambda: events.add_route([]),
            lambda: events.add_route([Step(7)]),
            lambda: events.add_route([Step(resource, -1.0)]),
            lambda: events.add_train(0.0, 1.0, route, count=0),
            lambda: events.add_train(0.0, 1.0, route, routes=2),
            lambda: events.add_train(0.0, float("nan"), route),
            lambda: events.add_train(0.0, 1.0, route, kind=4),
            lambda: events.reserve(resource, 0.0, -1.0),
            lambda: events.usage(3),
            lambda: events.stream(np.array([1.0, 0.5]), np.ones(2), np.zeros(2, dtype=np.int32)),
            lambda: events.stream(np.array([0.0]), np.ones(1), np.ones(1, dtype=np.int32)),
        ]
        for act in nonsense:
            with pytest.raises(AssertionError, match="the event core refuses"):
                act()  # type: ignore[no-untyped-call]
        assert events.run(10.0) is None
        with pytest.raises(AssertionError, match="the event core refuses"):
            events.add_train(9.0, 1.0, route)  # the past


def test_five_stages_and_eight_drives_cost_the_same_for_each_of_many_requests() -> None:
    """The shape that `make bench-sim` times; this only checks that every request passes every stage."""
    n = 20_000
    rng = np.random.default_rng(5)
    with Events() as events:
        shared = [events.add_resource() for _ in range(4)]
        drives = [events.add_resource() for _ in range(8)]
        for drive in drives:
            events.add_route(
                [*(Step(stage, s_per_unit=0.5) for stage in shared), Step(drive, s_per_unit=4.0)]
            )
        routes = (np.arange(n) % 8).astype(np.int32)
        arrival_s = np.cumsum(rng.exponential(1.0, n))
        done_s = events.stream(arrival_s, np.ones(n), routes)
        assert [events.usage(stage).served for stage in shared] == [n] * 4
        assert [events.usage(drive).served for drive in drives] == [n // 8] * 8
    assert (done_s - arrival_s).min() == pytest.approx(4 * 0.5 + 4.0)
    # Behind the first of four equal stages nobody waits at the others.
    first = list(itertools.accumulate(arrival_s, lambda free, t: max(free + 0.5, t + 0.5), initial=-1.0))[1:]
    free = [0.0] * 8
    for i in range(n):
        begin = max(first[i] + 1.5, free[i % 8])
        free[i % 8] = begin + 4.0
        if i < 500:
            assert done_s[i] == pytest.approx(free[i % 8])


def test_a_list_of_messages_takes_two_routes_and_pays_for_each_page() -> None:
    with Events() as events:
        first, second = events.add_resource(), events.add_resource()
        out = events.add_route([Step(first, overhead_s=0.5, s_per_unit=1.0)])
        then = events.add_route([Step(second, s_per_unit=2.0, latency_s=0.25)])
        rows = [(1.0, 1.0, 2.0, out, then), (1.0, 3.0, 1.0, out, -1), (9.0, 1.0, 0.0, then, out)]
        train = events.add_list(np.array(rows, dtype=MESSAGE))
        # 1: 1 to 3 at the first, 3 to 5 at the second. 2: 3 to 6.5 at the first. 3: 9 to 11, 11.25 to 12.25.
        assert events.run(100.0) == (12.25, train)
        assert events.usage(first).busy_s == pytest.approx(2.0 + 3.5 + 1.0)


def test_a_cut_through_stop_serves_while_the_previous_one_does() -> None:
    with Events() as events:
        nic, link = events.add_resource(), events.add_resource()
        route = events.add_route([Step(nic, s_per_unit=1.0), Step(link, s_per_unit=1.0, cuts_through=True)])
        slow = events.add_route([Step(link, s_per_unit=3.0, cuts_through=True)])
        events.add_train(0.0, 2.0, route)
        assert events.run(100.0) == (2.0, 0), "the wire is one"
        events.add_train(10.0, 1.0, slow)
        assert events.run(100.0) == (10.0, 1), "its service was over when it arrived: the link was free"
        events.add_train(10.5, 2.0, route)
        assert events.run(100.0) == (12.5, 2)
        assert events.usage(link).busy_s == pytest.approx(2 + 3 + 2)
