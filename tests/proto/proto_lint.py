#!/usr/bin/python3
"""Style and compatibility of the API's Protobuf files.

    proto_lint.py check     buf's STANDARD rules, comments, and no breaking change against winnow_v1.binpb
    proto_lint.py update    accept the API as it is now: rewrite winnow_v1.binpb

Needs protoc and Python's protobuf. Only packages of ours are checked: google.rpc and grpc.health.v1 are given.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

from google.protobuf import descriptor_pb2

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMITTED = pathlib.Path(__file__).with_name("winnow_v1.binpb")
Field = descriptor_pb2.FieldDescriptorProto


def compile_protos(proto_root):
    """A FileDescriptorSet of all files under winnow/, with comments."""
    files = sorted(str(path.relative_to(proto_root)) for path in pathlib.Path(proto_root).glob("winnow/**/*.proto"))
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run(["protoc", "-I", proto_root, "--include_source_info", f"--descriptor_set_out={out.name}", *files],
                       check=True)
        return descriptor_pb2.FileDescriptorSet.FromString(pathlib.Path(out.name).read_bytes())


def is_snake(name):
    return re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) is not None


def is_pascal(name):
    return re.fullmatch(r"[A-Z][A-Za-z0-9]*", name) is not None


def upper_snake(name):
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()


class Linter:
    def __init__(self, file_set):
        self.faults = []
        packages = {}
        self.request_types = {}
        for file in file_set.file:
            self.file = file
            self.comments = {tuple(location.path): location.leading_comments
                             for location in file.source_code_info.location}
            packages.setdefault(str(pathlib.PurePosixPath(file.name).parent), set()).add(file.package)
            self.lint_file(file)
        for directory, names in packages.items():
            if len(names) > 1:
                self.faults.append(f"{directory}: more than one package: {sorted(names)}")

    def fault(self, where, what):
        self.faults.append(f"{self.file.name}: {where}: {what}")

    def need_comment(self, path, where):
        if not self.comments.get(tuple(path), "").strip():
            self.fault(where, "has no comment")

    def lint_file(self, file):
        path = pathlib.PurePosixPath(file.name)
        if file.syntax != "proto3":
            self.fault("syntax", "is not proto3")
        if not file.package:
            self.fault("package", "is missing")
        if str(path.parent) != file.package.replace(".", "/"):
            self.fault("package", f"{file.package} does not match the directory {path.parent}")
        if not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)*\.v[1-9][0-9]*((alpha|beta)[1-9][0-9]*)?", file.package):
            self.fault("package", f"{file.package} is not lower_snake with a version at the end")
        if not is_snake(path.stem):
            self.fault("file", "is not lower_snake_case")
        if file.public_dependency or file.weak_dependency:
            self.fault("import", "is public or weak")
        for i, message in enumerate(file.message_type):
            self.lint_message(message, [4, i], message.name)
        for i, enum in enumerate(file.enum_type):
            self.lint_enum(enum, [5, i], enum.name)
        for i, service in enumerate(file.service):
            self.lint_service(service, [6, i])

    def lint_message(self, message, path, where):
        if message.options.map_entry:
            return
        if not is_pascal(message.name):
            self.fault(where, "is not PascalCase")
        if not where.endswith(("Request", "Response")):  # for those the RPC's comment speaks
            self.need_comment(path, where)
        for i, field in enumerate(message.field):
            if not is_snake(field.name):
                self.fault(f"{where}.{field.name}", "is not lower_snake_case")
            if field.label == Field.LABEL_REQUIRED:
                self.fault(f"{where}.{field.name}", "is required")
        for i, oneof in enumerate(message.oneof_decl):
            if not is_snake(oneof.name.lstrip("_")):
                self.fault(f"{where}.{oneof.name}", "is not lower_snake_case")
        for i, nested in enumerate(message.nested_type):
            self.lint_message(nested, path + [3, i], f"{where}.{nested.name}")
        for i, enum in enumerate(message.enum_type):
            self.lint_enum(enum, path + [4, i], f"{where}.{enum.name}")

    def lint_enum(self, enum, path, where):
        self.need_comment(path, where)
        prefix = upper_snake(enum.name) + "_"
        if not is_pascal(enum.name):
            self.fault(where, "is not PascalCase")
        if enum.options.allow_alias:
            self.fault(where, "allows aliases")
        if not any(value.number == 0 and value.name == prefix + "UNSPECIFIED" for value in enum.value):
            self.fault(where, f"has no {prefix}UNSPECIFIED = 0")
        for i, value in enumerate(enum.value):
            if not value.name.startswith(prefix):
                self.fault(f"{where}.{value.name}", f"does not begin with {prefix}")
            if not re.fullmatch(r"[A-Z][A-Z0-9_]*", value.name):
                self.fault(f"{where}.{value.name}", "is not UPPER_SNAKE_CASE")
            if value.number != 0:
                self.need_comment(path + [2, i], f"{where}.{value.name}")

    def lint_service(self, service, path):
        self.need_comment(path, service.name)
        if not is_pascal(service.name) or not service.name.endswith("Service"):
            self.fault(service.name, "is not PascalCase that ends with Service")
        for i, method in enumerate(service.method):
            where = f"{service.name}.{method.name}"
            self.need_comment(path + [2, i], where)
            if not is_pascal(method.name):
                self.fault(where, "is not PascalCase")
            for kind, type_name in (("Request", method.input_type), ("Response", method.output_type)):
                short = type_name.rpartition(".")[2]
                if short not in (method.name + kind, service.name + method.name + kind):
                    self.fault(where, f"has {short}, not {method.name}{kind}")
                if type_name in self.request_types:
                    self.fault(where, f"shares {short} with {self.request_types[type_name]}")
                self.request_types[type_name] = where


def messages_of(file_set):
    def walk(prefix, messages):
        for message in messages:
            name = f"{prefix}.{message.name}"
            yield name, message
            yield from walk(name, message.nested_type)
    for file in file_set.file:
        yield from walk(file.package, file.message_type)


def enums_of(file_set):
    for file in file_set.file:
        for enum in file.enum_type:
            yield f"{file.package}.{enum.name}", enum
    for name, message in messages_of(file_set):
        for enum in message.enum_type:
            yield f"{name}.{enum.name}", enum


def breaking_changes(old, new):
    """What a client that was built against `old` could trip over in `new`, on the wire, in JSON or in source."""
    faults = []
    new_messages, new_enums = dict(messages_of(new)), dict(enums_of(new))
    for name, message in messages_of(old):
        if name not in new_messages:
            faults.append(f"message {name} is gone")
            continue
        now = new_messages[name]
        fields = {field.number: field for field in now.field}
        for field in message.field:
            where = f"{name}.{field.name} = {field.number}"
            if field.number not in fields:
                reserved = any(r.start <= field.number < r.end for r in now.reserved_range)
                if not (reserved and field.name in now.reserved_name):
                    faults.append(f"{where} is gone, and number and name are not both reserved")
                continue
            other = fields[field.number]
            for attribute in ("name", "type", "label", "type_name", "json_name", "proto3_optional"):
                if getattr(field, attribute) != getattr(other, attribute):
                    faults.append(f"{where}: {attribute} was {getattr(field, attribute)!r}, "
                                  f"is {getattr(other, attribute)!r}")
            oneof = lambda m, f: m.oneof_decl[f.oneof_index].name if f.HasField("oneof_index") else None
            if oneof(message, field) != oneof(now, other):
                faults.append(f"{where}: moved into or out of a oneof")
        for old_range in message.reserved_range:
            for number in range(old_range.start, min(old_range.end, old_range.start + 1000)):
                if number in fields:
                    faults.append(f"{name}: the reserved number {number} is used")
    for name, enum in enums_of(old):
        if name not in new_enums:
            faults.append(f"enum {name} is gone")
            continue
        values = {value.number: value.name for value in new_enums[name].value}
        for value in enum.value:
            if values.get(value.number) != value.name:
                faults.append(f"{name}.{value.name} = {value.number} is gone or has another name")
    services = {f"{file.package}.{service.name}": service for file in new.file for service in file.service}
    for file in old.file:
        for service in file.service:
            name = f"{file.package}.{service.name}"
            methods = {method.name: method for method in services[name].method} if name in services else {}
            if name not in services:
                faults.append(f"service {name} is gone")
            for method in service.method:
                other = methods.get(method.name)
                attributes = ("input_type", "output_type", "client_streaming", "server_streaming")
                if other is None:
                    faults.append(f"{name}.{method.name} is gone")
                elif any(getattr(method, a) != getattr(other, a) for a in attributes):
                    faults.append(f"{name}.{method.name} has other types or another kind of streaming")
    return faults


def main():
    if sys.argv[1:] not in (["check"], ["update"]):
        sys.exit(__doc__)
    now = compile_protos(ROOT / "proto")
    if sys.argv[1] == "update":
        for file in now.file:
            file.ClearField("source_code_info")
        COMMITTED.write_bytes(now.SerializeToString(deterministic=True))
        return
    faults = Linter(now).faults
    faults += [f"breaking: {fault}" for fault in breaking_changes(
        descriptor_pb2.FileDescriptorSet.FromString(COMMITTED.read_bytes()), now)]
    for fault in faults:
        print(fault)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
