"""The enums of the proto files match those of the code, so the files suffice for a client in another language."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore import errors, limits
from kvstore.errors import KvError, NoSession, Overloaded
from kvstore.miss import MissReason
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.status import code_of, error_named
from nic_offload.errors import PutFailed

ROOT = Path(__file__).resolve().parents[2]
PROTO = (ROOT / "proto/kvstore/v1/kvstore.proto").read_text()
PAGE = (ROOT / "docs/grpc.md").read_text()


def named(code: str) -> str:
    """The error's name of a value, as the proto says: ERROR_CODE_KEY_TAKEN is `KeyTaken`."""
    return "".join(word.capitalize() for word in code.removeprefix("ERROR_CODE_").split("_"))


CODES = [(name, number) for name, number in pb.ErrorCode.items() if number]


def test_miss_reasons_match_ours() -> None:
    told = {name.removeprefix("MISS_REASON_"): number for name, number in pb.MissReason.items() if number}
    assert told == {reason.name: reason.value for reason in MissReason}


@pytest.mark.parametrize(("code", "number"), CODES)
def test_each_code_belongs_to_one_error(code: str, number: int) -> None:
    kind = getattr(errors, named(code))
    error = kind("One sentence.")
    assert code_of(error) == number
    assert type(error_named(type(error).__name__, str(error), 0)) is kind


def test_an_error_without_a_code_has_that_of_its_kind_or_none() -> None:
    assert code_of(PutFailed("It failed.")) == pb.ERROR_CODE_FABRIC_ERROR
    assert code_of(NoSession("None.")) == pb.ERROR_CODE_NO_SESSION
    assert code_of(Overloaded("Full.")) == pb.ERROR_CODE_OVERLOADED
    assert code_of(KvError("Something.")) == pb.ERROR_CODE_UNSPECIFIED


def test_an_unknown_number_of_a_newer_node_is_accepted() -> None:
    assert pb.GetMiss.FromString(b"\x08\x63").reason == 99
    assert MissReason(pb.GetMiss.FromString(b"\x08\x63").reason) is MissReason.UNKNOWN


@pytest.mark.parametrize(
    "text", [re.sub(r"\n// ", " ", PROTO), re.sub(r"\s+", " ", PAGE)], ids=["proto", "page"]
)
def test_the_documented_limits_are_the_actual_ones(text: str) -> None:
    mib = 1 << 20
    assert f"A key has {limits.KEY_BYTES} bytes" in text
    assert f"to {limits.BLOCK_BYTES_MAX // mib} MiB" in text
    assert f"a chunk at most {limits.CHUNK_BYTES_MAX // mib} MiB" in text
    assert f"{limits.INLINE_CHUNK_BYTES >> 20} MiB" in text
    assert f"1 to {limits.BATCH_BLOCKS_MAX:,} blocks" in text
    assert f"{limits.SESSION_BLOCKS_MAX:,}" in text
    assert f"{limits.MESSAGE_BYTES_MAX // mib} MiB and {limits.MESSAGE_BYTES_MAX % mib >> 10} KiB" in text
    assert f"{limits.GUARD_STREAMS_MAX} calls at a time" in text
    assert f"within {limits.GUARD_FIRST_MESSAGE_MS // 1000} s" in text
    assert f"within {limits.INLINE_TIMEOUT_MS // 1000} s" in text
