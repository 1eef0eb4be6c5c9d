"""The error tree. Each error says in one sentence what is wrong and, where it can, what to do.

    KvError
    ├── Overloaded             the node is at a limit; try again after `retry_after_ms`
    ├── LayoutError            an impossible layout, or bytes that can't be moved between shards
    ├── NotAuthenticated       the caller could not be authenticated
    ├── TenantDenied           the caller may not act for this tenant
    ├── UsageError             a mistake of the caller's, found before anything is sent
    │   ├── ConfigError        a setting, or a file that one names, that can't be used
    │   ├── InvalidArgument    an invalid argument: a length, a number of blocks, a time
    │   ├── NotRegistered      memory that is not, or no longer, registered with this client
    │   └── Closed             the object has been closed
    ├── Refused                the call doesn't fit what the node has stored, or how it is set up
    │   ├── KeyTaken           the key, which is written once, already has another block
    │   ├── NoSession          no session has this name
    │   ├── SessionRefused     the session's state does not allow this step
    │   ├── Expired            the block's time to live has passed
    │   ├── BeingErased        the user or tenant is being erased: try again when that has ended
    │   ├── NotEncrypted       the node has no master key, and the block names an erase domain
    │   └── DomainRequired     the node encrypts, and the put names no erase domain
    ├── ProtocolError          a peer sent something that the protocol does not allow
    │   ├── AddressRefused     a fabric address that is not the source of its call, which is in `caller`
    │   └── LeaseExpired       the lease of a reserved slot is over
    ├── SessionFileError       a file that is not an exported session, is incomplete, or can't be written
    ├── NodeUnavailable        the node could not be reached, or went away
    ├── CannotListen           a node can't listen on a port: it is in use, or not this user's to use
    ├── WrongEpoch             the node may not order the user's sessions now; no caller of a client sees it
    ├── DeadlineExceeded       a call's own deadline passed
    ├── MasterKeyUnavailable   the master key, or the service that has it, could not be reached
    ├── WrongMasterKey         the keyring is sealed with another master key
    ├── StorageError           the drive, the keyring or the data on them, not the call, is at fault
    │   ├── NoSpace            no extent is free for the block
    │   ├── QuotaExceeded      the tenant is at its quota, and none of its blocks can be evicted
    │   ├── Corrupt            bytes on the drive differ from those written
    │   ├── ReadOnly           the drive failed and accepts no more writes
    │   ├── WrongVersion       a data folder of another format version
    │   ├── FolderLocked       another node has this data folder open
    │   ├── NoKeyring          the data folder has no keyring
    │   ├── WrongKeyring       the keyring is not the one that the drives were last used with, or an older copy of it
    │   └── ForeignDrive       a drive of another store, or of another place in this one
    ├── FabricError            (this and what follows: defined in `nic_offload.errors`, the lower package)
    │   ├── FabricUnavailable
    │   ├── NoProvider         libfabric has no provider of this name
    │   ├── FabricStuck        the fabric's thread is stuck in the provider
    │   ├── NoMemory           no memory, or no more memory can be registered
    │   ├── PortTaken          the endpoint's port is taken by another socket
    │   ├── PutFailed
    │   └── RegionBusy         registered memory that may still be read or written
    ├── RuleError              a rule or request that the match-action table cannot use
    ├── TableFull              the match-action table is full
    ├── CudaUnavailable        the CUDA driver, its compiler or a GPU is missing (also defined there)
    └── DeviceError            a GPU refused work, was reset, or let no more memory be page-locked

A miss is not an error: see `kvstore.miss`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nic_offload.errors import (
    Closed,
    CudaUnavailable,
    DeviceError,
    FabricError,
    FabricStuck,
    FabricUnavailable,
    InvalidArgument,
    KvError,
    NoMemory,
    NoProvider,
    PortTaken,
    PutFailed,
    RegionBusy,
    RuleError,
    TableFull,
    UsageError,
)

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "AddressRefused",
    "BeingErased",
    "CannotListen",
    "Closed",
    "ConfigError",
    "Corrupt",
    "CudaUnavailable",
    "DeadlineExceeded",
    "DeviceError",
    "DomainRequired",
    "Expired",
    "FabricError",
    "FabricStuck",
    "FabricUnavailable",
    "FolderLocked",
    "ForeignDrive",
    "InvalidArgument",
    "KeyTaken",
    "KvError",
    "LayoutError",
    "LeaseExpired",
    "MasterKeyUnavailable",
    "NoKeyring",
    "NoMemory",
    "NoProvider",
    "NoSession",
    "NoSpace",
    "NodeUnavailable",
    "NotAuthenticated",
    "NotEncrypted",
    "NotRegistered",
    "Overloaded",
    "PortTaken",
    "ProtocolError",
    "PutFailed",
    "QuotaExceeded",
    "ReadOnly",
    "Refused",
    "RegionBusy",
    "RuleError",
    "SessionFileError",
    "SessionRefused",
    "StorageError",
    "TableFull",
    "TenantDenied",
    "UsageError",
    "WrongEpoch",
    "WrongKeyring",
    "WrongMasterKey",
    "WrongVersion",
]


class Overloaded(KvError):
    """The node is at a limit; nothing was done, and a later try may succeed."""

    def __init__(self, message: str, retry_after_ms: int = 50) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class LayoutError(KvError):
    """An invalid layout, or bytes that can't be moved between shards."""


class NotAuthenticated(KvError):
    """The caller is not authenticated."""


class TenantDenied(KvError):
    """The caller may not act for this tenant."""


class ConfigError(UsageError):
    """A setting, an option, or a file that one of them names, that can't be used."""


class NotRegistered(UsageError):
    """A block lies in memory that is not, or no longer, registered with this client."""


class Refused(KvError):
    """The call does not fit what the node has stored, or how it is set up. It is refused until that changes."""


class KeyTaken(Refused):
    """Another block is stored under this key: keys are written once, and the bytes of this put were not stored."""

    @classmethod
    def of(cls, key: bytes, differs: str = "other bytes") -> Self:
        """The error of this key, and what to do."""
        return cls(
            f"The key {key.hex()} already has a block with {differs}: put this one under another key, or delete that"
            " one."
        )


class NoSession(Refused):
    """There is no session of this name."""


class SessionRefused(Refused):
    """The session's state doesn't allow the step: another length, a full session, or a block that is not stored."""


class Expired(Refused):
    """The block's time to live has passed, so no get would return it."""


class BeingErased(Refused):
    """The block's user or tenant is being erased, and nothing can be stored for them before that has ended."""

    def __init__(
        self, sentence: str = "The erase domain of the block is being erased; put it again afterwards."
    ) -> None:
        """The default message says when to try again."""
        super().__init__(sentence)


class NotEncrypted(Refused):
    """The node does not encrypt blocks, so it has no key that could be destroyed to erase a domain."""

    def __init__(
        self,
        sentence: str = "The node does not encrypt blocks, so it has no key for an erase domain: start it with"
        " --master-key, or put the block without a domain.",
    ) -> None:
        """The default message says what to do about it."""
        super().__init__(sentence)


class DomainRequired(Refused):
    """The node encrypts, and the put names no erase domain; no block is shared unless SHARED is requested."""

    def __init__(
        self,
        sentence: str = "The node encrypts blocks, and this put names no erase domain: name the block's user (a key of"
        " in_domain, and that domain), or ask for SHARED, whose blocks erasing a user doesn't reach.",
    ) -> None:
        """The default message has both remedies."""
        super().__init__(sentence)


class ProtocolError(KvError):
    """A peer sent something that the protocol does not allow."""


class AddressRefused(ProtocolError):
    """A client's fabric address is not the one that its call comes from."""

    def __init__(self, message: str, caller: str = "") -> None:
        super().__init__(message)
        self.caller = caller


class LeaseExpired(ProtocolError):
    """The lease of a reserved slot has expired: a put into it now will not be stored."""


class SessionFileError(KvError):
    """The file is not a complete exported session; or a session can't be exported completely."""


class NodeUnavailable(KvError):
    """The node could not be reached, or went away during the call."""

    was_tried = True  # False: it was down a moment ago, and no call was made


class CannotListen(KvError):
    """A node can't listen on a port: another process does, this user may not, or the machine lacks the address."""


class WrongEpoch(KvError):
    """The node may not order the sessions of this user now, and nothing was done: it is not their home, or not yet."""


class DeadlineExceeded(KvError):
    """A call's own deadline passed before its answer arrived."""

    was_tried = True  # False: nothing of the call was or will be sent


class MasterKeyUnavailable(KvError):
    """The master key could not be read, or the service that has it could not be used."""


class WrongMasterKey(KvError):
    """The keyring is sealed with another master key; nothing was changed."""


class StorageError(KvError):
    """The drive, or the data on it, did not allow the operation."""


class NoSpace(StorageError):
    """No extent is free for the block."""


class QuotaExceeded(StorageError):
    """The tenant is at its quota of bytes, and none of its own blocks may be evicted."""


class Corrupt(StorageError):
    """Bytes on the drive differ from those written."""


class ReadOnly(StorageError):
    """The drive failed and accepts no more writes."""


class WrongVersion(StorageError):
    """The data folder was written in another format version."""


class FolderLocked(StorageError):
    """Another process has this data folder open."""


class NoKeyring(StorageError):
    """The data folder has no keyring, so its encrypted records can't be decrypted."""


class WrongKeyring(StorageError):
    """The keyring is not the one that encrypts the store's records, or an older copy of it; nothing was changed."""


class ForeignDrive(StorageError):
    """The drive belongs to another store, or is linked under another drive's number."""
