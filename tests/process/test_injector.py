"""The injector on plain processes in the place of agents, supervisors and ranks: who is hit, who is not, and what heals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gangline.chaos import faults as f
from gangline.chaos.injector import Injector, alive, observe, process_table
from gangline.chaos.targets import Component, Identity, Kind, NoTarget
from gangline.nodeagent import rankfile

pytestmark = pytest.mark.process

DEADLINE_S = 10.0
#: a supervisor with one rank below it, whose pid it prints
SUPERVISOR = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait(); sys.stdin.read()"


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state_of(process: Identity) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


class Cluster:
    """Implements `injector.Cluster` with processes that do nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.children: list[subprocess.Popen[bytes]] = []
        self.found: dict[str, Component] = {}
        self.restarted: list[str] = []
        self.leading = ""

    def components(self) -> dict[str, Component]:
        return self.found

    def node_folders(self) -> dict[str, Path]:
        return {path.name: path for path in self.root.iterdir()}

    def leader(self) -> str:
        return self.leading

    def restart(self, name: str) -> None:
        self.restarted.append(name)

    def spawn(self, *command: str) -> Identity:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.children.append(child)
        return Identity(child.pid, rankfile.process_start(child.pid))

    def add(self, name: str, kind: Kind) -> Identity:
        process = self.spawn("sleep", "600")
        self.found[name] = Component(name, kind, process)
        return process

    def add_rank(self, node: str, rank: int, generation: int = 1) -> tuple[Identity, Identity]:
        """Start a supervisor with its rank, and write the status file of a real one."""
        supervisor = self.spawn(sys.executable, "-c", SUPERVISOR)
        output = self.children[-1].stdout
        assert output is not None
        pid = int(output.readline())
        process = Identity(pid, rankfile.process_start(pid))
        self.write_status(node, rank, generation, supervisor, process)
        return supervisor, process

    def write_status(self, node: str, rank: int, generation: int, supervisor: Identity, process: Identity) -> None:
        path = self.root / node / rankfile.status_path("j1", generation, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        status: rankfile.Status = {
            "job": "j1", "generation": generation, "rank": rank, "gpus": [rank], "boot_id": rankfile.boot_id(),
            "supervisor": supervisor.pid, "supervisor_start": supervisor.start, "pid": process.pid, "pid_start": process.start,
            "state": "running", "exit_code": 0, "cause": "", "message": "", "started_at_ms": 1, "exited_at_ms": 0, "dropped_bytes": 0,
        }  # fmt: skip
        path.write_bytes((rankfile.encode(status) + b"\n") * 2)

    def end(self) -> None:
        below = [p for p, parent in process_table().items() if parent in {c.pid for c in self.children}]
        for process in below:
            if alive(process):
                os.kill(process.pid, signal.SIGKILL)
        for child in self.children:
            child.kill()
            child.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.end()


def test_a_killed_rank_leaves_its_supervisor_and_its_neighbours(cluster: Cluster) -> None:
    cluster.add("n1", "agent")
    supervisor, rank = cluster.add_rank("n1", 0)
    _, neighbour = cluster.add_rank("n1", 1)
    before_ms = time.time_ns() // 1_000_000
    record = Injector(cluster).inject(f.KillRank("j1", 0))
    assert not alive(rank)
    assert alive(supervisor)
    assert alive(neighbour)
    assert record.pids == (rank.pid,)
    assert before_ms <= record.at_ms <= time.time_ns() // 1_000_000
    assert record.to_json()["targets"] == [{"what": "rank 0 on n1", "pid": rank.pid, "start": rank.start}]
    assert Injector(cluster).heal(record) == []
    with pytest.raises(NoTarget, match="rank 0 of job j1 is not running"):
        Injector(cluster).inject(f.KillRank("j1", 0))


def test_a_stranger_with_the_pid_of_a_rank_is_not_hit(cluster: Cluster) -> None:
    stranger = cluster.spawn("sleep", "600")
    cluster.write_status("n1", 0, 1, Identity(stranger.pid, stranger.start - 1), Identity(stranger.pid, stranger.start - 1))
    cluster.found["n1"] = Component("n1", "agent", Identity(stranger.pid, stranger.start + 1))
    for fault in (f.KillRank("j1", 0), f.KillNode("n1"), f.KillAgent("n1"), f.FreezeProcess("n1")):
        with pytest.raises(NoTarget):
            Injector(cluster).inject(fault)
    assert alive(stranger)
    assert state_of(stranger) == "S"


def test_a_killed_node_is_gone_with_all_of_it_and_nothing_of_another(cluster: Cluster) -> None:
    agent = cluster.add("n1", "agent")
    mine = [agent, *cluster.add_rank("n1", 0), *cluster.add_rank("n1", 1)]
    others = [cluster.add("n2", "agent"), *cluster.add_rank("n2", 2)]
    injector = Injector(cluster)
    record = injector.inject(f.KillNode("n1"))
    assert not any(alive(p) for p in mine)
    assert all(alive(p) for p in others)
    assert record.pids[0] == agent.pid
    assert injector.heal(record) == ["agent n1 started again"]
    assert cluster.restarted == ["n1"]


def test_a_frozen_node_goes_on_after_healing(cluster: Cluster) -> None:
    everything = [cluster.add("n1", "agent"), *cluster.add_rank("n1", 0)]
    injector = Injector(cluster)
    record = injector.inject(f.FreezeNode("n1"))
    wait_for(lambda: [state_of(p) for p in everything] == ["T"] * 3)
    assert len(injector.heal(record)) == 3
    wait_for(lambda: "T" not in [state_of(p) for p in everything])
    assert cluster.restarted == []


def test_healing_passes_over_what_has_ended_meanwhile(cluster: Cluster) -> None:
    agent = cluster.add("n1", "agent")
    injector = Injector(cluster)
    record = injector.inject(f.FreezeProcess("n1"))
    os.kill(agent.pid, signal.SIGKILL)
    wait_for(lambda: not alive(agent))
    assert injector.heal(record) == []


def test_the_leader_is_who_leads_at_that_moment(cluster: Cluster) -> None:
    first, second = cluster.add("s1", "scheduler"), cluster.add("s2", "scheduler")
    injector = Injector(cluster)
    with pytest.raises(NoTarget, match="no scheduler leads"):
        injector.inject(f.KillLeader())
    cluster.leading = "s2"
    assert injector.inject(f.KillLeader()).targets[0].component == "s2"
    assert alive(first)
    assert not alive(second)


def test_a_view_has_what_runs_and_leaves_out_what_has_ended(cluster: Cluster) -> None:
    agent = cluster.add("n1", "agent")
    supervisor, rank = cluster.add_rank("n1", 0, generation=2)
    cluster.write_status("n1", 0, 1, Identity(supervisor.pid, 1), Identity(rank.pid, 1))
    (cluster.root / "n1" / "runs" / "j1@2.7.status").write_text('{"job": "j1"')
    view = observe(cluster)
    assert view.newest("j1")[0].process == rank
    assert [r.generation for r in view.ranks] == [2]
    assert view.children[supervisor] == (rank,)
    os.kill(agent.pid, signal.SIGKILL)
    wait_for(lambda: not alive(agent))
    assert observe(cluster).components == {}
