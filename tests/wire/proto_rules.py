"""Rules for the proto files, as functions over their descriptors: what a name is like, and what a version may change.

What always holds: a breach is one sentence that names the place. A rule imports nothing of what it judges.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import descriptor_pb2 as pb
from grpc_tools import protoc

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["breaks", "descriptors", "flaws"]

PACKAGE = "kvstore.v1"
SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
CAMEL = re.compile(r"([A-Z][a-z0-9]*)+")
UPPER = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
SERVICE, METHOD = 6, 2  # field numbers in a file's descriptor, by which comments are found


def descriptors(folder: Path) -> pb.FileDescriptorSet:
    """The descriptors of all proto files under a folder, with their comments."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out.binpb"
        sources = [str(path) for path in sorted(folder.rglob("*.proto"))]
        command = ["protoc", f"-I{folder}", "--include_source_info", f"--descriptor_set_out={out}", *sources]
        assert protoc.main(command) == 0
        return pb.FileDescriptorSet.FromString(out.read_bytes())


def messages_of(file: pb.FileDescriptorProto) -> Iterator[tuple[str, pb.DescriptorProto]]:
    """All messages by name, including nested ones."""
    waiting = [(message.name, message) for message in file.message_type]
    while waiting:
        name, message = waiting.pop()
        yield name, message
        waiting += [(f"{name}.{inner.name}", inner) for inner in message.nested_type]


def enums_of(file: pb.FileDescriptorProto) -> Iterator[tuple[str, pb.EnumDescriptorProto]]:
    """All enums by name, including nested ones."""
    yield from ((enum.name, enum) for enum in file.enum_type)
    for name, message in messages_of(file):
        yield from ((f"{name}.{enum.name}", enum) for enum in message.enum_type)


def flaws(files: pb.FileDescriptorSet) -> Iterator[str]:
    """The names, numbers and comments that break the rules."""
    for file in files.file:
        if file.package != PACKAGE or not file.name.startswith(PACKAGE.replace(".", "/") + "/"):
            yield f"{file.name}: its package is {file.package!r}, and not {PACKAGE}, which its folder says"
        if file.syntax != "proto3":
            yield f"{file.name}: it is not proto3"
        for name, message in messages_of(file):
            yield from _message_flaws(name, message)
        for name, enum in enums_of(file):
            yield from _enum_flaws(name, enum)
        yield from _service_flaws(file)


def _message_flaws(name: str, message: pb.DescriptorProto) -> Iterator[str]:
    if not CAMEL.fullmatch(message.name):
        yield f"{name}: a message is UpperCamel"
    numbers = {field.number for field in message.field}
    for field in message.field:
        if not SNAKE.fullmatch(field.name):
            yield f"{name}.{field.name}: a field is lower_snake_case"
    reserved = {number for reserve in message.reserved_range for number in range(reserve.start, reserve.end)}
    for number in sorted(set(range(1, max(numbers | reserved, default=0) + 1)) - numbers - reserved):
        yield f"{name}: number {number} is neither a field's nor reserved"


def _enum_flaws(name: str, enum: pb.EnumDescriptorProto) -> Iterator[str]:
    if not CAMEL.fullmatch(enum.name):
        yield f"{name}: an enum is UpperCamel"
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper()
    if enum.value[0].number != 0 or enum.value[0].name != f"{prefix}_UNSPECIFIED":
        yield f"{name}: its value 0 is not {prefix}_UNSPECIFIED"
    for value in enum.value:
        if not UPPER.fullmatch(value.name) or not value.name.startswith(f"{prefix}_"):
            yield f"{name}.{value.name}: a value is UPPER_CASE and begins with {prefix}_"


def _service_flaws(file: pb.FileDescriptorProto) -> Iterator[str]:
    commented = {
        tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()
    }
    for number, service in enumerate(file.service):
        if not CAMEL.fullmatch(service.name):
            yield f"{service.name}: a service is UpperCamel"
        for at, method in enumerate(service.method):
            called = f"{service.name}.{method.name}"
            if (SERVICE, number, METHOD, at) not in commented:
                yield f"{called}: a call has a comment that says what it does"
            if not CAMEL.fullmatch(method.name):
                yield f"{called}: a call is UpperCamel"
            asked, answered = (one.rpartition(".")[2] for one in (method.input_type, method.output_type))
            if (asked, answered) != (f"{method.name}Request", f"{method.name}Response"):
                yield f"{called}: its messages are {method.name}Request and {method.name}Response"


def breaks(old: pb.FileDescriptorSet, new: pb.FileDescriptorSet) -> Iterator[str]:
    """The definitions of an old version that are missing or changed in a new one; additions are allowed."""
    messages = {name: message for file in new.file for name, message in messages_of(file)}
    enums = {name: enum for file in new.file for name, enum in enums_of(file)}
    services = {service.name: service for file in new.file for service in file.service}
    for file in old.file:
        for name, message in messages_of(file):
            if name not in messages:
                yield f"{name}: the message is gone"
            else:
                yield from _message_breaks(name, message, messages[name])
        for name, enum in enums_of(file):
            values = {value.number: value.name for value in enums[name].value} if name in enums else {}
            for value in enum.value:
                if values.get(value.number) != value.name:
                    yield f"{name}: {value.number} is no longer {value.name}"
        for service in file.service:
            calls = (
                {call.name: call for call in services[service.name].method}
                if service.name in services
                else {}
            )
            for call in service.method:
                if call.name not in calls or _shape(call) != _shape(calls[call.name]):
                    yield f"{service.name}.{call.name}: the call is gone or changed"


def _message_breaks(name: str, old: pb.DescriptorProto, new: pb.DescriptorProto) -> Iterator[str]:
    fields = {field.number: field for field in new.field}
    reserved = {number for reserve in new.reserved_range for number in range(reserve.start, reserve.end)}
    for field in old.field:
        now = fields.get(field.number)
        if now is None and not (field.number in reserved and field.name in new.reserved_name):
            yield f"{name}.{field.name}: it is gone, and its number and name are not reserved"
        elif now is not None and _meaning(field) != _meaning(now) and not _has_names_now(field, now):
            yield f"{name}.{field.name}: number {field.number} means something else"
    kept = {number for reserve in old.reserved_range for number in range(reserve.start, reserve.end)}
    for number in sorted(kept - reserved):
        yield f"{name}: number {number} is no longer reserved"


def _shape(call: pb.MethodDescriptorProto) -> tuple[str, str, bool, bool]:
    return call.input_type, call.output_type, call.client_streaming, call.server_streaming


def _has_names_now(old: pb.FieldDescriptorProto, new: pb.FieldDescriptorProto) -> bool:
    """Whether a number has become an enum, which is the same on the wire: proto3's enums take any number."""
    kinds = (pb.FieldDescriptorProto.TYPE_UINT32, pb.FieldDescriptorProto.TYPE_ENUM)
    rest = old.name, old.label, old.HasField("oneof_index")
    return (old.type, new.type) == kinds and rest == (new.name, new.label, new.HasField("oneof_index"))


def _meaning(field: pb.FieldDescriptorProto) -> tuple[str, int, int, str, bool]:
    return field.name, field.type, field.label, field.type_name, field.HasField("oneof_index")
