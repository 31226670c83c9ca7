"""The agent's socket against honest ranks (the real SDK in processes of their own) and against everything else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gangline.nodeagent import jobsocket
from gangline.nodeagent.jobsocket import JobSocket, RankRef

pytestmark = pytest.mark.process

DEADLINE_S = 10.0
REF = RankRef("j1", 2, 0)

Heard = list[tuple[RankRef, dict[str, object]]]


@pytest.fixture
def heard() -> Heard:
    return []


@pytest.fixture
async def agent(tmp_path: Path, heard: Heard) -> AsyncIterator[JobSocket]:
    agent = await start_agent(tmp_path, heard)
    yield agent
    await agent.close()


async def start_agent(tmp_path: Path, heard: Heard) -> JobSocket:
    agent = JobSocket(tmp_path / "agent", lambda ref, message: heard.append((ref, message)))
    agent.admit("secret", REF)
    await agent.start()
    return agent


async def eventually(condition: Callable[[], object]) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while True:
        if condition():
            return
        assert asyncio.get_running_loop().time() < deadline, "the condition has not come true"
        await asyncio.sleep(0.002)


class Peer:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, tmp_path: Path, token: str = "") -> Peer:
        peer = cls(*await asyncio.open_unix_connection(str(tmp_path / "agent")))
        if token:
            peer.say({"type": "hello", "token": token})
        return peer

    def say(self, *messages: object) -> None:
        self.writer.write(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    async def line(self) -> dict[str, object]:
        async with asyncio.timeout(DEADLINE_S):
            found: dict[str, object] = json.loads(await self.reader.readline())
            return found

    async def closed(self) -> bool:
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read() == b""
            return True


async def test_a_rank_hears_its_generation_and_the_agent_hears_the_rank(agent: JobSocket, heard: Heard, tmp_path: Path) -> None:
    agent.publish("j1", 2, {"event": "start"})
    agent.publish("j1", 1, {"event": "old"})
    agent.publish("j2", 2, {"event": "other"})
    peer = await Peer.connect(tmp_path, "secret")
    assert await peer.line() == {"event": "start"}
    agent.publish("j1", 2, {"event": "drain", "grace_s": 5})
    assert await peer.line() == {"event": "drain", "grace_s": 5}
    peer.say(
        {"type": "progress", "step": 3, "evil": "x" * 1000},
        {"type": "from the future"},
        {"type": "checkpoint", "step": 3, "path": "/c"},
        {"type": "ack"},
    )
    expected = [{"type": "progress", "step": 3}, {"type": "checkpoint", "step": 3, "path": "/c"}, {"type": "ack"}]
    await eventually(lambda: heard == [(REF, message) for message in expected])


async def test_a_dismissed_rank_is_cut_off_and_its_events_go_with_the_last(agent: JobSocket, tmp_path: Path) -> None:
    agent.admit("other", RankRef("j1", 2, 1))
    agent.publish("j1", 2, {"event": "start"})
    first, second = await Peer.connect(tmp_path, "secret"), await Peer.connect(tmp_path, "other")
    assert await first.line() == await second.line() == {"event": "start"}
    agent.dismiss("secret")
    agent.dismiss("secret")
    assert await first.closed()
    refused = await Peer.connect(tmp_path, "secret")
    assert (await refused.line())["code"] == "unknown_token"
    agent.publish("j1", 2, {"event": "drain"})
    assert await second.line() == {"event": "drain"}
    agent.dismiss("other")
    agent.admit("secret", REF)
    again = await Peer.connect(tmp_path, "secret")
    agent.publish("j1", 2, {"event": "fresh"})
    assert await again.line() == {"event": "fresh"}


BAD_LINES: list[tuple[bytes, str]] = [
    (b"{", "bad_json"),
    (b"\xff\xfe\x00", "bad_json"),
    (b"[" * 10_000, "bad_json"),
    (b"9" * 5_000, "bad_json"),
    (b"[]", "bad_message"),
    (b"{}", "bad_message"),
    (b'{"type":["hello"]}', "bad_message"),
    (b'{"type":"progress"}', "bad_message"),
    (b'{"type":"progress","step":-1}', "bad_message"),
    (b'{"type":"progress","step":1.5}', "bad_message"),
    (b'{"type":"progress","step":NaN}', "bad_message"),
    (b'{"type":"progress","step":true}', "bad_message"),
    (b'{"type":"progress","step":9223372036854775808}', "bad_message"),
    (b'{"type":"checkpoint","step":1,"path":"\\ud800"}', "bad_message"),
    (b'{"type":"checkpoint","step":1,"path":"a\\u0000b"}', "bad_message"),
    (b'{"type":"checkpoint","step":1,"path":7}', "bad_message"),
    (b'{"type":"checkpoint","step":1,"path":"' + b"a" * 5_000 + b'"}', "bad_message"),
    (b"x" * (jobsocket.LINE_BYTES_MAX + 1), "line_too_long"),
]


@pytest.mark.parametrize(("line", "code"), BAD_LINES, ids=[str(i) for i in range(len(BAD_LINES))])
async def test_bad_lines_end_the_connection_with_one_reason(agent: JobSocket, heard: Heard, tmp_path: Path, line: bytes, code: str) -> None:
    stranger = await Peer.connect(tmp_path)
    stranger.writer.write(line + b"\n")
    assert (await stranger.line())["event"] == "error"
    assert await stranger.closed()
    friend = await Peer.connect(tmp_path, "secret")
    friend.writer.write(line + b"\n" + b'{"type":"ack"}\n')
    assert (await friend.line())["code"] == code
    assert await friend.closed()
    assert heard == []


async def test_a_line_without_an_end_and_a_stranger_without_words(agent: JobSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = await Peer.connect(tmp_path, "secret")
    endless.writer.write(b"x" * (2 * jobsocket.LINE_BYTES_MAX))
    assert (await endless.line())["code"] == "line_too_long"
    monkeypatch.setattr(jobsocket, "HELLO_TIMEOUT_S", 0.05)
    silent = await Peer.connect(tmp_path)
    assert (await silent.line())["code"] == "no_hello"
    assert await silent.closed()


async def test_a_flood_is_slowed_down_and_nothing_is_lost(agent: JobSocket, heard: Heard, tmp_path: Path) -> None:
    peer = await Peer.connect(tmp_path, "secret")
    count = jobsocket.BURST_MAX + 50
    peer.say(*({"type": "progress", "step": step} for step in range(count)))
    await eventually(lambda: len(heard) >= jobsocket.BURST_MAX - 1)
    assert len(heard) < count
    await eventually(lambda: len(heard) == count)
    assert [message["step"] for _, message in heard] == list(range(count))


async def test_a_rank_that_does_not_read_is_dropped(agent: JobSocket, tmp_path: Path) -> None:
    deaf = await Peer.connect(tmp_path, "secret")
    transport = deaf.writer.transport
    agent.publish("j1", 2, {"event": "start"})
    await deaf.line()
    assert isinstance(transport, asyncio.Transport)
    transport.pause_reading()
    for number in range(200):
        agent.publish("j1", 2, {"event": "health", "number": number, "padding": "x" * 10_000})
        await asyncio.sleep(0)
    assert [len(stream.connections) for stream in agent._streams.values()] == [0]
    # A late connector gets the newest of them, within bounds.
    late = await Peer.connect(tmp_path, "secret")
    first = await late.line()
    assert isinstance(first["number"], int)
    assert first["number"] > 100


async def test_connections_are_counted(agent: JobSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobsocket, "CONNECTIONS_PER_RANK_MAX", 2)
    agent.publish("j1", 2, {"event": "start"})
    friends = [await Peer.connect(tmp_path, "secret") for _ in range(2)]
    for friend in friends:
        await friend.line()
    assert (await (await Peer.connect(tmp_path, "secret")).line())["code"] == "too_many_connections"
    monkeypatch.setattr(jobsocket, "CONNECTIONS_MAX", 4)
    strangers = [await Peer.connect(tmp_path) for _ in range(3)]
    assert (await strangers[0].line())["code"] == "too_many_connections"
    agent.admit("other", RankRef("j1", 2, 1))
    assert (await (await Peer.connect(tmp_path, "other")).line()) == {"event": "start"}


async def test_events_without_ranks_are_bounded(agent: JobSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobsocket, "IDLE_STREAMS_MAX", 5)
    for number in range(100):
        agent.publish(f"idle-{number}", 1, {"event": "start"})
        agent.publish("again", number, {"event": "start"})
    assert len(agent._streams) <= 8
    assert ("j1", 2) in agent._streams


async def test_the_path(tmp_path: Path, heard: Heard) -> None:
    with pytest.raises(ValueError, match="shorter state directory"):
        await JobSocket(tmp_path / ("x" * 100), print).start()
    (tmp_path / "agent").write_text("precious")
    with pytest.raises(FileExistsError, match="not a socket"):
        await start_agent(tmp_path, heard)
    (tmp_path / "agent").unlink()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "agent"))
    agent = await start_agent(tmp_path, heard)
    assert stat.S_IMODE(os.stat(tmp_path / "agent").st_mode) == 0o600
    await agent.close()
    await agent.close()
    assert not (tmp_path / "agent").exists()


RANK = """
import sys
from gangline import rank
step = 0
for event in rank.events(None):
    print(event["event"], flush=True)
    step += 1
    rank.progress(step)
    if rank.should_stop():
        rank.acknowledge()
        sys.exit(143)
"""


async def test_the_sdk_across_an_agent_restart(tmp_path: Path, heard: Heard) -> None:
    agent = await start_agent(tmp_path, heard)
    agent.publish("j1", 2, {"event": "start", "job": "j1", "generation": 2})
    env = {
        "GANGLINE_JOB_ID": "j1",
        "GANGLINE_GENERATION": "2",
        "GANGLINE_SOCKET": str(tmp_path / "agent"),
        "GANGLINE_TOKEN": "secret",
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", RANK, env=env, stdout=asyncio.subprocess.PIPE)
    try:
        await eventually(lambda: (REF, {"type": "progress", "step": 1}) in heard)
        await agent.close()
        heard.clear()
        agent = await start_agent(tmp_path, heard)
        await eventually(lambda: (REF, {"type": "progress", "step": 1}) in heard)
        agent.publish("j1", 2, {"event": "start", "job": "j1", "generation": 2})
        agent.publish("j1", 2, {"event": "preemption", "job": "j1", "generation": 2, "grace_s": 5})
        await eventually(lambda: (REF, {"type": "ack"}) in heard)
        async with asyncio.timeout(DEADLINE_S):
            out, _ = await process.communicate()
        assert process.returncode == 143
        assert out.split() == [b"start", b"preemption"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await agent.close()
