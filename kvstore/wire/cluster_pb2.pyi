# Generated from proto sources with BLAKE2b c0bae93241153211100dbc80e20f0936
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MapRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class MapResponse(_message.Message):
    __slots__ = ("clustered", "revision", "members", "etcd_away_ms", "outside")
    CLUSTERED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ETCD_AWAY_MS_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_FIELD_NUMBER: _ClassVar[int]
    clustered: bool
    revision: int
    members: _containers.RepeatedCompositeFieldContainer[ClusterMember]
    etcd_away_ms: int
    outside: str
    def __init__(self, clustered: bool = ..., revision: _Optional[int] = ..., members: _Optional[_Iterable[_Union[ClusterMember, _Mapping]]] = ..., etcd_away_ms: _Optional[int] = ..., outside: _Optional[str] = ...) -> None: ...

class ClusterMember(_message.Message):
    __slots__ = ("name", "node", "weight", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    node: str
    weight: int
    version: str
    def __init__(self, name: _Optional[str] = ..., node: _Optional[str] = ..., weight: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...
