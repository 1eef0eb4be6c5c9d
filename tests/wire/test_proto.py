"""The proto files keep their rules, and recorded fields keep their meaning; each rule catches a planted breach.

`kvstore_v1.txtpb` is the recorded protocol. `python -m tests.wire.test_proto` records additions; recorded entries never
change.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from google.protobuf import descriptor_pb2 as pb
from google.protobuf import text_format

from tests.wire.proto_rules import breaks, descriptors, flaws

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent.parent
LANDED = Path(__file__).with_name("kvstore_v1.txtpb")
PRESENT = descriptors(ROOT / "proto")

GOOD = """syntax = "proto3";
package kvstore.v1;
service Things {
  // Does it.
  rpc Do(DoRequest) returns (DoResponse);
}
message DoRequest {
  string name_of_it = 1;
  reserved 2;
  Kind kind = 3;
  oneof either { string text = 4; uint32 number = 5; }
}
message DoResponse {}
enum Kind {
  KIND_UNSPECIFIED = 0;
  KIND_ONE = 1;
}
"""


def parsed(folder: Path, text: str) -> pb.FileDescriptorSet:
    place = folder / "kvstore" / "v1"
    place.mkdir(parents=True, exist_ok=True)
    (place / "things.proto").write_text(text)
    return descriptors(folder)


def landed() -> pb.FileDescriptorSet:
    return text_format.Parse(LANDED.read_text(), pb.FileDescriptorSet())


def test_the_current_files_follow_the_rules() -> None:
    assert list(flaws(PRESENT)) == []


def test_a_released_block_keeps_its_layout() -> None:
    assert len(landed().file) > 0
    assert list(breaks(landed(), PRESENT)) == []


def test_all_current_definitions_are_recorded_as_released() -> None:
    assert list(breaks(PRESENT, landed())) == [], (
        "run `python -m tests.wire.test_proto`, and look at what it changes"
    )


def test_a_good_file_has_no_flaw(tmp_path: Path) -> None:
    assert list(flaws(parsed(tmp_path, GOOD))) == []


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("package kvstore.v1", "package kvstore.v2", "its package is"),
        ('"proto3"', '"proto2"', "not proto3"),
        ("name_of_it", "nameOfIt", "lower_snake_case"),
        ("name_of_it", "Name_of_it", "lower_snake_case"),
        ("  reserved 2;\n", "", "number 2 is neither"),
        ("DoResponse", "do_response", "a message is UpperCamel"),
        ("DoRequest", "DoThings", "its messages are DoRequest"),
        ("  // Does it.\n", "", "has a comment"),
        ("rpc Do(", "rpc do(", "a call is UpperCamel"),
        ("Things", "things", "a service is UpperCamel"),
        ("KIND_UNSPECIFIED", "KIND_NONE", "value 0 is not"),
        ("KIND_ONE", "ONE", "begins with KIND_"),
        ("KIND_ONE", "KIND_one", "UPPER_CASE"),
    ],
)
def test_a_flaw_is_found(tmp_path: Path, old: str, new: str, why: str) -> None:
    text = GOOD.replace(old, new)
    if "proto2" in new:
        text = text.replace("string name", "optional string name").replace("Kind kind", "optional Kind kind")
    assert [why for found in flaws(parsed(tmp_path, text)) if why in found] == [why]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("string name_of_it = 1;", "reserved 1;", "name_of_it: it is gone"),
        ("string name_of_it = 1;", 'reserved 1; reserved "another";', "name_of_it: it is gone"),
        ("name_of_it = 1", "name_of_it = 6", "name_of_it: it is gone"),
        ("string name_of_it", "bytes name_of_it", "means something else"),
        ("string name_of_it", "repeated string name_of_it", "means something else"),
        ("name_of_it", "name_of_them", "means something else"),
        ("Kind kind = 3", "uint32 kind = 3", "means something else"),
        (
            "oneof either { string text = 4; uint32 number = 5; }",
            "string text = 4; uint32 number = 5;",
            "else",
        ),
        ("reserved 2;", "uint32 more = 2;", "no longer reserved"),
        ("KIND_ONE = 1", "KIND_ONE = 2", "1 is no longer KIND_ONE"),
        ("KIND_ONE", "KIND_SOLE", "1 is no longer KIND_ONE"),
        ("rpc Do(DoRequest)", "rpc Do(stream DoRequest)", "Things.Do: the call"),
        ("rpc Do(", "rpc Make(", "Things.Do: the call"),
        ("service Things", "service Others", "Things.Do: the call"),
        ("DoResponse", "DoneResponse", "DoResponse: the message is gone"),
    ],
)
def test_a_change_of_a_released_definition_is_found(tmp_path: Path, old: str, new: str, why: str) -> None:
    assert old in GOOD
    before = parsed(tmp_path / "old", GOOD)
    after = parsed(tmp_path / "new", GOOD.replace(old, new))
    assert any(why in found for found in breaks(before, after))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("uint32 number = 5; }", "uint32 number = 5; } bytes more = 6;"),
        lambda text: text.replace("KIND_ONE = 1;", "KIND_ONE = 1; KIND_TWO = 2;"),
        lambda text: text.replace("string name_of_it = 1;", 'reserved 1; reserved "name_of_it";'),
        lambda text: text.replace("uint32 number = 5", "Kind number = 5"),  # the same bytes
        lambda text: text + "message More {}\n",
        lambda text: text.replace("// Does it.", "// Does that."),
    ],
)
def test_an_addition_breaks_nothing(tmp_path: Path, change: Callable[[str], str]) -> None:
    assert list(breaks(parsed(tmp_path / "old", GOOD), parsed(tmp_path / "new", change(GOOD)))) == []


def write_down() -> None:
    """Record the current protocol, without comments; a breaking change is refused."""
    broken = list(breaks(landed(), PRESENT)) if LANDED.exists() else []
    if broken:
        raise SystemExit("\n".join(broken))
    bare = pb.FileDescriptorSet.FromString(PRESENT.SerializeToString())
    for file in bare.file:
        file.ClearField("source_code_info")
    LANDED.write_text(text_format.MessageToString(bare))


if __name__ == "__main__":
    write_down()
