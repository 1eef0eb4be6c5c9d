"""The headers of a call over the fabric, in the form in which gRPC delivers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.wire.fabric_call import Metadata

__all__ = ["FabricHeaders"]


class FabricHeaders:
    """The headers of one call."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        """As `grpc.ServicerContext` names it."""
        return self._metadata
