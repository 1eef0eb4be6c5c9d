"""The name of a page: it covers everything that decides the page's bytes, and is the same in every process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# In a process of its own: importing vLLM warns of much, and here warnings are errors.
_PROGRAM = """
import json, os, sys
from types import SimpleNamespace as Fake
import torch
from transformers import LlamaConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvstore.engines.vllm import identity as names
from kvstore.engines.vllm.chain import Chain
from kvstore.engines.vllm.offloading_connector import TriggerKvOffloadingConnector
from kvstore.engines.vllm.offloading import Engine, _Manager
from kvstore.engines.vllm.host import State
from kvstore.engines.vllm.weights import weights_name
from kvstore.errors import LayoutError
from kvstore.names import block_key

adapters = sys.argv[1]
os.chdir(adapters)

def chain(tokens=range(64), salt=None, adapter=None, images=()):
    lora = adapter and Fake(lora_name=adapter[0], lora_path=f"{adapters}/{adapter[1]}")
    request = Fake(
        all_token_ids=list(tokens), cache_salt=salt, lora_request=lora, prompt_embeds=None,
        mm_features=[Fake(identifier=i, mm_position=Fake(offset=at, length=4)) for i, at in images],
    )
    return [digest.hex() for digest in Chain(request, 32).grow()]

def parts():
    request = Fake(
        all_token_ids=list(range(32)), cache_salt=None, lora_request=None, prompt_embeds=None, mm_features=[]
    )
    one = Chain(request, 32)
    one.grow()
    request.all_token_ids[31:] = [99, *range(32)]  # the last token was taken back
    return [digest.hex() for digest in one.grow()]

def offloaded(adapter=None, reset=False):
    # What a chunk of a request is called on the node, by way of the connector and the spec's manager.
    asked = []
    def look(key):
        asked.append(key)
        return State.ABSENT
    told = Engine(b"layout")
    manager = _Manager(Fake(look=look, clear=lambda: None), None, told)
    if reset:
        manager.reset_cache()
    from vllm.v1.kv_offload.base import ReqContext
    context = ReqContext("r")
    connector = TriggerKvOffloadingConnector.__new__(TriggerKvOffloadingConnector)
    connector._engine = told
    connector.connector_scheduler = Fake(on_new_request=lambda request: manager.on_new_request(context))
    lora = adapter and Fake(lora_name=adapter[0], lora_path=f"{adapters}/{adapter[1]}")
    connector.on_new_request(Fake(request_id="r", lora_request=lora))
    manager.lookup(b"hash of name and path", context)
    return block_key(told.layout, *asked).hex()

def ident(
    ranks=1, rank=0, dtype=torch.bfloat16, tokens=32, model="m", weights="w", isa="amx", spec=None, stages=1,
    dcp=1, heads=4, quantization=None, cache_dtype="auto", revision=None, commit=None, rope=None, layers=2,
    skipped=(), dummy=False, draft=None, code=None, window=False, mla=False, prefixes=True,
):
    names._isa = lambda *_: isa
    spec = spec or FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=64, dtype=dtype)

    def one(model, weights_of):
        about = LlamaConfig(num_hidden_layers=layers, **({"rope_parameters": rope} if rope else {}))
        about._commit_hash = commit
        return Fake(model=model, model_weights=weights_of, revision=revision, code_revision=code, dtype=dtype,
            quantization=quantization, quantization_config=None, disable_sliding_window=window, hf_config=about,
            use_mla=mla)

    config = Fake(
        parallel_config=Fake(tensor_parallel_size=ranks, pipeline_parallel_size=stages, world_size=ranks * stages,
            decode_context_parallel_size=dcp, prefill_context_parallel_size=1),
        model_config=one(model, ""), load_config=Fake(load_format="dummy" if dummy else "auto"),
        speculative_config=draft and Fake(draft_model_config=one(draft, "")),
        cache_config=Fake(cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=list(skipped),
            enable_prefix_caching=prefixes),
        attention_config=Fake(backend=None))
    cache = Fake(kv_cache_groups=[Fake(kv_cache_spec=spec, layer_names=["a", "b"])], kv_cache_layout="LBHNC")
    try:
        given = weights if rank is not None else ""
        one_ = names.identify(config, cache, given)
        chunks = names.identify_chunks(config, cache, given)
    except LayoutError as error:
        return str(error)
    return [one_.layout.hex(), block_key(chunks, b"d").hex()] + [
        key.hex() for key in one_.groups[0].objects([b"d"], rank or 0)]

yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 2048}
window = SlidingWindowSpec(block_size=32, num_kv_heads=4, head_size=64, dtype=torch.bfloat16, sliding_window=64)
state = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
print(json.dumps({
    "chain": chain(), "longer": chain(range(70)), "other tokens": chain([7, *range(1, 64)]),
    "later tokens": chain([*range(32), 9, *range(33, 64)]),
    "salt": chain(salt="s"), "other salt": chain(salt="t"),
    "lora": chain(adapter=("a", "one")), "lora renamed": chain(adapter=("b", "one")),
    "lora other bytes": chain(adapter=("a", "two")), "lora moved": chain(adapter=("a", "same as one")),
    "image": chain(images=[("i", 3)]), "other image": chain(images=[("j", 3)]),
    "image elsewhere": chain(images=[("i", 5)]),
    "late image": chain(images=[("i", 40)]),
    "ident": ident(), "rank 0 of 2": ident(2, 0, heads=2), "rank 1 of 2": ident(2, 1, heads=2),
    "dtype": ident(dtype=torch.float16), "fed in parts": parts(), "tokens fed": chain([*range(31), 99, *range(32)]),
    "block size": ident(tokens=64), "model": ident(model="n"), "weights": ident(weights="v"), "isa": ident(isa="vec"),
    "config": ident(layers=3), "rope scaling": ident(rope=yarn), "quantisation": ident(quantization="fp8"),
    "cache dtype": ident(cache_dtype="fp8"), "revision": ident(revision="v2"), "commit": ident(commit="c" * 40),
    "a layer's cache dtype": ident(skipped=["0"]), "dummy weights": ident(dummy=True), "code": ident(code="v2"),
    "windows off": ident(window=True), "draft": ident(draft=adapters + "/one"),
    "other draft": ident(draft=adapters + "/two"), "same draft": ident(draft=adapters + "/same as one"),
    "again": ident(),
    "found": ident(model=adapters + "/one", rank=None), "found other": ident(model=adapters + "/two", rank=None),
    "not found": ident(model=adapters + "/empty", rank=None), "branch": ident(model="o/m", revision="main", rank=None),
    "on a hub": ident(model="o/m", revision="main", commit="c" * 40, rank=None),
    "other commit": ident(model="o/m", revision="main", commit="d" * 40, rank=None),
    "in the cache": weights_name("org/cached", None, None),
    "a file": weights_name("one/adapter_model.safetensors", None, None),
    "other file": weights_name("two/adapter_model.safetensors", None, None),
    "chunk": offloaded(), "chunk lora": offloaded(("a", "one")), "chunk lora moved": offloaded(("a", "same as one")),
    "chunk lora other bytes": offloaded(("a", "two")), "chunk reset": offloaded(reset=True),
    "lora scaled": chain(adapter=("a", "scaled")), "lora unknown": chain(adapter=("a", "empty")),
    "looks ahead": ident(spec=FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=64, dtype=torch.bfloat16,
        non_causal=True)),
    "window": ident(spec=window), "state": ident(spec=state), "stages": ident(stages=2), "context": ident(dcp=2),
    "latent without context": ident(mla=True, prefixes=False), "latent": ident(mla=True),
    "no prefix cache": ident(prefixes=False),
}))
"""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name, content in (("one", b"1"), ("two", b"2"), ("same as one", b"1")):
        (folder / name).mkdir()
        (folder / name / "adapter_model.safetensors").write_bytes(content)
    (folder / "scaled").mkdir()
    (folder / "scaled" / "adapter_model.safetensors").write_bytes(b"1")
    (folder / "scaled" / "adapter_config.json").write_text('{"lora_alpha": 32}')
    (folder / "empty").mkdir()
    (folder / "empty" / "readme.md").write_text("no weights")
    hub = folder / "hub" / "models--org--cached"  # as huggingface_hub keeps it
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("e" * 40)
    (hub / "snapshots" / ("e" * 40)).mkdir(parents=True)
    (hub / "snapshots" / ("e" * 40) / "config.json").write_text("{}")
    return folder


def _named(adapters: Path, seed: str) -> dict[str, list[str] | str]:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(adapters)],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=ROOT,
        env={
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "HF_HUB_CACHE": str(adapters / "hub"),
        },
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    named: dict[str, list[str] | str] = json.loads(run.stdout.splitlines()[-1])
    return named


@pytest.fixture(scope="module")
def named(adapters: Path) -> dict[str, list[str] | str]:
    return _named(adapters, "1")


# Nobody else may find them, not even another process of the same engine.
_NOBODYS = ("lora unknown", "chunk reset")


def test_every_process_makes_the_same_names(adapters: Path, named: dict[str, list[str] | str]) -> None:
    other = _named(adapters, "2")
    for what in _NOBODYS:
        assert other.pop(what) != named[what]
    assert other == {what: names for what, names in named.items() if what not in _NOBODYS}


@pytest.mark.parametrize(
    "what",
    [
        *("other tokens", "salt", "other salt", "lora", "lora renamed", "lora other bytes", "lora scaled"),
        *("image", "other image", "image elsewhere"),
    ],
)
def test_a_name_depends_on_everything_that_determines_the_kv(
    what: str, named: dict[str, list[str] | str]
) -> None:
    for other in ("chain", "salt", "lora", "image"):
        if other != what:
            assert not set(named[what]) & set(named[other]), other


@pytest.mark.parametrize("what", ["later tokens", "late image"])
def test_later_events_do_not_change_earlier_names(what: str, named: dict[str, list[str] | str]) -> None:
    assert named[what][0] == named["chain"][0]
    assert named[what][1] != named["chain"][1]


def test_a_name_depends_on_nothing_else(named: dict[str, list[str] | str]) -> None:
    assert named["longer"] == named["chain"]
    assert named["lora moved"] == named["lora"]


@pytest.mark.parametrize(
    "what",
    [
        *(
            "dtype",
            "block size",
            "model",
            "weights",
            "isa",
            "rank 0 of 2",
            "window",
            "config",
            "rope scaling",
        ),
        *(
            "quantisation",
            "cache dtype",
            "a layer's cache dtype",
            "revision",
            "commit",
            "code",
            "windows off",
        ),
        *("dummy weights", "draft"),
    ],
)
def test_engines_that_differ_in_one_thing_share_no_name(what: str, named: dict[str, list[str] | str]) -> None:
    """Neither a layout, nor an OffloadingSpec's chunk, nor a page of the connector's."""
    assert named["again"] == named["ident"]
    assert not set(named[what]) & set(named["ident"])


def test_drafts_are_distinguished_by_their_weights(named: dict[str, list[str] | str]) -> None:
    assert not set(named["draft"]) & set(named["other draft"])


def test_weights_are_identified_by_their_content_or_their_commit(named: dict[str, list[str] | str]) -> None:
    assert not set(named["found"]) & set(named["found other"])
    assert not set(named["on a hub"]) & set(named["other commit"])
    assert named["in the cache"] == "commit " + "e" * 40
    assert named["a file"] != named["other file"]


@pytest.mark.parametrize("what", ["not found", "branch"])
def test_unidentified_weights_must_be_named(what: str, named: dict[str, list[str] | str]) -> None:
    assert "set `weights`" in str(named[what])


def test_an_offloadingspec_distinguishes_adapters_by_their_content(
    named: dict[str, list[str] | str],
) -> None:
    assert named["chunk lora"] == named["chunk lora moved"]
    assert len({str(named[what]) for what in ("chunk", "chunk lora", "chunk lora other bytes")}) == 3


def test_an_offloadingspec_finds_nothing_from_before_a_reset(named: dict[str, list[str] | str]) -> None:
    assert named["chunk reset"] != named["chunk"]


def test_a_withdrawn_token_is_in_no_name(named: dict[str, list[str] | str]) -> None:
    assert named["fed in parts"] == named["tokens fed"]


def test_ranks_have_one_layout_and_their_own_pages(named: dict[str, list[str] | str]) -> None:
    one, other = named["rank 0 of 2"], named["rank 1 of 2"]
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


@pytest.mark.parametrize("what", ["state", "stages", "context", "looks ahead", "latent without context"])
def test_a_block_without_a_name_is_not_stored(what: str, named: dict[str, list[str] | str]) -> None:
    assert isinstance(named[what], str)


@pytest.mark.parametrize("what", ["latent", "no prefix cache"])
def test_blocks_that_the_platform_can_use_are_stored(what: str, named: dict[str, list[str] | str]) -> None:
    assert not isinstance(named[what], str)
