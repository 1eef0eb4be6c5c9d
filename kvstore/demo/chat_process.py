"""One process of `kvstore chat`: `begin` chats and saves, `resume` continues. Prints its results as JSON.

`resume` is what a serving engine does when a user returns: it matches the request against the rules, has the user's KV
read into the node's memory while the user is still typing, and resumes when the prompt is there. The user's entry was
added at run time, is bound to the 5-tuple of their connection, and ages.
"""

from __future__ import annotations

import json
import sys
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvstore.commands.trace_command import document, table
from kvstore.engines.transformers import CacheStore
from kvstore.reach import Reach
from kvstore.steps import Step
from nic_offload.match_action import Action, ActionKind, Request, Rule, Table
from nic_offload.match_fields import FIVE_FIELDS, parse_pattern

__all__ = ["main"]

_SEED = 7
_ANSWER = 16
_USER, _SESSION, _TENANT, _MODEL = "ada", "chat", "demo", "random weights"
_TYPES_S = 1.0  # how long the user types
_IDLE_TIMEOUT_MS = 3_600_000
# What a server reads from its user's connection. Here the user is this process, and there is none.
_FIVE: dict[str, Any] = {
    "source": "127.0.0.2",
    "destination": "127.0.0.1",
    "source_port": 40_000,
    "destination_port": 443,
    "protocol": "tcp",
}

assert list(_FIVE) == list(FIVE_FIELDS)


def _model() -> Any:
    torch.manual_seed(_SEED)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1 << 16,
    )
    return LlamaForCausalLM(config).eval()


def _prompt(turn: int, tokens: int) -> list[int]:
    drawn = torch.randint(0, 1000, (tokens,), generator=torch.Generator().manual_seed(_SEED + turn))
    return [int(one) for one in drawn]


def _logits(model: Any, tokens: list[int], cache: DynamicCache) -> Any:
    """The logits after the last token; the cache holds the KV of all tokens afterwards."""
    new = torch.tensor([tokens[cache.get_seq_length() :]])
    return model(new, past_key_values=cache, logits_to_keep=1).logits[0, -1]


def _answer(model: Any, tokens: list[int], cache: DynamicCache, logits: Any) -> list[int]:
    """Generate tokens greedily."""
    answer: list[int] = []
    while len(answer) < _ANSWER:
        answer.append(int(logits.argmax()))
        logits = _logits(model, [*tokens, *answer], cache)
    return answer


def _digest(logits: Any) -> str:
    return blake2b(logits.numpy().tobytes(), digest_size=16).hexdigest()


def _since_ms(start_s: float) -> float:
    return (time.perf_counter() - start_s) * 1e3


def _begin(model: Any, store: CacheStore, home: Path, turns: int, prompt_tokens: int) -> dict[str, Any]:
    chat = store.session(_USER, _SESSION)
    tokens: list[int] = []
    cache = DynamicCache(config=model.config)
    story = []
    for turn in range(turns):
        tokens += _prompt(turn, prompt_tokens)
        start_s = time.perf_counter()
        tokens += _answer(model, tokens, cache, _logits(model, tokens, cache))
        computed_ms, start_s = _since_ms(start_s), time.perf_counter()
        saved = chat.save(cache, tokens)
        if saved.error is not None:
            raise saved.error
        story.append(
            {
                "tokens": len(tokens),
                "answered": _ANSWER,
                "computed_ms": computed_ms,
                "sent_bytes": saved.sent_bytes,
                "saved_ms": _since_ms(start_s),
            }
        )
    (home / "transcript.json").write_text(
        json.dumps(tokens)
    )  # the conversation's text, which a service keeps
    return {
        "turns": story,
        "logits": _digest(_logits(model, [*tokens, *_prompt(turns, prompt_tokens)], cache)),
    }


def _rules() -> Table:
    """One entry, of this user's session, from this user's connection only."""
    whole = {"tenant": _TENANT, "user": _USER, "context": _SESSION, "bind": [_FIVE]}
    prefetch = (Action(ActionKind.PREFETCH),)
    rules = Table()
    rules.add(
        Rule(
            parse_pattern("The user's entry", whole),
            prefetch,
            name="ada's chat",
            idle_timeout_ms=_IDLE_TIMEOUT_MS,
        ),
        time.monotonic_ns(),
    )
    return rules


def _request(source: str) -> Request:
    names = {"tenant": _TENANT, "user": _USER, "context": _SESSION, "model": _MODEL}
    return Request.parse(names | _FIVE | {"source": source})


def _resume(model: Any, store: CacheStore, home: Path, turns: int, prompt_tokens: int) -> dict[str, Any]:
    tokens = json.loads((home / "transcript.json").read_text()) + _prompt(turns, prompt_tokens)
    _logits(model, tokens[:8], DynamicCache(config=model.config))  # the first run in a process loads code
    chat = store.session(_USER, _SESSION)
    spoofed = chat.arrived(_request("127.0.0.3"))
    typing = chat.arrived(_request(_FIVE["source"]))
    start_s = time.perf_counter()
    was_read = typing.wait(_TYPES_S)
    read_ms = _since_ms(start_s)
    time.sleep(max(0.0, _TYPES_S - read_ms / 1e3))
    start_s = time.perf_counter()
    back = chat.resume(tokens)
    fetched_ms = _since_ms(start_s)
    logits = _logits(model, tokens, back.cache)
    chat.mark(Step.COMPUTED, tokens=prompt_tokens)
    resumed_ms, start_s = _since_ms(start_s), time.perf_counter()
    anew = DynamicCache(config=model.config)
    logits_anew = _logits(model, tokens, anew)
    recomputed_ms = _since_ms(start_s)
    answer = _answer(model, tokens, back.cache, logits)
    chat.mark(Step.ANSWERED, tokens=len(answer))
    saved = chat.save(back.cache, [*tokens, *answer])
    if saved.error is not None:
        raise saved.error
    chat.mark(Step.SLOT_GIVEN)  # nothing of it is needed here any more
    trace = chat.trace()
    assert store.arrivals is not None
    return {
        "tokens": back.tokens,
        "rule": typing.rule,
        "spoofed_denied": spoofed.denied,
        "read_ahead": was_read,
        "read_ms": read_ms,
        "typed_s": _TYPES_S,
        "rules": {
            name: {"hits": seen.hits, "bytes": seen.moved_bytes}
            for name, seen in store.arrivals.counts().items()
        },
        "steps": document(trace),
        "trace": table(trace),
        "fetched_ms": fetched_ms,
        "resumed_ms": resumed_ms,
        "recomputed_ms": recomputed_ms,
        "logits": _digest(logits),
        "difference": float((logits - logits_anew).abs().max()),
        "answer": answer,
        "answer_recomputed": _answer(model, tokens, anew, logits_anew),
    }


def main(arguments: list[str]) -> None:
    """Run one part of the chat."""
    what, node, home, turns, tokens = arguments
    model = _model()
    reach = Reach.of({"node": node, "shared": True})
    rules = _rules() if what == "resume" else None
    with torch.no_grad(), CacheStore(reach, model, rules=rules, tenant=_TENANT) as store:
        part = {"begin": _begin, "resume": _resume}[what]
        story = part(model, store, Path(home), int(turns), int(tokens))
    sys.stdout.write(json.dumps(story))


if __name__ == "__main__":
    main(sys.argv[1:])
