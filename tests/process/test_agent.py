"""A real agent process on a real etcd, with the test in the leader's place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gangline.core.model.codec import pack, unpack
from gangline.core.model.documents import (
    Desired,
    DesiredGang,
    DesiredRank,
    Observed,
    ObservedGang,
    ObservedRank,
    Registration,
    RestartNotice,
    StopNotice,
)
from gangline.core.model.spec import JobSpec, Preemption, Restart
from gangline.core.store.api import Ambiguous
from gangline.core.store.etcd import EtcdStore
from gangline.core.store.keys import Keys
from gangline.core.store.node import SchedulerAddress
from gangline.nodeagent import rankfile
from gangline.nodeagent.adoption import read_status

pytestmark = [pytest.mark.process, pytest.mark.etcd]

TTL_S = 3.0
FOREVER = "echo up; while :; do sleep 0.05; done"


class World:
    """One cluster name in an etcd, never used before, one node `n1`, and the leader's pen."""

    def __init__(self, endpoint: str, root: Path) -> None:
        self.endpoint = endpoint
        self.root = root
        self.cluster = f"agent-{secrets.token_hex(6)}"
        self.keys = Keys(self.cluster)
        self.agents: list[subprocess.Popen[bytes]] = []
        self.index = 0
        self.sequences: list[Observed] = []

    async def open(self) -> None:
        self.store = await EtcdStore.connect([self.endpoint])

    def start_agent(self, *options: str, node: str = "n1", state: str = "n1", ttl_s: float = TTL_S) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "gangline.nodeagent", "--cluster", self.cluster, "--etcd", self.endpoint, "--node", node,
            "--gpus", "sim:h100x8", "--state-dir", str(self.root / state), "--lease-ttl", str(ttl_s), *options,
        ]  # fmt: skip
        with (self.root / f"{state}.log").open("ab") as log:
            agent = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        self.agents.append(agent)
        return agent

    async def registered(self) -> Registration:
        return await self.until(self._registration)

    async def _registration(self) -> Registration | None:
        kv = await self.store.get(self.keys.alive("n1"))
        return unpack(kv.value, Registration) if kv else None

    async def submit(self, job: str, shell: str, **more: Any) -> None:
        spec = JobSpec(command=("sh", "-c", shell), preemption=Preemption(grace_s=more.pop("grace_s", 5.0)), **more)
        await self.store.put(self.keys.job(job), pack(spec))

    async def desire(self, *gangs: DesiredGang, epoch: int = 1, index: int | None = None, session: str = "") -> int:
        self.index = index if index is not None else self.index + 1
        document = pack(Desired("n1", self.index, epoch, gangs, session=session))

        async def put() -> bool:
            with contextlib.suppress(Ambiguous):  # the same document may be written twice
                return await self.store.put(self.keys.desired("n1"), document) > 0
            return False

        await self.until(put)
        return self.index

    async def observed(self) -> Observed | None:
        kv = await self.store.get(self.keys.observed("n1"))
        return unpack(kv.value, Observed) if kv else None

    async def gang(self, job: str = "j") -> ObservedGang | None:
        seen = await self.observed()
        return next((g for g in seen.gangs if g.job == job), None) if seen else None

    async def until(self, what: Callable[[], Awaitable[Any]], timeout_s: float = 15.0, *, pause_s: float = 0.01) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            result = await what()
            if result:
                return result
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s} s; observed {await self.observed()}; log:\n{self.log()[-3000:]}")
            await asyncio.sleep(pause_s)

    async def until_ranks(self, state: str, job: str = "j", timeout_s: float = 15.0, generation: int = 1) -> list[ObservedRank]:
        """Wait until every rank of the gang is reported in that state and generation."""

        async def ranks() -> list[ObservedRank] | None:
            g = await self.gang(job)
            good = g and g.ranks and all(r.state == state and r.generation == generation for r in g.ranks)
            return list(g.ranks) if g and good else None

        found: list[ObservedRank] = await self.until(ranks, timeout_s)
        return found

    async def until_gone(self, job: str = "j") -> None:
        index = self.index

        async def gone() -> bool:
            seen = await self.observed()
            return seen is not None and seen.desired_index >= index and all(g.job != job for g in seen.gangs)

        await self.until(gone)

    def log(self, state: str = "n1") -> str:
        return (self.root / f"{state}.log").read_text()

    def rank_log(self, job: str = "j", generation: int = 1, rank: int = 0) -> str:
        path = self.root / f"n1/logs/{job}/rank-{rank}.{generation}.log"
        return path.read_text() if path.exists() else ""

    async def close(self) -> None:
        for agent in self.agents:
            with contextlib.suppress(ProcessLookupError):
                agent.send_signal(signal.SIGCONT)
                agent.kill()
            agent.wait()
        for path in self.root.glob("*/runs/*.status"):
            status = read_status(path)
            for pid, start in ((status.pid, status.pid_start), (status.supervisor, status.supervisor_start)) if status else ():
                if pid != os.getpid() and start and rankfile.process_start(pid) == start:
                    os.kill(pid, signal.SIGKILL)
        await self.store.close()


@pytest.fixture
async def world(etcd_endpoint: str, tmp_path: Path) -> AsyncIterator[World]:
    w = World(etcd_endpoint, tmp_path)
    await w.open()
    try:
        yield w
    finally:
        await w.close()


def gang(ranks: int = 2, job: str = "j", generation: int = 1, phase: Any = "run", nodes: int = 1, **more: Any) -> DesiredGang:
    of = tuple(DesiredRank(r, r, (r,), generation) for r in range(ranks))
    return DesiredGang(job, generation, phase, of, world_size=ranks * nodes, node_rank=0, nodes=nodes, **more)


def alive(pid: int) -> bool:
    return rankfile.process_start(pid) != 0


# ---------------------------------------------------------------- running


async def test_registers_what_it_has(world: World):
    world.start_agent("--labels", "rack=r1", "--cpus", "12", "--memory", "64GiB", "--address", "127.0.0.2")
    seen = await world.registered()
    assert [g.model for g in seen.gpus] == ["H100"] * 8
    assert len({g.uuid for g in seen.gpus}) == 8
    assert (seen.cpus_milli, seen.memory_mib, seen.labels, seen.address) == (12_000, 65_536, {"rack": "r1"}, "127.0.0.2")
    assert seen.boot_id == rankfile.boot_id()


async def test_runs_a_gang_and_reports_how_each_rank_ended(world: World):
    await world.submit("j", "echo $RANK/$WORLD_SIZE on $CUDA_VISIBLE_DEVICES; exit $RANK")
    world.start_agent()
    await world.registered()
    await world.desire(gang(3))
    ranks = await world.until_ranks("exited")
    assert [(r.rank, r.exit_code, r.cause) for r in ranks] == [(0, 0, ""), (1, 1, ""), (2, 2, "")]
    assert [world.rank_log(rank=r) for r in range(3)] == ["0/3 on 0\n", "1/3 on 1\n", "2/3 on 2\n"]
    await world.desire()
    await world.until_gone()


async def test_a_gang_of_several_nodes_waits_at_the_barrier(world: World):
    await world.submit("j", "echo $MASTER_ADDR:$MASTER_PORT; exec sleep 60")
    world.start_agent()
    await world.registered()
    await world.desire(gang(phase="prepare", nodes=2))

    async def prepared() -> ObservedGang | None:
        g = await world.gang()
        return g if g and g.phase == "prepared" else None

    ready = await world.until(prepared)
    assert ready.address == "127.0.0.1"
    assert ready.port > 1024
    assert ready.ranks == ()
    await world.desire(gang(phase="run", nodes=2, master_addr=ready.address, master_port=ready.port))
    await world.until_ranks("running")

    async def printed() -> bool:
        return world.rank_log() == f"127.0.0.1:{ready.port}\n"

    await world.until(printed)


async def test_failures_to_prepare_and_to_start_say_why(world: World):
    await world.submit("bad-workdir", "true", workdir="/no/such/folder")
    world.start_agent()
    await world.registered()
    far = DesiredGang("no-device", 1, "run", (DesiredRank(0, 0, (11,), 1),), 1, 0, 1)
    await world.desire(gang(1, "bad-workdir"), far, DesiredGang("no-spec", 1, "run", (DesiredRank(0, 0, (), 1),), 1, 0, 1))

    async def failed() -> bool:
        gangs = [await world.gang("bad-workdir"), await world.gang("no-device"), await world.gang("no-spec")]
        return all(g is not None and g.phase == "prepare_failed" for g in gangs)

    await world.until(failed)
    none, one, two = await world.gang("bad-workdir"), await world.gang("no-device"), await world.gang("no-spec")
    assert none is not None
    assert "working directory /no/such/folder: No such file" in none.message
    assert one is not None
    assert "device 11" in one.message
    assert two is not None
    assert "spec" in two.message


async def test_stop_then_kill(world: World):
    await world.submit("j", "trap '' TERM; " + FOREVER, grace_s=0.5)
    world.start_agent()
    await world.registered()
    await world.desire(gang())
    ranks = await world.until_ranks("running")
    await world.desire()
    await world.until_gone()
    assert not any(alive(r.pid) for r in ranks)


async def test_a_new_generation_replaces_the_old_one(world: World):
    await world.submit("j", "echo $GANGLINE_GENERATION $GANGLINE_RESTART_CAUSE; " + FOREVER)
    world.start_agent()
    await world.registered()
    await world.desire(gang())
    old = await world.until_ranks("running")
    notice = RestartNotice("rank_failed", "rank 1 died", "application", lost_ranks=(1,), restarts=1)
    await world.desire(gang(generation=2, restart=notice))
    new = await world.until_ranks("running", generation=2)
    assert not any(alive(r.pid) for r in old)
    assert all(alive(r.pid) for r in new)
    events = (world.root / "n1/runs/j@2.events").read_text().splitlines()
    event = json.loads(events[0])
    assert (event["event"], event["cause"], event["lost_ranks"], event["generation"]) == ("restart", "rank_failed", [1], 2)

    async def printed() -> bool:
        return world.rank_log(generation=2).startswith("2 rank_failed\n")

    await world.until(printed)


async def test_old_epochs_generations_and_indices_are_refused(world: World):
    await world.submit("j", FOREVER)
    world.start_agent()
    await world.registered()
    await world.desire(gang(generation=3), epoch=5, index=100)
    ranks = await world.until_ranks("running", generation=3)
    await world.desire(epoch=4, index=101)
    await world.desire(epoch=5, index=99)
    await world.desire(gang(generation=2), epoch=5, index=102)

    async def acted() -> bool:
        seen = await world.observed()
        return seen is not None and seen.desired_index == 102

    await world.until(acted)
    assert all(alive(r.pid) for r in ranks)
    assert [r.generation for r in await world.until_ranks("running", generation=3)] == [3, 3]
    assert "deposed leader" in world.log()
    assert "is older than" in world.log()


async def test_nothing_starts_on_a_document_from_before_the_node_was_away(world: World):
    """While it was away, what it was to start may have been started elsewhere."""
    world.start_agent()
    first = await world.registered()
    await world.submit("j", FOREVER)
    await world.desire(gang(), session=f"not {first.session}")
    await world.desire(session=f"not {first.session}")
    await world.until_gone()
    assert (await world.registered()).session == first.session
    index = await world.desire(gang(generation=2), session=f"not {first.session}")

    async def acted() -> bool:
        seen = await world.observed()
        return seen is not None and seen.desired_index == index

    await world.until(acted)
    assert await world.gang() is None
    await world.desire(gang(generation=2), session=first.session)
    await world.until_ranks("running", generation=2)
    assert not world.rank_log(generation=1)


async def test_a_rank_that_ended_stays_ended(world: World):
    await world.submit("j", "echo once")
    world.start_agent()
    await world.registered()
    await world.desire(gang())
    await world.until_ranks("exited")
    for _ in range(3):
        await world.desire(gang())

    async def acted() -> bool:
        seen = await world.observed()
        return seen is not None and seen.desired_index == world.index

    await world.until(acted)
    assert world.rank_log() == "once\n"


# ---------------------------------------------------------------- asked to leave, hung


async def test_a_stop_notice_is_told_and_acknowledged(world: World):
    spec = JobSpec(command=("sh", "-c", "trap 'echo told; exit 9' USR1; " + FOREVER), preemption=Preemption("SIGUSR1", 20.0))
    await world.store.put(world.keys.job("j"), pack(spec))
    world.start_agent()
    await world.registered()
    await world.desire(gang())
    await world.until_ranks("running")

    async def up() -> bool:
        return all("up" in world.rank_log(rank=r) for r in range(2))

    await world.until(up)
    await world.desire(gang(notice=StopNotice("preempted", "room is needed", 1, 20.0)))
    ranks = await world.until_ranks("exited")
    assert {r.exit_code for r in ranks} == {9}
    g = await world.gang()
    assert g is not None
    assert g.acknowledged
    events = [json.loads(line) for line in (world.root / "n1/runs/j@1.events").read_text().splitlines()]
    assert [e["event"] for e in events] == ["start", "preemption"]
    assert events[1]["grace_s"] == 20.0


async def test_ranks_report_progress_over_the_socket_and_silence_is_a_hang(world: World):
    code = """
import os, socket, json, time
s = socket.socket(socket.AF_UNIX); s.connect(os.environ["GANGLINE_SOCKET"])
def say(**m): s.sendall(json.dumps(m).encode() + b"\\n")
say(type="hello", token=os.environ["GANGLINE_TOKEN"])
say(type="checkpoint", step=40, path="/ckpt/40")
for i in range(int(os.environ["STEPS"])): say(type="progress", step=i + 41); time.sleep(0.1)
time.sleep(60)
"""
    spec = JobSpec(command=(sys.executable, "-c", code), env={"STEPS": "20"}, restart=Restart(hang_timeout_s=1.0))
    await world.store.put(world.keys.job("j"), pack(spec))
    world.start_agent()
    await world.registered()
    await world.desire(gang(1))
    begun = time.monotonic()
    (rank,) = await world.until_ranks("exited")
    assert (rank.exit_code, rank.cause) == (-signal.SIGKILL, "hang")
    assert time.monotonic() - begun > 2.0
    g = await world.gang()
    assert g is not None
    assert (g.step, g.checkpoint_step, g.checkpoint_path) == (60, 40, "/ckpt/40")


# ---------------------------------------------------------------- agents come and go


async def test_ranks_outlive_a_killed_agent_and_are_adopted(world: World):
    await world.submit("j", FOREVER)
    agent = world.start_agent()
    await world.registered()
    await world.desire(gang())
    before = await world.until_ranks("running")
    agent.kill()
    agent.wait()
    sequence = (await world.observed()).sequence  # type: ignore[union-attr]
    world.start_agent()
    index = await world.desire(gang(), gang(1, "other"))

    async def acted() -> bool:
        seen = await world.observed()
        return seen is not None and seen.desired_index == index and seen.sequence != sequence

    await world.until(acted)
    after = await world.until_ranks("running")
    assert [(r.pid, r.started_at_ms) for r in before] == [(r.pid, r.started_at_ms) for r in after]
    assert all(alive(r.pid) for r in after)
    await world.desire()
    await world.until_gone()
    assert not any(alive(r.pid) for r in after)


async def test_the_exit_of_a_rank_that_ended_without_an_agent_is_reported(world: World, eventually: Callable[..., Awaitable[None]]):
    shell = f"cd {world.root}; echo start >> ran; while [ ! -e go ]; do sleep 0.02; done; exit 6"
    await world.submit("j", shell)
    agent = world.start_agent()
    await world.registered()
    await world.desire(gang(1))
    (rank,) = await world.until_ranks("running")
    agent.kill()
    agent.wait()
    (world.root / "go").touch()
    await eventually(lambda: not alive(rank.pid))
    world.start_agent()
    (after,) = await world.until_ranks("exited")
    assert (after.pid, after.exit_code, after.cause) == (rank.pid, 6, "")
    assert [(world.root / "ran").read_text()] == ["start\n"]


async def test_an_upgrade_leaves_ranks_alone_and_stop_ranks_does_not(world: World, eventually: Callable[..., Awaitable[None]]):
    await world.submit("j", FOREVER)
    agent = world.start_agent()
    await world.registered()
    await world.desire(gang())
    ranks = await world.until_ranks("running")
    agent.terminate()
    assert agent.wait(10) == 0
    assert all(alive(r.pid) for r in ranks)
    agent = world.start_agent("--stop-ranks")
    await world.until_ranks("running")
    await world.desire(gang())
    await eventually(lambda: world.log().count('"event":"registered"') == 2)
    agent.terminate()
    assert agent.wait(15) == 0
    assert not any(alive(r.pid) for r in ranks)
    # The leader, which still wants the gang here, is told how its ranks ended: by this agent and by the next one.
    assert {r.cause for r in await world.until_ranks("exited")} == {"stopped"}
    world.start_agent()
    await eventually(lambda: world.log().count('"event":"registered"') == 3)
    assert {r.cause for r in await world.until_ranks("exited")} == {"stopped"}


def _fake_status(world: World, **changes: Any) -> None:
    """Leave the traces of a rank that "runs" in this very process."""
    me, start = os.getpid(), rankfile.process_start(os.getpid())
    root = world.root / "n1"
    (root / "runs").mkdir(parents=True)
    status = {
        "job": "j", "generation": 1, "rank": 0, "gpus": [0], "boot_id": rankfile.boot_id(), "supervisor": me, "supervisor_start": start,
        "state": "running", "pid": me, "pid_start": start, "exit_code": 0, "cause": "", "message": "", "started_at_ms": 1,
        "exited_at_ms": 0,
    }  # fmt: skip
    os.close(rankfile.claim(str(root / rankfile.status_path("j", 1, 0)), status | changes))
    record = {"job": "j", "generation": 1, "phase": "prepared"}
    (root / "gangs").write_text(json.dumps(record) + "\n")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"supervisor_start": 1, "pid_start": 1}, "lost"),
        ({"boot_id": "of another boot"}, "node_restart"),
        ({"supervisor": 4_000_000, "pid": 4_000_001}, "lost"),
    ],
    ids=["pid is another's now", "host was started anew", "gone"],
)
async def test_a_pid_alone_proves_nothing(world: World, changes: dict[str, Any], cause: str):
    _fake_status(world, **changes)
    await world.submit("j", "true")
    world.start_agent()
    await world.registered()
    await world.desire(gang(1))
    (rank,) = await world.until_ranks("exited")
    assert rank.cause == cause, "and this test's own process has not been killed"


async def test_a_late_hint_at_a_gang_that_is_forgotten_does_not_bring_it_back(world: World):
    await world.submit("j", "true")
    await world.submit("k", "true")
    world.start_agent()
    await world.registered()
    await world.desire(gang(1))
    await world.until_ranks("exited")
    await world.desire()
    await world.until_gone("j")
    (world.root / "n1" / rankfile.NOTIFY).write_text("j 1 0\n")
    await world.desire(gang(1, "k"))
    await world.until_ranks("exited", job="k")
    assert "stray_rank" not in world.log()
    observed = await world.observed()
    assert [g.job for g in observed.gangs] == ["k"]


async def test_a_killed_supervisor_is_noticed(world: World):
    await world.submit("j", "setsid sh -c 'sleep 0.1'; sleep 60 & " + FOREVER)
    world.start_agent()
    await world.registered()
    await world.desire(gang(1))
    (rank,) = await world.until_ranks("running")
    status = read_status(world.root / "n1/runs/j@1.0.status")
    assert status is not None
    os.kill(status.supervisor, signal.SIGKILL)
    (after,) = await world.until_ranks("exited")
    assert after.cause == "lost"
    assert not alive(rank.pid)


async def test_a_killed_fork_server_is_replaced_and_ranks_stay(world: World):
    await world.submit("j", FOREVER)
    await world.submit("k", "exit 4")
    agent = world.start_agent()
    await world.registered()
    await world.desire(gang(1))
    (rank,) = await world.until_ranks("running")
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    found = [int(p) for p in children.read_text().split()] if children.exists() else _children(agent.pid)
    (server,) = found
    os.kill(server, signal.SIGKILL)
    await world.desire(gang(1), DesiredGang("k", 1, "run", (DesiredRank(0, 0, (5,), 1),), 1, 0, 1))
    (other,) = await world.until_ranks("exited", "k")
    assert other.exit_code == 4
    assert alive(rank.pid)


def _children(parent: int) -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal() and _parent(int(p.name)) == parent]


def _parent(pid: int) -> int:
    data = rankfile.read_stat(pid)
    return int(data[data.rindex(b")") + 2 :].split()[1]) if data else 0


@pytest.mark.parametrize("seed", range(3))
async def test_after_any_churn_the_node_runs_what_it_should(world: World, seed: int):
    """Generations come, change size and go, faster than ranks start and stop; agents are killed in between."""
    chance = random.Random(seed)
    await world.submit("j", FOREVER, grace_s=1.0)
    await world.submit("k", "trap '' TERM; " + FOREVER, grace_s=0.1)
    agent = world.start_agent()
    await world.registered()
    generations = {"j": 0, "k": 0}
    wanted: list[DesiredGang] = []
    for _ in range(25):
        wanted = []
        for job in chance.sample(["j", "k"], chance.randint(0, 2)):
            generations[job] += 1
            wanted.append(gang(chance.randint(1, 4) if not wanted else 1, job, generations[job]))
        if len(wanted) == 2:
            taken = {g for r in wanted[0].ranks for g in r.gpus}
            free = min({0, 4} - taken, default=4)
            wanted[1] = DesiredGang(wanted[1].job, wanted[1].generation, "run", (DesiredRank(0, 0, (free,), wanted[1].generation),), 1, 0, 1)
        await world.desire(*wanted)
        if chance.random() < 0.15:
            agent.kill()
            agent.wait()
            agent = world.start_agent()
        await asyncio.sleep(chance.choice([0.0, 0.01, 0.05, 0.2]))
    wanted = [gang(3, "j", generations["j"] + 1)]
    await world.desire(*wanted)
    ranks = await world.until_ranks("running", generation=generations["j"] + 1, timeout_s=30)
    await world.until_gone("k")
    assert [r.rank for r in ranks] == [0, 1, 2]
    statuses = [s for p in (world.root / "n1/runs").glob("*.status") if (s := read_status(p))]
    running = {s.pid for s in statuses if s.state != "exited"}
    assert running == {r.pid for r in ranks}
    # And nothing runs that no status file knows.
    assert sorted(_ranks_below(world.root / "n1")) == sorted(r.pid for r in ranks)


def _ranks_below(state: Path) -> list[int]:
    """Return the first process of every rank whose working directory lies in this state directory."""
    found = []
    for p in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(p.name)
            if os.readlink(p / "cwd").startswith(str(state / "work")) and os.getsid(pid) == pid:
                found.append(pid)
    return found


async def test_a_second_agent_with_the_same_name_is_refused(world: World):
    world.start_agent()
    first = await world.registered()
    second = world.start_agent(state="impostor", ttl_s=2.0)
    assert await asyncio.to_thread(second.wait, 20) == 3
    assert "belongs to a living agent" in world.log("impostor")
    assert await world.registered() == first
    assert world.agents[0].poll() is None


async def test_a_state_directory_has_one_agent(world: World):
    world.start_agent()
    await world.registered()
    second = world.start_agent(node="n2")
    assert await asyncio.to_thread(second.wait, 20) == 4


async def test_a_lost_lease_is_replaced_and_work_goes_on(world: World):
    await world.submit("j", FOREVER)
    world.start_agent()
    await world.registered()
    await world.desire(gang())
    ranks = await world.until_ranks("running")
    kv = await world.store.get(world.keys.alive("n1"))
    assert kv is not None
    await world.store.lease_revoke(kv.lease)
    await world.registered()
    await world.desire(gang(), gang(1, "k"))
    await world.submit("k", "true")
    assert all(alive(r.pid) for r in ranks)


# ---------------------------------------------------------------- cut off


class Scheduler:
    """What the agent sees of a scheduler: its health."""

    def __init__(self) -> None:
        self.store = "ok"
        self.asked = 0

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/v1/health", self._health)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        assert isinstance(site._server, asyncio.Server)
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _health(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response({"store": self.store})


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    s = Scheduler()
    yield s
    await s.runner.cleanup()


async def announce(world: World, scheduler: Scheduler) -> None:
    """Make the agent know the scheduler."""
    url = await scheduler.start()
    await world.store.put(world.keys.scheduler("s1"), pack(SchedulerAddress("s1", url)))

    async def known() -> bool:
        return (world.root / "n1/schedulers").exists()

    await world.until(known)


async def test_a_frozen_agent_cannot_keep_its_ranks_alive(world: World):
    await world.submit("j", "trap '' TERM; " + FOREVER)
    await world.submit("keep", FOREVER, on_disconnect="keep")
    agent = world.start_agent(ttl_s=2.0)
    await world.registered()
    await world.desire(gang(), DesiredGang("keep", 1, "run", (DesiredRank(0, 0, (7,), 1),), 1, 0, 1))
    ranks = await world.until_ranks("running")
    (kept,) = await world.until_ranks("running", "keep")
    agent.send_signal(signal.SIGSTOP)
    frozen_at = time.monotonic()
    while any(alive(r.pid) for r in ranks):
        assert time.monotonic() < frozen_at + 4.0
        await asyncio.sleep(0.01)
    # The leader cannot have called the node lost before: its lease still lives, or has just ended.
    assert time.monotonic() - frozen_at < 2.0
    assert alive(kept.pid)
    agent.send_signal(signal.SIGCONT)
    ranks = await world.until_ranks("exited")
    assert {r.cause for r in ranks} == {"fenced"}


async def test_an_isolated_node_fences_itself_while_schedulers_are_well(start_etcd: Callable[..., Any], tmp_path: Path, scheduler: Scheduler):
    etcd = start_etcd()
    world = World(etcd.endpoint, tmp_path)
    await world.open()
    try:
        await world.submit("j", FOREVER)
        world.start_agent(ttl_s=2.0)
        await world.registered()
        await announce(world, scheduler)
        await world.desire(gang())
        ranks = await world.until_ranks("running")
        etcd.freeze()
        frozen_at = time.monotonic()
        while any(alive(r.pid) for r in ranks):
            assert time.monotonic() < frozen_at + 5.0
            await asyncio.sleep(0.01)
        assert time.monotonic() - frozen_at < 2.5
        assert scheduler.asked > 0
        etcd.thaw()
        assert {r.cause for r in await world.until_ranks("exited")} == {"fenced"}
    finally:
        await world.close()


async def test_a_whole_outage_of_etcd_stops_no_rank(start_etcd: Callable[..., Any], tmp_path: Path, scheduler: Scheduler):
    etcd = start_etcd()
    world = World(etcd.endpoint, tmp_path)
    await world.open()
    try:
        await world.submit("j", FOREVER)
        world.start_agent(ttl_s=2.0)
        await world.registered()
        await announce(world, scheduler)
        await world.desire(gang())
        ranks = await world.until_ranks("running")
        scheduler.store = "unreachable"
        etcd.freeze()
        # Three times the life of the lease.
        deadline = time.monotonic() + 6.0
        while time.monotonic() < deadline:
            assert all(alive(r.pid) for r in ranks)
            await asyncio.sleep(0.05)
        etcd.thaw()
        await world.desire(gang(), gang(1, "k"))

        async def acted() -> bool:
            seen = await world.observed()
            return seen is not None and seen.desired_index == world.index

        await world.until(acted, 20.0)
        assert [r.pid for r in await world.until_ranks("running")] == [r.pid for r in ranks]
    finally:
        await world.close()


# ---------------------------------------------------------------- over HTTP


async def get(url: str) -> tuple[int, bytes, dict[str, str]]:
    def fetch() -> tuple[int, bytes, dict[str, str]]:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as e:
            return e.code, e.read(), dict(e.headers)

    return await asyncio.to_thread(fetch)


async def test_logs_metrics_and_health(world: World, tmp_path: Path):
    await world.submit("j", "printf 0123456789; exit 1")
    world.start_agent()
    url = (await world.registered()).agent_url
    await world.desire(gang(1))
    await world.until_ranks("exited")
    status, body, headers = await get(f"{url}/v1/logs/j/0")
    assert (status, body) == (200, b"0123456789")
    assert headers["Content-Type"].startswith("text/plain")
    seen = {k: v for k, v in headers.items() if k.startswith("Gangline-Log")}
    assert seen == {"Gangline-Log-Offset": "0", "Gangline-Log-Size": "10", "Gangline-Log-Generation": "1", "Gangline-Log-Ended": "true"}
    assert (await get(f"{url}/v1/logs/j/0?offset=4&limit=3"))[1] == b"456"
    assert (await get(f"{url}/v1/logs/j/0?tail=2&generation=1"))[1] == b"89"
    assert (await get(f"{url}/v1/logs/j/0?offset=10"))[:2] == (200, b"")
    for bad in ("j/0?offset=-1", "j/0?limit=x", "j/-1", "j/0?tail=1e3", "j/0?offset=" + "9" * 40):
        assert (await get(f"{url}/v1/logs/{bad}"))[0] == 400, bad
    assert (await get(f"{url}/v1/logs/j/0?offset=11"))[0] == 416
    for absent in ("j/1", "k/0", "j/0?generation=2", "%2e%2e%2fj/0", "..%5cj/0", "%2fetc/0", ".../0"):
        assert (await get(f"{url}/v1/logs/{absent}"))[0] == 404, absent
    health = json.loads((await get(f"{url}/healthz"))[1])
    assert (health["node"], health["store"]) == ("n1", "ok")
    metrics = (await get(f"{url}/metrics"))[1].decode()
    for line in ("rank_starts_total 1.0", 'rank_ends_total{cause="failed"} 1.0', "fence_remaining_seconds{"):
        assert f"gangline_agent_{line}" in metrics, metrics


async def test_what_a_job_puts_in_place_of_its_log_is_not_served(world: World):
    await world.submit("j", "echo fine")
    world.start_agent()
    url = (await world.registered()).agent_url
    await world.desire(gang(1))
    await world.until_ranks("exited")
    path = world.root / "n1/logs/j/rank-0.1.log"
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert (await get(f"{url}/v1/logs/j/0"))[0] == 404
    path.unlink()
    os.mkfifo(path)
    assert (await get(f"{url}/v1/logs/j/0"))[0] == 404


# ---------------------------------------------------------------- cost


async def test_an_idle_agent_costs_nothing(world: World):
    await world.submit("j", "exec sleep 600")
    agent = world.start_agent()
    await world.registered()
    await world.desire(gang(8))
    await world.until_ranks("running")
    status = [read_status(world.root / f"n1/runs/j@1.{r}.status") for r in range(8)]
    pids = [agent.pid, *(s.supervisor for s in status if s is not None)]

    def cpu_s() -> float:
        ticks = 0
        for pid in pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    before, begun = cpu_s(), time.monotonic()
    renewals = await _renewals(world)

    async def two_more() -> bool:
        return await _renewals(world) >= renewals + 2

    await world.until(two_more, pause_s=0.2)
    used, passed = cpu_s() - before, time.monotonic() - begun
    assert passed > 1.0
    assert used / passed < 0.05


async def _renewals(world: World) -> int:
    kv = await world.store.get(world.keys.alive("n1"))
    assert kv is not None
    url = unpack(kv.value, Registration).agent_url
    metrics = (await get(f"{url}/metrics"))[1].decode()
    line = next(x for x in metrics.splitlines() if x.startswith('gangline_agent_lease_renewals_total{result="ok"}'))
    return int(float(line.split()[-1]))
