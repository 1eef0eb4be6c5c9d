"""The child of `engine`: an LLM that does what it is told on standard input, and ends when that ends."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is for the log
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))
    print(json.dumps("ready"), file=answers)

    def say(prompts: list[list[int]], tokens: int, salt: str = "", session: str = "") -> dict[str, Any]:
        params = {"session": session, "user": "ada"} if session else None
        how = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        given: Any = [{"prompt_token_ids": one, **({"cache_salt": salt} if salt else {})} for one in prompts]
        began = time.perf_counter()
        outputs = llm.generate(given, how, use_tqdm=False)
        return {
            "seconds": time.perf_counter() - began,
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
            case "counts":
                answer = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
        print(json.dumps(answer), file=answers)


def _steps(llm: Any, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Let one request decode, give it company, and time each step until that has its answer."""
    from vllm import SamplingParams

    core = llm.llm_engine.engine_core.engine_core
    schedule, counts = core.scheduler.schedule, []

    def counted(*arguments: Any, **named: Any) -> Any:
        order = schedule(*arguments, **named)
        counts.append(order.total_num_scheduled_tokens)
        return order

    core.scheduler.schedule = counted
    for name, given, length in (("first", prompt[:40], 4000), ("second", prompt, tokens)):
        how = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        llm.llm_engine.add_request(name, {"prompt_token_ids": given}, how)
        if name == "first":
            for _ in range(10):
                llm.llm_engine.step()
            counts.clear()
    seconds: list[float] = []
    is_over = False
    while not is_over:
        began = time.perf_counter()
        outputs = llm.llm_engine.step()
        seconds.append(time.perf_counter() - began)
        is_over = any(one.finished for one in outputs)
    llm.llm_engine.abort_request(["first"])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    core.scheduler.schedule = schedule
    return {"steps": list(zip(counts, seconds, strict=False))}


if __name__ == "__main__":
    main()
