"""The generated stubs match the proto files."""

from __future__ import annotations

import pytest

from tools.generate_wire import PROTO, WIRE, digest_line

NAMES = [
    f"{source.stem}{kind}"
    for source in sorted(PROTO.rglob("*.proto"))
    for kind in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
]


@pytest.mark.parametrize("name", NAMES)
def test_the_stubs_are_generated_from_the_current_proto_files(name: str) -> None:
    assert (WIRE / name).read_text().startswith(digest_line()), "run `make proto`"
