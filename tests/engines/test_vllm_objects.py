"""A block as objects: which layers each has, where their pages are, and that loads restore them there."""

from __future__ import annotations

import pytest

from tests.engines.pretend import FakeNode, FakeTransport  # isort: skip - it is how vLLM is imported here

import torch

from kvstore.engines.vllm import groups
from kvstore.engines.vllm.connector_metadata import Load, Wanted
from kvstore.engines.vllm.groups import Group
from kvstore.engines.vllm.kv_memory import KvMemory
from kvstore.engines.vllm.loading import Loads
from kvstore.errors import LayoutError
from kvstore.layout import Layer, Layout, Order

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

LAYERS, BLOCKS, PAGE = 7, 12, 256
NAMES = tuple(f"layer {number}" for number in range(LAYERS))
LAYOUT = Layout(
    model="m",
    weights="w",
    dtype="float32",
    block_tokens=4,
    layers=(Layer(1, 8, 8),) * LAYERS,
    order=Order.OPAQUE,
    engine="e",
)


def group(number: int = 0) -> Group:
    return Group(number, 4, 0, NAMES, (LAYOUT,), PAGE)


def caches(seed: int) -> dict[str, torch.Tensor]:
    """Three layers each have memory of their own; the others share one, block by block."""
    torch.manual_seed(seed)
    shared = torch.randn(BLOCKS, LAYERS - 3, PAGE // 4)
    return {
        name: torch.randn(BLOCKS, PAGE // 4) if number < 3 else shared[:, number - 3]
        for number, name in enumerate(NAMES)
    }


@pytest.fixture(params=[3 * PAGE, 100 * PAGE])
def objects_of_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(groups, "OBJECT_BYTES_MAX", request.param)
    return 3 if request.param == 3 * PAGE else 1


def test_a_block_is_one_object_or_several_within_their_bound(objects_of_block: int) -> None:
    one = group()
    assert [len(run) for run in one.runs] == ([3, 3, 1] if objects_of_block == 3 else [LAYERS])
    assert [layer for run in one.runs for layer in run] == list(range(LAYERS))
    keys = one.objects([b"digest"], 0)
    assert len(set(keys)) == len(keys) == objects_of_block
    assert one.all_objects([b"digest", b"other"]) == keys + one.objects([b"other"], 0)
    assert not set(group(1).objects([b"digest"], 0)) & set(keys)


def test_blocks_of_pages_or_other_runs_have_other_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named: list[set[bytes]] = []
    block = LAYOUT.fingerprint + b"digest"
    named.append({LAYOUT.key(b"%b0/%d" % (block, layer)) for layer in range(LAYERS)})
    for pages in (1, 2, 3, 7):
        monkeypatch.setattr(groups, "OBJECT_BYTES_MAX", pages * PAGE)
        keys = set(group().objects([b"digest"], 0))
        named.append(keys)
    last_of_two_and_three = {LAYOUT.key(b"%b0/6-7" % block)}
    for number, keys in enumerate(named):
        for others in named[:number]:
            assert keys & others <= last_of_two_and_three, "the same layers, and so the same bytes"


def test_blocks_return_to_their_places(objects_of_block: int) -> None:
    node = FakeNode()
    memory = KvMemory(caches(1), [group()], 0, BLOCKS)
    saves = FakeTransport(node, memory).saves
    wanted = [Wanted(0, block, bytes([block])) for block in (3, 0, 11, 7)]
    saves.begin(wanted)
    for name in NAMES:
        saves.layer_done(name)
    saves.settle(is_sound=True)
    saves._thread.shutdown()
    assert len(node.objects) == 4 * objects_of_block
    (saved,) = saves.ended()
    assert (saved.pages, saved.bytes, saved.failed) == (4 * LAYERS, 4 * LAYERS * PAGE, 0)
    assert saved.stored == [(0, one.digest) for one in wanted]

    tensors = caches(2)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    source = caches(1)
    other = KvMemory(tensors, [group()], 0, BLOCKS)
    gone = node.objects.pop(group().objects([bytes([11])], 0)[-1])
    loads = Loads(FakeTransport(node, other), other, 5.0, 5.0)
    load = Load(
        "r", [Wanted(0, block, bytes([digest])) for block, digest in ((5, 3), (6, 0), (1, 11), (2, 7))]
    )
    loaded = loads.load(load)
    assert [one.block for one in loaded.missing] == [1]
    assert loaded.bytes == 3 * LAYERS * PAGE
    assert gone
    for name, tensor in tensors.items():
        for block, digest in ((5, 3), (6, 0), (2, 7)):
            assert torch.equal(tensor[block], source[name][digest])
        for block in set(range(BLOCKS)) - {5, 6, 2, 1}:
            assert torch.equal(tensor[block], before[name][block])


@pytest.mark.parametrize(
    ("row", "is_accepted"), [(PAGE // 2, True), (PAGE // 4, False), (PAGE // 4 + 8, False), (PAGE, False)]
)
def test_padding_is_stored_with_a_page_only_where_it_is_no_other_pages(
    row: int, *, is_accepted: bool
) -> None:
    """A page of PAGE bytes that the engine counts as twice as many, so many numbers from one block to the next."""
    padded = Group(0, 4, 0, NAMES, (LAYOUT,), 2 * PAGE)
    tensors = {name: torch.zeros(BLOCKS, row)[:, : PAGE // 4] for name in NAMES}
    if is_accepted:
        KvMemory(tensors, [padded], 0, BLOCKS)
        return
    with pytest.raises(LayoutError, match=f"have {PAGE} bytes every {4 * row}, not {2 * PAGE}"):
        KvMemory(tensors, [padded], 0, BLOCKS)
