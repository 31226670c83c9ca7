"""Where logs and the rest of the evidence are: a local cluster's state directory, etcd, archives, and files of frames.

A file of frames is, for each frame in order, 4 bytes of length, big-endian, and its bytes; it begins with the first frame of the log.
"""

from __future__ import annotations

import asyncio
import heapq
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from gangline.chaos.checker.evidence import Entry, NodeView, Operation, RankLife, entries_of
from gangline.chaos.checker.history import NAME as HISTORY
from gangline.chaos.checker.history import read_history
from gangline.chaos.checker.records import lives_of, look_at
from gangline.chaos.replaying import ask_all
from gangline.core.client.localcluster.layout import Layout
from gangline.core.model.state import State
from gangline.core.model.statecodec import BadSnapshot, load_state
from gangline.core.store.api import Store
from gangline.core.store.archive import Archive, SegmentDamaged
from gangline.core.store.endpoints import TlsFiles
from gangline.core.store.etcd import EtcdStore
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log
from gangline.core.store.snapshots import Snapshots

#: (index, bytes, store revision or 0)
Raw = tuple[int, bytes, int]

_LENGTH = struct.Struct(">I")


class NoLog(Exception):
    """There is nothing to check; the message says why and what to give instead."""


class Evidence(NamedTuple):
    """Everything that was found in one place, as `examine` takes it. None is what is not there."""

    entries: Iterable[Entry]
    agent_records: list[RankLife] | None = None
    client_history: list[Operation] | None = None
    nodes: list[NodeView] | None = None
    snapshots: dict[int, bytes] | None = None
    replicas: dict[str, tuple[int, str]] | None = None
    base: State | None = None


class _InStore(NamedTuple):
    frames: list[Raw]
    snapshots: dict[int, bytes]


def gather(
    place: str, *, cluster: str = "local", tls: TlsFiles | None = None, agents: Sequence[Path] = (), history: Path | None = None,
) -> Evidence:  # fmt: skip
    """Return what there is at a place: a directory or file, or etcd's endpoints. `agents` are state directories of agents.

    Raises NoLog, StoreError, and OSError.
    """
    path = Path(place)
    if (path / "cluster.json").exists():
        found = _local_cluster(path)
    elif path.is_dir():
        archives = [Archive(d) for d in [path, *sorted(path.glob("*/archive"))] if Archive(d).segments()]
        if not archives:
            raise NoLog(f"{path} is neither the state directory of a cluster nor an archive: it has no cluster.json and no *.frames")
        found = _evidence([_archived(a) for a in archives], _InStore([], {}))
    elif path.is_file():
        entries = entries_of(read_frames(path))
        first = next(entries, None)
        if first is None:
            raise NoLog(f"{path} is empty")
        found = Evidence(_chain(first, entries))
    elif ":" in place:
        found = _evidence([], asyncio.run(_read_store(place.split(","), Keys(cluster), tls)))
    else:
        raise NoLog(f"{place} is no file, no directory, and no endpoints of etcd (host:port,host:port)")
    if agents:
        found = found._replace(agent_records=[*(found.agent_records or ()), *lives_of(agents)])
    if history is not None:
        found = found._replace(client_history=list(read_history(history)))
    return found


def _local_cluster(root: Path) -> Evidence:
    description = Layout(root).description()
    assert description is not None
    archives = [Archive(d) for d in sorted(root.glob("s*/archive"))]
    folders = [(p.parent.name, p.parent) for p in sorted(root.glob("n*/runs"))]
    history = root / HISTORY
    live = asyncio.run(_read_live(description.etcd, Keys(description.cluster), description.schedulers))
    # Nodes are looked at after the log was read: what the log says has had time to become true.
    return _evidence([_archived(a) for a in archives], live[0])._replace(
        agent_records=lives_of(folder for _, folder in folders), nodes=look_at(folders),
        client_history=list(read_history(history)) if history.exists() else None, replicas=live[1],
    )  # fmt: skip


def _evidence(archives: list[Iterator[Entry]], store: _InStore) -> Evidence:
    """Put frames of archives and of the store together, and find a state to begin with when the first ones are gone."""
    entries = _merged([*archives, entries_of(store.frames)])
    first = next(entries, None)
    if first is None:
        raise NoLog("the log is empty")
    whole = _chain(first, entries)
    if first.index == 1:
        return Evidence(whole, snapshots=store.snapshots)
    bases = sorted(index for index in store.snapshots if index >= first.index - 1)
    for index in bases:
        try:
            base = load_state(store.snapshots[index])
        except BadSnapshot:
            continue
        later = {at: data for at, data in store.snapshots.items() if at > index}
        return Evidence((e for e in whole if e.index > index), snapshots=later, base=base)
    raise NoLog(
        f"the log begins at entry {first.index}, and no snapshot has what was before: give the directory that has all schedulers' archives, "
        f"or the cluster itself"
    )


def _chain(first: Entry, rest: Iterator[Entry]) -> Iterator[Entry]:
    yield first
    yield from rest


def _merged(sources: list[Iterator[Entry]]) -> Iterator[Entry]:
    """Yield the entries of several sources by index, each once; twice when two sources differ on it."""
    for _, same in groupby(heapq.merge(*sources, key=lambda e: e.index), key=lambda e: e.index):
        found = list(same)
        readable = {e.frame.digest: e for e in sorted(found, key=lambda e: e.revision) if e.frame is not None}
        yield from readable.values() or found[:1]


def _archived(archive: Archive) -> Iterator[Entry]:
    """Yield what an archive has, segment by segment; of a damaged one, what is wrong with it."""
    for segment in archive.segments():
        try:
            yield from entries_of(archive.read(segment.first, segment.last))
        except SegmentDamaged as e:
            yield Entry(segment.first, None, str(e))


async def _read_live(etcd: Sequence[str], keys: Keys, urls: Sequence[str]) -> tuple[_InStore, dict[str, tuple[int, str]] | None]:
    # The log is read after the replicas have said where they are, so it has those entries.
    live = await asyncio.to_thread(ask_all, urls)
    return await _read_store(etcd, keys, None), {url: seen for url, seen in live.items() if seen[0]} or None


async def _read_store(etcd: Sequence[str], keys: Keys, tls: TlsFiles | None) -> _InStore:
    store = await EtcdStore.connect(etcd, tls=tls)
    try:
        return await read_store(store, keys)
    finally:
        await store.close()


async def read_store(store: Store, keys: Keys) -> _InStore:
    """Return the frames and the snapshots that a store has. Raises StoreErrors."""
    log = Log(store, keys)
    first = await log.first_index()
    frames = [entry async for entry in log.read(first)] if first is not None else []
    snapshots: dict[int, bytes] = {}
    reader, before = Snapshots(store, keys), None
    while (found := await reader.latest(before=before)) is not None:
        before = found[0]
        # One that is newer than what was read of the log would have nothing to be compared with.
        if frames and before <= frames[-1][0]:
            snapshots[before] = found[1]
    return _InStore(frames, snapshots)


def read_frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (index, bytes) of a file of frames."""
    with path.open("rb") as file:
        index = 0
        while head := file.read(_LENGTH.size):
            index += 1
            if len(head) < _LENGTH.size:
                raise NoLog(f"{path} ends inside of frame {index}: it is no file of frames, or it is cut")
            (size,) = _LENGTH.unpack(head)
            data = file.read(size)
            if len(data) < size:
                raise NoLog(f"{path} ends inside of frame {index}: it is no file of frames, or it is cut")
            yield index, data
