# Generated from proto sources with BLAKE2b 23715cd01bcbbd04fc7460ebf82120ca
from kvstore.wire import kvstore_pb2 as _kvstore_pb2
from kvstore.wire import sessions_pb2 as _sessions_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Step(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_UNSPECIFIED: _ClassVar[Step]
    STEP_REGISTERED: _ClassVar[Step]
    STEP_LEASED: _ClassVar[Step]
    STEP_ARMED: _ClassVar[Step]
    STEP_FIRED: _ClassVar[Step]
    STEP_LANDED: _ClassVar[Step]
    STEP_KEPT: _ClassVar[Step]
    STEP_APPENDED: _ClassVar[Step]
    STEP_ANSWERED: _ClassVar[Step]
    STEP_SLOT_GIVEN: _ClassVar[Step]
    STEP_ARRIVED: _ClassVar[Step]
    STEP_PREFETCHING: _ClassVar[Step]
    STEP_PREFETCHED: _ClassVar[Step]
    STEP_RESUMING: _ClassVar[Step]
    STEP_FETCHING: _ClassVar[Step]
    STEP_READ: _ClassVar[Step]
    STEP_SENT: _ClassVar[Step]
    STEP_FIRST_USABLE: _ClassVar[Step]
    STEP_WHOLE: _ClassVar[Step]
    STEP_MISSED: _ClassVar[Step]
    STEP_COMPUTED: _ClassVar[Step]
STEP_UNSPECIFIED: Step
STEP_REGISTERED: Step
STEP_LEASED: Step
STEP_ARMED: Step
STEP_FIRED: Step
STEP_LANDED: Step
STEP_KEPT: Step
STEP_APPENDED: Step
STEP_ANSWERED: Step
STEP_SLOT_GIVEN: Step
STEP_ARRIVED: Step
STEP_PREFETCHING: Step
STEP_PREFETCHED: Step
STEP_RESUMING: Step
STEP_FETCHING: Step
STEP_READ: Step
STEP_SENT: Step
STEP_FIRST_USABLE: Step
STEP_WHOLE: Step
STEP_MISSED: Step
STEP_COMPUTED: Step

class PrefetchBlocksRequest(_message.Message):
    __slots__ = ("tenant", "keys")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tenant: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PrefetchBlocksResponse(_message.Message):
    __slots__ = ("in_memory", "unread", "missing")
    IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    in_memory: int
    unread: _containers.RepeatedScalarFieldContainer[bytes]
    missing: _containers.RepeatedCompositeFieldContainer[BlockMiss]
    def __init__(self, in_memory: _Optional[int] = ..., unread: _Optional[_Iterable[bytes]] = ..., missing: _Optional[_Iterable[_Union[BlockMiss, _Mapping]]] = ...) -> None: ...

class BlockMiss(_message.Message):
    __slots__ = ("key", "miss")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    miss: _kvstore_pb2.GetMiss
    def __init__(self, key: _Optional[bytes] = ..., miss: _Optional[_Union[_kvstore_pb2.GetMiss, _Mapping]] = ...) -> None: ...

class ReportStepsRequest(_message.Message):
    __slots__ = ("tenant", "seen")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    seen: SeenByCaller
    def __init__(self, tenant: _Optional[str] = ..., seen: _Optional[_Union[SeenByCaller, _Mapping]] = ...) -> None: ...

class ReportStepsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: _sessions_pb2.SessionName
    def __init__(self, name: _Optional[_Union[_sessions_pb2.SessionName, _Mapping]] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("seen", "now_unix_ms")
    SEEN_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    seen: _containers.RepeatedCompositeFieldContainer[Seen]
    now_unix_ms: int
    def __init__(self, seen: _Optional[_Iterable[_Union[Seen, _Mapping]]] = ..., now_unix_ms: _Optional[int] = ...) -> None: ...

class SeenByCaller(_message.Message):
    __slots__ = ("user", "session", "clock", "sent_ns", "seen")
    USER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    user: str
    session: str
    clock: bytes
    sent_ns: int
    seen: _containers.RepeatedCompositeFieldContainer[Seen]
    def __init__(self, user: _Optional[str] = ..., session: _Optional[str] = ..., clock: _Optional[bytes] = ..., sent_ns: _Optional[int] = ..., seen: _Optional[_Iterable[_Union[Seen, _Mapping]]] = ...) -> None: ...

class Seen(_message.Message):
    __slots__ = ("step", "at_ns", "blocks", "size_bytes", "tokens", "detail", "by_node")
    STEP_FIELD_NUMBER: _ClassVar[int]
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    BY_NODE_FIELD_NUMBER: _ClassVar[int]
    step: Step
    at_ns: int
    blocks: int
    size_bytes: int
    tokens: int
    detail: str
    by_node: bool
    def __init__(self, step: _Optional[_Union[Step, str]] = ..., at_ns: _Optional[int] = ..., blocks: _Optional[int] = ..., size_bytes: _Optional[int] = ..., tokens: _Optional[int] = ..., detail: _Optional[str] = ..., by_node: bool = ...) -> None: ...
