# Generated from proto sources with BLAKE2b 23715cd01bcbbd04fc7460ebf82120ca
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EtcdHeader(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class EtcdKeyValue(_message.Message):
    __slots__ = ("key", "create_revision", "mod_revision", "value", "lease")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CREATE_REVISION_FIELD_NUMBER: _ClassVar[int]
    MOD_REVISION_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    create_revision: int
    mod_revision: int
    value: bytes
    lease: int
    def __init__(self, key: _Optional[bytes] = ..., create_revision: _Optional[int] = ..., mod_revision: _Optional[int] = ..., value: _Optional[bytes] = ..., lease: _Optional[int] = ...) -> None: ...

class EtcdRangeRequest(_message.Message):
    __slots__ = ("key", "range_end", "limit", "sort_order", "sort_target", "keys_only")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANGE_END_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    SORT_ORDER_FIELD_NUMBER: _ClassVar[int]
    SORT_TARGET_FIELD_NUMBER: _ClassVar[int]
    KEYS_ONLY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    range_end: bytes
    limit: int
    sort_order: int
    sort_target: int
    keys_only: bool
    def __init__(self, key: _Optional[bytes] = ..., range_end: _Optional[bytes] = ..., limit: _Optional[int] = ..., sort_order: _Optional[int] = ..., sort_target: _Optional[int] = ..., keys_only: bool = ...) -> None: ...

class EtcdRangeResponse(_message.Message):
    __slots__ = ("header", "kvs", "count")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KVS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    header: EtcdHeader
    kvs: _containers.RepeatedCompositeFieldContainer[EtcdKeyValue]
    count: int
    def __init__(self, header: _Optional[_Union[EtcdHeader, _Mapping]] = ..., kvs: _Optional[_Iterable[_Union[EtcdKeyValue, _Mapping]]] = ..., count: _Optional[int] = ...) -> None: ...

class EtcdPutRequest(_message.Message):
    __slots__ = ("key", "value", "lease")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    value: bytes
    lease: int
    def __init__(self, key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., lease: _Optional[int] = ...) -> None: ...

class EtcdCompare(_message.Message):
    __slots__ = ("key", "create_revision", "mod_revision", "range_end", "result", "target")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CREATE_REVISION_FIELD_NUMBER: _ClassVar[int]
    MOD_REVISION_FIELD_NUMBER: _ClassVar[int]
    RANGE_END_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    create_revision: int
    mod_revision: int
    range_end: bytes
    result: int
    target: int
    def __init__(self, key: _Optional[bytes] = ..., create_revision: _Optional[int] = ..., mod_revision: _Optional[int] = ..., range_end: _Optional[bytes] = ..., result: _Optional[int] = ..., target: _Optional[int] = ...) -> None: ...

class EtcdDeleteRangeRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: _Optional[bytes] = ...) -> None: ...

class EtcdRequestOp(_message.Message):
    __slots__ = ("request_range", "request_put", "request_delete_range")
    REQUEST_RANGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_PUT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DELETE_RANGE_FIELD_NUMBER: _ClassVar[int]
    request_range: EtcdRangeRequest
    request_put: EtcdPutRequest
    request_delete_range: EtcdDeleteRangeRequest
    def __init__(self, request_range: _Optional[_Union[EtcdRangeRequest, _Mapping]] = ..., request_put: _Optional[_Union[EtcdPutRequest, _Mapping]] = ..., request_delete_range: _Optional[_Union[EtcdDeleteRangeRequest, _Mapping]] = ...) -> None: ...

class EtcdTxnRequest(_message.Message):
    __slots__ = ("compare", "success")
    COMPARE_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    compare: _containers.RepeatedCompositeFieldContainer[EtcdCompare]
    success: _containers.RepeatedCompositeFieldContainer[EtcdRequestOp]
    def __init__(self, compare: _Optional[_Iterable[_Union[EtcdCompare, _Mapping]]] = ..., success: _Optional[_Iterable[_Union[EtcdRequestOp, _Mapping]]] = ...) -> None: ...

class EtcdResponseOp(_message.Message):
    __slots__ = ("response_range",)
    RESPONSE_RANGE_FIELD_NUMBER: _ClassVar[int]
    response_range: EtcdRangeResponse
    def __init__(self, response_range: _Optional[_Union[EtcdRangeResponse, _Mapping]] = ...) -> None: ...

class EtcdTxnResponse(_message.Message):
    __slots__ = ("header", "succeeded", "responses")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    header: EtcdHeader
    succeeded: bool
    responses: _containers.RepeatedCompositeFieldContainer[EtcdResponseOp]
    def __init__(self, header: _Optional[_Union[EtcdHeader, _Mapping]] = ..., succeeded: bool = ..., responses: _Optional[_Iterable[_Union[EtcdResponseOp, _Mapping]]] = ...) -> None: ...

class EtcdLeaseGrantRequest(_message.Message):
    __slots__ = ("ttl_s",)
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    ttl_s: int
    def __init__(self, ttl_s: _Optional[int] = ...) -> None: ...

class EtcdLeaseGrantResponse(_message.Message):
    __slots__ = ("header", "id")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    header: EtcdHeader
    id: int
    def __init__(self, header: _Optional[_Union[EtcdHeader, _Mapping]] = ..., id: _Optional[int] = ...) -> None: ...

class EtcdLeaseRevokeRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class EtcdLeaseRevokeResponse(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: EtcdHeader
    def __init__(self, header: _Optional[_Union[EtcdHeader, _Mapping]] = ...) -> None: ...

class EtcdLeaseKeepAliveRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class EtcdLeaseKeepAliveResponse(_message.Message):
    __slots__ = ("header", "id", "ttl_s")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    header: EtcdHeader
    id: int
    ttl_s: int
    def __init__(self, header: _Optional[_Union[EtcdHeader, _Mapping]] = ..., id: _Optional[int] = ..., ttl_s: _Optional[int] = ...) -> None: ...

class EtcdAuthenticateRequest(_message.Message):
    __slots__ = ("name", "password")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    name: str
    password: str
    def __init__(self, name: _Optional[str] = ..., password: _Optional[str] = ...) -> None: ...

class EtcdAuthenticateResponse(_message.Message):
    __slots__ = ("header", "token")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    header: EtcdHeader
    token: str
    def __init__(self, header: _Optional[_Union[EtcdHeader, _Mapping]] = ..., token: _Optional[str] = ...) -> None: ...

class EtcdWatchCreateRequest(_message.Message):
    __slots__ = ("key", "range_end", "start_revision")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANGE_END_FIELD_NUMBER: _ClassVar[int]
    START_REVISION_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    range_end: bytes
    start_revision: int
    def __init__(self, key: _Optional[bytes] = ..., range_end: _Optional[bytes] = ..., start_revision: _Optional[int] = ...) -> None: ...

class EtcdWatchRequest(_message.Message):
    __slots__ = ("create_request",)
    CREATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    create_request: EtcdWatchCreateRequest
    def __init__(self, create_request: _Optional[_Union[EtcdWatchCreateRequest, _Mapping]] = ...) -> None: ...

class EtcdEvent(_message.Message):
    __slots__ = ("type", "kv")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    type: int
    kv: EtcdKeyValue
    def __init__(self, type: _Optional[int] = ..., kv: _Optional[_Union[EtcdKeyValue, _Mapping]] = ...) -> None: ...

class EtcdWatchResponse(_message.Message):
    __slots__ = ("header", "created", "canceled", "compact_revision", "events")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    CANCELED_FIELD_NUMBER: _ClassVar[int]
    COMPACT_REVISION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    header: EtcdHeader
    created: bool
    canceled: bool
    compact_revision: int
    events: _containers.RepeatedCompositeFieldContainer[EtcdEvent]
    def __init__(self, header: _Optional[_Union[EtcdHeader, _Mapping]] = ..., created: bool = ..., canceled: bool = ..., compact_revision: _Optional[int] = ..., events: _Optional[_Iterable[_Union[EtcdEvent, _Mapping]]] = ...) -> None: ...
