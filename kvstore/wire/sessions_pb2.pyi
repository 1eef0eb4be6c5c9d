# Generated from proto sources with BLAKE2b 23715cd01bcbbd04fc7460ebf82120ca
from kvstore.wire import kvstore_pb2 as _kvstore_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionName(_message.Message):
    __slots__ = ("tenant", "user", "session", "map_revision")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAP_REVISION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    user: str
    session: str
    map_revision: int
    def __init__(self, tenant: _Optional[str] = ..., user: _Optional[str] = ..., session: _Optional[str] = ..., map_revision: _Optional[int] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("first_block", "tokens", "began_unix_ms")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    tokens: int
    began_unix_ms: int
    def __init__(self, first_block: _Optional[int] = ..., tokens: _Optional[int] = ..., began_unix_ms: _Optional[int] = ...) -> None: ...

class AppendSessionRequest(_message.Message):
    __slots__ = ("name", "keys", "tokens", "first_block", "continues", "durability", "time_to_live_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_MS_FIELD_NUMBER: _ClassVar[int]
    name: SessionName
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    tokens: int
    first_block: int
    continues: bool
    durability: _kvstore_pb2.Durability
    time_to_live_ms: int
    def __init__(self, name: _Optional[_Union[SessionName, _Mapping]] = ..., keys: _Optional[_Iterable[bytes]] = ..., tokens: _Optional[int] = ..., first_block: _Optional[int] = ..., continues: bool = ..., durability: _Optional[_Union[_kvstore_pb2.Durability, str]] = ..., time_to_live_ms: _Optional[int] = ...) -> None: ...

class AppendSessionResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("name", "first_block", "blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: SessionName
    first_block: int
    blocks: int
    def __init__(self, name: _Optional[_Union[SessionName, _Mapping]] = ..., first_block: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("blocks", "turns", "keys", "expires_unix_ms")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    expires_unix_ms: int
    def __init__(self, blocks: _Optional[int] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., keys: _Optional[_Iterable[bytes]] = ..., expires_unix_ms: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("tenant", "user", "page_size", "page_token", "map_revision")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MAP_REVISION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    user: str
    page_size: int
    page_token: bytes
    map_revision: int
    def __init__(self, tenant: _Optional[str] = ..., user: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[bytes] = ..., map_revision: _Optional[int] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[ListedSession]
    next_page_token: bytes
    def __init__(self, sessions: _Optional[_Iterable[_Union[ListedSession, _Mapping]]] = ..., next_page_token: _Optional[bytes] = ...) -> None: ...

class ListedSession(_message.Message):
    __slots__ = ("session", "blocks", "turns", "tokens", "last_turn_unix_ms", "expires_unix_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_TURN_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    session: str
    blocks: int
    turns: int
    tokens: int
    last_turn_unix_ms: int
    expires_unix_ms: int
    def __init__(self, session: _Optional[str] = ..., blocks: _Optional[int] = ..., turns: _Optional[int] = ..., tokens: _Optional[int] = ..., last_turn_unix_ms: _Optional[int] = ..., expires_unix_ms: _Optional[int] = ...) -> None: ...

class ForkSessionRequest(_message.Message):
    __slots__ = ("source", "name", "blocks", "durability")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    source: SessionName
    name: SessionName
    blocks: int
    durability: _kvstore_pb2.Durability
    def __init__(self, source: _Optional[_Union[SessionName, _Mapping]] = ..., name: _Optional[_Union[SessionName, _Mapping]] = ..., blocks: _Optional[int] = ..., durability: _Optional[_Union[_kvstore_pb2.Durability, str]] = ...) -> None: ...

class ForkSessionResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class TruncateSessionRequest(_message.Message):
    __slots__ = ("name", "blocks", "durability")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    name: SessionName
    blocks: int
    durability: _kvstore_pb2.Durability
    def __init__(self, name: _Optional[_Union[SessionName, _Mapping]] = ..., blocks: _Optional[int] = ..., durability: _Optional[_Union[_kvstore_pb2.Durability, str]] = ...) -> None: ...

class TruncateSessionResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class RemoveSessionRequest(_message.Message):
    __slots__ = ("name", "delete_blocks", "durability")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DELETE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    name: SessionName
    delete_blocks: bool
    durability: _kvstore_pb2.Durability
    def __init__(self, name: _Optional[_Union[SessionName, _Mapping]] = ..., delete_blocks: bool = ..., durability: _Optional[_Union[_kvstore_pb2.Durability, str]] = ...) -> None: ...

class RemoveSessionResponse(_message.Message):
    __slots__ = ("unreferenced", "deleted")
    UNREFERENCED_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    unreferenced: int
    deleted: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, unreferenced: _Optional[int] = ..., deleted: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LimitSessionRequest(_message.Message):
    __slots__ = ("name", "time_to_live_ms", "durability")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_MS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    name: SessionName
    time_to_live_ms: int
    durability: _kvstore_pb2.Durability
    def __init__(self, name: _Optional[_Union[SessionName, _Mapping]] = ..., time_to_live_ms: _Optional[int] = ..., durability: _Optional[_Union[_kvstore_pb2.Durability, str]] = ...) -> None: ...

class LimitSessionResponse(_message.Message):
    __slots__ = ("expires_unix_ms",)
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    expires_unix_ms: int
    def __init__(self, expires_unix_ms: _Optional[int] = ...) -> None: ...

class ProtectSessionRequest(_message.Message):
    __slots__ = ("name", "blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: SessionName
    blocks: int
    def __init__(self, name: _Optional[_Union[SessionName, _Mapping]] = ..., blocks: _Optional[int] = ...) -> None: ...

class ProtectSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnprotectSessionRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: SessionName
    def __init__(self, name: _Optional[_Union[SessionName, _Mapping]] = ...) -> None: ...

class UnprotectSessionResponse(_message.Message):
    __slots__ = ("was_protected",)
    WAS_PROTECTED_FIELD_NUMBER: _ClassVar[int]
    was_protected: bool
    def __init__(self, was_protected: bool = ...) -> None: ...

class PrefetchSessionRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: SessionName
    def __init__(self, name: _Optional[_Union[SessionName, _Mapping]] = ...) -> None: ...

class PrefetchSessionResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class GetStandbyRequest(_message.Message):
    __slots__ = ("tenant", "user", "map_revision", "away_node")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    MAP_REVISION_FIELD_NUMBER: _ClassVar[int]
    AWAY_NODE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    user: str
    map_revision: int
    away_node: str
    def __init__(self, tenant: _Optional[str] = ..., user: _Optional[str] = ..., map_revision: _Optional[int] = ..., away_node: _Optional[str] = ...) -> None: ...

class GetStandbyResponse(_message.Message):
    __slots__ = ("name", "standby_node", "standby_name")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STANDBY_NODE_FIELD_NUMBER: _ClassVar[int]
    STANDBY_NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    standby_node: str
    standby_name: str
    def __init__(self, name: _Optional[str] = ..., standby_node: _Optional[str] = ..., standby_name: _Optional[str] = ...) -> None: ...
