"""LMCache: KV that vLLM has computed is on a node, where a new LMCache server with empty memory finds it.

MODEL is any model that vLLM serves.

    $ kvstore serve --data ./node &
    $ examples/lmcache/server.sh MODEL &
    $ python examples/lmcache/chat.py MODEL
    0 of 700 tokens came from LMCache
    $ sleep 2  # the server hands it on to the node
    $ kill -9 %2  # the server's own memory is gone
    $ examples/lmcache/server.sh MODEL &
    $ python examples/lmcache/chat.py MODEL
    640 of 700 tokens came from LMCache
"""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":  # the engine may be a process of its own, which imports this
    llm = LLM(
        model=sys.argv[1],
        kv_transfer_config={
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",  # whatever fails, the engine computes
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": 5555},
        },
    )
    prompt = {"prompt_token_ids": [number % 900 + 5 for number in range(700)]}
    said = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)[0]
    print(said.num_cached_tokens, "of 700 tokens came from LMCache")
