"""Sending copied pages: everything pending at the deadline is ended, and a full node is waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.client import PutResult
from kvstore.durability import Durability
from kvstore.engines import stores
from kvstore.engines.vllm.saving import Copied
from kvstore.engines.vllm.sending import PutSender
from kvstore.engines.vllm.session_turns import domain_named
from kvstore.errors import (
    DeadlineExceeded,
    DomainRequired,
    KvError,
    NodeUnavailable,
    NotEncrypted,
    Overloaded,
)
from kvstore.names import SHARED, UNSAID, domain_of

PAGES = [Copied(bytes([number]) * 32, number * 64, 64) for number in range(8)]


class FakePuts:
    def __init__(self, pages: int, *, lands: bool) -> None:
        self.results = [PutResult(b"", Durability.WRITTEN, None) for _ in range(pages)]
        self.lands, self.has_ended = lands, False
        self.abandoned = 0

    def wait_landed(self, timeout_s: float) -> bool:  # noqa: ARG002
        return self.lands

    def abandon(self) -> None:
        self.abandoned += 1

    def wait(self, timeout_s: float) -> list[PutResult]:  # noqa: ARG002
        self.has_ended = True
        return self.results


class FakeClient:
    """Accepts `room` batches at a time."""

    def __init__(self, *, room: int = 9, lands: bool = True) -> None:
        self.room, self.lands = room, lands
        self.puts: list[FakePuts] = []
        self.copying_s = 0.0

    def arm(self, blocks: list[Any], *, timeout_s: float) -> Any:
        assert self.copying_s < timeout_s <= self.copying_s + 5
        if sum(not one.has_ended for one in self.puts) >= self.room:
            raise Overloaded("There are no slots.")
        self.puts.append(FakePuts(len(blocks), lands=self.lands))
        return self.puts[-1]


def sender(client: FakeClient) -> PutSender:
    return PutSender(cast("Any", client), cast("Any", SimpleNamespace(length=512)), slots=8, timeout_s=5.0)


def test_a_late_put_is_ended_before_its_memory_is_reused() -> None:
    client = FakeClient(lands=False)
    sender(client).send(PAGES)
    assert [one.abandoned for one in client.puts] == [1, 1]


def test_the_time_that_copies_take_is_added_to_the_time_for_sending() -> None:
    client = FakeClient()
    client.copying_s = 600.0
    sender(client).send(PAGES, copying_s=client.copying_s)
    assert len(client.puts) == 2


def test_our_own_puts_that_hold_the_slots_are_awaited() -> None:
    client = FakeClient(room=1)
    sent = sender(client).send(PAGES)
    assert len(client.puts) == 2
    assert sent.outcome(0) == [True] * 8


def test_a_node_full_of_others_puts_is_not_awaited() -> None:
    assert sender(FakeClient(room=0)).send(PAGES).outcome(0) == [False] * 8


def test_blocks_that_the_node_had_count_as_stored_and_were_not_sent() -> None:
    client = FakeClient()
    sent = sender(client).send(PAGES)
    client.puts[0].results[1] = PutResult(b"", Durability.WRITTEN, None, already_stored=True)
    client.puts[1].results[0] = PutResult(b"", None, NodeUnavailable("It went away."))
    assert sent.outcome(0) == [True, None, True, True, False, True, True, True]


def test_a_put_that_ends_just_after_the_wait_for_it_counts_as_stored() -> None:
    client = FakeClient()
    sent = sender(client).send(PAGES)
    late = client.puts[0]
    ended = late.results

    def wait(timeout_s: float) -> list[PutResult]:  # noqa: ARG001
        results, late.results = late.results, ended
        late.has_ended = True  # by the time that the caller looks
        return results

    late.results = [PutResult(b"", None, DeadlineExceeded("The put continues."))] * len(ended)
    late.wait = wait  # type: ignore[method-assign]
    assert sent.outcome(0) == [True] * 8


def test_no_more_is_armed_than_one_node_has_slots_for() -> None:
    """Of several nodes, one without free slots would not get its copies, and the others would."""
    client = FakeClient()
    two = sender(client)
    two.send(PAGES)
    under_way = [*client.puts]
    two.send(PAGES[:4])
    assert len(client.puts) == 3
    assert under_way[0].has_ended, "it was waited for"
    assert not under_way[1].has_ended


@pytest.mark.parametrize(
    ("refusal", "words"),
    [(DomainRequired, "have `user` or `shared`"), (NotEncrypted, "that name an erase domain are not saved")],
)
def test_a_refusal_of_all_domains_is_logged_once(
    caplog: pytest.LogCaptureFixture, refusal: type[KvError], words: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise refusal

    stores._warn_once.cache_clear()
    client = SimpleNamespace(arm=refuse)
    for _ in range(3):
        assert sender(cast("Any", client)).send(PAGES).outcome(0) == [False] * 8
    several = FakeClient()  # of which each result may have the error
    sent = sender(several).send(PAGES)
    several.puts[0].results[0] = PutResult(b"", None, refusal())
    assert sent.outcome(0) == [False, *[True] * 7]
    (line,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert words in line.getMessage()


def test_a_request_uses_its_own_user_or_else_that_of_the_settings() -> None:
    def of(default: bytes, **given: Any) -> bytes:
        return domain_named(SimpleNamespace(kv_transfer_params=given or None), default)

    for default in (UNSAID, SHARED, domain_of("bob")):
        assert of(default) == default
        assert of(default, domain="ada") == domain_of("ada")
        assert of(default, domain="shared") == domain_of("shared"), "a user may have any name"
        assert of(default, shared=True) == SHARED
        assert of(default, domain=0) == domain_of("0"), "which is a user as well"
        for wrong in ({"domain": ""}, {"domain": "u" * 129}, {"shared": "false"}, {"shared": 1}):
            assert of(default, **wrong) == UNSAID
