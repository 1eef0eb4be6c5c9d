"""How often an answer is saved, by the scheduler's own plans, from a device's memory to the node and back."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tests.engines.pretend  # noqa: F401  # isort: skip - it is how vLLM is imported here

from kvstore.client import Client
from kvstore.engines.vllm.scheduler import Scheduling
from kvstore.errors import NoSession
from kvstore.testing import MemoryNode
from nic_offload.host_device import HostDevice
from tests.device.engine import Engine, random_values, wait_for
from tests.device.tensors import BLOCKS, LAYERS, TOKENS, pages, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.engines.vllm.groups import Wanted

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

SHAPE = "[2, blocks] NHD"
PROMPT, END = 40, 330
FULL = END // TOKENS


def request() -> Any:
    return SimpleNamespace(
        request_id="r",
        all_token_ids=list(range(PROMPT)),
        num_tokens=PROMPT,
        num_prompt_tokens=PROMPT,
        num_computed_tokens=0,
        num_preemptions=0,
        kv_transfer_params=None,
        cache_salt=None,
        lora_request=None,
        prompt_embeds=None,
        mm_features=[],
    )


class Answer:
    """A request that is computed token by token; its blocks are 1, 2, ... of the device's."""

    def __init__(self, engine: Engine, **named: str) -> None:
        self.engine, self.request = engine, request()
        self.request.kv_transfer_params = named or None
        self.side = Scheduling(engine.settings, engine.identity, with_events=False, loads=False)
        self.side.bind(SimpleNamespace(get_block_ids=self._block_ids))
        self.side.new_request(self.request)
        self.side.allocated(self.request, None, 0)
        self.values = random_values(SHAPE, range(1, FULL + 1))

    def steps(self) -> Iterator[list[Wanted]]:
        """What each step saves."""
        one = self.request
        while one.num_computed_tokens < END:
            before, new = one.num_computed_tokens, len(one.all_token_ids) - one.num_computed_tokens
            plan = self.side.plan(SimpleNamespace(num_scheduled_tokens={"r": new}))
            self._compute(plan.saves, range(before // TOKENS + 1, (before + new) // TOKENS + 1))
            yield plan.saves
            one.num_computed_tokens += new
            one.all_token_ids.append(7)

    def _block_ids(self, _: str) -> tuple[list[int]]:
        """As vLLM has them: 0 for those that no token of the next step looks at."""
        (group,) = self.engine.identity.groups
        left = 0
        if group.window_tokens:
            left = max(0, self.request.num_computed_tokens - group.window_tokens + 1) // TOKENS
        return ([0] * left + list(range(1, BLOCKS))[left:],)

    def _compute(self, saves: list[Wanted], blocks: range) -> None:
        transfers = self.engine.transport.saves
        transfers.begin(saves)
        for at, (name, cache) in enumerate(self.engine.caches.items()):
            for block in blocks:
                self.engine.compute(cache, block, self.values[block][at])
            transfers.layer_done(name)
        transfers.settle(is_sound=True)

    def forget(self) -> None:
        """Overwrite all blocks."""
        for cache in self.engine.caches.values():
            for block in range(BLOCKS):
                self.engine.compute(cache, block, np.full_like(pages(cache)[block], 0xDEAD))


@pytest.mark.parametrize(
    ("every", "saved"), [(1, [2, *[1] * 18]), (96, [2, 6, 6, 6]), (90, [2, 6, 6, 6]), (100, [2, 7, 7])]
)
def test_an_answer_is_saved_every_so_many_tokens_and_exactly(
    every: int, saved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    armed: list[int] = []
    arm = Client.arm

    def counted(self: Client, blocks: Any, *given: Any, **named: Any) -> Any:
        armed.append(len(blocks))
        return arm(self, blocks, *given, **named)

    monkeypatch.setattr(Client, "arm", counted)
    device = HostDevice(every)
    with MemoryNode() as node, running(device):
        engine = Engine(node, SHAPE, device, transport="memory", save_every_tokens=every)
        answer = Answer(engine)
        wanted: list[Wanted] = []
        for saves in answer.steps():
            wanted += saves
            if saves:
                engine.saved(len(saves))  # one batch after the other, as if an answer took its time
        answer.forget()
        assert armed == saved
        assert [one.block for one in wanted] == list(range(1, sum(saved) + 1))
        assert engine.load(wanted).missing == []
        seen = engine.seen([one.block for one in wanted])
        for one in wanted:
            exact = [values.tobytes() for values in answer.values[one.block]]
            assert [seen[one.block, at] for at in range(LAYERS)] == exact, one.block
        engine.close()


def test_blocks_that_are_computed_again_are_saved_with_the_next_ones() -> None:
    """A block that was reported as stored, and did not arrive, counts as not saved, also if it is postponed."""
    with MemoryNode() as node:
        engine = Engine(node, SHAPE, transport="memory", save_every_tokens=48)
        answer = Answer(engine)
        side, known = answer.side, answer.side._known(answer.request)
        answer.request.all_token_ids = list(range(200))
        known.saved = [12]
        assert side._full(known, 96, 16) == []
        assert known.saved == [6]
        assert len(side._full(known, 112, 40)) == 3
        engine.close()


@pytest.mark.parametrize("window", [TOKENS, 40, 64])
def test_blocks_are_saved_before_they_leave_their_window_and_the_session_is_recorded(window: int) -> None:
    """Though an answer is saved only every so many tokens, and these are more than the window has."""
    with MemoryNode() as node, running(device := HostDevice(window)):
        engine = Engine(node, SHAPE, device, window, transport="memory", save_every_tokens=200)
        answer = Answer(engine, user="ada", session="long")
        wanted: list[Wanted] = []
        for saves in answer.steps():
            wanted += saves
            if saves:
                engine.saved(len(saves))
        answer.forget()
        last = max(one.block for one in wanted)
        assert [one.block for one in wanted] == list(range(1, last + 1)), "without a gap"
        assert last >= FULL - 200 // TOKENS
        assert engine.load(wanted).missing == []
        seen = engine.seen([one.block for one in wanted])
        for one in wanted:
            exact = [values.tobytes() for values in answer.values[one.block]]
            assert [seen[one.block, at] for at in range(LAYERS)] == exact, one.block
        answer.side.finished(answer.request)
        client = Client(node.target, layout=engine.identity.layout, transport="memory")
        with client:
            chat = client.session("ada", "long")

            def blocks() -> int:
                with suppress(NoSession):
                    return len(chat.keys())
                return 0

            wait_for(blocks, "the turn is recorded")
            assert blocks() == last
        engine.close()
