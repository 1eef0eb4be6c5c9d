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

    if "LMCache" in sys.argv[1]:
        # vLLM for CPUs looks into the `__dict__` of every object of every module, and LMCache imports llvmlite, whose
        # library answers to any name with a function: vLLM fails on that.
        from llvmlite.binding import ffi

        ffi.lib._fntab["__dict__"] = {}

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
            case "forget":
                answer = {"forgotten": llm.reset_prefix_cache(reset_connector=told["all"])}
            case "counts":
                answer = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
