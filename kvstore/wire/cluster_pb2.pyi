# Generated from proto sources with BLAKE2b 23715cd01bcbbd04fc7460ebf82120ca
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MapRequest(_message.Message):
    __slots__ = ("tenant", "places_by_lots")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PLACES_BY_LOTS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    places_by_lots: bool
    def __init__(self, tenant: _Optional[str] = ..., places_by_lots: bool = ...) -> None: ...

class MapResponse(_message.Message):
    __slots__ = ("clustered", "revision", "members", "etcd_away_ms", "outside", "members_digest", "placed_as", "absent", "lots", "replicas", "upkeep")
    CLUSTERED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ETCD_AWAY_MS_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PLACED_AS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    LOTS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    UPKEEP_FIELD_NUMBER: _ClassVar[int]
    clustered: bool
    revision: int
    members: _containers.RepeatedCompositeFieldContainer[ClusterMember]
    etcd_away_ms: int
    outside: str
    members_digest: int
    placed_as: str
    absent: _containers.RepeatedCompositeFieldContainer[ClusterMember]
    lots: int
    replicas: int
    upkeep: UpkeepState
    def __init__(self, clustered: bool = ..., revision: _Optional[int] = ..., members: _Optional[_Iterable[_Union[ClusterMember, _Mapping]]] = ..., etcd_away_ms: _Optional[int] = ..., outside: _Optional[str] = ..., members_digest: _Optional[int] = ..., placed_as: _Optional[str] = ..., absent: _Optional[_Iterable[_Union[ClusterMember, _Mapping]]] = ..., lots: _Optional[int] = ..., replicas: _Optional[int] = ..., upkeep: _Optional[_Union[UpkeepState, _Mapping]] = ...) -> None: ...

class UpkeepState(_message.Message):
    __slots__ = ("replicas", "one_copy", "unsure", "full", "copied_blocks", "copied_bytes", "looking", "unknown", "age_ms", "lots_alone", "session_blocks_left")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ONE_COPY_FIELD_NUMBER: _ClassVar[int]
    UNSURE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOOKING_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LOTS_ALONE_FIELD_NUMBER: _ClassVar[int]
    SESSION_BLOCKS_LEFT_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    one_copy: int
    unsure: int
    full: int
    copied_blocks: int
    copied_bytes: int
    looking: bool
    unknown: bool
    age_ms: int
    lots_alone: int
    session_blocks_left: int
    def __init__(self, replicas: _Optional[int] = ..., one_copy: _Optional[int] = ..., unsure: _Optional[int] = ..., full: _Optional[int] = ..., copied_blocks: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., looking: bool = ..., unknown: bool = ..., age_ms: _Optional[int] = ..., lots_alone: _Optional[int] = ..., session_blocks_left: _Optional[int] = ...) -> None: ...

class ClusterMember(_message.Message):
    __slots__ = ("name", "node", "weight", "version", "draining", "zone")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    name: str
    node: str
    weight: int
    version: str
    draining: bool
    zone: str
    def __init__(self, name: _Optional[str] = ..., node: _Optional[str] = ..., weight: _Optional[int] = ..., version: _Optional[str] = ..., draining: bool = ..., zone: _Optional[str] = ...) -> None: ...
