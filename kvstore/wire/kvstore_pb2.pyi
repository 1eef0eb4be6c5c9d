# Generated from proto sources with BLAKE2b 23715cd01bcbbd04fc7460ebf82120ca
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_LANDED: _ClassVar[Durability]
    DURABILITY_WRITTEN: _ClassVar[Durability]
    DURABILITY_SYNCED: _ClassVar[Durability]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_UNKNOWN: _ClassVar[MissReason]
    MISS_REASON_CORRUPT: _ClassVar[MissReason]
    MISS_REASON_LAYOUT: _ClassVar[MissReason]
    MISS_REASON_EXPIRED: _ClassVar[MissReason]
    MISS_REASON_LENGTH: _ClassVar[MissReason]
    MISS_REASON_UNREADABLE: _ClassVar[MissReason]
    MISS_REASON_NODE_AWAY: _ClassVar[MissReason]
    MISS_REASON_BUSY: _ClassVar[MissReason]
    MISS_REASON_EVICTED: _ClassVar[MissReason]
    MISS_REASON_QUOTA: _ClassVar[MissReason]
    MISS_REASON_ERASED: _ClassVar[MissReason]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_OVERLOADED: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_AUTHENTICATED: _ClassVar[ErrorCode]
    ERROR_CODE_TENANT_DENIED: _ClassVar[ErrorCode]
    ERROR_CODE_PROTOCOL_ERROR: _ClassVar[ErrorCode]
    ERROR_CODE_ADDRESS_REFUSED: _ClassVar[ErrorCode]
    ERROR_CODE_LEASE_EXPIRED: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_STORAGE_ERROR: _ClassVar[ErrorCode]
    ERROR_CODE_NO_SPACE: _ClassVar[ErrorCode]
    ERROR_CODE_EXPIRED: _ClassVar[ErrorCode]
    ERROR_CODE_QUOTA_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_KEY_TAKEN: _ClassVar[ErrorCode]
    ERROR_CODE_CORRUPT: _ClassVar[ErrorCode]
    ERROR_CODE_NO_SESSION: _ClassVar[ErrorCode]
    ERROR_CODE_SESSION_REFUSED: _ClassVar[ErrorCode]
    ERROR_CODE_READ_ONLY: _ClassVar[ErrorCode]
    ERROR_CODE_FABRIC_ERROR: _ClassVar[ErrorCode]
    ERROR_CODE_NO_MEMORY: _ClassVar[ErrorCode]
    ERROR_CODE_DOMAIN_REQUIRED: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_ENCRYPTED: _ClassVar[ErrorCode]
    ERROR_CODE_BEING_ERASED: _ClassVar[ErrorCode]
DURABILITY_UNSPECIFIED: Durability
DURABILITY_LANDED: Durability
DURABILITY_WRITTEN: Durability
DURABILITY_SYNCED: Durability
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_UNKNOWN: MissReason
MISS_REASON_CORRUPT: MissReason
MISS_REASON_LAYOUT: MissReason
MISS_REASON_EXPIRED: MissReason
MISS_REASON_LENGTH: MissReason
MISS_REASON_UNREADABLE: MissReason
MISS_REASON_NODE_AWAY: MissReason
MISS_REASON_BUSY: MissReason
MISS_REASON_EVICTED: MissReason
MISS_REASON_QUOTA: MissReason
MISS_REASON_ERASED: MissReason
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_OVERLOADED: ErrorCode
ERROR_CODE_NOT_AUTHENTICATED: ErrorCode
ERROR_CODE_TENANT_DENIED: ErrorCode
ERROR_CODE_PROTOCOL_ERROR: ErrorCode
ERROR_CODE_ADDRESS_REFUSED: ErrorCode
ERROR_CODE_LEASE_EXPIRED: ErrorCode
ERROR_CODE_DEADLINE_EXCEEDED: ErrorCode
ERROR_CODE_STORAGE_ERROR: ErrorCode
ERROR_CODE_NO_SPACE: ErrorCode
ERROR_CODE_EXPIRED: ErrorCode
ERROR_CODE_QUOTA_EXCEEDED: ErrorCode
ERROR_CODE_KEY_TAKEN: ErrorCode
ERROR_CODE_CORRUPT: ErrorCode
ERROR_CODE_NO_SESSION: ErrorCode
ERROR_CODE_SESSION_REFUSED: ErrorCode
ERROR_CODE_READ_ONLY: ErrorCode
ERROR_CODE_FABRIC_ERROR: ErrorCode
ERROR_CODE_NO_MEMORY: ErrorCode
ERROR_CODE_DOMAIN_REQUIRED: ErrorCode
ERROR_CODE_NOT_ENCRYPTED: ErrorCode
ERROR_CODE_BEING_ERASED: ErrorCode

class AttachRequest(_message.Message):
    __slots__ = ("tenant", "provider", "fabric_address", "ack_base", "ack_key", "ack_words", "block_bytes_max", "slots", "answers_base", "puts_by_grants", "seals", "shares", "reads_directory", "looks_in_rows")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    FABRIC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ACK_BASE_FIELD_NUMBER: _ClassVar[int]
    ACK_KEY_FIELD_NUMBER: _ClassVar[int]
    ACK_WORDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_BASE_FIELD_NUMBER: _ClassVar[int]
    PUTS_BY_GRANTS_FIELD_NUMBER: _ClassVar[int]
    SEALS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    READS_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    LOOKS_IN_ROWS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    provider: str
    fabric_address: bytes
    ack_base: int
    ack_key: int
    ack_words: int
    block_bytes_max: int
    slots: int
    answers_base: int
    puts_by_grants: bool
    seals: bool
    shares: bool
    reads_directory: bool
    looks_in_rows: bool
    def __init__(self, tenant: _Optional[str] = ..., provider: _Optional[str] = ..., fabric_address: _Optional[bytes] = ..., ack_base: _Optional[int] = ..., ack_key: _Optional[int] = ..., ack_words: _Optional[int] = ..., block_bytes_max: _Optional[int] = ..., slots: _Optional[int] = ..., answers_base: _Optional[int] = ..., puts_by_grants: bool = ..., seals: bool = ..., shares: bool = ..., reads_directory: bool = ..., looks_in_rows: bool = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("connection", "node", "fabric_address", "slots", "landing_key", "calls", "puts", "parts", "seal", "shared", "encrypts", "prefixes")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    FABRIC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LANDING_KEY_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    PUTS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    connection: int
    node: str
    fabric_address: bytes
    slots: int
    landing_key: int
    calls: CallArea
    puts: PutArea
    parts: bool
    seal: bytes
    shared: SharedMemory
    encrypts: bool
    prefixes: bool
    def __init__(self, connection: _Optional[int] = ..., node: _Optional[str] = ..., fabric_address: _Optional[bytes] = ..., slots: _Optional[int] = ..., landing_key: _Optional[int] = ..., calls: _Optional[_Union[CallArea, _Mapping]] = ..., puts: _Optional[_Union[PutArea, _Mapping]] = ..., parts: bool = ..., seal: _Optional[bytes] = ..., shared: _Optional[_Union[SharedMemory, _Mapping]] = ..., encrypts: bool = ..., prefixes: bool = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("socket", "pass_once", "size_bytes", "slots_bytes", "words_offset", "rows_offset", "directory_bytes", "owner", "log_offset")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    PASS_ONCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORDS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROWS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LOG_OFFSET_FIELD_NUMBER: _ClassVar[int]
    socket: str
    pass_once: bytes
    size_bytes: int
    slots_bytes: int
    words_offset: int
    rows_offset: int
    directory_bytes: int
    owner: bytes
    log_offset: int
    def __init__(self, socket: _Optional[str] = ..., pass_once: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., slots_bytes: _Optional[int] = ..., words_offset: _Optional[int] = ..., rows_offset: _Optional[int] = ..., directory_bytes: _Optional[int] = ..., owner: _Optional[bytes] = ..., log_offset: _Optional[int] = ...) -> None: ...

class PutArea(_message.Message):
    __slots__ = ("flags", "slots", "slot_bytes", "key", "count", "first_generation")
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_GENERATION_FIELD_NUMBER: _ClassVar[int]
    flags: int
    slots: int
    slot_bytes: int
    key: int
    count: int
    first_generation: int
    def __init__(self, flags: _Optional[int] = ..., slots: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., key: _Optional[int] = ..., count: _Optional[int] = ..., first_generation: _Optional[int] = ...) -> None: ...

class CallArea(_message.Message):
    __slots__ = ("base", "key", "first_generation")
    BASE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_GENERATION_FIELD_NUMBER: _ClassVar[int]
    base: int
    key: int
    first_generation: int
    def __init__(self, base: _Optional[int] = ..., key: _Optional[int] = ..., first_generation: _Optional[int] = ...) -> None: ...

class BlockName(_message.Message):
    __slots__ = ("key", "fingerprint", "length", "domain")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    fingerprint: bytes
    length: int
    domain: bytes
    def __init__(self, key: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ..., length: _Optional[int] = ..., domain: _Optional[bytes] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("connection", "blocks", "durability", "lease_ms", "expires_unix_ms")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    connection: int
    blocks: _containers.RepeatedCompositeFieldContainer[ReserveBlock]
    durability: Durability
    lease_ms: int
    expires_unix_ms: int
    def __init__(self, connection: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[ReserveBlock, _Mapping]]] = ..., durability: _Optional[_Union[Durability, str]] = ..., lease_ms: _Optional[int] = ..., expires_unix_ms: _Optional[int] = ...) -> None: ...

class ReserveBlock(_message.Message):
    __slots__ = ("name", "ack_word")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACK_WORD_FIELD_NUMBER: _ClassVar[int]
    name: BlockName
    ack_word: int
    def __init__(self, name: _Optional[_Union[BlockName, _Mapping]] = ..., ack_word: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("already_stored", "slot", "payload", "flag", "generation")
    ALREADY_STORED_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    already_stored: bool
    slot: int
    payload: int
    flag: int
    generation: int
    def __init__(self, already_stored: bool = ..., slot: _Optional[int] = ..., payload: _Optional[int] = ..., flag: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class WhyFailedRequest(_message.Message):
    __slots__ = ("connection", "generations")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    connection: int
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, connection: _Optional[int] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class WhyFailedResponse(_message.Message):
    __slots__ = ("puts",)
    PUTS_FIELD_NUMBER: _ClassVar[int]
    puts: _containers.RepeatedCompositeFieldContainer[FailedPut]
    def __init__(self, puts: _Optional[_Iterable[_Union[FailedPut, _Mapping]]] = ...) -> None: ...

class FailedPut(_message.Message):
    __slots__ = ("generation", "name", "sentence", "code")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    name: str
    sentence: str
    code: ErrorCode
    def __init__(self, generation: _Optional[int] = ..., name: _Optional[str] = ..., sentence: _Optional[str] = ..., code: _Optional[_Union[ErrorCode, str]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("connection", "leases")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    connection: int
    leases: _containers.RepeatedCompositeFieldContainer[AbortLease]
    def __init__(self, connection: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[AbortLease, _Mapping]]] = ...) -> None: ...

class AbortLease(_message.Message):
    __slots__ = ("slot", "generation")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("released", "expired")
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    released: int
    expired: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, released: _Optional[int] = ..., expired: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("connection", "blocks")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    connection: int
    blocks: _containers.RepeatedCompositeFieldContainer[FetchBlock]
    def __init__(self, connection: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[FetchBlock, _Mapping]]] = ...) -> None: ...

class FetchBlock(_message.Message):
    __slots__ = ("name", "target", "target_key", "ack_word", "ack_generation", "skip", "part")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TARGET_KEY_FIELD_NUMBER: _ClassVar[int]
    ACK_WORD_FIELD_NUMBER: _ClassVar[int]
    ACK_GENERATION_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    name: BlockName
    target: int
    target_key: int
    ack_word: int
    ack_generation: int
    skip: int
    part: int
    def __init__(self, name: _Optional[_Union[BlockName, _Mapping]] = ..., target: _Optional[int] = ..., target_key: _Optional[int] = ..., ack_word: _Optional[int] = ..., ack_generation: _Optional[int] = ..., skip: _Optional[int] = ..., part: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CancelFetchRequest(_message.Message):
    __slots__ = ("connection", "blocks", "called")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CALLED_FIELD_NUMBER: _ClassVar[int]
    connection: int
    blocks: _containers.RepeatedCompositeFieldContainer[CancelledBlock]
    called: bool
    def __init__(self, connection: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[CancelledBlock, _Mapping]]] = ..., called: bool = ...) -> None: ...

class CancelledBlock(_message.Message):
    __slots__ = ("ack_word", "ack_generation")
    ACK_WORD_FIELD_NUMBER: _ClassVar[int]
    ACK_GENERATION_FIELD_NUMBER: _ClassVar[int]
    ack_word: int
    ack_generation: int
    def __init__(self, ack_word: _Optional[int] = ..., ack_generation: _Optional[int] = ...) -> None: ...

class CancelFetchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("start", "chunk")
    START_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    start: PutStart
    chunk: bytes
    def __init__(self, start: _Optional[_Union[PutStart, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class PutStart(_message.Message):
    __slots__ = ("tenant", "name", "durability", "expires_unix_ms", "is_copy", "read_ms_ago")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    IS_COPY_FIELD_NUMBER: _ClassVar[int]
    READ_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    name: BlockName
    durability: Durability
    expires_unix_ms: int
    is_copy: bool
    read_ms_ago: int
    def __init__(self, tenant: _Optional[str] = ..., name: _Optional[_Union[BlockName, _Mapping]] = ..., durability: _Optional[_Union[Durability, str]] = ..., expires_unix_ms: _Optional[int] = ..., is_copy: bool = ..., read_ms_ago: _Optional[int] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("durability",)
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    durability: Durability
    def __init__(self, durability: _Optional[_Union[Durability, str]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("tenant", "name")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    name: BlockName
    def __init__(self, tenant: _Optional[str] = ..., name: _Optional[_Union[BlockName, _Mapping]] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("miss", "chunk")
    MISS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    miss: GetMiss
    chunk: bytes
    def __init__(self, miss: _Optional[_Union[GetMiss, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class GetMiss(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: MissReason
    detail: str
    def __init__(self, reason: _Optional[_Union[MissReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("node", "version", "provider", "blocks", "capacity_bytes", "free_bytes", "read_only", "connections", "corrupt_found", "index_rebuilt", "drives", "mapped", "encrypted", "keys", "keys_damaged", "master_key")
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FOUND_FIELD_NUMBER: _ClassVar[int]
    INDEX_REBUILT_FIELD_NUMBER: _ClassVar[int]
    DRIVES_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTED_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEYS_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    MASTER_KEY_FIELD_NUMBER: _ClassVar[int]
    node: str
    version: str
    provider: str
    blocks: int
    capacity_bytes: int
    free_bytes: int
    read_only: bool
    connections: int
    corrupt_found: int
    index_rebuilt: bool
    drives: _containers.RepeatedCompositeFieldContainer[DriveStatus]
    mapped: int
    encrypted: bool
    keys: int
    keys_damaged: int
    master_key: str
    def __init__(self, node: _Optional[str] = ..., version: _Optional[str] = ..., provider: _Optional[str] = ..., blocks: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., read_only: bool = ..., connections: _Optional[int] = ..., corrupt_found: _Optional[int] = ..., index_rebuilt: bool = ..., drives: _Optional[_Iterable[_Union[DriveStatus, _Mapping]]] = ..., mapped: _Optional[int] = ..., encrypted: bool = ..., keys: _Optional[int] = ..., keys_damaged: _Optional[int] = ..., master_key: _Optional[str] = ...) -> None: ...

class DriveStatus(_message.Message):
    __slots__ = ("number", "blocks", "capacity_bytes", "free_bytes", "takes_puts", "failure")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAKES_PUTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    number: int
    blocks: int
    capacity_bytes: int
    free_bytes: int
    takes_puts: bool
    failure: str
    def __init__(self, number: _Optional[int] = ..., blocks: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., takes_puts: bool = ..., failure: _Optional[str] = ...) -> None: ...
