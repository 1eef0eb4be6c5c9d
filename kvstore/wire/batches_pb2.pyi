# Generated from proto sources with BLAKE2b 23715cd01bcbbd04fc7460ebf82120ca
from kvstore.wire import kvstore_pb2 as _kvstore_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PutBatchRequest(_message.Message):
    __slots__ = ("tenant", "durability", "expires_unix_ms", "parts")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    durability: _kvstore_pb2.Durability
    expires_unix_ms: int
    parts: _containers.RepeatedCompositeFieldContainer[PutPart]
    def __init__(self, tenant: _Optional[str] = ..., durability: _Optional[_Union[_kvstore_pb2.Durability, str]] = ..., expires_unix_ms: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PutPart, _Mapping]]] = ...) -> None: ...

class PutPart(_message.Message):
    __slots__ = ("name", "chunk")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    name: _kvstore_pb2.BlockName
    chunk: bytes
    def __init__(self, name: _Optional[_Union[_kvstore_pb2.BlockName, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class PutBatchResponse(_message.Message):
    __slots__ = ("ends",)
    ENDS_FIELD_NUMBER: _ClassVar[int]
    ends: _containers.RepeatedCompositeFieldContainer[BlockEnd]
    def __init__(self, ends: _Optional[_Iterable[_Union[BlockEnd, _Mapping]]] = ...) -> None: ...

class BlockEnd(_message.Message):
    __slots__ = ("number", "durability", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    durability: _kvstore_pb2.Durability
    error: BlockError
    def __init__(self, number: _Optional[int] = ..., durability: _Optional[_Union[_kvstore_pb2.Durability, str]] = ..., error: _Optional[_Union[BlockError, _Mapping]] = ...) -> None: ...

class BlockError(_message.Message):
    __slots__ = ("name", "sentence", "retry_after_ms", "code")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    name: str
    sentence: str
    retry_after_ms: int
    code: _kvstore_pb2.ErrorCode
    def __init__(self, name: _Optional[str] = ..., sentence: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., code: _Optional[_Union[_kvstore_pb2.ErrorCode, str]] = ...) -> None: ...

class GetBatchRequest(_message.Message):
    __slots__ = ("tenant", "blocks")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    blocks: _containers.RepeatedCompositeFieldContainer[_kvstore_pb2.BlockName]
    def __init__(self, tenant: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[_kvstore_pb2.BlockName, _Mapping]]] = ...) -> None: ...

class GetBatchResponse(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[GetPart]
    def __init__(self, parts: _Optional[_Iterable[_Union[GetPart, _Mapping]]] = ...) -> None: ...

class GetPart(_message.Message):
    __slots__ = ("number", "miss", "chunk")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    number: int
    miss: _kvstore_pb2.GetMiss
    chunk: bytes
    def __init__(self, number: _Optional[int] = ..., miss: _Optional[_Union[_kvstore_pb2.GetMiss, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...
