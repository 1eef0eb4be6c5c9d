# Generated from proto sources with BLAKE2b 23715cd01bcbbd04fc7460ebf82120ca
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EraseUserRequest(_message.Message):
    __slots__ = ("tenant", "user")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    user: str
    def __init__(self, tenant: _Optional[str] = ..., user: _Optional[str] = ...) -> None: ...

class EraseTenantRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class EraseUserResponse(_message.Message):
    __slots__ = ("erased",)
    ERASED_FIELD_NUMBER: _ClassVar[int]
    erased: Erased
    def __init__(self, erased: _Optional[_Union[Erased, _Mapping]] = ...) -> None: ...

class EraseTenantResponse(_message.Message):
    __slots__ = ("erased",)
    ERASED_FIELD_NUMBER: _ClassVar[int]
    erased: Erased
    def __init__(self, erased: _Optional[_Union[Erased, _Mapping]] = ...) -> None: ...

class Erased(_message.Message):
    __slots__ = ("at_unix_ms", "blocks", "bytes", "sessions", "keys", "receipt", "members_digest", "node")
    AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    at_unix_ms: int
    blocks: int
    bytes: int
    sessions: int
    keys: int
    receipt: str
    members_digest: int
    node: str
    def __init__(self, at_unix_ms: _Optional[int] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., sessions: _Optional[int] = ..., keys: _Optional[int] = ..., receipt: _Optional[str] = ..., members_digest: _Optional[int] = ..., node: _Optional[str] = ...) -> None: ...
