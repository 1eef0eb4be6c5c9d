# Generated from proto sources with BLAKE2b 1cb882bca73e51e4b2dc0041b00e3dab
from kvstore.wire import kvstore_pb2 as _kvstore_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Offered(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OFFERED_UNSPECIFIED: _ClassVar[Offered]
    OFFERED_STORED: _ClassVar[Offered]
    OFFERED_STORED_SURELY: _ClassVar[Offered]
    OFFERED_MISSING: _ClassVar[Offered]
    OFFERED_WANTED: _ClassVar[Offered]
    OFFERED_FULL: _ClassVar[Offered]
OFFERED_UNSPECIFIED: Offered
OFFERED_STORED: Offered
OFFERED_STORED_SURELY: Offered
OFFERED_MISSING: Offered
OFFERED_WANTED: Offered
OFFERED_FULL: Offered

class ForgetRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ForgetResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("undo",)
    UNDO_FIELD_NUMBER: _ClassVar[int]
    undo: bool
    def __init__(self, undo: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("looked", "left", "unsure", "full", "copied_blocks")
    LOOKED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    UNSURE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    looked: bool
    left: int
    unsure: int
    full: int
    copied_blocks: int
    def __init__(self, looked: bool = ..., left: _Optional[int] = ..., unsure: _Optional[int] = ..., full: _Optional[int] = ..., copied_blocks: _Optional[int] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("node", "lease", "tenant", "blocks")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    node: str
    lease: int
    tenant: str
    blocks: _containers.RepeatedCompositeFieldContainer[OfferedBlock]
    def __init__(self, node: _Optional[str] = ..., lease: _Optional[int] = ..., tenant: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[OfferedBlock, _Mapping]]] = ...) -> None: ...

class OfferedBlock(_message.Message):
    __slots__ = ("key", "length", "surely")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SURELY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    length: int
    surely: bool
    def __init__(self, key: _Optional[bytes] = ..., length: _Optional[int] = ..., surely: bool = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("refused", "lease", "ticket", "blocks")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    refused: str
    lease: int
    ticket: int
    blocks: _containers.RepeatedScalarFieldContainer[Offered]
    def __init__(self, refused: _Optional[str] = ..., lease: _Optional[int] = ..., ticket: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Offered, str]]] = ...) -> None: ...

class CopyRequest(_message.Message):
    __slots__ = ("start", "chunk")
    START_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    start: CopyStart
    chunk: bytes
    def __init__(self, start: _Optional[_Union[CopyStart, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class CopyStart(_message.Message):
    __slots__ = ("ticket", "tenant", "name", "expires_unix_ms", "crc32c")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    tenant: str
    name: _kvstore_pb2.BlockName
    expires_unix_ms: int
    crc32c: int
    def __init__(self, ticket: _Optional[int] = ..., tenant: _Optional[str] = ..., name: _Optional[_Union[_kvstore_pb2.BlockName, _Mapping]] = ..., expires_unix_ms: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class CopyResponse(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: bool
    def __init__(self, kept: bool = ...) -> None: ...
