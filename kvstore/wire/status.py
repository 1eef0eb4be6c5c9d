"""The error tree in gRPC: a status code for all clients, and the error's own name for ours."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

import grpc

from kvstore import errors
from kvstore.errors import KvError
from kvstore.wire import kvstore_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CALLER",
    "ERROR_NAME",
    "RETRY_AFTER_MS",
    "code_of",
    "error_from_rpc",
    "error_named",
    "status_of",
    "trailers_of",
    "words_of",
]

_WAS_THERE = (
    "Stream removed",
    "Socket closed",
    "recvmsg",
    "ping timeout",
    "Connection reset",
    "GOAWAY",
    "Broken pipe",
)

_BEFORE_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")
ERROR_NAME = "kvstore-error"
RETRY_AFTER_MS = "kvstore-retry-after-ms"
CALLER = "kvstore-caller"

# The first entry that the error is an instance of counts.
_STATUS: tuple[tuple[type[KvError], grpc.StatusCode], ...] = (
    (errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.NotAuthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (errors.TenantDenied, grpc.StatusCode.PERMISSION_DENIED),
    (errors.ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.NoSpace, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.QuotaExceeded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Expired, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NoSession, grpc.StatusCode.NOT_FOUND),
    (errors.WrongEpoch, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.SessionRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ReadOnly, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.BeingErased, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.NotEncrypted, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.DomainRequired, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.KeyTaken, grpc.StatusCode.ALREADY_EXISTS),
    (errors.Corrupt, grpc.StatusCode.DATA_LOSS),
    (KvError, grpc.StatusCode.INTERNAL),
)


def status_of(error: KvError) -> grpc.StatusCode:
    """The status code of an error."""
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def trailers_of(error: KvError) -> tuple[tuple[str, str], ...]:
    """The trailers of the status, for a client that knows our error tree."""
    trailers = [(ERROR_NAME, type(error).__name__)]
    if isinstance(error, errors.Overloaded):
        trailers.append((RETRY_AFTER_MS, str(error.retry_after_ms)))
    if isinstance(error, errors.AddressRefused):
        trailers.append((CALLER, error.caller))
    return tuple(trailers)


def code_of(error: KvError) -> kvstore_pb2.ErrorCode:
    """The number of its kind, or of the nearest kind above it that has one."""
    for kind in type(error).__mro__:
        name = "ERROR_CODE_" + _BEFORE_CAPITAL.sub("_", kind.__name__).upper()
        if name in kvstore_pb2.ErrorCode.keys():  # noqa: SIM118 - it is no dictionary
            return cast("kvstore_pb2.ErrorCode", kvstore_pb2.ErrorCode.Value(name))
    return kvstore_pb2.ERROR_CODE_UNSPECIFIED


def error_named(name: str, sentence: str, retry_after_ms: int) -> KvError:
    """The error of this name; a newer node's error that is unknown here is a StorageError."""
    kind = _kind(name) or errors.StorageError
    return errors.Overloaded(sentence, retry_after_ms) if kind is errors.Overloaded else kind(sentence)


def error_from_rpc(doing: str, failure: grpc.RpcError) -> KvError:
    """The error that a failed call stands for."""
    code = failure.code() if isinstance(failure, grpc.Call) else grpc.StatusCode.UNKNOWN
    detail = words_of(failure)
    trailers = _trailers(failure)
    if trailers.get(ERROR_NAME) == errors.AddressRefused.__name__:
        return errors.AddressRefused(detail, trailers.get(CALLER, ""))
    if _kind(trailers.get(ERROR_NAME, "")) is not None:
        return error_named(trailers[ERROR_NAME], detail, int(trailers.get(RETRY_AFTER_MS, "50")))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"{doing} was not answered in time.")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return errors.NodeUnavailable(f"{doing} failed: {detail}.")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.ProtocolError(
            f"{doing} failed: the other end does not know this call. It is not a node, or an older one."
        )
    return errors.ProtocolError(f"{doing} was refused: {detail or code.name.lower()}.")


def words_of(failure: grpc.RpcError) -> str:
    """The details of a failed call; without a connection, a plain phrase instead of gRPC's internals."""
    if not isinstance(failure, grpc.Call):
        return ""
    detail = failure.details() or ""
    if failure.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return detail
    if any(word in detail for word in _WAS_THERE):
        return "the connection to the node was lost"
    return "no connection to the node"


def _kind(name: str) -> type[KvError] | None:
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, KvError) else None


def _trailers(failure: grpc.RpcError) -> dict[str, str]:
    if not isinstance(failure, grpc.Call):
        return {}
    pairs: Sequence[tuple[str, str | bytes]] = failure.trailing_metadata() or ()
    return {name: value for name, value in pairs if isinstance(value, str)}
