"""libfabric itself: finds it, loads it once, and knows its capabilities.

Nothing is loaded on import. `load()` is the only way to load it; without libfabric its error says in one sentence
what to install. TRIGGERKV_LIBFABRIC names a library to use instead of the system's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError, FabricUnavailable

__all__ = ["Library", "ProviderInfo", "expect_no_messages", "load"]

_PROVIDERS_MAX = 64

# The data plane wants reliable datagrams with remote writes. `tcp` has them natively since libfabric
# 1.18; before that they are in `net`; the layer over tcp is the slowest of the three.
_PREFERRED = ("cxi", "verbs;ofi_rxm", "efa", "tcp", "net", "tcp;ofi_rxm", "sockets", "shm")

# `tcp;ofi_rxm` allocates buffers for messages with each endpoint: 68 MiB by default, and 17 MiB with this (1.17). Their
# size (FI_OFI_RXM_BUFFER_SIZE) must be the same at both ends.
_FEW_BUFFERS = ("FI_OFI_RXM_MSG_RX_SIZE", "16")


@dataclass(frozen=True, slots=True)
class ProviderInfo:
    """One provider of libfabric, and its properties that matter here."""

    name: str
    rma: bool  # remote writes over reliable datagrams
    ordered: bool  # one message arrives as one stream, so its flag can travel inside it
    deferred_work: bool  # implements FI_QUEUE_WORK, libfabric's own triggered operations


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded libfabric."""

    version: str

    def providers(self) -> list[ProviderInfo]:
        """Every provider that this machine's libfabric offers."""
        found = ffi.new("struct tk_provider_info[]", _PROVIDERS_MAX)
        count = lib.tk_library_providers(found, _PROVIDERS_MAX)
        if count < 0:
            raise FabricError.from_code("Listing the providers of libfabric", count)
        return [
            ProviderInfo(
                name=ffi.string(found[i].name).decode(),
                rma=bool(found[i].rma),
                ordered=bool(found[i].ordered),
                deferred_work=bool(found[i].deferred_work),
            )
            for i in range(count)
        ]

    def best_provider(self) -> str:
        """The default provider of the data plane."""
        usable = {provider.name for provider in self.providers() if provider.rma}
        for name in _PREFERRED:
            if name in usable:
                return name
        raise FabricUnavailable(
            f"libfabric {self.version} offers no provider with remote writes over reliable datagrams;"
            " on Debian, install libfabric1 (1.17 or newer)."
        )


def expect_no_messages() -> None:
    """Have endpoints of this process allocate little for messages, none of which we send; before `load`.

    For a process in which nothing else uses libfabric, as others may send some.
    """
    os.environ.setdefault(*_FEW_BUFFERS)


def load() -> Library:
    """Load libfabric, once in a process; later calls return at once."""
    path = os.environ.get("TRIGGERKV_LIBFABRIC", "libfabric.so.1")
    message = ffi.new("char[]", lib.TK_MESSAGE_BYTES)
    if lib.tk_library_load(path.encode(), message):
        why = ffi.string(message).decode()
        raise FabricUnavailable(
            f"libfabric could not be loaded ({why}); on Debian: apt install libfabric1, or name another"
            " library in TRIGGERKV_LIBFABRIC."
        )
    version = lib.tk_library_version()
    return Library(version=f"{version >> 16}.{version & 0xFFFF}")
