# Generated from proto sources with BLAKE2b 23715cd01bcbbd04fc7460ebf82120ca
from kvstore.wire import blocks_pb2 as _blocks_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatisticsRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class StatisticsResponse(_message.Message):
    __slots__ = ("puts", "put_bytes", "puts_failed", "hits_memory", "hits_drive", "got_bytes", "misses", "evictions", "refused", "syncs", "quarantined", "leased", "landed", "leases_expired", "puts_key_taken", "uptime_ms", "blocks", "capacity_bytes", "free_bytes", "connections", "leases", "pins", "watchers", "fetches_waiting", "puts_waiting", "puts_waiting_for_room", "puts_waiting_for_quota", "gets_waiting", "deletes_waiting", "session_steps_waiting", "wipes_waiting", "memory_bytes", "memory_kept_bytes", "sessions_protected", "takes_puts", "blocks_doubted", "quota_bytes", "quota_used_bytes")
    PUTS_FIELD_NUMBER: _ClassVar[int]
    PUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    HITS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    HITS_DRIVE_FIELD_NUMBER: _ClassVar[int]
    GOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SYNCS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    LEASES_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    PUTS_KEY_TAKEN_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_WAITING_FIELD_NUMBER: _ClassVar[int]
    PUTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    PUTS_WAITING_FOR_ROOM_FIELD_NUMBER: _ClassVar[int]
    PUTS_WAITING_FOR_QUOTA_FIELD_NUMBER: _ClassVar[int]
    GETS_WAITING_FIELD_NUMBER: _ClassVar[int]
    DELETES_WAITING_FIELD_NUMBER: _ClassVar[int]
    SESSION_STEPS_WAITING_FIELD_NUMBER: _ClassVar[int]
    WIPES_WAITING_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_PROTECTED_FIELD_NUMBER: _ClassVar[int]
    TAKES_PUTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DOUBTED_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    puts: int
    put_bytes: int
    puts_failed: int
    hits_memory: int
    hits_drive: int
    got_bytes: int
    misses: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    evictions: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    refused: int
    syncs: int
    quarantined: int
    leased: int
    landed: int
    leases_expired: int
    puts_key_taken: int
    uptime_ms: int
    blocks: int
    capacity_bytes: int
    free_bytes: int
    connections: int
    leases: int
    pins: int
    watchers: int
    fetches_waiting: int
    puts_waiting: int
    puts_waiting_for_room: int
    puts_waiting_for_quota: int
    gets_waiting: int
    deletes_waiting: int
    session_steps_waiting: int
    wipes_waiting: int
    memory_bytes: int
    memory_kept_bytes: int
    sessions_protected: int
    takes_puts: bool
    blocks_doubted: int
    quota_bytes: int
    quota_used_bytes: int
    def __init__(self, puts: _Optional[int] = ..., put_bytes: _Optional[int] = ..., puts_failed: _Optional[int] = ..., hits_memory: _Optional[int] = ..., hits_drive: _Optional[int] = ..., got_bytes: _Optional[int] = ..., misses: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., evictions: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., refused: _Optional[int] = ..., syncs: _Optional[int] = ..., quarantined: _Optional[int] = ..., leased: _Optional[int] = ..., landed: _Optional[int] = ..., leases_expired: _Optional[int] = ..., puts_key_taken: _Optional[int] = ..., uptime_ms: _Optional[int] = ..., blocks: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., connections: _Optional[int] = ..., leases: _Optional[int] = ..., pins: _Optional[int] = ..., watchers: _Optional[int] = ..., fetches_waiting: _Optional[int] = ..., puts_waiting: _Optional[int] = ..., puts_waiting_for_room: _Optional[int] = ..., puts_waiting_for_quota: _Optional[int] = ..., gets_waiting: _Optional[int] = ..., deletes_waiting: _Optional[int] = ..., session_steps_waiting: _Optional[int] = ..., wipes_waiting: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., memory_kept_bytes: _Optional[int] = ..., sessions_protected: _Optional[int] = ..., takes_puts: bool = ..., blocks_doubted: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., quota_used_bytes: _Optional[int] = ...) -> None: ...

class ReasonCount(_message.Message):
    __slots__ = ("reason", "blocks")
    REASON_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    reason: int
    blocks: int
    def __init__(self, reason: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("events", "dropped")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    dropped: int
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., dropped: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("at_unix_ms", "stored", "gone", "session")
    AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    at_unix_ms: int
    stored: BlockStored
    gone: BlockGone
    session: SessionChanged
    def __init__(self, at_unix_ms: _Optional[int] = ..., stored: _Optional[_Union[BlockStored, _Mapping]] = ..., gone: _Optional[_Union[BlockGone, _Mapping]] = ..., session: _Optional[_Union[SessionChanged, _Mapping]] = ...) -> None: ...

class BlockStored(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: _Optional[bytes] = ...) -> None: ...

class BlockGone(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    reason: _blocks_pb2.GoneReason
    def __init__(self, key: _Optional[bytes] = ..., reason: _Optional[_Union[_blocks_pb2.GoneReason, str]] = ...) -> None: ...

class SessionChanged(_message.Message):
    __slots__ = ("user", "session", "blocks", "removed")
    USER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    user: str
    session: str
    blocks: int
    removed: bool
    def __init__(self, user: _Optional[str] = ..., session: _Optional[str] = ..., blocks: _Optional[int] = ..., removed: bool = ...) -> None: ...
