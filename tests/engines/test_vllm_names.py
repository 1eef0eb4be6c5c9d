"""What a page is named by: everything that decides its bytes, the same in every process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# In a process of its own: importing vLLM warns of much, and here warnings are errors.
_PROGRAM = """
import json, sys
from dataclasses import replace
from types import SimpleNamespace as Fake
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvstore.engines.vllm import identity as names
from kvstore.engines.vllm.chain import Chain
from kvstore.errors import LayoutError

adapters = sys.argv[1]

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

def ident(
    ranks=1, rank=0, dtype=torch.bfloat16, tokens=32, model=None, weights="w", isa="amx", spec=None, stages=1,
    dcp=1, heads=4, mla=False, prefixes=True,
):
    names._isa = lambda *_: isa
    spec = spec or FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=64, dtype=dtype)
    config = Fake(
        parallel_config=Fake(tensor_parallel_size=ranks, pipeline_parallel_size=stages,
            decode_context_parallel_size=dcp, prefill_context_parallel_size=1),
        model_config=Fake(model=model or "m", revision=None, dtype=dtype, quantization=None, use_mla=mla,
            hf_config=Fake(to_json_string=lambda use_diff: "{}")),
        cache_config=Fake(cache_dtype="auto", enable_prefix_caching=prefixes), attention_config=Fake(backend=None))
    cache = Fake(kv_cache_groups=[Fake(kv_cache_spec=spec, layer_names=["a", "b"])], kv_cache_layout="LBHNC")
    try:
        one = names.identify(config, cache, weights)
    except LayoutError as error:
        return str(error)
    return [one.layout.hex()] + [key.hex() for key in one.groups[0].pages(b"d", rank)]

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
    return folder


def _named(adapters: Path, seed: str) -> dict[str, list[str] | str]:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(adapters)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    named: dict[str, list[str] | str] = json.loads(run.stdout.splitlines()[-1])
    return named


@pytest.fixture(scope="module")
def named(adapters: Path) -> dict[str, list[str] | str]:
    return _named(adapters, "1")


def test_every_process_names_alike(adapters: Path, named: dict[str, list[str] | str]) -> None:
    assert _named(adapters, "2") == named


@pytest.mark.parametrize(
    "what",
    [
        *("other tokens", "salt", "other salt", "lora", "lora renamed", "lora other bytes"),
        *("image", "other image", "image elsewhere"),
    ],
)
def test_what_decides_the_kv_decides_the_name(what: str, named: dict[str, list[str] | str]) -> None:
    for other in ("chain", "salt", "lora", "image"):
        if other != what:
            assert not set(named[what]) & set(named[other]), other


@pytest.mark.parametrize("what", ["later tokens", "late image"])
def test_what_comes_later_does_not_change_what_was_before(
    what: str, named: dict[str, list[str] | str]
) -> None:
    assert named[what][0] == named["chain"][0]
    assert named[what][1] != named["chain"][1]


def test_a_name_does_not_depend_on_what_is_not_in_it(named: dict[str, list[str] | str]) -> None:
    assert named["longer"] == named["chain"]
    assert named["lora moved"] == named["lora"]


@pytest.mark.parametrize("what", ["dtype", "block size", "model", "weights", "isa", "rank 0 of 2", "window"])
def test_another_engine_has_other_blocks(what: str, named: dict[str, list[str] | str]) -> None:
    assert named[what][0] != named["ident"][0]


def test_a_token_that_is_taken_back_is_in_no_name(named: dict[str, list[str] | str]) -> None:
    assert named["fed in parts"] == named["tokens fed"]


def test_ranks_have_one_layout_and_pages_of_their_own(named: dict[str, list[str] | str]) -> None:
    one, other = named["rank 0 of 2"], named["rank 1 of 2"]
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])


@pytest.mark.parametrize("what", ["state", "stages", "context", "latent without context"])
def test_what_has_no_name_is_not_stored(what: str, named: dict[str, list[str] | str]) -> None:
    assert isinstance(named[what], str)


@pytest.mark.parametrize("what", ["latent", "no prefix cache"])
def test_what_the_platform_can_compute_from_is_stored(what: str, named: dict[str, list[str] | str]) -> None:
    assert not isinstance(named[what], str)
