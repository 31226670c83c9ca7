"""The examples as real processes: training survives a killed rank and a preemption, and its loss goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process
pytest.importorskip("numpy")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEADLINE_S = 20.0
RANKS = 4
STEPS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Gang:
    """The ranks of one generation, started as an agent would start them, without one."""

    def __init__(
        self, directory: Path, generation: int, *options: str, restart: dict[str, object] | None = None, port: int = 0, ranks: int = RANKS
    ) -> None:
        self.output = directory / f"output-{generation}"
        self.checkpoints = directory / "checkpoints"
        self.events = directory / f"events-{generation}"
        self.events.touch()
        if restart:
            self.tell({"event": "restart", "job": "j1", "generation": generation, **restart})
        port = port or free_port()
        self.ranks: list[subprocess.Popen[bytes]] = []
        with self.output.open("wb") as output:
            for rank in range(ranks):
                env = {
                    "PATH": os.environ["PATH"],
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "GANGLINE_JOB_ID": "j1",
                    "GANGLINE_GENERATION": str(generation),
                    "GANGLINE_EVENTS": str(self.events),
                    "GANGLINE_CHECKPOINT_DIR": str(self.checkpoints),
                }
                command = [sys.executable, str(EXAMPLES / "digits" / "train.py"), "--backend", "ring", "--steps", str(STEPS), *options]
                self.ranks.append(subprocess.Popen(command, env=env, stdout=output, stderr=output))

    def tell(self, event: dict[str, object]) -> None:
        with self.events.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def wait(self) -> list[int]:
        deadline = time.monotonic() + DEADLINE_S
        return [rank.wait(max(0.0, deadline - time.monotonic())) for rank in self.ranks]

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, condition: Callable[[str], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition(self.text()):
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.01)

    def kill(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
            rank.wait()


Start = Callable[..., Gang]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    gangs: list[Gang] = []

    def factory(directory: Path, generation: int, *options: str, **more: Any) -> Gang:
        directory.mkdir(exist_ok=True)
        gangs.append(Gang(directory, generation, *options, **more))
        return gangs[-1]

    yield factory
    for gang in gangs:
        gang.kill()


def losses(gang: Gang) -> dict[int, float]:
    """Loss by step; where generations overlap, the newest counts."""
    lines = [json.loads(line) for line in (gang.checkpoints / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def test_the_loss_goes_on_after_a_killed_rank_and_a_preemption(tmp_path: Path, start: Start) -> None:
    whole = start(tmp_path / "whole", 1)
    assert whole.wait() == [0] * RANKS, whole.text()
    assert f"done step={STEPS}" in whole.text()
    expected = losses(whole)
    assert list(expected) == list(range(1, STEPS + 1))
    assert expected[STEPS] < expected[1] / 2

    # A rank dies: the others notice at once, not after a timeout, and say whom they miss.
    slow = ("--checkpoint-every", "7", "--print-every", "1", "--step-time-ms", "20")
    first = start(tmp_path / "broken", 1, *slow)
    first.wait_for(lambda text: "step=16 " in text)
    killed_at = time.monotonic()
    first.ranks[2].kill()
    assert first.wait() == [3, 3, -signal.SIGKILL, 3]
    assert time.monotonic() - killed_at < 5
    assert "peer lost: rank 3 lost its neighbour in the ring: rank 2 has hung up" in first.text()

    # The next generation goes on from the checkpoint and is preempted by a notice.
    second = start(tmp_path / "broken", 2, *slow, restart={"cause": "rank_failed"})
    second.wait_for(lambda text: "step=30 " in text)
    assert f"resumed from checkpoint step=14 loss={expected[14]:.6f} cause=rank_failed" in second.text()
    second.tell({"event": "preemption", "job": "j1", "generation": 2, "cause": "preempted", "deadline_ms": 0, "grace_s": 9})
    assert second.wait() == [143] * RANKS, second.text()
    left = int(second.text().split("leaving step=")[1].split()[0])
    # Ranks hear of it one by one; rank 0 may not have been the first.
    assert second.text().split(f"leaving step={left} checkpoint={left} cause=")[1] in ("preempted\n", "another rank was asked\n")

    # The third one loses nothing at all, and is stopped by a signal to one rank only.
    third = start(tmp_path / "broken", 3, *slow, restart={"cause": "preempted"})
    third.wait_for(lambda text: f"step={left + 3} " in text)
    assert f"resumed from checkpoint step={left} " in third.text()
    third.ranks[1].terminate()
    assert third.wait() == [143] * RANKS, third.text()
    assert "cause=another rank was asked" in third.text()

    # A straggler of an older generation is refused; the last generation finishes, and the curve is that of the undisturbed run.
    fourth = start(tmp_path / "broken", 4, restart={"cause": "node_lost"})
    assert fourth.wait() == [0] * RANKS, fourth.text()
    straggler = start(tmp_path / "broken", 3, *slow)
    assert straggler.wait() == [1] * RANKS
    assert "StaleGeneration: generation 4 of job j1 has taken" in straggler.text()
    assert losses(fourth) == expected


def test_the_loss_goes_on_with_another_number_of_ranks(tmp_path: Path, start: Start) -> None:
    whole = start(tmp_path / "whole", 1)
    assert whole.wait() == [0] * RANKS, whole.text()
    expected = losses(whole)

    slow = ("--checkpoint-every", "7", "--print-every", "1", "--step-time-ms", "20")
    before, left = start(tmp_path / "elastic", 1, *slow), 0
    for generation, ranks in ((2, 6), (3, 1)):
        before.wait_for(lambda text, left=left: f"step={left + 8} " in text)
        size = len(before.ranks)
        before.tell({"event": "resize", "job": "j1", "generation": generation - 1, "cause": "resize", "deadline_ms": 0, "grace_s": 9})
        assert before.wait() == [143] * size, before.text()
        left = int(before.text().split("leaving step=")[1].split()[0])
        resized = {"cause": "resize", "old_world_size": size, "new_world_size": ranks}
        before = start(tmp_path / "elastic", generation, *slow, restart=resized, ranks=ranks)
        before.wait_for(lambda text, left=left: f"step={left + 1} " in text)
        assert f"resumed from checkpoint step={left} " in before.text()
        assert f"cause=resize ranks={size}->{ranks}" in before.text()
    assert before.wait() == [0], before.text()
    # The batches are the same; sums are added up in another order.
    assert losses(before) == pytest.approx(expected, rel=1e-6)


def test_a_gang_that_never_gets_complete_gives_up(tmp_path: Path, start: Start) -> None:
    gang = start(tmp_path / "late", 1, "--timeout-s", "1")
    gang.ranks[3].kill()
    assert gang.wait() == [3, 3, 3, -signal.SIGKILL]
    assert "could not meet the others within 1 s" in gang.text()


def test_a_port_that_an_older_generation_still_holds_is_waited_for(tmp_path: Path, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as older:
        older.settimeout(DEADLINE_S)
        gang = start(tmp_path / "port", 1, port=older.getsockname()[1])
        guests = [older.accept()[0] for _ in range(RANKS - 1)]
    for guest in guests:
        guest.close()
    assert gang.wait() == [0] * RANKS, gang.text()


def test_a_job_that_imports_nothing(tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.write_text('{"event":"restart","job":"j","generation":2,"cause":"node_lost","message":"node n7 lost"}\n')
    env = {"PATH": os.environ["PATH"], "GANGLINE_CHECKPOINT_DIR": str(tmp_path / "ckpt"), "STEPS": "2", "STEP_SECONDS": "0.01"}
    command = ["sh", str(EXAMPLES / "plain" / "job.sh")]
    first = subprocess.run(command, env={**env, "GANGLINE_GENERATION": "1"}, capture_output=True, text=True, check=True)
    assert "starts at step 0" in first.stdout
    assert "done at step 2" in first.stdout
    second_env = {"GANGLINE_GENERATION": "2", "GANGLINE_RESTARTS": "1", "GANGLINE_RESTART_CAUSE": "node_lost", "GANGLINE_EVENTS": str(events)}
    slow = {**env, **second_env, "STEPS": "900", "STEP_SECONDS": "0.5"}
    second = subprocess.Popen(command, env=slow, stdout=subprocess.PIPE, text=True)
    assert second.stdout is not None
    assert "generation 2, starts at step 2" in second.stdout.readline()
    assert second.stdout.readline() == "restarted 1 times, this time because of node_lost: node n7 lost\n"
    second.terminate()
    assert second.wait(DEADLINE_S) == 143
