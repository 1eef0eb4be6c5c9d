"""The node's end of `kvstore keys` (`kvstore.sealing.keys_protocol`): keys are rotated while the node serves.

What always holds: a change is made only for a caller that proves possession of the master key, and each has a line in
the audit log, with the user on this machine. A rotation continues when its caller disconnects; one that was interrupted
by the end of a process continues when the next one starts. Rotations run one at a time, and wait on threads of their
own.

What it doesn't do: encrypt existing records (`kvstore.storage.encrypting` does), or accept a tenant's token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import socket
import struct
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import ConfigError, KvError, NotAuthenticated, Overloaded, ProtocolError, StorageError
from kvstore.limits import (
    ACCEPT_AGAIN_MS,
    CONTROL_ASK_MS,
    CONTROL_CALLERS_MAX,
    CONTROL_LINE_BYTES_MAX,
    TENANT_BYTES,
)
from kvstore.sealing.keys_protocol import SOCKET_NAME, address_in, line_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from kvstore.node.audit import Audit
    from kvstore.sealing.store_keys import StoreKeys

__all__ = ["ControlSocket"]

log = logging.getLogger(__name__)

_CHALLENGE_BYTES: Final = 32
_PEER: Final = struct.Struct("3i")  # pid, uid, gid
_NODE: Final = "the node"


class ControlSocket:
    """A node's control socket."""

    def __init__(
        self, data: Path, keys: StoreKeys, audit: Audit, clear: Callable[[], dict[int, tuple[int, str]]]
    ) -> None:
        """Listen in the locked data folder, and continue an interrupted rotation."""
        self._data = data
        self._keys = keys
        self._audit = audit
        self._clear = clear
        self._loop = asyncio.get_running_loop()
        self._callers: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        (data / SOCKET_NAME).unlink(missing_ok=True)  # of a node that was killed
        try:
            with address_in(data) as address:
                self._listener.bind(address)
                (data / SOCKET_NAME).chmod(0o600)  # nobody can connect before it listens
            self._listener.listen(CONTROL_CALLERS_MAX)
        except OSError as error:
            self._listener.close()
            raise StorageError(f"The socket {data / SOCKET_NAME} can't be made: {error.strerror}.") from error
        for tenant in keys.rotating:
            self._watch("rotate tenant", keys.rotate_tenant(tenant), _NODE, tenant)
        self._accepting = self._loop.create_task(self._accept())

    async def _accept(self) -> None:
        while True:
            try:
                caller, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # the process has no descriptor left, or the caller has left
                log.warning("The socket for keys could not accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_AGAIN_MS / 1000)
                continue
            task = self._loop.create_task(self._serve(caller))
            self._callers.add(task)
            task.add_done_callback(self._callers.discard)

    async def _serve(self, caller: socket.socket) -> None:
        pid, uid, _ = _PEER.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        peer = f"unix:uid={uid},pid={pid}"
        reader, writer = await asyncio.open_unix_connection(sock=caller, limit=CONTROL_LINE_BYTES_MAX)
        try:
            if len(self._callers) > CONTROL_CALLERS_MAX:
                raise Overloaded("The node has enough to do for others that manage its keys.")
            challenge = secrets.token_bytes(_CHALLENGE_BYTES)
            writer.write(
                line_of(
                    {
                        "challenge": challenge.hex(),
                        "clear": self._clear(),
                        "damaged": self._keys.status.damaged,
                    }
                )
            )
            async with asyncio.timeout(CONTROL_ASK_MS / 1000):
                line = await reader.readline()
            if line:
                writer.write(line_of({"done": await self._do(_asked(line), challenge, peer)}))
                await writer.drain()
        except KvError as error:
            with suppress(OSError):
                writer.write(line_of({"error": str(error), "kind": type(error).__name__}))
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # it has left, or its message is invalid
        finally:
            writer.close()

    async def _do(self, asked: dict[str, Any], challenge: bytes, peer: str) -> Any:
        what = str(asked.get("do"))
        if what not in {"rotate-tenant", "rotate-master"}:
            raise ProtocolError(
                "The node knows no such change of its keys; is the command of another version?"
            )
        said = str(asked.get("proof", "")).encode()
        if not hmac.compare_digest(said, self._keys.proof(challenge).hex().encode()):
            why = "The caller did not prove that they have the keyring's master key."
            self._audit.refused(what.replace("-", " "), tenant="", peer=peer, why=why)
            raise NotAuthenticated(why)
        if what == "rotate-master":
            return await self._rotate_master(str(asked.get("new_master_key")), peer)
        return await self._rotate_tenants(asked.get("tenant"), peer)

    async def _rotate_master(self, option: str, peer: str) -> str:
        rotating = self._keys.rotate_master(option)
        self._watch("rotate master", rotating, peer)
        return await asyncio.shield(asyncio.wrap_future(rotating))

    async def _rotate_tenants(self, wanted: object, peer: str) -> dict[str, int]:
        known = self._keys.tenants
        if wanted is not None:
            tenant = bytes.fromhex(str(wanted))
            if len(tenant) != TENANT_BYTES or tenant not in known:
                raise ConfigError(f"The keyring has no tenant {wanted}; `kvstore keys status` lists them.")
            known = [tenant]
        under_way = {tenant: self._keys.rotate_tenant(tenant) for tenant in known}
        for tenant, rotating in under_way.items():
            self._watch("rotate tenant", rotating, peer, tenant)
        return {
            tenant.hex(): await asyncio.shield(asyncio.wrap_future(rotating))
            for tenant, rotating in under_way.items()
        }

    def _watch(self, what: str, rotating: Future[Any], peer: str, tenant: bytes = b"") -> None:
        """Log how a rotation ended, even if the caller has left."""
        ended = partial(self._ended, what, peer, tenant.hex())
        rotating.add_done_callback(lambda done: self._loop.call_soon_threadsafe(ended, done))

    def _ended(self, what: str, peer: str, tenant: str, rotating: Future[Any]) -> None:
        if rotating.cancelled():
            return
        error = rotating.exception()
        if error is not None:
            log.warning("%s: %s", what, error)
            self._audit.refused(what, tenant=tenant, peer=peer, why=str(error))
        elif tenant:
            self._audit.note(what, tenant=tenant, peer=peer, keys=rotating.result())
        else:
            log.warning(
                "The keyring is sealed with master key %s: the next start needs it.", rotating.result()
            )
            self._audit.note(what, tenant="", peer=peer, master_key=rotating.result())

    async def close(self) -> None:
        """Stop listening. A rotation in progress continues at the next start."""
        self._accepting.cancel()
        for task in self._callers:
            task.cancel()
        await asyncio.gather(self._accepting, *self._callers, return_exceptions=True)
        self._listener.close()
        (self._data / SOCKET_NAME).unlink(missing_ok=True)


def _asked(line: bytes) -> dict[str, Any]:
    asked = json.loads(line)
    if not isinstance(asked, dict):
        raise ProtocolError("A request for a change of keys is not a JSON object.")
    return asked
