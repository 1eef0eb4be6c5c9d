"""Generates `kvstore/wire/*_pb2*` from `proto/`.

`make proto` runs it with an *old* generator (grpcio-tools 1.76), because generated code requires a runtime at least
as new as its generator, and engines pin theirs. The modules import each other as `kvstore.v1`, the proto package, but
are in `kvstore.wire`, so the import lines are rewritten. Classes for gRPC's experimental interface are left out: nobody
uses them. Each module contains the digest of the sources, which a test compares with `proto/`.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from pathlib import Path

__all__ = ["adapted", "digest_line", "generate", "main"]

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
WIRE = ROOT / "kvstore" / "wire"

_EXPERIMENTAL = re.compile(
    r"\n\n # This class is part of an EXPERIMENTAL API\.\nclass .*?\n(?=\n\nclass |\Z)", re.DOTALL
)
# Whoever installs us gets a grpcio that is new enough: pyproject.toml says which.
_VERSION = re.compile(r"import warnings\n|GRPC_GENERATED_VERSION = .*?\n    \)\n*", re.DOTALL)


def digest_line() -> str:
    """The line with the digest of the proto sources."""
    sources = b"".join(path.read_bytes() for path in sorted(PROTO.rglob("*.proto")))
    return f"# Generated from proto sources with BLAKE2b {hashlib.blake2b(sources, digest_size=16).hexdigest()}\n"


def generate() -> dict[str, str]:
    """The generated modules' texts by file name."""
    from grpc_tools import protoc  # noqa: PLC0415 - the digest is wanted where there is no generator

    with tempfile.TemporaryDirectory() as folder:
        sources = [str(path) for path in sorted(PROTO.rglob("*.proto"))]
        outputs = [f"--python_out={folder}", f"--pyi_out={folder}", f"--grpc_python_out={folder}"]
        if protoc.main(["protoc", f"-I{PROTO}", *outputs, *sources]):
            raise SystemExit("protoc failed.")
        return {
            path.name: digest_line() + adapted(path.read_text())
            for path in sorted(Path(folder).rglob("*.py*"))
        }


def adapted(text: str) -> str:
    """A generated module as we use it."""
    text = _VERSION.sub("", _EXPERIMENTAL.sub("", text))
    return text.replace("from kvstore.v1 import", "from kvstore.wire import")


def main() -> int:
    """Write the modules."""
    for name, text in generate().items():
        (WIRE / name).write_text(text)
        print(f"wrote kvstore/wire/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
