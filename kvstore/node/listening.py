"""Listens on the gRPC port with its certificates; each mistake in them has its own message.

What always holds: certificates are checked before the node listens, each file by itself and then as a pair. Files that
are read again later are checked the same way, and invalid ones leave the previous ones in force. A connection keeps the
certificate with which it began.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from typing import TYPE_CHECKING

import grpc

from kvstore.config_files import read_pem
from kvstore.errors import CannotListen, ConfigError

if TYPE_CHECKING:
    from kvstore.config import NodeConfig

__all__ = ["Certificates", "check_port", "listen", "why_not"]


class Certificates:
    """The node's own certificate, and the CA of its clients' certificates, for gRPC's and Python's servers."""

    def __init__(self, config: NodeConfig) -> None:
        self.context = _context(config)
        self._wants_clients = config.tls_clients is not None
        self._renewed: grpc.ServerCertificateConfiguration | None = None
        self.for_grpc = grpc.dynamic_ssl_server_credentials(
            _for_grpc(config),
            self._fetch,  # type: ignore[arg-type]  # the stubs don't know that it may return None
            require_client_authentication=self._wants_clients,
        )

    @classmethod
    def of(cls, config: NodeConfig) -> Certificates | None:
        """Read the certificates; None if the node has none."""
        return None if config.tls_certificate is None else cls(config)

    def renew(self, config: NodeConfig) -> None:
        """Read them again, for connections that begin from now on; ConfigError if they are invalid."""
        if config.tls_certificate is None or (config.tls_clients is not None) != self._wants_clients:
            raise ConfigError("Turning TLS or client certificates on or off needs a restart.")
        context, self._renewed = _context(config), _for_grpc(config)
        self.context = context

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake, on gRPC's own thread; None: the certificate has not changed."""
        renewed, self._renewed = self._renewed, None
        return renewed


def _for_grpc(config: NodeConfig) -> grpc.ServerCertificateConfiguration:
    assert config.tls_certificate is not None
    assert config.tls_key is not None
    clients = None if config.tls_clients is None else read_pem(config.tls_clients, "certificate")
    pair = (read_pem(config.tls_key, "key"), read_pem(config.tls_certificate, "certificate"))
    return grpc.ssl_server_certificate_configuration([pair], clients)


def _context(config: NodeConfig) -> ssl.SSLContext:
    assert config.tls_certificate is not None
    assert config.tls_key is not None
    read_pem(config.tls_certificate, "certificate")
    read_pem(config.tls_key, "key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_key, password=_refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{config.tls_key} is not the key of {config.tls_certificate}.") from error
        raise ConfigError(
            f"{config.tls_certificate} and {config.tls_key} can't be used: {error.reason or error}."
        ) from error
    if config.tls_clients is not None:
        read_pem(config.tls_clients, "certificate")
        # Probes without a certificate, such as a kubelet's, may ask for health; the service refuses all other calls.
        context.verify_mode = ssl.CERT_OPTIONAL
        try:
            context.load_verify_locations(config.tls_clients)
        except ssl.SSLError as error:
            raise ConfigError(f"{config.tls_clients} can't be used: {error.reason or error}.") from error
    return context


def _refuse_password() -> str:
    raise ConfigError("The node's key has a password; use a key without one.")


def listen(server: grpc.aio.Server, config: NodeConfig, certificates: Certificates | None) -> str:
    """Bind the port, with TLS if there is a certificate; returns HOST:PORT."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.port}"
    try:
        if certificates is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, certificates.for_grpc)
    except RuntimeError as error:
        check_port(config.host, config.port)
        raise CannotListen(f"The node could not listen on {host} port {config.port}.") from error
    return f"{host}:{port}"


def check_port(host: str, port: int) -> None:
    """CannotListen with the kernel's reason if the port can't be bound; gRPC doesn't report one."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
            trial.listen()
    except OSError as error:
        raise CannotListen(why_not(error, host, port)) from error


def why_not(error: OSError, host: str, port: int) -> str:
    """The kernel's reason, as a sentence."""
    known = {
        errno.EADDRINUSE: f"Port {port} on {host} is in use by another process.",
        errno.EADDRNOTAVAIL: f"This machine has no address {host}.",
        errno.EACCES: f"This user may not listen on port {port}.",
    }
    why = os.strerror(error.errno) if error.errno else error.strerror  # asyncio's text contains a tuple
    return known.get(error.errno or 0, f"The node could not listen on {host} port {port}: {why}.")
