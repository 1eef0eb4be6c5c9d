"""The generated stubs are those of the present proto files."""

from __future__ import annotations

import pytest

from tools.generate_wire import WIRE, digest_line


@pytest.mark.parametrize("name", ["kvstore_pb2.py", "kvstore_pb2.pyi", "kvstore_pb2_grpc.py"])
def test_the_stubs_are_generated_from_the_present_proto_files(name: str) -> None:
    assert (WIRE / name).read_text().startswith(digest_line()), "run `make proto`"
