"""`kvstore token`: a token for a tenant, and its digest for the node's tenants file.

What always holds: with a file, the token is only there, readable by its owner alone; an existing file is never
replaced, because clients may be using its token.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["make"]


def make(out: Path | None, digest_of: Callable[[str], str]) -> int:
    """Make one and print it, or write it to a new file; print its digest. Returns the exit status."""
    token = secrets.token_urlsafe(32)
    if out is None:
        print(f"token   {token}")  # noqa: T201 - its output
    else:
        _write(out, token)
    print(f"sha256  {digest_of(token)}")  # noqa: T201 - its output
    return 0


def _write(out: Path, token: str) -> None:
    try:
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{out} exists; a new token needs a new file.") from None
    except OSError as error:
        raise ConfigError(f"{out} could not be written: {error.strerror}.") from error
    try:
        with os.fdopen(fd, "w") as file:
            file.write(f"{token}\n")
    except OSError as error:
        with suppress(OSError):
            out.unlink()
        error.filename = str(out)
        raise
