"""etcd's gRPC messages and methods, out of the package `etcd3` 0.12.0.

That package no longer imports: protobuf 4 and later refuse generated code as old as its. The code carries the serialized
descriptors of etcd's API, though, and those are as good as ever. So its three generated files are read as text, never run:
their descriptors are loaded into a pool of our own (apart from any other etcd package in the process), and today's protobuf
builds the message classes on its fast backend. The fields that etcd added since, and that a safe watch needs, are added first.

`MESSAGES` has the message classes by name, `stub` makes the methods of one service on a channel.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_VERSION = "0.12.0"
_REMEDY = f"run: pip install --force-reinstall etcd3=={_VERSION}"
_PACKAGE = "etcdserverpb"

#: in order of dependency
_FILES = {
    "kv_pb2.py": "cfe0010053f6ea8a136f21b5709c32da42166c94deaee9a8a29bc6f249cb3b96",
    "auth_pb2.py": "4afd4c95f25b9bc152f3366a403eddf2308b1551b521c1751faade2a06b353f7",
    "rpc_pb2.py": "a8b858e78c946ecb1d149eff0fca422af6c2195b54a76eb57189673af726c506",
}

_Field = descriptor_pb2.FieldDescriptorProto

#: (message, field, number, type, label), as in etcd's rpc.proto
_ADDED_FIELDS: tuple[tuple[str, str, int, _Field.Type.ValueType, _Field.Label.ValueType], ...] = (
    ("WatchCreateRequest", "watch_id", 7, _Field.TYPE_INT64, _Field.LABEL_OPTIONAL),
    ("WatchCreateRequest", "fragment", 8, _Field.TYPE_BOOL, _Field.LABEL_OPTIONAL),
    ("WatchResponse", "fragment", 7, _Field.TYPE_BOOL, _Field.LABEL_OPTIONAL),
    ("StatusResponse", "raftAppliedIndex", 7, _Field.TYPE_UINT64, _Field.LABEL_OPTIONAL),
    ("StatusResponse", "errors", 8, _Field.TYPE_STRING, _Field.LABEL_REPEATED),
    ("StatusResponse", "dbSizeInUse", 9, _Field.TYPE_INT64, _Field.LABEL_OPTIONAL),
    ("StatusResponse", "isLearner", 10, _Field.TYPE_BOOL, _Field.LABEL_OPTIONAL),
)


def _load() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the message classes and the service descriptors of etcd's API."""
    pool = descriptor_pool.DescriptorPool()
    folder = _generated_folder()
    for name, digest in _FILES.items():
        file = descriptor_pb2.FileDescriptorProto.FromString(_serialized_descriptor(folder / name, digest))
        if name == "rpc_pb2.py":
            _add_new_fields(file)
        pool.AddSerializedFile(file.SerializeToString())
    rpc = pool.FindFileByName("rpc.proto")
    messages = {name: message_factory.GetMessageClass(message) for name, message in rpc.message_types_by_name.items()}
    return MappingProxyType(messages), MappingProxyType(dict(rpc.services_by_name))


def _generated_folder() -> Path:
    # find_spec locates the package without running it.
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"the package etcd3 {_VERSION}, which holds etcd's API, is not installed; {_REMEDY}")
    return Path(spec.submodule_search_locations[0]) / "etcdrpc"


def _serialized_descriptor(path: Path, digest: str) -> bytes:
    """Return the literal in `serialized_pb=_b('...')` of one generated file."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ImportError(f"cannot read etcd's descriptors: {error}; {_REMEDY}") from error
    seen = hashlib.sha256(source).hexdigest()
    if seen != digest:
        raise ImportError(f"{path} is not the file of etcd3 {_VERSION}: its sha256 is {seen}, expected {digest}; {_REMEDY}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
            literal = node.value.args[0]
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                return literal.value.encode("latin1")
    raise ImportError(f"{path} has no serialized descriptor")


def _add_new_fields(file: descriptor_pb2.FileDescriptorProto) -> None:
    messages = {message.name: message for message in file.message_type}
    for message, name, number, kind, label in _ADDED_FIELDS:
        messages[message].field.add(name=name, number=number, type=kind, label=label)
    file.message_type.add(name="WatchProgressRequest")
    messages["WatchRequest"].field.add(
        name="progress_request",
        number=3,
        type=_Field.TYPE_MESSAGE,
        type_name=f".{_PACKAGE}.WatchProgressRequest",
        label=_Field.LABEL_OPTIONAL,
        oneof_index=0,
    )


MESSAGES, _SERVICES = _load()


def stub(channel: Any, service: str) -> SimpleNamespace:
    """Return the methods of `service` ("KV", "Watch", "Lease", "Maintenance"...) on a `grpc` or `grpc.aio` channel, by name."""
    methods = SimpleNamespace()
    for method in _SERVICES[service].methods:
        streams = "stream_stream" if method.client_streaming else "unary_stream" if method.server_streaming else "unary_unary"
        make = getattr(channel, streams)
        call = make(
            f"/{_PACKAGE}.{service}/{method.name}",
            request_serializer=MESSAGES[method.input_type.name].SerializeToString,
            response_deserializer=MESSAGES[method.output_type.name].FromString,
        )
        setattr(methods, method.name, call)
    return methods
