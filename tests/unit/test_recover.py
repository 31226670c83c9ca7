"""Recovery and replay: snapshot + tail is the fold of everything, and what cannot be folded stops it with the index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.core.model.codec import BadFrame
from gangline.core.model.state import State
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.store.archive import Archive
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log, LogGap
from gangline.core.store.memory import MemoryCluster, MemoryStore
from gangline.core.store.recover import Unrecoverable, recover, replay
from gangline.core.store.snapshots import Snapshots

KEYS = Keys("test")

History = Callable[[int, int], Any]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(MemoryCluster(), timeout_s=0.3)


async def write(store: MemoryStore, scribe: Any) -> int:
    """Append all that the scribe wrote, and return the token."""
    token = await store.put(KEYS.leader, b"a")
    log = Log(store, KEYS)
    for index, (data, nonce) in enumerate(zip(scribe.frames, scribe.nonces, strict=True), 1):
        await log.append(data, index=index, nonce=nonce, token=token)
    return token


async def save(store: MemoryStore, frames: list[bytes], index: int, token: int) -> None:
    await Snapshots(store, KEYS).save(dump_state(replay(frames[:index])), index, token)


# ---------------------------------------------------------------- laws


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9), frames=st.integers(1, 250), cut=st.floats(0, 1))
def test_a_stored_state_and_the_tail_are_the_fold_of_everything(history: History, seed: int, frames: int, cut: float) -> None:
    scribe = history(seed, frames)
    at = round(cut * len(scribe.frames))
    restored = load_state(dump_state(replay(scribe.frames[:at])))
    folded = replay(scribe.frames[at:], restored)
    assert dump_state(folded) == dump_state(scribe.state)
    assert (folded.queue, list(folded.running)) == (scribe.state.queue, list(scribe.state.running))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**9), frames=st.integers(1, 60), cuts=st.lists(st.floats(0, 1), max_size=3), truncate=st.booleans())
def test_recovery_from_any_snapshots_is_the_fold_of_everything(
    history: History, seed: int, frames: int, cuts: list[float], truncate: bool
) -> None:
    async def check() -> None:
        scribe = history(seed, frames)
        store = MemoryStore(MemoryCluster())
        token = await write(store, scribe)
        for at in sorted({round(cut * len(scribe.frames)) for cut in cuts} - {0}):
            await save(store, scribe.frames, at, token)
        if truncate:
            await Log(store, KEYS).truncate(await Snapshots(store, KEYS).prune(token=token) + 1, token)
        found = await recover(store, KEYS)
        assert dump_state(found.state) == dump_state(scribe.state)
        assert found.skipped == ()

    asyncio.run(check())


# ---------------------------------------------------------------- recovery


async def test_an_empty_store_is_the_empty_state(store: MemoryStore) -> None:
    found = await recover(store, KEYS)
    assert dump_state(found.state) == dump_state(State())
    assert found.snapshot == 0


async def test_following_goes_on_exactly_behind_recovery(store: MemoryStore, history: History) -> None:
    scribe = history(3, 40)
    token = await write(store, scribe)
    found = await recover(store, KEYS)
    data = scribe.elected(1_000)
    log = Log(store, KEYS)
    await log.append(data, index=found.state.index + 1, nonce=scribe.nonces[-1], token=token)
    batch = await anext(aiter(log.follow(found.state.index + 1, found.revision + 1)))
    assert [(index, d) for index, d, _ in batch] == [(len(scribe.frames), data)]


async def test_a_damaged_snapshot_costs_only_time(store: MemoryStore, history: History) -> None:
    scribe = history(4, 60)
    token = await write(store, scribe)
    await save(store, scribe.frames, 20, token)
    await save(store, scribe.frames, 40, token)
    await store.put(KEYS.snapshot_chunk(40, 0), b"damaged")  # row 85
    found = await recover(store, KEYS)
    assert dump_state(found.state) == dump_state(scribe.state)
    assert found.snapshot == 20
    assert len(found.skipped) == 1
    await store.put(KEYS.snapshot_chunk(20, 0), b"damaged")
    found = await recover(store, KEYS)
    assert dump_state(found.state) == dump_state(scribe.state)
    assert (found.snapshot, len(found.skipped)) == (0, 2)


@pytest.mark.parametrize("state", [b"not a state", msgpack.packb({"version": 99})])
async def test_a_state_that_this_version_cannot_read_is_passed_over(state: bytes, store: MemoryStore, history: History) -> None:
    scribe = history(5, 30)
    token = await write(store, scribe)
    await Snapshots(store, KEYS).save(state, 25, token)
    found = await recover(store, KEYS)
    assert dump_state(found.state) == dump_state(scribe.state)
    assert "snapshot 25" in found.skipped[0]


async def test_a_snapshot_of_another_index_is_passed_over(store: MemoryStore, history: History) -> None:
    scribe = history(5, 30)
    token = await write(store, scribe)
    await Snapshots(store, KEYS).save(dump_state(replay(scribe.frames[:10])), 25, token)
    found = await recover(store, KEYS)
    assert dump_state(found.state) == dump_state(scribe.state)
    assert "after log entry 10" in found.skipped[0]


async def test_without_a_readable_snapshot_a_truncated_log_is_unrecoverable(store: MemoryStore, history: History) -> None:
    scribe = history(6, 30)
    token = await write(store, scribe)
    await save(store, scribe.frames, 20, token)
    await Log(store, KEYS).truncate(21, token)
    await store.put(KEYS.snapshot_chunk(20, 0), b"damaged")
    with pytest.raises(Unrecoverable, match=r"begins at 21.*snapshot 20: .*restore a backup"):
        await recover(store, KEYS)
    await Log(store, KEYS).truncate(1_000, token)
    with pytest.raises(Unrecoverable, match="the log is empty and no snapshot can be read"):
        await recover(store, KEYS)


async def test_a_snapshot_taken_while_recovering_is_used(store: MemoryStore, history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    scribe = history(7, 60)
    token = await write(store, scribe)
    real, first = store.range, True

    async def truncated_before_the_log_is_read(prefix: bytes, **kw: Any) -> Any:
        nonlocal first
        if prefix == KEYS.log and first:
            first = False
            await save(store, scribe.frames, 30, token)
            await Log(store, KEYS).truncate(31, token)
        return await real(prefix, **kw)

    monkeypatch.setattr(store, "range", truncated_before_the_log_is_read)
    found = await recover(store, KEYS)
    assert found.snapshot == 30
    assert dump_state(found.state) == dump_state(scribe.state)


async def test_archive_and_store_together_are_the_whole_log(store: MemoryStore, history: History, tmp_path: Any) -> None:
    scribe = history(8, 60)
    token = await write(store, scribe)
    log, archive = Log(store, KEYS), Archive(tmp_path)
    archive.write([(index, data) async for index, data, _ in log.read(1, 40)])
    await log.truncate(41, token)
    state = replay(data for _, data in archive.read(1))
    state = replay([data async for _, data, _ in log.read(41)], state)
    assert dump_state(state) == dump_state(scribe.state)


# ---------------------------------------------------------------- what stops a fold


async def stopped_at(store: MemoryStore, index: int, match: str) -> None:
    with pytest.raises(BadFrame, match=match) as e:
        await recover(store, KEYS)
    assert e.value.index == index


async def test_a_missing_frame_stops_recovery(store: MemoryStore, history: History) -> None:
    await write(store, history(9, 30))
    await store.delete(KEYS.frame(12))  # row 39
    with pytest.raises(LogGap) as e:
        await recover(store, KEYS)
    assert e.value.index == 12


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x93\x01\x02", b"not msgpack at all", b"\xdd\xff\xff\xff\xff", b"\x91" * 5_000])
async def test_garbage_stops_recovery(garbage: bytes, store: MemoryStore, history: History) -> None:
    await write(store, history(9, 30))
    await store.put(KEYS.frame(12), garbage)  # row 35
    await stopped_at(store, 12, "log frame 12: not a frame")


@pytest.mark.parametrize("at", [0, 1, 9, 30, 60, -1])
async def test_a_flipped_bit_stops_recovery_at_the_frame_or_the_next(at: int, store: MemoryStore, history: History) -> None:
    scribe = history(9, 30)
    await write(store, scribe)
    data = bytearray(scribe.frames[11])
    data[at] ^= 1
    await store.put(KEYS.frame(12), bytes(data))
    with pytest.raises(BadFrame) as e:
        await recover(store, KEYS)
    assert e.value.index in (12, 13)


async def test_a_frame_of_another_history_breaks_the_chain(store: MemoryStore, history: History) -> None:
    await write(store, history(9, 30))
    await store.put(KEYS.frame(12), history(10, 30).frames[11])
    await stopped_at(store, 12, "breaks the hash chain")


async def test_a_frame_in_the_place_of_another_is_noticed(store: MemoryStore, history: History) -> None:
    scribe = history(9, 30)
    await write(store, scribe)
    await store.put(KEYS.frame(12), scribe.frames[12])
    await stopped_at(store, 12, "says that it is number 13")


def rewritten(data: bytes, change: Callable[[list[Any]], None]) -> bytes:
    wire = msgpack.unpackb(data, raw=False)
    change(wire)
    return msgpack.packb(wire)  # type: ignore[no-any-return]


def _set(index: int, value: object) -> Callable[[list[Any]], None]:
    def change(wire: list[Any]) -> None:
        wire[index] = value

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_set(6, [["gang_teleported", 1, {}]]), "unknown event 'gang_teleported'.*upgrade this process"),  # row 36
        # row 84
        (_set(6, [["brake_set", 2, {"on": True, "message": ""}]]), "event brake_set has version 2, this process knows 1 to 1; upgrade"),
        (_set(6, [["brake_set", 1, {"on": True, "message": "", "mood": 1}]]), "brake_set version 1.*mood"),
        (_set(6, [["brake_set", 1, {"on": "yes", "message": ""}]]), "brake_set version 1"),
        (_set(0, 2), "frame schema 2, this process knows 1"),
        (_set(2, "epoch"), "header fields have wrong types"),
        (_set(6, [["node_lost", 1, {"node": "nowhere", "cause": "", "message": ""}]]), "cannot happen, node_lost: no node nowhere"),
        (_set(2, 0), "epoch 0 at index 12 is older"),
    ],
)
async def test_a_frame_that_cannot_be_folded_stops_recovery(
    change: Callable[[list[Any]], None], match: str, store: MemoryStore, history: History
) -> None:
    scribe = history(9, 30)
    await write(store, scribe)
    await store.put(KEYS.frame(12), rewritten(scribe.frames[11], change))
    await stopped_at(store, 12, match)


def test_replay_from_the_middle_needs_the_state_before(history: History) -> None:
    frames = history(9, 30).frames
    with pytest.raises(BadFrame, match="log frame 1: the frame says that it is number 2"):
        replay(frames[1:])
