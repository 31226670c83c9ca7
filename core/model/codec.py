"""Bytes to and from the log: frames, the hash chain, event versions and their upcasting. DESIGN section 2.

A frame is a msgpack array

    [schema, index, epoch, at_ms, previous, nonce, [[name, version, body], ...]]

`previous` is the BLAKE2b-256 digest of the previous frame's bytes (32 zero bytes before the first), `nonce` tells our own ambiguous append
from another's. The bodies are maps by field name. Reading is strict: an unknown name, a newer version, an unknown field or a wrong type
raises BadFrame; nothing is ever skipped.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgpack
import msgspec

from gangline.core.model import events
from gangline.core.model.events import LogEvent

FRAME_SCHEMA = 1
DIGEST_SIZE = 32
GENESIS = bytes(DIGEST_SIZE)

#: refused at the door, long before the store would: RELIABILITY section 2.1
MAX_FRAME_BYTES = 1_400_000

T = TypeVar("T")


class BadFrame(Exception):
    """A frame that cannot be read: damaged, out of order, or written by a newer version. The fold stops there.

    `index` is the frame's expected index.
    """

    def __init__(self, index: int, what: str) -> None:
        super().__init__(f"log frame {index}: {what}; the fold stops here and nothing is skipped")
        self.index = index
        self.what = what


class Frame(msgspec.Struct, frozen=True):
    """One log entry: events that were committed together. `digest` is that of its own bytes."""

    index: int
    epoch: int
    at_ms: int
    previous: bytes
    nonce: bytes
    events: tuple[LogEvent, ...]
    digest: bytes
    size_bytes: int


def encode_event(event: LogEvent) -> bytes:
    """Return the wire form [name, version, body] as msgpack."""
    data: bytes = msgpack.packb([event.NAME, event.VERSION, msgspec.to_builtins(event, builtin_types=(bytes,))], use_bin_type=True)
    return data


def decode_event(wire: Any) -> LogEvent:
    """Return the event of a wire form, upcast to the newest version. Raises ValueError saying what is wrong with it."""
    try:
        name, version, body = wire
    except (TypeError, ValueError):
        raise ValueError(f"an event is [name, version, body], not {type(wire).__name__}") from None
    cls = events.REGISTRY.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"unknown event {name!r}: written by a newer version? upgrade this process")
    if type(version) is not int or not 1 <= version <= cls.VERSION:
        raise ValueError(f"event {name} has version {version!r}, this process knows 1 to {cls.VERSION}; upgrade this process")
    try:
        for step in range(version, cls.VERSION):
            body = events.UPCASTS[name, step](body)
        return msgspec.convert(body, cls)
    except (msgspec.ValidationError, TypeError, ValueError, LookupError, AttributeError) as e:  # an upcast meets a body that is not one
        raise ValueError(f"event {name} version {version}: {e}") from e


def encode_frame(index: int, epoch: int, at_ms: int, previous: bytes, nonce: bytes, wires: list[bytes]) -> bytes:
    """Return the bytes of a frame from already encoded events."""
    packer = msgpack.Packer(use_bin_type=True, autoreset=False)
    packer.pack_array_header(7)
    for field in (FRAME_SCHEMA, index, epoch, at_ms, previous, nonce):
        packer.pack(field)
    packer.pack_array_header(len(wires))
    header: bytes = packer.bytes()
    return header + b"".join(wires)


def decode_frame(data: bytes, index: int, previous: bytes | None) -> Frame:
    """Return the frame that must be number `index` and continue the chain from `previous` (None: the chain is not checked).

    Raises BadFrame.
    """
    try:
        wire = _unpack(data)
        schema, seen, epoch, at_ms, prev, nonce, wires = wire
    except (ValueError, TypeError, msgpack.UnpackException) as e:
        raise BadFrame(index, f"not a frame ({e or type(e).__name__})") from e
    if schema != FRAME_SCHEMA:
        raise BadFrame(index, f"frame schema {schema!r}, this process knows {FRAME_SCHEMA}")
    if seen != index:
        raise BadFrame(index, f"the frame says that it is number {seen!r}")
    if not (type(epoch) is int and type(at_ms) is int and isinstance(prev, bytes) and isinstance(nonce, bytes) and isinstance(wires, list)):
        raise BadFrame(index, "header fields have wrong types")
    if previous is not None and prev != previous:
        raise BadFrame(index, f"breaks the hash chain: continues {prev.hex()[:16]}, the frame before is {previous.hex()[:16]}")
    try:
        decoded = tuple(decode_event(w) for w in wires)
    except ValueError as e:
        raise BadFrame(index, str(e)) from e
    return Frame(index, epoch, at_ms, prev, nonce, decoded, digest(data), len(data))


def digest(data: bytes) -> bytes:
    """Return the BLAKE2b-256 digest that chains frames and seals snapshots."""
    return hashlib.blake2b(data, digest_size=DIGEST_SIZE).digest()


def pack(document: msgspec.Struct) -> bytes:
    """Return a document (see documents.py) or a job spec as msgpack."""
    data: bytes = msgpack.packb(msgspec.to_builtins(document, builtin_types=(bytes,)), use_bin_type=True)
    return data


def unpack(data: bytes, as_type: type[T]) -> T:
    """Return the document in `data`. Raises ValueError for bytes that are not exactly one document of that type."""
    try:
        return msgspec.convert(_unpack(data), as_type)
    except (msgpack.UnpackException, TypeError, msgspec.ValidationError, ValueError) as e:
        raise ValueError(f"not a {as_type.__name__}: {e or type(e).__name__}") from e


def _unpack(data: bytes) -> Any:
    # Bounded by the size of the data itself, so that no header can ask for more memory than it brought.
    size = len(data)
    return msgpack.unpackb(
        data, raw=False, strict_map_key=True, ext_hook=_no_ext, timestamp=0,
        max_str_len=size, max_bin_len=size, max_array_len=size, max_map_len=size, max_ext_len=0,
    )  # fmt: skip


def _no_ext(code: int, _data: bytes) -> Any:
    raise ValueError(f"msgpack extension type {code} is not used in the log")

