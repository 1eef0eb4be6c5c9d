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

class Offered(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OFFERED_UNSPECIFIED: _ClassVar[Offered]
    OFFERED_STORED: _ClassVar[Offered]
    OFFERED_STORED_SURELY: _ClassVar[Offered]
    OFFERED_MISSING: _ClassVar[Offered]
    OFFERED_WANTED: _ClassVar[Offered]
    OFFERED_FULL: _ClassVar[Offered]
    OFFERED_UNWANTED: _ClassVar[Offered]
OFFERED_UNSPECIFIED: Offered
OFFERED_STORED: Offered
OFFERED_STORED_SURELY: Offered
OFFERED_MISSING: Offered
OFFERED_WANTED: Offered
OFFERED_FULL: Offered
OFFERED_UNWANTED: Offered

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
    __slots__ = ("undo", "has_begun")
    UNDO_FIELD_NUMBER: _ClassVar[int]
    HAS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    undo: bool
    has_begun: bool
    def __init__(self, undo: bool = ..., has_begun: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("looked", "left", "unsure", "full", "copied_blocks", "users_left", "unnamed_sessions")
    LOOKED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    UNSURE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USERS_LEFT_FIELD_NUMBER: _ClassVar[int]
    UNNAMED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    looked: bool
    left: int
    unsure: int
    full: int
    copied_blocks: int
    users_left: int
    unnamed_sessions: int
    def __init__(self, looked: bool = ..., left: _Optional[int] = ..., unsure: _Optional[int] = ..., full: _Optional[int] = ..., copied_blocks: _Optional[int] = ..., users_left: _Optional[int] = ..., unnamed_sessions: _Optional[int] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("node", "lease", "tenant", "blocks", "moved")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    node: str
    lease: int
    tenant: str
    blocks: _containers.RepeatedCompositeFieldContainer[OfferedBlock]
    moved: bool
    def __init__(self, node: _Optional[str] = ..., lease: _Optional[int] = ..., tenant: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[OfferedBlock, _Mapping]]] = ..., moved: bool = ...) -> None: ...

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

class TakeSessionsRequest(_message.Message):
    __slots__ = ("tenant", "user")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    user: str
    def __init__(self, tenant: _Optional[str] = ..., user: _Optional[str] = ...) -> None: ...

class TakeSessionsResponse(_message.Message):
    __slots__ = ("refused", "epoch")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    refused: str
    epoch: int
    def __init__(self, refused: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class SendSessionsRequest(_message.Message):
    __slots__ = ("node", "ticket", "tenant", "user", "epoch", "history")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    node: str
    ticket: int
    tenant: str
    user: str
    epoch: int
    history: str
    def __init__(self, node: _Optional[str] = ..., ticket: _Optional[int] = ..., tenant: _Optional[str] = ..., user: _Optional[str] = ..., epoch: _Optional[int] = ..., history: _Optional[str] = ...) -> None: ...

class SendSessionsResponse(_message.Message):
    __slots__ = ("earlier_node", "earlier_epoch", "is_partial", "earlier_standby", "earlier_copies", "lot")
    EARLIER_NODE_FIELD_NUMBER: _ClassVar[int]
    EARLIER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    EARLIER_STANDBY_FIELD_NUMBER: _ClassVar[int]
    EARLIER_COPIES_FIELD_NUMBER: _ClassVar[int]
    LOT_FIELD_NUMBER: _ClassVar[int]
    earlier_node: str
    earlier_epoch: int
    is_partial: bool
    earlier_standby: str
    earlier_copies: int
    lot: TakenOver
    def __init__(self, earlier_node: _Optional[str] = ..., earlier_epoch: _Optional[int] = ..., is_partial: bool = ..., earlier_standby: _Optional[str] = ..., earlier_copies: _Optional[int] = ..., lot: _Optional[_Union[TakenOver, _Mapping]] = ...) -> None: ...

class TakenOver(_message.Message):
    __slots__ = ("earlier_node", "earlier_epoch", "earlier_standby", "earlier_copies", "taken")
    EARLIER_NODE_FIELD_NUMBER: _ClassVar[int]
    EARLIER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EARLIER_STANDBY_FIELD_NUMBER: _ClassVar[int]
    EARLIER_COPIES_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    earlier_node: str
    earlier_epoch: int
    earlier_standby: str
    earlier_copies: int
    taken: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, earlier_node: _Optional[str] = ..., earlier_epoch: _Optional[int] = ..., earlier_standby: _Optional[str] = ..., earlier_copies: _Optional[int] = ..., taken: _Optional[_Iterable[str]] = ...) -> None: ...

class TakeSessionRequest(_message.Message):
    __slots__ = ("ticket", "session", "keys", "turns", "expires_unix_ms", "deleted", "protected_blocks")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    session: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    turns: _containers.RepeatedCompositeFieldContainer[_sessions_pb2.Turn]
    expires_unix_ms: int
    deleted: _containers.RepeatedScalarFieldContainer[bytes]
    protected_blocks: int
    def __init__(self, ticket: _Optional[int] = ..., session: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., turns: _Optional[_Iterable[_Union[_sessions_pb2.Turn, _Mapping]]] = ..., expires_unix_ms: _Optional[int] = ..., deleted: _Optional[_Iterable[bytes]] = ..., protected_blocks: _Optional[int] = ...) -> None: ...

class TakeSessionResponse(_message.Message):
    __slots__ = ("taken",)
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    taken: bool
    def __init__(self, taken: bool = ...) -> None: ...

class FollowSessionsRequest(_message.Message):
    __slots__ = ("node", "lease", "lot", "epoch", "copies", "earlier_node", "earlier_epoch", "earlier_standby", "earlier_copies", "taken", "history")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LOT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    EARLIER_NODE_FIELD_NUMBER: _ClassVar[int]
    EARLIER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EARLIER_STANDBY_FIELD_NUMBER: _ClassVar[int]
    EARLIER_COPIES_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    node: str
    lease: int
    lot: int
    epoch: int
    copies: int
    earlier_node: str
    earlier_epoch: int
    earlier_standby: str
    earlier_copies: int
    taken: _containers.RepeatedScalarFieldContainer[str]
    history: str
    def __init__(self, node: _Optional[str] = ..., lease: _Optional[int] = ..., lot: _Optional[int] = ..., epoch: _Optional[int] = ..., copies: _Optional[int] = ..., earlier_node: _Optional[str] = ..., earlier_epoch: _Optional[int] = ..., earlier_standby: _Optional[str] = ..., earlier_copies: _Optional[int] = ..., taken: _Optional[_Iterable[str]] = ..., history: _Optional[str] = ...) -> None: ...

class FollowSessionsResponse(_message.Message):
    __slots__ = ("refused", "ticket")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    refused: str
    ticket: int
    def __init__(self, refused: _Optional[str] = ..., ticket: _Optional[int] = ...) -> None: ...

class SessionCopy(_message.Message):
    __slots__ = ("ticket", "tenant", "user", "session", "removed", "first_block", "last_key", "keys", "first_turn", "turns", "expires_unix_ms", "protected_blocks", "deleted", "is_list", "listed", "delete_blocks", "is_complete")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    LAST_KEY_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TURN_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    IS_LIST_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    DELETE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    tenant: str
    user: str
    session: str
    removed: bool
    first_block: int
    last_key: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    first_turn: int
    turns: _containers.RepeatedCompositeFieldContainer[_sessions_pb2.Turn]
    expires_unix_ms: int
    protected_blocks: int
    deleted: _containers.RepeatedScalarFieldContainer[bytes]
    is_list: bool
    listed: _containers.RepeatedScalarFieldContainer[str]
    delete_blocks: bool
    is_complete: bool
    def __init__(self, ticket: _Optional[int] = ..., tenant: _Optional[str] = ..., user: _Optional[str] = ..., session: _Optional[str] = ..., removed: bool = ..., first_block: _Optional[int] = ..., last_key: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., first_turn: _Optional[int] = ..., turns: _Optional[_Iterable[_Union[_sessions_pb2.Turn, _Mapping]]] = ..., expires_unix_ms: _Optional[int] = ..., protected_blocks: _Optional[int] = ..., deleted: _Optional[_Iterable[bytes]] = ..., is_list: bool = ..., listed: _Optional[_Iterable[str]] = ..., delete_blocks: bool = ..., is_complete: bool = ...) -> None: ...

class CopySessionsRequest(_message.Message):
    __slots__ = ("copies",)
    COPIES_FIELD_NUMBER: _ClassVar[int]
    copies: _containers.RepeatedCompositeFieldContainer[SessionCopy]
    def __init__(self, copies: _Optional[_Iterable[_Union[SessionCopy, _Mapping]]] = ...) -> None: ...

class CopySessionsResponse(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, kept: _Optional[_Iterable[bool]] = ...) -> None: ...

class DeleteCopiesRequest(_message.Message):
    __slots__ = ("tenant", "keys")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tenant: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DeleteCopiesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
