"""Conversations of small models on a real node: resumed bit for bit, or a reason; never with other tokens' KV."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="torch is in .venv-engines only: make test-engines")

from transformers import (  # noqa: E402
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from kvstore.client import Client  # noqa: E402
from kvstore.client.own_address import OwnSide  # noqa: E402
from kvstore.demo.node_process import NodeProcess  # noqa: E402
from kvstore.engines.transformers import CacheStore, moving  # noqa: E402
from kvstore.engines.transformers.token_blocks import Piece, pieces  # noqa: E402
from kvstore.errors import FabricUnavailable, InvalidArgument, KvError, LayoutError  # noqa: E402
from kvstore.miss import MissReason  # noqa: E402
from kvstore.names import block_key, is_in_domain  # noqa: E402
from kvstore.reach import Reach  # noqa: E402
from kvstore.sealing.masters import new_master_file  # noqa: E402
from kvstore.steps import Step  # noqa: E402
from nic_offload.match_action import Request, Table  # noqa: E402
from nic_offload.match_file import parse_rules  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engines.node import GuardedNode

_SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def _model(kind: str, seed: int = 1, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(seed)
    if kind == "sliding":
        model = MistralForCausalLM(MistralConfig(**_SMALL, sliding_window=24))
    elif kind == "mixed":
        model = Gemma2ForCausalLM(Gemma2Config(**_SMALL, sliding_window=24))
    else:
        model = LlamaForCausalLM(LlamaConfig(**_SMALL))
    return model.eval().to(dtype)


def _tokens(count: int, seed: int = 5) -> Any:
    return torch.randint(0, 100, (1, count), generator=torch.Generator().manual_seed(seed))


def _run(model: Any, tokens: Any, cache: Any) -> Any:
    with torch.no_grad():
        return model(tokens[:, cache.get_seq_length() :], past_key_values=cache).logits


def _same(one: Any, two: Any) -> bool:
    return all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        for a, b in zip(one.layers, two.layers, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full", "sliding", "mixed"])
def test_a_chat_of_three_turns_resumes_bit_for_bit(node: NodeProcess, kind: str, dtype: Any) -> None:
    model = _model(kind, dtype=dtype)
    tokens = _tokens(300)
    live = DynamicCache(config=model.config)
    for end in (70, 71, 200):
        _run(model, tokens[:, :end], live)
        with CacheStore(node.target, model, block_tokens=16) as store:
            saved = store.session("ada", f"{kind} {dtype}").save(live, tokens)
        assert (saved.tokens, saved.error) == (end, None)
    with CacheStore(node.target, model, block_tokens=16) as store:
        back = store.session("ada", f"{kind} {dtype}").resume(tokens)
    assert (back.tokens, back.miss) == (200, None)
    assert _same(back.cache, live)
    assert torch.equal(_run(model, tokens, back.cache), _run(model, tokens, live))


def test_a_conversation_resumes_over_tls_with_a_token_file(guarded: GuardedNode) -> None:
    model, tokens = _model("full"), _tokens(100)
    live = DynamicCache(config=model.config)
    _run(model, tokens, live)
    reach = Reach.of({"node": guarded.target, **guarded.trust})
    with CacheStore(reach, model) as store:
        assert store.session("ada", "over TLS").save(live, tokens).error is None
    with CacheStore(reach, model) as store:
        back = store.session("ada", "over TLS").resume(_tokens(101))
    assert (back.tokens, back.miss) == (100, None)
    assert _same(back.cache, live)


def test_a_conversation_is_erased_with_its_user_and_the_node_may_start_to_encrypt(tmp_path: Path) -> None:
    """On a node that encrypts, each user's blocks are their own, unless the settings ask for `shared`."""
    model, tokens = _model("full"), _tokens(100)
    live = DynamicCache(config=model.config)
    _run(model, tokens, live)
    new_master_file(tmp_path / "master.key")
    with (
        NodeProcess(tmp_path / "node") as node,
        CacheStore(node.target, model) as store,
        CacheStore(Reach.of({"node": node.target, "shared": True}), model) as sharing,
        Client(node.target) as client,
    ):
        assert store.session("ada", "in the clear").save(live, tokens).error is None
        node.stop()
        node.arguments = ["--master-key", f"file:{tmp_path / 'master.key'}"]
        node.start()
        client.status(wait_s=20)
        every = {
            (user, one): one.session(user, f"chat {one is sharing}")
            for user in ("ada", "grace")
            for one in (store, sharing)
        }
        _until_saved(every["ada", store], live, tokens)
        for (_, one), chat in every.items():
            assert chat.save(live, tokens).error is None
            keys = chat._session.keys()
            assert set(map(is_in_domain, keys)) == {one is store}
            back = chat.resume(_tokens(101))
            assert (back.tokens, back.miss) == (100, None)
            assert _same(back.cache, live)
        erased = client.erase_user("ada")
        assert erased.keys > 0
        gone = every["ada", store].resume(_tokens(101))
        assert (gone.tokens, gone.cache.get_seq_length()) == (0, 0)
        for user, one in (("grace", store), ("grace", sharing)):
            assert every[user, one].resume(_tokens(101)).tokens == 100


def _until_saved(chat: Any, live: Any, tokens: Any) -> None:
    """Save again until it succeeds: the first save after the change may use the old state."""
    until = time.monotonic() + 20
    while (error := chat.save(live, tokens).error) is not None:
        assert time.monotonic() < until, error
        time.sleep(0.1)


def test_an_unchanged_conversation_sends_nothing_and_a_turn_only_new_blocks(node: NodeProcess) -> None:
    model, tokens = _model("full"), _tokens(150)
    cache = DynamicCache(config=model.config)
    with CacheStore(node.target, model) as store:
        chat = store.session("ada", "delta")
        _run(model, tokens[:, :100], cache)
        first = chat.save(cache, tokens)
        assert chat.save(cache, tokens).sent_bytes == 0
        _run(model, tokens, cache)
        second = chat.save(cache, tokens)
    assert (first.sent_bytes, second.sent_bytes) == (100 * 1024, 50 * 1024)


@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_an_edited_prompt_keeps_the_prefix_before_the_edit(node: NodeProcess, kind: str) -> None:
    model, tokens = _model(kind), _tokens(200)
    cache = DynamicCache(config=model.config)
    with CacheStore(node.target, model, block_tokens=16) as store:
        chat = store.session("ada", f"edited {kind}")
        for end in (64, 160):
            _run(model, tokens[:, :end], cache)
            chat.save(cache, tokens)
        edited = tokens.clone()
        edited[0, 100] = (edited[0, 100] + 1) % 100
        back = chat.resume(edited)
        # A layer with a window has of a turn what it had at its end, so there the turn before is what is left.
        assert back.tokens == (96 if kind == "full" else 64)
        assert back.miss is not None
        assert back.miss.reason is MissReason.UNKNOWN
        fresh = DynamicCache(config=model.config)
        _run(model, edited[:, : back.tokens], fresh)
        for ours, other in zip(back.cache.layers, fresh.layers, strict=True):
            assert torch.allclose(ours.keys, other.keys, atol=1e-4)
        _run(model, edited, back.cache)
        assert chat.save(back.cache, edited).error is None
        again = chat.resume(torch.cat([edited, tokens[:, :1]], 1))
        assert (again.tokens, again.miss) == (200, None)
        assert _same(again.cache, back.cache)
        assert chat.resume(tokens).tokens == (96 if kind == "full" else 64)


def test_other_weights_share_nothing(node: NodeProcess) -> None:
    tokens = _tokens(100)
    for seed in (1, 2):
        model = _model("full", seed)
        cache = DynamicCache(config=model.config)
        _run(model, tokens[:, :80], cache)
        with CacheStore(node.target, model) as store:
            chat = store.session("ada", "weights")
            back = chat.resume(tokens)
            assert (back.tokens, back.cache.get_seq_length()) == (0, 0)
            chat.save(cache, tokens)
            assert chat.resume(tokens).tokens == 80


def test_one_token_is_always_left_to_compute(node: NodeProcess) -> None:
    model, tokens = _model("full"), _tokens(128)
    cache = DynamicCache(config=model.config)
    _run(model, tokens, cache)
    with CacheStore(node.target, model) as store:
        chat = store.session("ada", "whole prompt")
        chat.save(cache, tokens)
        assert chat.resume(tokens).tokens == 64


def test_a_missing_block_leaves_the_prefix_before_it(node: NodeProcess) -> None:
    model, tokens = _model("full"), _tokens(300)
    cache = DynamicCache(config=model.config)
    _run(model, tokens[:, :256], cache)
    with (
        CacheStore(node.target, model) as store,
        Client(node.target, layout=store.shapes.canonical) as client,
    ):
        chat = store.session("ada", "gone")
        chat.save(cache, tokens)
        client.delete([list(pieces(store.shapes, tokens[0].tolist(), [256]))[2].key])
        back = chat.resume(tokens)
        assert back.tokens == 128
        assert back.miss is not None
        _run(model, tokens[:, :256], back.cache)
        # What is named is not sent again; whoever computed it again says so by another turn.
        assert torch.allclose(back.cache.layers[0].keys, cache.layers[0].keys, atol=1e-4)


def test_without_a_fabric_blocks_are_sent_over_grpc(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **_how: object) -> None:
        raise FabricUnavailable("there is none")

    monkeypatch.setattr(OwnSide, "open_fabric", none)
    model, tokens = _model("mixed"), _tokens(300)
    cache = DynamicCache(config=model.config)
    _run(model, tokens[:, :256], cache)
    with CacheStore(node.target, model) as store:
        chat = store.session("ada", "inline")
        assert chat.save(cache, tokens).error is None
        back = chat.resume(tokens)
    assert back.tokens == 256
    assert _same(back.cache, cache)


def test_a_dead_node_is_a_miss_and_raises_nothing(tmp_path: Path) -> None:
    model, tokens = _model("full"), _tokens(100)
    cache = DynamicCache(config=model.config)
    _run(model, tokens[:, :80], cache)
    with NodeProcess(tmp_path / "node") as node, CacheStore(node.target, model) as store:
        chat = store.session("ada", "killed")
        assert chat.save(cache, tokens).error is None
        node.kill()
        begun_s = time.monotonic()
        back, saved = chat.resume(tokens), chat.save(cache, tokens)
        chat.prefetch()
        assert time.monotonic() - begun_s < 30
        assert back.miss is not None
        assert (back.tokens, back.miss.reason) == (0, MissReason.NODE_AWAY)
        assert saved.error is not None
        node.start()
        begun_s = time.monotonic()
        while chat.resume(tokens).tokens != 80:  # the breaker lets a call through soon
            assert time.monotonic() - begun_s < 30


def test_a_node_stopped_during_a_put_never_stores_later_contents_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "_TIMEOUT_S", 1.0)
    arm = Client.arm
    size, count = 1 << 20, 32  # more than sockets hold
    with (
        NodeProcess(tmp_path / "node") as node,
        Client(node.target, slots=count, block_bytes_max=size) as client,
    ):

        def arm_of_a_still_node(client: Client, blocks: Any, flag: Any) -> Any:
            client.attach()
            os.kill(node.pid, signal.SIGSTOP)
            return arm(client, blocks, flag)

        mover = moving.Mover(client, size, count)
        mover.memory.fill_(1)
        some = [Piece(block_key(bytes([number])), 0, 1, (), size) for number in range(count)]
        monkeypatch.setattr(Client, "arm", arm_of_a_still_node)
        try:
            with pytest.raises(KvError):
                mover.put("ada", some)
        finally:
            mover.memory.fill_(2)  # the next conversation
            os.kill(node.pid, signal.SIGCONT)
        with Client(node.target) as other:
            other.status(wait_s=20)
            until_s = time.monotonic() + 3  # what still comes in comes now
            while time.monotonic() < until_s:
                for got in other.get_many_inline([(piece.key, size) for piece in some]):
                    assert not isinstance(got, bytes) or got == b"\x01" * size


def test_a_sequence_of_another_model_is_refused(node: NodeProcess) -> None:
    model, tokens = _model("full"), _tokens(20)
    cache = DynamicCache(config=model.config)
    _run(model, tokens, cache)
    with CacheStore(node.target, model) as store:
        chat = store.session("ada", "refused")
        with pytest.raises(InvalidArgument, match="20 tokens, and 19"):
            chat.save(cache, tokens[:, :19])
        with pytest.raises(InvalidArgument, match="one sequence"):
            chat.resume(tokens.repeat(2, 1))
        two = DynamicCache(config=model.config)
        _run(model, tokens.repeat(2, 1), two)
        with pytest.raises(LayoutError, match="Layer 0"):
            chat.save(two, tokens)
        with pytest.raises(LayoutError, match="Layer 0"):
            chat.save(DynamicCache([(layer.keys.half(), layer.values) for layer in cache.layers]), tokens)


def test_with_rules_a_returning_users_kv_is_prefetched_and_identical(node: NodeProcess) -> None:
    model, tokens = _model("full"), _tokens(120)
    live = DynamicCache(config=model.config)
    _run(model, tokens[:, :100], live)
    rules = Table()
    rules.replace(
        parse_rules(
            'rule = [{ name = "ruled", tenant = "t", user = "ruled", actions = ["prefetch"],'
            ' bind = [{ source = "10.0.0.0/8" }] }]'
        )
    )

    def request(source: str) -> Request:
        names = {"tenant": "t", "user": "ruled", "context": "chat", "model": "m"}
        five = {"source": source, "destination": "10.9.9.9", "source_port": 1, "destination_port": 2}
        return Request.parse({**names, **five, "protocol": "tcp"})

    with CacheStore(node.target, model, block_tokens=16) as store:
        plain = store.session("ruled", "chat")
        assert plain.save(live, tokens).error is None
        with pytest.raises(InvalidArgument, match="without rules"):
            plain.arrived(request("10.1.2.3"))
    with CacheStore(node.target, model, block_tokens=16, rules=rules, tenant="t") as store:
        chat = store.session("ruled", "chat")
        assert chat.arrived(request("11.0.0.1")).denied
        typing = chat.arrived(request("10.1.2.3"))
        assert (typing.denied, typing.rule, typing.wait(10)) == (False, "ruled", True)
        back = chat.resume(tokens)
        assert (back.tokens, back.miss) == (100, None)
        assert _same(back.cache, live)
        _run(model, tokens, back.cache)
        assert chat.save(back.cache, tokens).error is None
        seen = [one.step for one in chat.trace().seen]
        expected = [Step.PREFETCHED, Step.RESUMING, Step.WHOLE]
        assert [one for one in seen if one in expected] == expected
        assert {Step.ARMED, Step.FIRED, Step.LANDED, Step.APPENDED} <= set(seen)
        assert store.arrivals is not None
        known = {extent.key for extent in store.arrivals.known("ruled")}
        assert len(known) == 9, (
            "the catalogue follows what was saved: seven blocks, and the two of the new turn"
        )
