# Generated from proto sources with BLAKE2b 23715cd01bcbbd04fc7460ebf82120ca
from kvstore.wire import kvstore_pb2 as _kvstore_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GoneReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GONE_REASON_UNSPECIFIED: _ClassVar[GoneReason]
    GONE_REASON_SPACE: _ClassVar[GoneReason]
    GONE_REASON_STRANDED: _ClassVar[GoneReason]
    GONE_REASON_EXPIRED: _ClassVar[GoneReason]
    GONE_REASON_SUPERSEDED: _ClassVar[GoneReason]
    GONE_REASON_DELETED: _ClassVar[GoneReason]
    GONE_REASON_QUARANTINED: _ClassVar[GoneReason]
    GONE_REASON_CLEARED: _ClassVar[GoneReason]
    GONE_REASON_QUOTA: _ClassVar[GoneReason]
    GONE_REASON_ERASED: _ClassVar[GoneReason]
GONE_REASON_UNSPECIFIED: GoneReason
GONE_REASON_SPACE: GoneReason
GONE_REASON_STRANDED: GoneReason
GONE_REASON_EXPIRED: GoneReason
GONE_REASON_SUPERSEDED: GoneReason
GONE_REASON_DELETED: GoneReason
GONE_REASON_QUARANTINED: GoneReason
GONE_REASON_CLEARED: GoneReason
GONE_REASON_QUOTA: GoneReason
GONE_REASON_ERASED: GoneReason

class ExistsRequest(_message.Message):
    __slots__ = ("tenant", "blocks")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    blocks: _containers.RepeatedCompositeFieldContainer[_kvstore_pb2.BlockName]
    def __init__(self, tenant: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[_kvstore_pb2.BlockName, _Mapping]]] = ...) -> None: ...

class ExistsResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockState]
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockState, _Mapping]]] = ...) -> None: ...

class BlockState(_message.Message):
    __slots__ = ("stored", "length", "expires_unix_ms", "miss", "fingerprint")
    STORED_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    stored: bool
    length: int
    expires_unix_ms: int
    miss: _kvstore_pb2.GetMiss
    fingerprint: bytes
    def __init__(self, stored: bool = ..., length: _Optional[int] = ..., expires_unix_ms: _Optional[int] = ..., miss: _Optional[_Union[_kvstore_pb2.GetMiss, _Mapping]] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class PrefixRequest(_message.Message):
    __slots__ = ("tenant", "fingerprint", "keys")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    fingerprint: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tenant: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PrefixResponse(_message.Message):
    __slots__ = ("blocks", "miss")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    miss: _kvstore_pb2.GetMiss
    def __init__(self, blocks: _Optional[int] = ..., miss: _Optional[_Union[_kvstore_pb2.GetMiss, _Mapping]] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("tenant", "keys", "durability", "user", "session")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    durability: _kvstore_pb2.Durability
    user: str
    session: str
    def __init__(self, tenant: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., durability: _Optional[_Union[_kvstore_pb2.Durability, str]] = ..., user: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("found", "members_digest", "node")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    found: _containers.RepeatedScalarFieldContainer[bool]
    members_digest: int
    node: str
    def __init__(self, found: _Optional[_Iterable[bool]] = ..., members_digest: _Optional[int] = ..., node: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("tenant", "keys")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tenant: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("explanations",)
    EXPLANATIONS_FIELD_NUMBER: _ClassVar[int]
    explanations: _containers.RepeatedCompositeFieldContainer[Explanation]
    def __init__(self, explanations: _Optional[_Iterable[_Union[Explanation, _Mapping]]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("stored", "gone", "gone_unix_ms", "idle_ms", "sentence")
    STORED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    GONE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    stored: bool
    gone: GoneReason
    gone_unix_ms: int
    idle_ms: int
    sentence: str
    def __init__(self, stored: bool = ..., gone: _Optional[_Union[GoneReason, str]] = ..., gone_unix_ms: _Optional[int] = ..., idle_ms: _Optional[int] = ..., sentence: _Optional[str] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("tenant", "keys", "time_to_live_ms")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_MS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    time_to_live_ms: int
    def __init__(self, tenant: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., time_to_live_ms: _Optional[int] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pin", "time_to_live_ms", "pinned")
    PIN_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_MS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    pin: int
    time_to_live_ms: int
    pinned: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, pin: _Optional[int] = ..., time_to_live_ms: _Optional[int] = ..., pinned: _Optional[_Iterable[bool]] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("tenant", "pins")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    pins: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tenant: _Optional[str] = ..., pins: _Optional[_Iterable[int]] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("ended",)
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ended: int
    def __init__(self, ended: _Optional[int] = ...) -> None: ...
