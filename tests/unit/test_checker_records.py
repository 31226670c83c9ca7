"""What agents and clients write down, and what the checker makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.chaos.checker.history import read_history
from gangline.chaos.checker.records import lives_of
from gangline.nodeagent import journal
from gangline.nodeagent.adoption import RankStatus
from gangline.nodeagent.journal import NAME, Opened, RankJournal, read_journal
from gangline.nodeagent.launcher import Launch


def launch(rank: int, generation: int = 1) -> Launch:
    return Launch(
        job="j", generation=generation, rank=rank, gpus=(rank,), boot_id="b1", command=("true",), env={}, workdir="/", make_workdir=False,
        log="log", log_part_bytes=1, log_parts=1, fenced=True, grace_s=1.0, locks=(),
    )  # fmt: skip


def status(rank: int, generation: int = 1, ended_boot_ms: int = 0, cause: str = "") -> RankStatus:
    return RankStatus(
        job="j", generation=generation, rank=rank, gpus=(rank,), boot_id="b1", supervisor=1, supervisor_start=1, pid=2, pid_start=2,
        state="exited", exit_code=-9, cause=cause, message="", started_at_ms=1, exited_at_ms=5_000, ended_boot_ms=ended_boot_ms,
    )  # fmt: skip


def test_a_journal_tells_of_every_life(tmp_path: Path) -> None:
    book = RankJournal(tmp_path, "n1", "b1")
    book.started([launch(0), launch(1), launch(2)], index=7, epoch=3)
    book.ended(status(0, ended_boot_ms=9_000_000))
    book.close()
    # The next agent finds one that is gone, and hears once more of the other.
    book = RankJournal(tmp_path, "n1", "b1")
    book.ended(status(1, cause="lost"))
    book.ended(status(0))
    book.close()
    lives = {life.rank: life for life in lives_of([tmp_path])}
    assert [(lives[r].ended, lives[r].cause) for r in range(3)] == [("seen", ""), ("found", "lost"), ("", "")]
    assert (lives[0].ended_s, lives[0].ended_ms, lives[0].gpus, lives[0].code) == (9_000.0, 5_000, (0,), -9)
    assert {(x.node, x.clock, x.index, x.epoch) for x in lives.values()} == {("n1", "b1", 7, 3)}


def test_a_journal_is_bounded_and_tells_in_each_file_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_FILE_BYTES", 2_000)
    book = RankJournal(tmp_path, "n1", "b1")
    for generation in range(1, 200):
        book.started([launch(0, generation)], index=generation, epoch=1)
    book.close()
    sizes = [(tmp_path / name).stat().st_size for name in (NAME, f"{NAME}.1")]
    assert max(sizes) < 2_400
    assert isinstance(next(read_journal(tmp_path)), Opened)
    generations = [life.generation for life in lives_of([tmp_path])]
    assert generations == list(range(generations[0], 200)), "the newest, without a hole"


def test_a_torn_line_is_passed_over_and_the_next_one_is_whole(tmp_path: Path) -> None:
    book = RankJournal(tmp_path, "n1", "b1")
    book.started([launch(0)], index=1, epoch=1)
    book.close()
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"t":"start","job":"j","ra')
    book = RankJournal(tmp_path, "n1", "b1")
    book.started([launch(1)], index=2, epoch=1)
    book.close()
    assert [life.rank for life in lives_of([tmp_path])] == [0, 1]


def test_a_journal_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    book = RankJournal(tmp_path, "n1", "b1")
    book.started([launch(0)], index=1, epoch=1)
    assert book.lost == 1


def test_a_history_tells_what_clients_know(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text(
        '{"t":"invoke","id":"c1","op":"submit","key":"a"}\n{"t":"invoke","id":"c2","op":"submit","key":"b"}\n'
        '{"t":"ok","id":"c1","job":"j1","index":7}\n{"t":"invoke","id":"c3","op":"read","job":"j1","after":7}\n'
        '{"t":"ok","id":"c3","found":false}\n{"t":"invoke","id":"c4","op":"submit","key":"c"}\n{"t":"fail","id":"c4"}\n{"t":"ok","id'
    )
    told = [(o.op, o.key, o.outcome, o.job, o.index, o.found) for o in read_history(path)]
    assert told == [
        ("submit", "a", "ok", "j1", 7, True), ("submit", "b", "unknown", "", 0, True), ("read", "", "ok", "j1", 7, False),
        ("submit", "c", "fail", "", 0, True),
    ]  # fmt: skip
