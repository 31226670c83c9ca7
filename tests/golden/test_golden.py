"""Recorded logs fold to recorded states, for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from gangline.core.model import events as ev
from gangline.core.model.codec import BadFrame, decode_event, decode_frame, encode_frame
from gangline.core.model.statecodec import dump_state, load_state, state_digest
from gangline.core.store.recover import replay

GOLDEN = Path(__file__).parent
LOGS = sorted(GOLDEN.glob("v*.frames"))


def read(path: Path) -> list[bytes]:
    content, frames, at = path.read_bytes(), list[bytes](), 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "big")
        frames.append(content[at + 4 : at + 4 + size])
        at += 4 + size
    return frames


def wires(path: Path) -> Iterator[list[Any]]:
    for data in read(path):
        yield from msgpack.unpackb(data, raw=False)[6]


@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.stem)
def test_a_golden_log_folds_to_its_recorded_state(path: Path) -> None:
    expected = json.loads(path.with_suffix(".json").read_text())
    frames = read(path)
    state = replay(frames)
    assert (len(frames), state.digest.hex()) == (expected["frames"], expected["log_digest"]), "the recorded log itself has changed"
    assert state_digest(state) == expected["state_digest"], "the fold makes another state of a log of running clusters"


@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.stem)
def test_a_golden_log_folds_over_a_restart_at_every_frame(path: Path) -> None:
    frames = read(path)
    whole = dump_state(replay(frames))
    for cut in range(len(frames) + 1):
        assert dump_state(replay(frames[cut:], load_state(dump_state(replay(frames[:cut]))))) == whole


def test_every_event_is_in_a_golden_log_at_its_version() -> None:
    recorded = {(name, version) for path in LOGS for name, version, _ in wires(path)}
    needed = {(cls.NAME, version) for cls in ev.REGISTRY.values() for version in range(1, cls.VERSION + 1)}
    assert needed <= recorded, f"record these in a new golden log: {sorted(needed - recorded)}"


def test_every_older_version_can_be_upcast() -> None:
    needed = {(cls.NAME, version) for cls in ev.REGISTRY.values() for version in range(1, cls.VERSION)}
    assert needed == set(ev.UPCASTS)


# ---------------------------------------------------------------- how an event changes


class TeaMade(ev.LogEvent, frozen=True, kw_only=True):
    """An event of these tests, at version 3: `minutes` became `seconds`, then `kind` became a list."""

    seconds: int
    kinds: tuple[str, ...]
    #: added later with a default, which needs no version
    by: str = ""


@pytest.fixture
def tea(monkeypatch: pytest.MonkeyPatch) -> type[TeaMade]:
    monkeypatch.setitem(ev.REGISTRY, "tea_made", TeaMade)
    monkeypatch.setattr(TeaMade, "NAME", "tea_made")
    monkeypatch.setattr(TeaMade, "VERSION", 3)
    monkeypatch.setitem(ev.UPCASTS, ("tea_made", 1), lambda body: {"seconds": body["minutes"] * 60, "kind": body["kind"]})
    monkeypatch.setitem(ev.UPCASTS, ("tea_made", 2), lambda body: {"seconds": body["seconds"], "kinds": [body["kind"]]})
    return TeaMade


@pytest.mark.parametrize(
    ("version", "body"),
    [(1, {"minutes": 3, "kind": "green"}), (2, {"seconds": 180, "kind": "green"}), (3, {"seconds": 180, "kinds": ["green"]})],
)
def test_all_versions_of_an_event_read_as_the_newest(version: int, body: dict[str, Any], tea: type[TeaMade]) -> None:
    assert decode_event(["tea_made", version, body]) == tea(seconds=180, kinds=("green",))
    data = encode_frame(1, 1, 1, bytes(32), b"nonce", [msgpack.packb(["tea_made", version, body])])
    assert decode_frame(data, 1, None).events == (tea(seconds=180, kinds=("green",)),)


@pytest.mark.parametrize("version", [0, 4, -1, "1", 1.0, None, True])
def test_an_unknown_version_stops_the_fold(version: object, tea: type[TeaMade]) -> None:
    data = encode_frame(7, 1, 1, bytes(32), b"nonce", [msgpack.packb(["tea_made", version, {"seconds": 1, "kinds": []}])])
    with pytest.raises(BadFrame, match=r"log frame 7: event tea_made has version .*upgrade this process"):
        decode_frame(data, 7, None)


@pytest.mark.parametrize("body", [{}, None, [], {"minutes": "three", "kind": "green"}])
def test_a_body_that_is_not_of_its_version_stops_the_fold(body: object, tea: type[TeaMade]) -> None:
    data = encode_frame(7, 1, 1, bytes(32), b"nonce", [msgpack.packb(["tea_made", 1, body])])
    with pytest.raises(BadFrame, match="log frame 7: event tea_made version 1"):
        decode_frame(data, 7, None)
