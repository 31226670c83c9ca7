"""Real processes through real faults: three members of etcd, three schedulers, four agents, and ranks that write down when they ran.

All tests share one cluster and one gang, in the order of this file; each fault must leave it able to bear the next one.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gangline.chaos import replaying
from gangline.chaos.checker import examine
from gangline.chaos.checker.history import NAME as HISTORY
from gangline.chaos.checker.history import History
from gangline.chaos.checker.report import TITLES
from gangline.chaos.checker.sources import gather
from gangline.core.client.api import Client
from gangline.core.client.localcluster import LocalCluster
from gangline.core.client.localcluster.process import start_time_of

pytestmark = [pytest.mark.process, pytest.mark.etcd, pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd binary")]

#: that of a local cluster: with a shorter one, etcd's own failover ends leases
LEASE_TTL_S = 8.0
LEADER_TTL_S = 3.0
#: one line for each tenth of a second that a rank runs, by a clock that all nodes share
RANK = 'exec >>"$1/$RANK-$GANGLINE_GENERATION-$$"; while :; do read t _ </proc/uptime; echo $t; sleep 0.1; done'


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 25.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
    return found


class World:
    def __init__(self, cluster: LocalCluster, out: Path) -> None:
        self.cluster = cluster
        self.out = out
        self.client: Client = cluster.client()
        self.history = History(cluster.state_dir / HISTORY)
        job = {
            "gang": {"ranks": 4, "ranks_per_node": 2}, "resources": {"gpus": 1, "cpus": 0.1}, "command": ["sh", "-c", RANK, "rank", str(out)],
            "preemption": {"grace": "1s"},
        }  # fmt: skip
        self.id: str = self.history.submit(self.client, job, "the gang").body["job"]
        self.generation = 1
        self.running(1)

    def job(self) -> dict[str, Any]:
        return dict(self.client.job(self.id).body)

    def running(self, generation: int, timeout_s: float = 30.0) -> dict[str, Any]:
        def is_so() -> dict[str, Any] | None:
            job = self.job()
            return job if (job["state"], job["generation"]) == ("running", generation) else None

        return dict(wait_for(is_so, f"running as generation {generation}, is {self.job()}", timeout_s))

    def writes(self, without: str = "") -> None:
        """The cluster decides: a job gets from submission to its end. The scheduler `without` is not asked: it would not answer."""
        client = Client([url for i, url in enumerate(self.cluster.urls, 1) if f"s{i}" != without])
        answer = self.history.submit(client, {"command": ["true"], "resources": {"cpus": 0.1}}, f"w{time.monotonic_ns()}")
        job = answer.body["job"]
        self.history.read(client, job, answer.index)
        wait_for(lambda: client.job(job, min_index=answer.index, wait_s=20).body["state"] == "finished", "a small job runs")
        client.close()

    def role(self, scheduler: str) -> str:
        url = self.cluster.urls[int(scheduler[1:]) - 1]
        try:
            with urllib.request.urlopen(f"{url}/v1/health", timeout=2) as answer:
                return str(json.load(answer)["role"])
        except OSError:
            return ""

    def lives(self) -> dict[str, list[tuple[float, float]]]:
        """When each rank ran: first and last sign of each of its processes."""
        found: dict[str, list[tuple[float, float]]] = {}
        for path in self.out.iterdir():
            signs = path.read_text().split()
            if signs:
                found.setdefault(path.name.split("-")[0], []).append((float(signs[0]), float(signs[-1])))
        return found

    def goes_on(self, generation: int = 0) -> None:
        """The gang runs: as before, or as the given generation."""
        self.generation = self.running(generation or self.generation)["generation"]
        self.beats()

    def beats(self) -> None:
        """All four ranks of now write on."""
        before = {p: p.stat().st_size for p in self.out.iterdir()}
        wait_for(lambda: sum(p.stat().st_size > before.get(p, 0) for p in self.out.iterdir()) == 4, "four ranks run")

    def freeze(self, name: str) -> None:
        pid = self.cluster.processes[name].pid
        assert self.cluster.kill(name, signal.SIGSTOP)
        wait_for(lambda: start_time_of(pid)[1] == "T", f"{name} stands still")

    def check(self) -> None:
        for rank, lives in self.lives().items():
            lives.sort()
            for (_, ended), (began, _) in pairwise(lives):
                assert ended <= began, f"rank {rank} ran twice at once: {lives}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "out").mkdir()
    cluster = LocalCluster(
        folder / "state", nodes=4, gpus=2, schedulers=3, etcd_members=3, lease_ttl_s=LEASE_TTL_S, leader_ttl_s=LEADER_TTL_S
    )
    with cluster:
        yield World(cluster, folder / "out")


@pytest.fixture(autouse=True)
def _nothing_ran_twice(world: World) -> Iterator[None]:
    yield
    world.check()


def test_members_of_etcd_die_and_freeze(world: World) -> None:
    for name, number in (("e1", signal.SIGKILL), ("e2", signal.SIGSTOP), ("e3", signal.SIGKILL)):
        if number == signal.SIGSTOP:
            world.freeze(name)
        else:
            world.cluster.kill(name, number)
        world.writes()
        if number == signal.SIGSTOP:
            world.cluster.kill(name, signal.SIGCONT)
        else:
            world.cluster.start_process(name)
    world.goes_on()


def test_a_leader_that_was_frozen_wakes_as_a_standby(world: World) -> None:
    leader = wait_for(world.cluster.leader, "somebody leads")
    world.freeze(leader)
    try:
        other = wait_for(lambda: world.cluster.leader() not in ("", leader) and world.cluster.leader(), "another leads")
        world.writes(without=leader)
    finally:
        world.cluster.kill(leader, signal.SIGCONT)
    wait_for(lambda: world.role(leader) == "standby", "it has seen that it no longer leads")
    assert world.cluster.leader() == other
    world.writes()
    world.goes_on()


def test_all_of_etcd_dies_and_comes_back_and_ranks_run_on(world: World) -> None:
    for name in ("e1", "e2", "e3"):
        world.cluster.kill(name)
    before = {p: p.stat().st_size for p in world.out.iterdir()}
    went_down = time.monotonic()
    wait_for(lambda: time.monotonic() > went_down + LEASE_TTL_S + 3, "an outage longer than any lease", 2 * LEASE_TTL_S)
    assert sum(p.stat().st_size > before[p] for p in before) == 4
    for name in ("e1", "e2", "e3"):
        world.cluster.start_process(name, wait=False)
    world.writes()
    world.goes_on()


def test_all_schedulers_die_and_nobody_notices(world: World) -> None:
    for name in ("s1", "s2", "s3"):
        world.cluster.kill(name)
    world.beats()
    for name in ("s1", "s2", "s3"):
        world.cluster.start_process(name)
    world.writes()
    world.goes_on()


def test_a_frozen_agent_loses_its_ranks_and_comes_back_to_its_senses(world: World) -> None:
    node = world.job()["nodes"][0]
    node = node["node"] if isinstance(node, dict) else node
    world.freeze(node)
    try:
        moved = world.running(world.generation + 1)
        assert node not in json.dumps(moved["nodes"])
        world.check()
    finally:
        world.cluster.kill(node, signal.SIGCONT)
    wait_for(lambda: {n["id"]: n["state"] for n in world.client.nodes()}[node] == "up", f"{node} is back")
    world.writes()
    world.goes_on(world.generation + 1)


def test_the_log_is_the_truth_after_all_that(world: World) -> None:
    description = json.loads((world.cluster.state_dir / "cluster.json").read_text())
    found = replaying.compare(world.cluster.etcd, description["cluster"], world.cluster.urls, 20.0)
    assert found.agreed, found.live
    for name in ("s1", "s2", "s3"):
        said = world.cluster.log(name).read_text()
        assert '"illegal_event"' not in said
        assert '"policy_error"' not in said
        assert "Traceback" not in said


def test_the_checker_finds_that_all_was_kept(world: World) -> None:
    """By the log, the archives, what agents and clients have written down, the nodes themselves, and the live schedulers."""
    found = examine(**gather(str(world.cluster.state_dir))._asdict(), quiescent_after=time.time_ns() // 1_000_000 - 1_000)
    assert found.violations == [], "\n".join(found.lines())
    # No queues are declared.
    assert [a for a in TITLES if found.status(a) == "not checked"] == ["S9"]
    assert found.checked["S7"] > 5
    assert found.checked["S12"] > 3
