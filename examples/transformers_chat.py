"""transformers: a conversation's cache is saved after a turn, and resumed by another process.

MODEL is a folder or a name on the hub, of a causal language model.

    $ kvstore serve --data ./node &
    $ python examples/transformers_chat.py MODEL
    0 of 500 tokens came from the node
    $ python examples/transformers_chat.py MODEL
    448 of 500 tokens came from the node
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from kvstore.engines.transformers import CacheStore

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = torch.arange(5, 505).unsqueeze(0)  # the conversation so far

with CacheStore("127.0.0.1:7070", model) as store:
    chat = store.session("ada", "chat 7")
    back = chat.resume(tokens)  # an empty cache the first time, and whenever the node is away
    print(back.tokens, "of 500 tokens came from the node")
    said = model.generate(tokens, past_key_values=back.cache, max_new_tokens=16, do_sample=False)
    chat.save(back.cache, said)
