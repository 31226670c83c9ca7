"""What a training job imports: outside Gangline, with an agent, without one, and on a checkpoint directory that two generations want."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from gangline import rank
from gangline.core.model import documents
from gangline.nodeagent import jobevents, jobsocket
from gangline.rank import fence
from gangline.rank.link import Link
from gangline.rank.records import Context, read_context, restart_notice

DEADLINE_S = 10.0


def env_of(**more: str) -> dict[str, str]:
    return {
        "GANGLINE_JOB_ID": "j1",
        "GANGLINE_JOB_NAME": "digits",
        "GANGLINE_GENERATION": "2",
        "GANGLINE_RESTARTS": "1",
        "GANGLINE_RESTART_CAUSE": "rank_failed",
        "RANK": "3",
        "WORLD_SIZE": "4",
        **more,
    }


def context_of(**more: str) -> Context:
    return read_context(env_of(**more))


def run(code: str, **env: str) -> str:
    """Run a program that imports the SDK in a process of its own, because the SDK is one per process."""
    program = "from gangline import rank\n" + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- outside Gangline


def test_outside_everything_is_harmless(tmp_path: Path) -> None:
    out = run(
        """
        import os, sys, threading
        assert not {"asyncio", "dataclasses", "socket", "json"} & set(sys.modules), "the import must stay cheap"
        rank.progress(1); rank.checkpoint(1, "/nowhere"); rank.acknowledge(); rank.on_event(print)
        assert not rank.should_stop() and rank.stop_notice() is None and rank.restart() is None
        assert list(rank.events(timeout_s=None)) == []
        assert rank.context()[:2] == (False, "") and rank.context().world_size == 1
        try:
            rank.checkpoint(3)
        except ValueError as error:
            assert "checkpoint directory" in str(error)
        with rank.checkpoint(3, directory=os.environ["DIR"], suffix=".txt") as path:
            path.write_text("three")
        print(rank.latest_checkpoint(os.environ["DIR"]).step, sorted(os.listdir(os.environ["DIR"])), threading.active_count())
        """,
        DIR=str(tmp_path / "ckpt"),
    )
    assert out.strip() == "3 ['.gangline.lock', 'step-000000000003.txt'] 1"


def test_sigterm_is_taken_over_only_by_who_asks() -> None:
    asks = "import os, signal\nrank.should_stop()\nos.kill(os.getpid(), signal.SIGTERM)\nprint(rank.should_stop(), rank.stop_notice())"
    assert run(asks).split() == ["True", "None"]
    handles = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: print('mine'))\nprint(rank.should_stop())\nos.kill(os.getpid(), 15)"
    assert run(handles).split() == ["False", "mine"]
    child = """
        import os, signal
        rank.should_stop()
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(tell, b"x")
            signal.pause()
        os.read(ready, 1)
        os.kill(pid, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    assert run(child).strip() == "-15"
    assert run(child, **env_of(GANGLINE_EVENTS="/nowhere")).strip() == "-15"


def test_a_damaged_environment_reads_as_running_alone() -> None:
    who = read_context({"GANGLINE_JOB_ID": "j", "RANK": "x", "WORLD_SIZE": "", "MASTER_PORT": "1e3"})
    assert (who.inside, who.rank, who.world_size, who.master_port) == (True, 0, 1, 0)
    assert context_of().rank == 3


# --- events from the file


def write_events(path: Path, *events: dict[str, object] | str) -> None:
    with path.open("a") as file:
        file.writelines((event if isinstance(event, str) else json.dumps(event)) + "\n" for event in events)


def test_restart_notice_comes_from_the_file_and_else_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "events"
    write_events(
        path,
        {"event": "restart", "job": "j1", "generation": 1, "cause": "hang"},
        "{broken",
        "[" * 100_000,
        {
            "event": "restart",
            "job": "j1",
            "generation": 2,
            "cause": "node_lost",
            "lost_ranks": [1, 2, "x"],
            "checkpoint_step": 70,
            "downtime_s": 3.5,
        },
    )
    ask = "n = rank.restart(); print(n.cause, n.lost_ranks, n.checkpoint_step, n.downtime_s, n.old_world_size)"
    assert run(ask, **env_of(GANGLINE_EVENTS=str(path))).strip() == "node_lost (1, 2) 70 3.5 0"
    assert run("print(rank.restart().cause, rank.restart().restarts)", **env_of()).strip() == "rank_failed 1"


def test_a_notice_in_the_file_reaches_a_rank_whose_agent_is_away(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.touch()
    link = Link(context_of(GANGLINE_EVENTS=str(path)), str(tmp_path / "no-agent"), "token")
    heard: list[str] = []
    link.listen(lambda event: heard.append(str(event["event"])))
    assert list(link.events(0.0)) == []
    write_events(path, {"event": "drain", "generation": 2, "cause": "maintenance", "deadline_ms": 5, "grace_s": 2.5})
    assert next(link.events(DEADLINE_S))["cause"] == "maintenance"
    assert link.stop is not None
    assert (link.stop.event, link.stop.grace_s) == ("drain", 2.5)
    eventually(lambda: heard == ["drain"])


# --- with an agent


class FakeAgent:
    """One connection at a time; what ranks say is in `lines`."""

    def __init__(self, path: Path) -> None:
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen()
        self.server.settimeout(DEADLINE_S)
        self.accept()

    def accept(self) -> None:
        self.connection: socket.socket | None = None
        self.lines: list[dict[str, object]] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        self.connection, _ = self.server.accept()
        with self.connection.makefile("rb") as file:
            self.lines.extend(json.loads(line) for line in file)

    def say(self, *events: dict[str, object]) -> None:
        eventually(lambda: self.connection is not None)
        assert self.connection is not None
        self.connection.sendall(b"".join(json.dumps(event).encode() + b"\n" for event in events))

    def hang_up(self) -> None:
        assert self.connection is not None
        self.connection.shutdown(socket.SHUT_RDWR)
        self.thread.join(DEADLINE_S)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    agent = FakeAgent(tmp_path / "agent")
    yield agent
    agent.server.close()


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition has not come true"
        time.sleep(0.002)


def test_steps_are_coalesced_and_the_newest_always_arrives(agent: FakeAgent, tmp_path: Path) -> None:
    link = Link(context_of(), str(tmp_path / "agent"), "secret")
    for step in range(100_000):
        link.step = step
        if not link.pending:
            link.wake()
    eventually(lambda: agent.lines and agent.lines[-1] == {"type": "progress", "step": 99_999})
    assert agent.lines[0] == {"type": "hello", "token": "secret"}
    assert len(agent.lines) < 1000


def test_a_new_agent_is_told_everything_again(agent: FakeAgent, tmp_path: Path) -> None:
    link = Link(context_of(), str(tmp_path / "agent"), "secret")
    link.step, link.checkpoint, link.acknowledged = 5, (4, "/ckpt/\ud800"), True
    link.wake()
    expected: list[dict[str, object]] = [
        {"type": "hello", "token": "secret"},
        {"type": "progress", "step": 5},
        {"type": "checkpoint", "step": 4, "path": ""},
        {"type": "ack"},
    ]
    eventually(lambda: agent.lines == expected)
    agent.say({"event": "start", "generation": 2}, {"event": "start", "generation": 1})
    assert [event["event"] for event in link.events(0.2)] == ["start"]
    agent.hang_up()
    agent.accept()
    eventually(lambda: agent.lines == expected)
    # The agent repeats the events so far: the job hears each once.
    agent.say({"event": "start", "generation": 2}, {"event": "preemption", "generation": 2, "grace_s": 1})
    eventually(lambda: link.stop is not None)
    assert [event["event"] for event in link.events(0.0)] == ["start", "preemption"]


def test_a_callback_that_fails_does_not_cut_the_link(agent: FakeAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = Link(context_of(), str(tmp_path / "agent"), "secret")
    link.listen(lambda event: 1 / 0)
    agent.say({"event": "health"})
    agent.say({"event": "drain"})
    eventually(lambda: link.stop is not None)
    eventually(lambda: capsys.readouterr().err.count("ZeroDivisionError") >= 1)


def test_the_last_words_of_a_short_process_arrive(agent: FakeAgent, tmp_path: Path) -> None:
    run("rank.progress(9)\nrank.acknowledge()", **env_of(GANGLINE_SOCKET=str(tmp_path / "agent"), GANGLINE_TOKEN="t"))
    eventually(lambda: {"type": "progress", "step": 9} in agent.lines and {"type": "ack"} in agent.lines)


# --- the fence


def write(
    directory: Path,
    who: Context,
    step: int,
    content: str = "x",
    *,
    keep: int = 0,
    after: Callable[[], object] = lambda: None,
    again: bool = False,
) -> None:
    with fence.CheckpointWriter(who, directory, step, ".txt", keep, lambda step, path: None) as path:
        path.write_text(content)
        after()
        if again:
            path.write_text(content)


def generation(number: int, job: str = "j1") -> Context:
    return context_of(GANGLINE_GENERATION=str(number), GANGLINE_JOB_ID=job)


def steps(directory: Path) -> list[int]:
    return [saved.step for saved in fence._all(directory)]


def test_a_checkpoint_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    reported: list[tuple[int, str]] = []
    with fence.CheckpointWriter(generation(1), tmp_path, 10, ".txt", 0, lambda *report: reported.append(report)) as path:
        path.write_text("half")
        assert steps(tmp_path) == []
    assert reported == [(10, str(tmp_path / "step-000000000010.txt"))]
    with pytest.raises(ZeroDivisionError):
        write(tmp_path, generation(1), 11, after=lambda: 1 / 0)
    assert steps(tmp_path) == [10]
    assert len(reported) == 1
    assert not list(tmp_path.glob(".partial*"))


def test_an_older_generation_is_refused_even_in_the_middle_of_its_write(tmp_path: Path) -> None:
    write(tmp_path, generation(1), 10)
    taken: list[fence.Saved | None] = []
    with pytest.raises(rank.StaleGeneration, match="which has been replaced"):
        write(tmp_path, generation(1), 20, after=lambda: taken.append(fence.latest(tmp_path, generation(2))), again=True)
    assert [saved and saved.step for saved in taken] == [10]
    assert steps(tmp_path) == [10]
    with pytest.raises(rank.StaleGeneration, match="generation 2 of job j1 has taken"):
        write(tmp_path, generation(1), 30)
    with pytest.raises(rank.StaleGeneration):
        fence.latest(tmp_path, generation(1))
    write(tmp_path, generation(2), 20, "new")
    assert steps(tmp_path) == [10, 20]
    assert (tmp_path / "step-000000000020.txt").read_text() == "new"


def test_a_directory_handed_to_another_job_does_not_come_back(tmp_path: Path) -> None:
    write(tmp_path, generation(7, "a"), 10)
    write(tmp_path, generation(1, "b"), 20)
    with pytest.raises(rank.StaleGeneration, match="job b has taken"):
        write(tmp_path, generation(8, "a"), 30)
    write(tmp_path, generation(1, "b"), 40)
    (tmp_path / fence.FENCE).write_text("{")
    with pytest.raises(rank.StaleGeneration, match="damaged"):
        write(tmp_path, generation(1, "b"), 50)


def test_newest_by_number_old_ones_pruned_strangers_ignored(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        write(tmp_path, generation(1), step)
    (tmp_path / "step-000000000999").mkdir()
    for name in ("step-12.txt", ".partial-1-0-1-5000.txt", "step-0000000000007", "notes"):
        (tmp_path / name).touch()
    assert steps(tmp_path) == [5, 20, 100, 999]
    write(tmp_path, generation(1), 200, keep=2)
    assert steps(tmp_path) == [100, 200, 999]


def test_a_directory_is_a_checkpoint_too_and_replaces_its_like(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with fence.CheckpointWriter(generation(1), tmp_path, 1, "", 0, lambda step, path: None) as path:
            (path / "deep").mkdir(parents=True)
            (path / "deep" / "shard").write_text(content)
    found = fence.latest(tmp_path, generation(1))
    assert found is not None
    assert (found.path / "deep" / "shard").read_text() == "second"
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".gangline")] == ["step-000000000001"]


# --- the documentation


def test_the_documented_messages_are_those_that_are_sent() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "training-jobs.md").read_text()
    blocks = [json.loads(block.split("```")[0]) for block in text.split("```json\n")[1:]]
    gang = documents.DesiredGang("j", 1, "run", (), 1, 0, 1, restart=documents.RestartNotice("node_lost", "m", "infrastructure"))
    notice = documents.StopNotice("drain", "m", 5, 5.0)
    sent = {
        "start": jobevents.start_event(msgspec.structs.replace(gang, restart=None), 0),
        "restart": jobevents.start_event(gang, 0),
        "drain": jobevents.stop_event(gang, 1, notice, 0),
        "preemption": jobevents.stop_event(gang, 1, msgspec.structs.replace(notice, cause="preempted"), 0),
        "resize": jobevents.stop_event(gang, 1, msgspec.structs.replace(notice, cause="resize", new_world_size=8), 0),
    }
    for name, event in sent.items():
        assert event["event"] == name
        assert [set(block) for block in blocks if block.get("event") == name] == [set(event)]
    for block in blocks:
        if "type" in block:
            assert jobsocket.parse(json.dumps(block).encode()) == block
    for block in text.split("```python\n")[1:]:
        compile(block.split("```")[0], "docs/training-jobs.md", "exec")
    assert restart_notice(next(block for block in blocks if block.get("event") == "restart")).downtime_s == 3.5
