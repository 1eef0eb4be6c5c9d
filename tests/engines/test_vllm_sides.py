"""The scheduler's and the worker's side without an engine: roles, sessions, a failing worker, and our names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# In a process of its own: importing vLLM warns of much, and here warnings are errors.
_PROGRAM = """
import json, os
from types import SimpleNamespace as Fake
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.base import ReqContext
from kvstore.engines.vllm import plugin
from kvstore.engines.vllm.groups import Group, Identity
from kvstore.engines.vllm.offloading import Engine, TriggerKvOffloadingSpec, _Manager
from kvstore.engines.vllm.lookup import Usable
from kvstore.engines.vllm.connector_metadata import Load, Plan, Wanted
from kvstore.engines.vllm.scheduler import Scheduling
from kvstore.engines.vllm.settings import ENGINE, Settings
from kvstore.reach import Reach
from kvstore.engines.vllm.session_turns import Turns
from kvstore.engines.vllm.worker import Absent
from kvstore.errors import ConfigError
from kvstore.layout import Layer, Layout, Order

def absent(waits):
    side = Absent()
    side.begin_step(Plan([Load("r", [Wanted(0, 5, b"d")], waits)]))
    side.load()
    ended, _ = side.finished_loads()
    return [sorted(ended), sorted(side.failed_blocks())]

layout = Layout(model="m", weights="w", dtype="float32", block_tokens=32, layers=(Layer(1, 8, 8),),
    order=Order.OPAQUE, engine="e")
identity = Identity((Group(0, 32, 0, ("a",), (layout,), 4096),), b"layout")

here, away = Usable(64, is_shared=True), Usable(64, is_shared=False)

def side(loads, saves):
    it = Scheduling(Settings(Reach(("127.0.0.1:9",))), identity, with_events=False, loads=loads, saves=saves)
    told = []
    it._turns = Fake(arrived=lambda request, _: told.append("arrived"), finished=lambda *_: told.append("finished"))
    it._lookups = Fake(step_tokens=32, begin=lambda *_: told.append("asked") or Fake(result=lambda _: away))
    it.bind(Fake(get_block_ids=lambda _: ([1, 2, 3, 4],)))
    request = Fake(request_id="r", all_token_ids=list(range(100)), num_tokens=100, num_computed_tokens=0,
        num_prompt_tokens=100, num_preemptions=0, kv_transfer_params=None,
        cache_salt=None, lora_request=None, prompt_embeds=None, mm_features=[])
    it.new_request(request)
    matched = it.matched(request, 0)
    it.allocated(request, None, 0)
    saved = len(it.plan(Fake(num_scheduled_tokens={"r": 100})).saves)
    it.finished(request)
    return [list(matched), saved, told]

def waits(*found, busy=False, layers=1):
    # Of each of some requests that arrive at once, whether its load runs beside the steps.
    group = Group(0, 32, 0, tuple(map(str, range(layers))), (layout,), 4096)
    it = Scheduling(Settings(Reach(("127.0.0.1:9",))), Identity((group,), b"layout"), with_events=False)
    it._turns = Fake(arrived=lambda *_: None)
    it.plan(Fake(num_scheduled_tokens={"another": 1} if busy else {}))
    beside = []
    for number, one in enumerate(found):
        it._lookups = Fake(step_tokens=32, begin=lambda *_: Fake(result=lambda _: one))
        request = Fake(request_id=str(number), all_token_ids=list(range(100)), num_tokens=100, num_preemptions=0,
            cache_salt=None, lora_request=None, prompt_embeds=None, mm_features=[], kv_transfer_params=None)
        it.new_request(request)
        tokens, is_beside = it.matched(request, 0)
        beside.append(is_beside)
        blocks = Fake(blocks=[[Fake(block_id=at, is_null=False) for at in range(4)]])
        it.allocated(request, blocks, tokens)
    planned = it.plan(Fake(num_scheduled_tokens={})).loads
    assert [not load.waits for load in planned] == beside
    return beside

def session(params, header):
    rules = Fake(session=lambda user, name: [user, name])
    return Turns(rules, (), b"")._session(Fake(kv_transfer_params=params, session_id=header))

def prefetched(params, fetches=True):
    done = []
    one = lambda user, name: Fake(prefetch=lambda: done.append(["session", user, name]))
    turns = Turns(Fake(session=one, fetch=lambda _: done.append("user")), (), b"")
    turns._later = lambda work: work()
    turns.arrived(Fake(kv_transfer_params=params, session_id=None), Fake(fetches=fetches))
    return done

def manager(loads, saves):
    host = Fake(look=lambda key: 1 / 0, begin_fill=lambda keys: [(key, 0) for key in keys])
    it = _Manager(host, None, Engine(b"layout", loads=loads, saves=saves))
    found = it.lookup(b"key", ReqContext("r")).name if not loads else ""
    return [found, len(it.prepare_store([b"key"], ReqContext("r")).keys_to_store)]

def spec(extra):
    config = Fake(extra_config={"node": "127.0.0.1:9", "host_bytes": 1 << 20, "transport": "grpc"} | extra,
        worker_kv_bytes_per_block=4096, parallel=Fake(world_size=1, rank=0), engine_id=f"test {os.getpid()}",
        enable_kv_cache_events=False, groups=(), cache=Fake(tokens_per_hash=32, blocks_per_chunk=1))
    try:
        it = TriggerKvOffloadingSpec(config)
        it.get_manager()
    except ConfigError as error:
        return str(error)
    return it

plugin.register()
plugin.register()
first, second = spec({ENGINE: Engine(b"l")}), spec({ENGINE: Engine(b"l")})
other = spec({ENGINE: Engine(b"l"), "tenant": "another"})
for one in (first, other):
    one.get_manager().shutdown()
print(json.dumps({
    "absent": [absent(waits=False), absent(waits=True)],
    "both": side(True, True), "producer": side(False, True), "consumer": side(True, False),
    "waits": [waits(here, here), waits(away), waits(here, busy=True), waits(here, layers=8193), waits(away, here)],
    "sessions": [session({"user": "ada", "session": "s"}, "h"), session(None, "h"), session({"user": "ada"}, "h"),
        session({"session": "s"}, None), session(None, None)],
    "prefetched": [prefetched({"user": "ada", "session": "s"}), prefetched({"session": "s"}), prefetched({}),
        prefetched({"user": "ada", "session": "s"}, fetches=False), prefetched({"session": "s"}, fetches=False)],
    "managers": [manager(True, True), manager(False, True), manager(True, False)],
    "connectors": [KVConnectorFactory.get_connector_class_by_name(name).__name__
        for name in ("TriggerKvConnector", "TriggerKvOffloadingConnector", "TriggerKvTieringConnector")],
    "plain": str(spec({})), "second": str(second),
}))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_a_worker_that_cannot_load_ends_only_loads_in_the_background(told: dict[str, Any]) -> None:
    """The scheduler fails an assertion if a load that its step waited for is reported as ended."""
    assert told["absent"] == [[["r"], [5]], [[], [5]]]


def test_a_producer_requests_nothing_and_a_consumer_saves_nothing(told: dict[str, Any]) -> None:
    assert told["both"] == [[64, True], 3, ["arrived", "asked", "finished"]]
    assert told["producer"] == [[0, False], 3, ["finished"]]
    assert told["consumer"] == [[64, True], 0, ["arrived", "asked"]]


def test_a_step_waits_for_one_load_that_is_a_short_copy_while_nothing_else_is_computed(
    told: dict[str, Any],
) -> None:
    """Not for a second load, a remote one, one beside a decoding request, or a long one."""
    assert told["waits"] == [[False, True], [True], [True], [True], [True, True]]


def test_roles_hold_for_chunks_too(told: dict[str, Any]) -> None:
    assert told["managers"] == [["", 1], ["MISS", 1], ["", 0]]


def test_a_session_without_a_user_is_the_anonymous_users(told: dict[str, Any]) -> None:
    assert told["sessions"] == [["ada", "s"], ["anonymous", "h"], ["ada", "h"], ["anonymous", "s"], None]


def test_all_kv_of_a_user_is_prefetched_and_only_the_session_of_the_anonymous_one(
    told: dict[str, Any],
) -> None:
    assert told["prefetched"] == [["user"], [["session", "anonymous", "s"]], [], [], []]


def test_our_connectors_have_names_however_often_they_are_configured(told: dict[str, Any]) -> None:
    assert told["connectors"] == [
        "TriggerKvConnector",
        "TriggerKvOffloadingConnector",
        "TriggerKvTieringConnector",
    ]


def test_a_spec_without_its_model_does_not_start(told: dict[str, Any]) -> None:
    assert "TriggerKvOffloadingConnector" in told["plain"]


def test_two_specs_of_one_engine_never_share_their_memory(told: dict[str, Any]) -> None:
    assert "need different nodes or tenants" in told["second"]
