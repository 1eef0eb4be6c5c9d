"""Finds out why a node can't be reached, which gRPC doesn't say: the name, the connection, or TLS.

`steps` makes the first steps towards a node itself, beside gRPC: it resolves the name, connects, and does the TLS
handshake. A client uses it when a call found no node; `kvstore doctor --node` shows all steps.

What always holds: each step ends within its time; the first failed step is the last; no token and no call is sent.

What it doesn't do: decide anything. A client is guided by the outcomes of its calls.
"""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.config import printable
from kvstore.errors import ConfigError, NodeUnavailable
from kvstore.limits import CONTACT_HURRIED_MS
from kvstore.reach import credentials_of, split_target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.errors import KvError
    from kvstore.reach import Reach

__all__ = ["Step", "broken_step", "explained", "steps"]

_HURRIED_S: Final = CONTACT_HURRIED_MS / 1000
_PREFACE: Final = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # and empty settings
)
_TLS_ALERT: Final = 0x15
_ASKS = ("the node requires a client certificate", "Set certificate and key.")
_FOREIGN = ("the node rejects this client's certificate", "Is it signed by one of the node's CAs?")
_NO_TLS = ("the node does not use TLS", "Leave out {}.")
_REFUSALS: Final = {  # by OpenSSL's name for them
    "CERTIFICATE_REQUIRED": _ASKS,
    "HANDSHAKE_FAILURE": _ASKS,
    "UNKNOWN_CA": _FOREIGN,
    "BAD_CERTIFICATE": _FOREIGN,
    "WRONG_VERSION": _NO_TLS,
    "RECORD_LAYER_FAILURE": _NO_TLS,
}


_HUNG: Final = (
    "the node accepted the connection and does not answer",
    "It may be hung or overloaded.",
)


class Step(NamedTuple):
    """One step: what was done, its result and, if it failed, what to try."""

    name: str
    is_done: bool
    said: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.said}. {self.advice}".strip()


def broken_step(reach: Reach) -> Step | None:
    """The first step that fails; None if all succeed, and the cause is another one."""
    return next((step for step in steps(reach, _HURRIED_S) if not step.is_done), None)


def explained(doing: str, reach: Reach, error: KvError) -> KvError:
    """The error of a call; if the node can't be reached, one that says where it was expected and which step failed.

    gRPC reports only that there was no connection.
    """
    if not isinstance(error, NodeUnavailable) or (step := broken_step(reach)) is None:
        return error
    where = reach.node if step.said == _HUNG[0] else f"no node at {reach.node}"
    return NodeUnavailable(f"{doing} failed: {where}: {step}")


def steps(reach: Reach, timeout_s: float | None = None) -> Iterator[Step]:
    """Name, connection and TLS, each as it ends; it may take as long as a connection may."""
    if timeout_s is None:
        timeout_s = reach.connect_timeout_s
    host, port = split_target(reach.node)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the second is a name with an invalid label
        why = getattr(error, "strerror", None) or str(error)
        yield Step(
            "name", False, f"{host} has no address ({why})", "Is the name right, and known to this machine?"
        )
        return
    addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
    yield Step("name", True, f"{host} is {', '.join(addresses)}")
    connected, how = _connect(addresses, port, timeout_s)
    yield how
    if connected is None:
        return
    with connected:
        yield _shake_hands(connected, host, reach) if reach.uses_tls else _speak_plainly(connected)


def _connect(addresses: list[str], port: int, timeout_s: float) -> tuple[socket.socket | None, Step]:
    failures: dict[str, str] = {}
    advice = "Is the node running, and is this its port?"
    for address in addresses:
        try:
            # Not asked of the socket, which may have been reset by now.
            how = Step("connection", True, f"a process listens on {address} port {port}")
            return socket.create_connection((address, port), timeout=timeout_s), how
        except TimeoutError:
            failures[address] = f"no answer in {timeout_s:.0f} s"
            advice = "A firewall may drop it, or the machine is down."
        except OSError as error:
            failures[address] = error.strerror or str(error)
    said = "; ".join(f"{address} port {port}: {why}" for address, why in failures.items())
    return None, Step("connection", False, f"no connection to {said}", advice)


def _shake_hands(connected: socket.socket, host: str, reach: Reach) -> Step:
    try:
        credentials_of(reach)  # reads each file, with a bound
        context = ssl.create_default_context(cafile=None if reach.ca is None else str(reach.ca))
        context.set_alpn_protocols(["h2"])
        if reach.certificate is not None:
            context.load_cert_chain(reach.certificate, reach.key)
    except OSError as error:  # `ssl.SSLError` is one
        files = ", ".join(str(path) for path in (reach.ca, reach.certificate, reach.key) if path is not None)
        raise ConfigError(
            f"{files} can't be used: {getattr(error, 'reason', None) or error.strerror}."
        ) from error
    try:
        with context.wrap_socket(connected, server_hostname=host) as secure:
            version = secure.version()
            secure.sendall(_PREFACE)
            refused = not secure.recv(1)  # a node that requires a certificate refuses only now
    except ssl.SSLCertVerificationError as error:
        return Step(
            "TLS",
            False,
            f"the node's certificate is not valid: {error.verify_message.rstrip('.')}",
            _advice(error),
        )
    except TimeoutError:
        return Step("TLS", False, *_HUNG)
    except OSError as error:  # TLS errors among them
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        said, advice = f"the handshake failed ({reason})", "Is this the gRPC port?"
        for part, known in _REFUSALS.items():
            if part in reason:
                said, advice = known
        turns_on = [name for name in ("tls", "ca", "certificate") if getattr(reach, name)]
        return Step("TLS", False, said, advice.format(" and ".join(turns_on)))
    if refused:  # without an alert, as gRPC does
        said, advice = _ASKS if reach.certificate is None else _FOREIGN
        return Step("TLS", False, said, advice)
    return Step("TLS", True, f"{version}, and the node's certificate is for {host}")


def _advice(error: ssl.SSLCertVerificationError) -> str:
    if "mismatch" in error.verify_message.lower() or "not valid for" in error.verify_message.lower():
        return "Use a name from the node's certificate."
    if "expired" in error.verify_message or "not yet valid" in error.verify_message:
        return "Renew it, or check this machine's clock."
    return "Set its CA: ca."


def _speak_plainly(connected: socket.socket) -> Step:
    try:
        connected.sendall(_PREFACE)
        first = connected.recv(9)
    except TimeoutError:
        return Step("protocol", False, *_HUNG)
    except OSError as error:
        return Step(
            "protocol",
            False,
            f"the connection was closed ({error.strerror or error})",
            "Does it require TLS?",
        )
    if first[:1] == bytes([_TLS_ALERT]) or not first:
        return Step(
            "protocol",
            False,
            "the node uses TLS, and this client does not",
            "Set the CA of its certificate: ca.",
        )
    if first.startswith(b"HTTP/1"):
        return Step("protocol", False, "it is an HTTP port", "Is this the gRPC port?")
    if len(first) < len(_PREFACE) and first[3:4] != b"\x04":
        return Step("protocol", False, f"it answered {printable(repr(first))}", "Is this the gRPC port?")
    return Step("protocol", True, "it accepts gRPC, without TLS")
