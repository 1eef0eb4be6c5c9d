"""vLLM: a prompt that one engine has computed is loaded by the next one, from the node.

MODEL is any model that vLLM serves. The connector is for KV in host memory (vLLM for CPUs); on a GPU the tier of
docs/engines.md takes its place, with the same two commands.

    $ kvstore serve --data ./node &
    $ python examples/vllm_chat.py MODEL
    0 of 700 tokens came from the node
    $ python examples/vllm_chat.py MODEL
    640 of 700 tokens came from the node
"""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":  # the engine may be a process of its own, which imports this
    llm = LLM(
        model=sys.argv[1],
        kv_transfer_config={
            "kv_connector": "TriggerKvConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",  # whatever fails, the engine computes
            "kv_connector_extra_config": {"node": "127.0.0.1:7070"},
        },
    )
    prompt = {"prompt_token_ids": [number % 900 + 5 for number in range(700)]}
    said = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)[0]
    print(said.num_cached_tokens, "of 700 tokens came from the node")
