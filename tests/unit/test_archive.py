"""The archive: complete files or none, a chain from one to the next, and honest answers about what is missing or damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gangline.core.model.codec import encode_frame
from gangline.core.store import archive as module
from gangline.core.store.archive import Archive, NotArchived, SegmentDamaged

Frames = list[tuple[int, bytes]]


@pytest.fixture
def frames(history: Callable[[int, int], Any]) -> Frames:
    return list(enumerate(history(1, 60).frames, 1))


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive")


def test_what_was_written_is_read_back(archive: Archive, frames: Frames) -> None:
    archive.write(frames[:25])
    archive.write(frames[25:])
    assert list(archive.read(1)) == frames
    assert list(archive.read(20, 31)) == frames[19:31]
    assert (archive.first, archive.last, archive.gaps(), archive.verify()) == (1, len(frames), [], [])


def test_an_archive_without_a_directory_is_empty(archive: Archive) -> None:
    assert (archive.first, archive.last, archive.segments(), archive.gaps(), archive.verify()) == (None, None, [], [], [])
    with pytest.raises(NotArchived, match=r"log frame 1 is not in archive .*nothing later"):
        list(archive.read(1))


def test_writing_again_writes_nothing(archive: Archive, frames: Frames) -> None:
    archive.write(frames[:30])
    before = {s.path: s.path.stat().st_mtime_ns for s in archive.segments()}
    archive.write(frames[:30])
    archive.write(frames[10:20])
    archive.write([])
    assert {s.path: s.path.stat().st_mtime_ns for s in archive.segments()} == before


def test_only_the_new_part_is_written(archive: Archive, frames: Frames) -> None:
    archive.write(frames[:30])
    archive.write(frames[20:40])
    assert [(s.first, s.last) for s in archive.segments()] == [(1, 30), (31, 40)]
    assert list(archive.read(1)) == frames[:40]


def test_big_batches_become_several_segments(archive: Archive, frames: Frames, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEGMENT_BYTES", 2_000)
    archive.write(frames)
    assert len(archive.segments()) > 3
    assert list(archive.read(1)) == frames


def test_gaps_are_known_filled_and_reported(archive: Archive, frames: Frames) -> None:
    archive.write(frames[:10])
    archive.write(frames[20:30])
    assert archive.gaps() == [(11, 20)]
    got: Frames = []
    with pytest.raises(NotArchived, match="the next one here is 21") as e:
        got.extend(archive.read(5))
    assert (e.value.index, e.value.next) == (11, 21)
    assert got == frames[4:10]
    with pytest.raises(NotArchived):
        list(archive.read(25, 31))
    archive.write(frames[:30])
    assert archive.gaps() == []
    assert list(archive.read(1)) == frames[:30]
    assert archive.verify() == []


@pytest.mark.parametrize("harm", ["truncate", "flip", "empty", "swap"])
def test_a_damaged_segment_is_named(harm: str, archive: Archive, frames: Frames) -> None:
    archive.write(frames[:20])
    archive.write(frames[20:])
    first, second = (s.path for s in archive.segments())
    content = first.read_bytes()
    flipped = content[:99] + bytes([content[99] ^ 4]) + content[100:]
    first.write_bytes({"truncate": content[:-5], "flip": flipped, "empty": b"", "swap": second.read_bytes()}[harm])
    with pytest.raises(SegmentDamaged, match=f"archive segment {first}: its digest is not the one in its name"):
        list(archive.read(1))
    assert list(archive.read(21)) == frames[20:]
    assert len(archive.verify()) == 1


def test_a_segment_of_a_newer_format_is_refused(archive: Archive, frames: Frames, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAGIC", b"GANGLOG\x02")
    archive.write(frames)
    monkeypatch.undo()
    with pytest.raises(SegmentDamaged, match="newer version"):
        list(archive.read(1))


def test_frames_of_another_history_are_refused(archive: Archive, frames: Frames, history: Callable[[int, int], Any]) -> None:
    other = list(enumerate(history(2, 60).frames, 1))
    archive.write(frames[:20])
    with pytest.raises(SegmentDamaged, match="of another history"):
        archive.write(other[20:30])
    with pytest.raises(SegmentDamaged, match="of another history"):
        archive.write(other[:30])
    assert list(archive.read(1)) == frames[:20]


def test_frames_that_do_not_follow_each_other_are_refused(archive: Archive, frames: Frames) -> None:
    with pytest.raises(ValueError, match="frame 7 was given to the archive after frame 5"):
        archive.write([*frames[:5], frames[6]])
    with pytest.raises(ValueError, match="does not continue the chain"):
        archive.write([frames[0], (2, encode_frame(2, 1, 1, bytes(32), b"nonce", []))])
    assert archive.segments() == []


def test_segments_of_two_histories_are_found_by_the_chain(tmp_path: Path, frames: Frames, history: Callable[[int, int], Any]) -> None:
    archive, other = Archive(tmp_path / "a"), Archive(tmp_path / "b")
    archive.write(frames[:20])
    other.write(list(enumerate(history(2, 60).frames, 1))[20:40])
    (foreign,) = other.segments()
    foreign.path.rename(tmp_path / "a" / foreign.path.name)
    with pytest.raises(SegmentDamaged, match="frame 21 does not continue the chain"):
        list(archive.read(1))
    assert len(archive.verify()) == 1


def test_a_crash_while_writing_leaves_no_segment(archive: Archive, frames: Frames, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(_fd: int) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="power cut"):
        archive.write(frames)
    monkeypatch.undo()
    assert archive.segments() == []
    archive.write(frames)
    assert list(archive.read(1)) == frames
