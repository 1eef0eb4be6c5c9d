"""The child of `engine`: an LLM that executes commands from standard input, and ends when that is closed."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from socket import socket

_CALLS = (
    *(
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
    ),
    *("bind_connector_metadata", "start_load_kv", "save_kv_layer", "wait_for_save", "get_transfer_results"),
    *(
        "get_block_ids_with_load_errors",
        "build_connector_worker_meta",
        "get_kv_connector_stats",
        "take_events",
    ),
)


def forked(given: str, end: socket, log: str, environment: dict[str, str]) -> None:
    """The same in a forked process, with the arguments of a process of its own."""
    os.environ.clear()
    os.environ.update(environment)
    with Path(log).open("w") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(end.fileno(), 0)
    os.dup2(end.fileno(), 1)
    end.close()
    sys.stdin = os.fdopen(0)
    main(given)


def main(given: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is for the log
    from vllm import LLM, SamplingParams

    if "LMCache" in given:
        # vLLM for CPUs looks into the `__dict__` of every object of every module, and LMCache imports llvmlite, whose
        # library answers to any name with a function: vLLM fails on that.
        from llvmlite.binding import ffi

        ffi.lib._fntab["__dict__"] = {}

    llm = LLM(**json.loads(given))
    _step_as_a_server(llm)
    print(json.dumps("ready"), file=answers)

    adapters: dict[str, Any] = {}

    def adapter_of(path: str) -> Any:
        from vllm.lora.request import LoRARequest

        return adapters.setdefault(path, LoRARequest(Path(path).name, len(adapters) + 1, path))

    def say(
        prompts: list[list[int]],
        tokens: int,
        salt: str = "",
        session: str = "",
        adapter: str = "",
        domain: str = "",
        five_tuple: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        params: dict[str, Any] = {"session": session, "user": "ada"} if session else {}
        params |= {"five_tuple": five_tuple} if five_tuple else {}
        params |= {"domain": domain} if domain else {}
        how = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        given: Any = [{"prompt_token_ids": one, **({"cache_salt": salt} if salt else {})} for one in prompts]
        began, cpu_began = time.perf_counter(), time.process_time()
        lora = adapter_of(adapter) if adapter else None
        outputs = llm.generate(given, how, use_tqdm=False, lora_request=lora)
        seconds = time.perf_counter() - began
        _wait_for_saves()
        _step_until_stored(llm)
        return {
            "seconds": seconds,
            "cpu_seconds": time.process_time() - cpu_began,
            "answers": [list(one.outputs[0].token_ids) for one in outputs],
            "cached": sum(one.num_cached_tokens or 0 for one in outputs),
        }

    for line in sys.stdin:
        told = json.loads(line)
        match told.pop("do"):
            case "say":
                answer: Any = say(**told)
            case "steps":
                answer = _steps(llm, **told)
            case "forget":
                answer = {"forgotten": llm.reset_prefix_cache(reset_connector=told["all"])}
            case "drop":
                answer = _drop_pool(llm)
            case "counts":
                answer = {
                    one.name + (f" {one.labels['rule']}" if "rule" in one.labels else ""): one.value
                    for one in llm.get_metrics()
                    if hasattr(one, "value")
                }
        print(json.dumps(answer), file=answers)


def _step_as_a_server(llm: Any) -> None:
    """Pause after a step that computed nothing, as the loop of a served engine does; an `LLM` in one process spins."""
    core = llm.llm_engine.engine_core.engine_core
    step = core.step_fn

    def step_and_pause() -> Any:
        outputs, has_computed = step()
        if not has_computed and core.scheduler.has_requests():
            time.sleep(0.001)
        return outputs, has_computed

    core.step_fn = step_and_pause


def _wait_for_saves() -> None:
    """Let the connector's thread send everything copied so far, so that a following look-up finds it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    working = getattr(get_kv_transfer_group(), "_working", None) if has_kv_transfer_group() else None
    if (saves := getattr(working, "_saves", None)) is not None:
        saves._thread.submit(lambda: None).result(60)


def _step_until_stored(llm: Any) -> None:
    """Step until vLLM's multi-tier offloading has finished, as the engine's own loop would, and its tiers have, too."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    until = time.perf_counter() + 60
    while scheduler.has_requests() and time.perf_counter() < until:
        llm.llm_engine.step()
    connector = getattr(scheduler.connector, "scheduler", None)
    manager = getattr(connector, "manager", None)
    while manager is not None and getattr(manager, "_jobs", None) and time.perf_counter() < until:
        manager._process_finished_jobs()
        time.sleep(0.0005)


def _drop_pool(llm: Any) -> bool:
    """Drop the engine's cache and vLLM's pool of host memory; the tiers behind it keep theirs."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert not scheduler.has_requests()
    scheduler.connector.scheduler.manager.primary_tier.reset_cache()
    return bool(llm.reset_prefix_cache())


def _steps(llm: Any, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Decode one request, add a second one, and time each step until the second has its answer."""
    from vllm import SamplingParams

    core = llm.llm_engine.engine_core.engine_core
    schedule, counts = core.scheduler.schedule, []

    def counted(*arguments: Any, **named: Any) -> Any:
        order = schedule(*arguments, **named)
        counts.append(order.total_num_scheduled_tokens)
        return order

    core.scheduler.schedule = counted
    spent = _Spent()
    if core.scheduler.connector is not None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        spent.count(core.scheduler.connector)
        spent.count(get_kv_transfer_group())
    for name, given, length in (("first", prompt[:40], 4000), ("second", prompt, tokens)):
        how = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        llm.llm_engine.add_request(name, {"prompt_token_ids": given}, how)
        if name == "first":
            for _ in range(10):
                llm.llm_engine.step()
            counts.clear()
    seconds: list[float] = []
    of_connector: list[float] = []
    is_over = False
    while not is_over:
        spent.seconds = 0.0
        began = time.perf_counter()
        outputs = llm.llm_engine.step()
        seconds.append(time.perf_counter() - began)
        of_connector.append(spent.seconds)
        is_over = any(one.finished for one in outputs)
    llm.llm_engine.abort_request(["first"])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    core.scheduler.schedule = schedule
    spent.end()
    return {"steps": list(zip(counts, seconds, of_connector, strict=False))}


class _Spent:
    """The seconds that an engine was in calls of its connector."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._counted: list[tuple[Any, str]] = []

    def count(self, connector: Any) -> None:
        for name in _CALLS:
            setattr(connector, name, self._counting(getattr(connector, name)))
            self._counted.append((connector, name))

    def end(self) -> None:
        for connector, name in self._counted:
            delattr(connector, name)

    def _counting(self, call: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return counted


if __name__ == "__main__":
    main(sys.argv[1])
