"""Errors of the tree through gRPC's status, and back."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvstore import errors
from kvstore.errors import DeadlineExceeded, KvError, NodeUnavailable, Overloaded, ProtocolError
from kvstore.wire.status import error_from_rpc, status_of, trailers_of


class Failure(grpc.RpcError, grpc.Call):
    """A failed call, as grpcio raises one."""

    def __init__(
        self, code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._code, self._details, self._trailers = code, details, trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailers

    def initial_metadata(self) -> Any:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: object) -> bool:  # noqa: ARG002
        return False


TREE = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", TREE)
def test_an_error_is_decoded_as_itself(kind: type[KvError]) -> None:
    error = kind("One sentence.")
    back = error_from_rpc("Doing", Failure(status_of(error), str(error), trailers_of(error)))
    assert type(back) is kind
    assert str(back) == "One sentence."


def test_overload_is_decoded_with_its_hint() -> None:
    error = Overloaded("Full.", retry_after_ms=123)
    back = error_from_rpc("Doing", Failure(status_of(error), str(error), trailers_of(error)))
    assert isinstance(back, Overloaded)
    assert back.retry_after_ms == 123


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.UNAVAILABLE, NodeUnavailable),
        (grpc.StatusCode.CANCELLED, NodeUnavailable),
        (grpc.StatusCode.UNIMPLEMENTED, ProtocolError),
    ],
)
def test_a_failure_without_our_name_is_judged_by_its_status(
    code: grpc.StatusCode, kind: type[KvError]
) -> None:
    back = error_from_rpc("Doing", Failure(code, "why"))
    assert type(back) is kind
    assert str(back).startswith("Doing ")


def test_an_unknown_error_name_is_not_accepted() -> None:
    back = error_from_rpc(
        "Doing", Failure(grpc.StatusCode.INTERNAL, "x", (("kvstore-error", "annotations"),))
    )
    assert type(back) is ProtocolError
