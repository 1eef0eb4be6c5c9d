"""Acknowledgement words: a client decodes what a node encodes."""

from __future__ import annotations

import pytest

from kvstore.durability import Durability
from kvstore.errors import (
    BeingErased,
    Expired,
    KeyTaken,
    KvError,
    LeaseExpired,
    NoSpace,
    QuotaExceeded,
    ReadOnly,
    StorageError,
)
from kvstore.limits import GENERATION_MAX
from kvstore.miss import MissReason
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.ack import AckCode, ack_word, code_of_error, code_of_miss, error_of_code, miss_of_code

KEY = bytes(range(32))


def test_a_word_holds_generation_and_code() -> None:
    assert ack_word(1, AckCode.LANDED) == 0x101
    assert ack_word(GENERATION_MAX, 0xFF) == (1 << 64) - 1
    for generation, code in ((0, 1), (GENERATION_MAX + 1, 1), (1, 0), (1, 256)):
        with pytest.raises(AssertionError):
            ack_word(generation, code)


def test_more_durable_is_a_higher_code_and_failures_are_above_all_of_them() -> None:
    assert [AckCode(durability) for durability in Durability] == [
        AckCode.LANDED,
        AckCode.WRITTEN,
        AckCode.SYNCED,
    ]
    failures = (AckCode.LEASE_EXPIRED, AckCode.NO_SPACE, AckCode.READ_ONLY, AckCode.STORAGE_FAILED)
    assert min(failures) > max(Durability)  # so that a watch for any durability ends at a failure


def test_the_protos_durabilities_match_ours() -> None:
    assert [(durability.name, int(durability)) for durability in Durability] == [
        (name.removeprefix("DURABILITY_"), number) for name, number in pb.Durability.items() if number
    ]


@pytest.mark.parametrize("reason", list(MissReason))
def test_a_miss_is_encoded_with_its_reason(reason: MissReason) -> None:
    miss = miss_of_code(code_of_miss(reason))
    assert miss is not None
    assert miss.reason is reason
    assert code_of_miss(reason) not in list(AckCode)


def test_served_is_not_a_miss() -> None:
    assert miss_of_code(AckCode.SERVED) is None


@pytest.mark.parametrize("error", [NoSpace, ReadOnly, Expired, BeingErased, QuotaExceeded, StorageError])
def test_a_failed_put_is_encoded_as_its_error(error: type[KvError]) -> None:
    travelled = error_of_code(code_of_error(error("x")), KEY)
    assert type(travelled) is error
    assert "code" not in str(travelled)


def test_a_taken_key_is_reported_with_what_to_do() -> None:
    taken = error_of_code(AckCode.KEY_TAKEN, KEY)
    assert type(taken) is KeyTaken
    assert str(taken).startswith(f"The key {KEY.hex()} already has a block")
    assert str(taken).endswith("put this one under another key, or delete that one.")


def test_a_durable_put_is_no_error_and_an_unknown_code_is_one() -> None:
    assert all(error_of_code(durability, KEY) is None for durability in Durability)
    assert isinstance(error_of_code(AckCode.LEASE_EXPIRED, KEY), LeaseExpired)
    assert isinstance(error_of_code(0x7E, KEY), StorageError)  # of a newer node's
