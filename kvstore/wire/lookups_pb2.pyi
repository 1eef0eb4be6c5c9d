# Generated from proto sources with BLAKE2b 23715cd01bcbbd04fc7460ebf82120ca
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LookupKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOOKUP_KIND_UNSPECIFIED: _ClassVar[LookupKind]
    LOOKUP_KIND_EXISTS: _ClassVar[LookupKind]
    LOOKUP_KIND_PREFIX: _ClassVar[LookupKind]
    LOOKUP_KIND_FETCH: _ClassVar[LookupKind]
    LOOKUP_KIND_GET: _ClassVar[LookupKind]
    LOOKUP_KIND_SESSION: _ClassVar[LookupKind]

class LookupOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOOKUP_OUTCOME_UNSPECIFIED: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_MEMORY: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_DRIVE: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_STORED: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_NAMED: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_NEVER: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_EVICTED: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_STRANDED: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_CLEARED: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_EXPIRED: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_QUOTA: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_DELETED: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_CORRUPT: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_LAYOUT: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_LENGTH: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_LEASE_EXPIRED: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_UNREADABLE: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_BUSY: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_NODE_AWAY: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_GIVEN_UP: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_NO_SESSION: _ClassVar[LookupOutcome]
    LOOKUP_OUTCOME_ERASED: _ClassVar[LookupOutcome]
LOOKUP_KIND_UNSPECIFIED: LookupKind
LOOKUP_KIND_EXISTS: LookupKind
LOOKUP_KIND_PREFIX: LookupKind
LOOKUP_KIND_FETCH: LookupKind
LOOKUP_KIND_GET: LookupKind
LOOKUP_KIND_SESSION: LookupKind
LOOKUP_OUTCOME_UNSPECIFIED: LookupOutcome
LOOKUP_OUTCOME_MEMORY: LookupOutcome
LOOKUP_OUTCOME_DRIVE: LookupOutcome
LOOKUP_OUTCOME_STORED: LookupOutcome
LOOKUP_OUTCOME_NAMED: LookupOutcome
LOOKUP_OUTCOME_NEVER: LookupOutcome
LOOKUP_OUTCOME_EVICTED: LookupOutcome
LOOKUP_OUTCOME_STRANDED: LookupOutcome
LOOKUP_OUTCOME_CLEARED: LookupOutcome
LOOKUP_OUTCOME_EXPIRED: LookupOutcome
LOOKUP_OUTCOME_QUOTA: LookupOutcome
LOOKUP_OUTCOME_DELETED: LookupOutcome
LOOKUP_OUTCOME_CORRUPT: LookupOutcome
LOOKUP_OUTCOME_LAYOUT: LookupOutcome
LOOKUP_OUTCOME_LENGTH: LookupOutcome
LOOKUP_OUTCOME_LEASE_EXPIRED: LookupOutcome
LOOKUP_OUTCOME_UNREADABLE: LookupOutcome
LOOKUP_OUTCOME_BUSY: LookupOutcome
LOOKUP_OUTCOME_NODE_AWAY: LookupOutcome
LOOKUP_OUTCOME_GIVEN_UP: LookupOutcome
LOOKUP_OUTCOME_NO_SESSION: LookupOutcome
LOOKUP_OUTCOME_ERASED: LookupOutcome

class ListLookupsRequest(_message.Message):
    __slots__ = ("tenant", "request_id", "user", "session", "last")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    request_id: str
    user: str
    session: str
    last: int
    def __init__(self, tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., user: _Optional[str] = ..., session: _Optional[str] = ..., last: _Optional[int] = ...) -> None: ...

class ListLookupsResponse(_message.Message):
    __slots__ = ("lookups", "now_unix_ms", "remembered", "since_unix_ms", "unwritten")
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    UNWRITTEN_FIELD_NUMBER: _ClassVar[int]
    lookups: _containers.RepeatedCompositeFieldContainer[Lookup]
    now_unix_ms: int
    remembered: int
    since_unix_ms: int
    unwritten: int
    def __init__(self, lookups: _Optional[_Iterable[_Union[Lookup, _Mapping]]] = ..., now_unix_ms: _Optional[int] = ..., remembered: _Optional[int] = ..., since_unix_ms: _Optional[int] = ..., unwritten: _Optional[int] = ...) -> None: ...

class LookupsByCaller(_message.Message):
    __slots__ = ("sent_unix_ms", "lookups")
    SENT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    sent_unix_ms: int
    lookups: _containers.RepeatedCompositeFieldContainer[Lookup]
    def __init__(self, sent_unix_ms: _Optional[int] = ..., lookups: _Optional[_Iterable[_Union[Lookup, _Mapping]]] = ...) -> None: ...

class Lookup(_message.Message):
    __slots__ = ("request_id", "kind", "at_unix_ms", "took_us", "queued_us", "drive_us", "blocks", "size_bytes", "runs", "by_caller", "detail")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    TOOK_US_FIELD_NUMBER: _ClassVar[int]
    QUEUED_US_FIELD_NUMBER: _ClassVar[int]
    DRIVE_US_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    BY_CALLER_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    kind: LookupKind
    at_unix_ms: int
    took_us: int
    queued_us: int
    drive_us: int
    blocks: int
    size_bytes: int
    runs: _containers.RepeatedCompositeFieldContainer[LookupRun]
    by_caller: bool
    detail: str
    def __init__(self, request_id: _Optional[str] = ..., kind: _Optional[_Union[LookupKind, str]] = ..., at_unix_ms: _Optional[int] = ..., took_us: _Optional[int] = ..., queued_us: _Optional[int] = ..., drive_us: _Optional[int] = ..., blocks: _Optional[int] = ..., size_bytes: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[LookupRun, _Mapping]]] = ..., by_caller: bool = ..., detail: _Optional[str] = ...) -> None: ...

class LookupRun(_message.Message):
    __slots__ = ("blocks", "outcome", "gone_unix_ms", "idle_ms")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    GONE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    outcome: LookupOutcome
    gone_unix_ms: int
    idle_ms: int
    def __init__(self, blocks: _Optional[int] = ..., outcome: _Optional[_Union[LookupOutcome, str]] = ..., gone_unix_ms: _Optional[int] = ..., idle_ms: _Optional[int] = ...) -> None: ...
