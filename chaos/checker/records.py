"""Agents' own records as lives of ranks, and a look at what runs on nodes: from their state directories. Reads disks and /proc."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from gangline.chaos.checker.evidence import LiveRank, NodeView, RankLife
from gangline.nodeagent.adoption import stored_statuses
from gangline.nodeagent.journal import Ended, Line, Opened, Started, read_journal
from gangline.nodeagent.rankfile import process_start

#: (boot, job, rank, generation): a life
_Key = tuple[str, str, int, int]


def lives_of(folders: Iterable[Path]) -> list[RankLife]:
    """Return what the agents with these state directories have written down, in no order. A folder without a journal gives nothing."""
    return [life for folder in folders for life in lives_in(read_journal(folder))]


def lives_in(lines: Iterable[Line]) -> Iterator[RankLife]:
    """Yield the lives that one agent's journal tells of. Of what had begun before the journal begins nothing is said."""
    node, boot = "", ""
    started: dict[_Key, Started] = {}
    ended: dict[_Key, Ended] = {}
    nodes: dict[_Key, str] = {}
    for line in lines:
        if isinstance(line, Opened):
            node, boot = line.node, line.boot
        elif isinstance(line, Started):
            key = (boot, line.job, line.rank, line.generation)
            started[key], nodes[key] = line, node
        else:
            key = (line.boot, line.job, line.rank, line.generation)
            if key not in ended or (line.seen and not ended[key].seen):
                ended[key] = line
    for key, line in started.items():
        yield _life(key, nodes[key], line, ended.get(key))


def _life(key: _Key, node: str, start: Started, end: Ended | None) -> RankLife:
    return RankLife(
        node=node, job=start.job, rank=start.rank, generation=start.generation, gpus=start.gpus, share=start.share,
        # Boottime is one clock for the whole host, and another one after its next boot.
        clock=key[0], started_s=start.at_s, started_ms=start.at_ms, ended_s=end.at_s if end is not None else 0.0,
        ended_ms=end.at_ms if end is not None else 0, ended="" if end is None else "seen" if end.seen else "found",
        fenced=start.fenced, code=end.code if end is not None else 0, cause=end.cause if end is not None else "",
        index=start.index, epoch=start.epoch,
    )  # fmt: skip


def look_at(nodes: Iterable[tuple[str, Path]]) -> list[NodeView]:
    """Look at nodes whose agents keep their state in these folders of this host: which ranks run there by their processes."""
    return [_view(node, folder) for node, folder in nodes]


def _view(node: str, folder: Path) -> NodeView:
    live = [
        LiveRank(s.job, s.rank, s.generation)
        for s in stored_statuses(folder / "runs")
        if s.state != "exited" and s.pid > 0 and process_start(s.pid) == s.pid_start
    ]
    return NodeView(node=node, at_ms=time.time_ns() // 1_000_000, live=tuple(live))
