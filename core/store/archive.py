"""Frames that a snapshot has made superfluous for the store, kept in files: the history of the cluster, and the audit trail.

Each scheduler has a directory of its own and archives what it truncates; one that led later lacks the earlier segments, which is no fault:
`gaps` tells. A segment is one file, `<first>-<last>.<digest>.frames`, with indexes of 16 digits and the first 128 bits of the BLAKE2b-256
digest of the file's bytes in hex:

    8 bytes    b"GANGLOG" and the version of this format
    4 bytes    length of the header, big-endian
    header     msgpack of `Header`
    the rest   zlib data: for each frame 4 bytes of length, big-endian, and its bytes

The header has the digests of the chain's ends, so that segments are known to fit without unpacking them. A file is complete or absent: it is
written under another name, forced to the disk, and renamed.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgpack
import msgspec

from gangline.core.model.codec import digest, pack, unpack

FORMAT = 1

_MAGIC = b"GANGLOG" + bytes([FORMAT])
_LENGTH = struct.Struct(">I")
_NAME = re.compile(r"(\d{16})-(\d{16})\.([0-9a-f]{32})\.frames")
_NAME_DIGEST_CHARS = 32

#: a segment is closed once its frames have so many bytes, so that reading one frame never unpacks a huge file
_SEGMENT_BYTES = 16 << 20
_ZLIB_LEVEL = 6


class ArchiveError(Exception):
    """The archive cannot give what was asked. The message says which file or index, and what to do."""


class SegmentDamaged(ArchiveError):
    """A file is not what its name says, or breaks the chain."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"archive segment {path}: {what}; take the file from a backup or another scheduler, or move it away to go on without it"
        )
        self.path = path


class NotArchived(ArchiveError):
    """This scheduler's archive does not have the frame. `next` is the first later one that it has, None without any."""

    def __init__(self, directory: Path, index: int, next_index: int | None) -> None:
        later = "nothing later" if next_index is None else f"the next one here is {next_index}"
        super().__init__(f"log frame {index} is not in archive {directory} ({later}); another scheduler that led at that time may have it")
        self.index = index
        self.next = next_index


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a segment."""

    first: int
    last: int
    #: of the frame before `first`, as that frame's bytes say
    previous: bytes
    #: of the frame `last`
    digest: bytes


class Segment(NamedTuple):
    """One file of the archive, by its name."""

    first: int
    last: int
    path: Path


class Archive:
    """The archive in one directory. All methods block on the disk; they raise ArchiveError and OSError."""

    def __init__(self, directory: Path) -> None:
        """The directory is made when the first segment is written."""
        self._directory = directory

    @property
    def first(self) -> int | None:
        """Index of the first frame, None when there is none."""
        segments = self.segments()
        return segments[0].first if segments else None

    @property
    def last(self) -> int | None:
        """Index of the last frame, None when there is none."""
        return max((s.last for s in self.segments()), default=None)

    def segments(self) -> list[Segment]:
        """Return what the directory has, by first index. Other files in it are ignored."""
        if not self._directory.is_dir():
            return []
        found = []
        for path in self._directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                found.append(Segment(int(match[1]), int(match[2]), path))
        return sorted(found)

    def gaps(self) -> list[tuple[int, int]]:
        """Return (first, last) of each range that is missing between segments."""
        return [(a.last + 1, b.first - 1) for a, b in pairwise(self.segments()) if b.first > a.last + 1]

    def write(self, frames: Iterable[tuple[int, bytes]]) -> None:
        """Archive (index, bytes) of successive frames; those that are archived already are passed over. On return they are on the disk.

        Raises SegmentDamaged for frames that do not continue the chain of the segment before them; ValueError when they do not follow each
        other.
        """
        batch: list[bytes] = []
        first = size = 0
        for index, data in self._new(frames):
            if batch and (index != first + len(batch) or size >= _SEGMENT_BYTES):
                self._write_segment(first, batch)
                batch, size = [], 0
            if not batch:
                self._check_before(index, data)
                first = index
            batch.append(data)
            size += len(data)
        if batch:
            self._write_segment(first, batch)

    def read(self, first: int, last: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (index, bytes) from `first` to `last` (None: to the end of the archive), digests and chain checked.

        Raises NotArchived at the first frame that is missing, SegmentDamaged.
        """
        want, chain = first, b""
        while last is None or want <= last:
            segment = next((s for s in self.segments() if s.first <= want <= s.last), None)
            if segment is None:
                later = next((s.first for s in self.segments() if s.first > want), None)
                if last is None and later is None and want > first:
                    return
                raise NotArchived(self._directory, want, later)
            for index, data in _frames(segment):
                if index == want and chain and _previous(data) != chain:
                    raise SegmentDamaged(segment.path, f"frame {index} does not continue the chain of the frames before it")
                if index >= want and (last is None or index <= last):
                    chain = digest(data)
                    want = index + 1
                    yield index, data

    def verify(self) -> list[str]:
        """Return what is wrong with the archive, a sentence each: damaged files, breaks of the chain. Gaps are in `gaps`."""
        problems: list[str] = []
        before: tuple[Segment, Header] | None = None
        for segment in self.segments():
            try:
                header = _check(segment)
            except ArchiveError as e:
                problems.append(str(e))
                before = None
                continue
            if before is not None and before[0].last + 1 == segment.first and before[1].digest != header.previous:
                problems.append(f"archive segment {segment.path}: does not continue the chain of {before[0].path.name}")
            before = segment, header
        return problems

    def _new(self, frames: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield the frames that no segment has, checked to follow each other."""
        known = self.segments()
        expected, chain = None, b""
        for index, data in frames:
            if expected is not None and index != expected:
                raise ValueError(f"frame {index} was given to the archive after frame {expected - 1}")
            if chain and _previous(data) != chain:
                raise ValueError(f"frame {index} does not continue the chain of frame {index - 1}")
            expected, chain = index + 1, digest(data)
            if not any(s.first <= index <= s.last for s in known):
                yield index, data

    def _check_before(self, index: int, data: bytes) -> None:
        before = next((s for s in self.segments() if s.last == index - 1), None)
        if before is not None and _read(before)[0].digest != _previous(data):
            raise SegmentDamaged(before.path, f"frame {index} of the log does not continue its chain: it is of another history")

    def _write_segment(self, first: int, frames: list[bytes]) -> None:
        last = first + len(frames) - 1
        header = pack(Header(first=first, last=last, previous=_previous(frames[0]), digest=digest(frames[-1])))
        compressor = zlib.compressobj(_ZLIB_LEVEL)
        out = bytearray(_MAGIC + _LENGTH.pack(len(header)) + header)
        for data in frames:
            out += compressor.compress(_LENGTH.pack(len(data)) + data)
        out += compressor.flush()
        content = bytes(out)
        name = f"{first:016d}-{last:016d}.{digest(content).hex()[:_NAME_DIGEST_CHARS]}.frames"
        self._directory.mkdir(parents=True, exist_ok=True)
        temporary = self._directory / f".{name}.tmp"
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._directory / name)
        _sync_directory(self._directory)


def _check(segment: Segment) -> Header:
    """Read all of a segment. Raises SegmentDamaged."""
    for _ in _frames(segment):
        pass
    return _read(segment)[0]


def _frames(segment: Segment) -> Iterator[tuple[int, bytes]]:
    """Yield what is in a segment, its digest and the chain inside it checked. Raises SegmentDamaged."""
    header, packed = _read(segment)
    index, chain = segment.first, header.previous
    for data in _unpack(segment, packed):
        if _previous(data) != chain:
            raise SegmentDamaged(segment.path, f"frame {index} does not continue the chain of the frames before it")
        yield index, data
        index, chain = index + 1, digest(data)
    if index != segment.last + 1 or chain != header.digest:
        raise SegmentDamaged(segment.path, f"ends after frame {index - 1}, but its name says {segment.last}")


def _read(segment: Segment) -> tuple[Header, bytes]:
    """Return the header of a segment and its packed frames. Raises SegmentDamaged when the file is not what its name says."""
    content = segment.path.read_bytes()
    if digest(content).hex()[:_NAME_DIGEST_CHARS] != segment.path.name.split(".")[1]:
        raise SegmentDamaged(segment.path, "its digest is not the one in its name: it is damaged")
    if content[: len(_MAGIC)] != _MAGIC:
        raise SegmentDamaged(segment.path, f"does not begin as a segment of format {FORMAT}; was it written by a newer version?")
    start = len(_MAGIC) + _LENGTH.size
    try:
        (size,) = _LENGTH.unpack_from(content, len(_MAGIC))
        header = unpack(content[start : start + size], Header)
    except (struct.error, ValueError) as e:
        raise SegmentDamaged(segment.path, f"has no readable header: {e}") from e
    if (header.first, header.last) != (segment.first, segment.last):
        raise SegmentDamaged(segment.path, f"has the frames {header.first} to {header.last} by its header")
    return header, content[start + size :]


def _unpack(segment: Segment, packed: bytes) -> Iterator[bytes]:
    try:
        raw = zlib.decompress(packed)
    except zlib.error as e:
        raise SegmentDamaged(segment.path, f"cannot be unpacked: {e}") from e
    at = 0
    while at < len(raw):
        if at + _LENGTH.size > len(raw):
            raise SegmentDamaged(segment.path, "ends inside a frame")
        (size,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if at + size > len(raw):
            raise SegmentDamaged(segment.path, "ends inside a frame")
        yield raw[at : at + size]
        at += size


def _previous(data: bytes) -> bytes:
    """Return the digest that a frame continues from, without reading its events. Raises ValueError when it is no frame."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    try:
        unpacker.feed(data)
        unpacker.read_array_header()
        for _ in range(4):
            unpacker.skip()
        previous = unpacker.unpack()
    except (msgpack.UnpackException, ValueError) as e:
        raise ValueError(f"not a frame: {e or type(e).__name__}") from e
    if not isinstance(previous, bytes):
        raise ValueError("not a frame: it names no frame before it")
    return previous


def _sync_directory(directory: Path) -> None:
    """A rename is on the disk once its directory is."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
