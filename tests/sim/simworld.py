"""A whole cluster in one event loop on simulated time: schedulers, nodes, clients and an adversary, all of one seed.

`play(seed)` runs it with faults, then lets the faults end, and checks what must be true: see `_check`. Everything but time, ranks and the
store's server is the real code.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import time
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack
import msgspec
from simloop import SimLoop
from simnode import Habits, Run, SimNode

from gangline.core.model.arrays import parse_array, size
from gangline.core.model.codec import decode_frame
from gangline.core.model.fold import apply_frame
from gangline.core.model.gpufacts import MIG_LAYOUTS
from gangline.core.model.gpushares import GpuUse, uses_of
from gangline.core.model.queues import Amounts, QueueSpec, Weights
from gangline.core.model.reservations import WHOLE, KeptNode, Reservation
from gangline.core.model.spec import Condition, Dependency, Elastic, Gang, JobSpec, Preemption, Resources, Restart, Role, TopologyRequest
from gangline.core.model.state import Job, Node, State
from gangline.core.model.statecodec import dump_state, state_digest
from gangline.core.store.api import StoreError
from gangline.core.store.archive import Archive
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log
from gangline.core.store.memory import Faults, MemoryCluster, MemoryStore
from gangline.core.store.recover import recover
from gangline.core.store.watching import Timing
from gangline.core.telemetry import Telemetry, setup, structured_logging
from gangline.leader import snapshotter
from gangline.leader.commands import (
    Accepted,
    Administer,
    Command,
    DeclareQueues,
    Hold,
    Refused,
    Release,
    Reserve,
    SetBrake,
    Stop,
    Submit,
    Unreserve,
)
from gangline.leader.scheduler import Scheduler
from gangline.leader.service import NotLeader, Unavailable

KEYS = Keys("test")
GPUS = 4
#: queues that jobs go to where some are declared
LEAVES = ("default", "team/a", "team/b")
#: GPUs of the largest job, MIG instances counted by their slices
LARGEST = 8 * 2 * 7
LEADER_TTL_S = 3.0
#: quiet must come within this simulated time after the last fault: restarts' backoff, a prepare timeout and its avoidance, three in a row
SETTLES_S = 900.0
#: lines of the schedulers that none of them may write, whatever happens
NEVER = ("illegal_event", "policy_error", "policy_does_not_settle")


class Violation(AssertionError):
    """Something that must always be true was not."""


class Scenario(msgspec.Struct, frozen=True):
    """How much of what."""

    schedulers: int = 3
    nodes: int = 5
    jobs: int = 14
    duration_s: float = 120.0
    #: seconds between two acts of the adversary
    pace_s: float = 3.0
    ambiguous: float = 0.05
    watch_trouble: float = 0.05
    stale: float = 0.02
    #: share of submissions that are arrays, wait for others, are held, or have a begin or a deadline
    conditional: float = 0.0
    #: jobs are in declared queues and of several users; now and then the queues are declared anew, with other amounts, and nodes are reserved
    queues: bool = False


class World:
    def __init__(self, seed: int, scenario: Scenario, folder: Path, telemetry: Telemetry) -> None:
        self.rng = random.Random(seed)
        self.queue_rng = random.Random(f"{seed}-queues")
        self.reserve_rng = random.Random(f"{seed}-reservations")
        self.role_rng = random.Random(f"{seed}-roles")
        self.scenario = scenario
        self.folder = folder
        self.telemetry = telemetry
        self.faults = Faults(seed)
        self.loop = asyncio.get_running_loop()
        self.cluster = MemoryCluster(
            clock=self.loop.time, faults=self.faults, min_lease_ttl_s=1.0, latency=lambda: self.rng.random() * 0.004
        )
        self.habits = Habits()
        self.journal = io.StringIO()
        self.nodes = {
            f"n{i}": SimNode(self.cluster, f"n{i}", random.Random(f"{seed}-n{i}"), self.habits, self.nobody_decides, GPUS)
            for i in range(scenario.nodes)
        }
        self.schedulers: dict[str, tuple[Scheduler, asyncio.Task[None]]] = {}
        self.dying: list[asyncio.Task[None]] = []
        self.lives = 0
        #: idempotency key → job that the client was told; "" for those of unknown outcome
        self.submitted: dict[str, str] = {}
        self.clients: list[asyncio.Task[None]] = []
        self.story: list[str] = []

    def say(self, what: str) -> None:
        self.story.append(f"{self.loop.time():9.3f} {what}")

    # ---------------------------------------------------------------- schedulers

    def start_scheduler(self, name: str) -> None:
        self.lives += 1
        store = MemoryStore(self.cluster, f"{name}.{self.lives}", timeout_s=2.0, timing=Timing(4.0, 1.0))
        s = Scheduler(
            name=name, store=store, keys=KEYS, url=f"http://{name}", state_dir=self.folder / name, ttl_s=LEADER_TTL_S, telemetry=self.telemetry,
            journal=structured_logging("info", self.journal, scheduler=store.name), monotonic=self.loop.time,
            wall_ms=lambda: 1_000_000 + int(self.loop.time() * 1000),
        )  # fmt: skip
        s.metrics = mock.MagicMock(telemetry=self.telemetry)
        self.schedulers[name] = (s, asyncio.create_task(s.run(), name=store.name))

    def crash_scheduler(self, name: str) -> None:
        """It stops between two awaits, and nothing that it would still send arrives."""
        s, task = self.schedulers.pop(name)
        assert isinstance(s._store, MemoryStore)
        self.faults.partitioned.add(s._store.name)
        task.cancel()
        self.dying.append(task)

    def nobody_decides(self, node: str) -> bool:
        if node in self.faults.partitioned:
            return False
        living = [s for s, _ in self.schedulers.values()]
        return bool(living) and not any(s.store_ok for s in living)

    def leader(self) -> Scheduler | None:
        return next((s for s, _ in self.schedulers.values() if s.role == "leader" and s.term is not None), None)

    # ---------------------------------------------------------------- clients

    async def ask(self, command: Command) -> Accepted | None:
        """Send one command to whoever leads, until it is answered."""
        while True:
            s = self.leader()
            if s is not None:
                try:
                    (answer,) = await s.execute([command])
                except NotLeader:
                    answer = NotLeader("", "")
                if isinstance(answer, Accepted):
                    return answer
                if isinstance(answer, Refused):
                    return None
                if not isinstance(answer, (Unavailable, NotLeader)):
                    raise answer
            await asyncio.sleep(0.2)

    async def client(self, number: int) -> None:
        rng = self.rng
        await asyncio.sleep(rng.random() * self.scenario.duration_s * 0.8)
        key, tries = f"key-{number}", 0
        spec = self.conditional(self.spec()) if rng.random() < self.scenario.conditional else self.spec()
        user = ""
        if self.scenario.queues:
            spec = msgspec.structs.replace(spec, queue=self.queue_rng.choice(LEAVES))
            # Only the first has no bounds on what cannot be preempted.
            spec = msgspec.structs.replace(spec, preemptible=spec.preemptible or spec.queue != LEAVES[0])
            user = self.queue_rng.choice(("ann", "bob"))
        while True:
            tries += 1
            command = Submit(f"j{number}-{tries}", spec, user, idempotency_key=key, body_digest=str(number))
            asking = asyncio.create_task(self.ask(command))
            done, _ = await asyncio.wait([asking], timeout=rng.choice((0.01, 0.5, 20.0)))
            if done:
                answer = asking.result()
                assert answer is not None, f"{key} refused"
                self.submitted[key] = answer.subject
                break
            self.submitted.setdefault(key, "")
            asking.cancel()
        self.say(f"{key} is {self.submitted[key]}: {spec}")
        if self.scenario.conditional:
            await self._hold(self.submitted[key], spec.hold)
        if rng.random() < 0.25:
            await asyncio.sleep(rng.random() * 30)
            await self.ask(Stop(self.submitted[key], by="client", reason="enough"))
            self.say(f"{self.submitted[key]} stopped")

    def spec(self) -> JobSpec:
        rng = self.rng
        ranks = rng.choice((1, 1, 2, 3, 4, 6, 8, 8))
        per_node = rng.choice((0, 0, 2)) if ranks % 2 == 0 else 0
        unit = per_node or 1
        gang = Gang(ranks, ranks if rng.random() < 0.5 else max(unit, ranks // 2 // unit * unit), per_node)
        restart = Restart(
            on_rank_failure=rng.choice(("gang", "gang", "rank", "never")), on_node_failure=rng.choice(("reschedule",) * 4 + ("fail",)),
            max_restarts=rng.choice((1, 3, 100)), backoff_initial_s=rng.choice((0.0, 0.5, 3.0)), backoff_max_s=10.0,
        )  # fmt: skip
        devices = self.devices()
        most = max(devices.gpus, devices.mig_count, int(devices.shares_gpu))
        fits = gang.min_ranks <= 2 * per_node if per_node else gang.min_ranks * most <= 2 * GPUS
        roles = self.roles() if self.role_rng.random() < 0.25 else ()
        near = rng.choice(("", "", "preferred", "required" if fits and not roles else "preferred"))
        return JobSpec(
            ("train",), gang=gang, elastic=Elastic(rng.choice((1.0, 5.0, 20.0))),
            topology=TopologyRequest(**({near: "rack"} if near else {})), priority=rng.choice((10, 50, 150)),
            preemptible=rng.random() < 0.7, restart=restart,
            resources=devices, roles=roles,
            time_limit_s=rng.choice((0.0, 0.0, 15.0, 60.0)), preemption=Preemption(grace_s=rng.choice((0.5, 3.0, 10.0))),
            on_disconnect=rng.choice(("stop", "stop", "stop", "keep")),
        )  # fmt: skip

    def roles(self) -> tuple[Role, ...]:
        """Two or three kinds of rank, of which some are in replicas: so few that they fit together."""
        rng, nowhere = self.role_rng, TopologyRequest()

        def role(name: str, most: int, topology: TopologyRequest = nowhere) -> Role:
            ranks = rng.randrange(1, most + 1)
            resources = Resources(gpus=rng.choice((0, 1)), cpus_milli=rng.choice((100, 500)))
            return Role(name, Gang(ranks, rng.choice((ranks, 1))), resources, topology=topology)

        near = TopologyRequest(**{rng.choice(("preferred", "balanced", "spread")): rng.choice(("rack", "hostname"))})
        group = Role("g", replicas=2, min_replicas=rng.choice((0, 1, 2)), roles=(role("x", 1), role("y", 2)), topology=near)
        return (role("a", 2, near), group) if rng.random() < 0.5 else (role("a", 2), role("b", 3, near))

    async def declare(self) -> None:
        """Declare queues, and others with the same names later."""
        while True:
            leader = self.leader()
            if leader is None:
                await asyncio.sleep(1.0)
                continue
            queues = self.tree()
            if await self.ask(DeclareQueues(queues, leader.state.queues.index, by="operator")) is not None:
                self.say(f"declared {queues}")
            await asyncio.sleep(self.queue_rng.choice((1.0, 20.0, 60.0)))

    async def reserve(self) -> None:
        """Keep nodes, or some of their GPUs, for maintenance or for somebody, soon and not for long; some are removed before their end."""
        rng, number = self.reserve_rng, 0
        while True:
            await asyncio.sleep(rng.choice((5.0, 20.0, 60.0)))
            leader = self.leader()
            if leader is None or not leader.state.nodes:
                continue
            number += 1
            name, maintenance = f"r{number}", rng.random() < 0.5
            some = rng.sample(sorted(leader.state.nodes), min(len(leader.state.nodes), rng.choice((1, 1, 2))))
            start_ms = leader.state.at_ms + rng.choice((0, 5_000, 20_000))
            reservation = Reservation(
                name, tuple(KeptNode(node, rng.choice((WHOLE, WHOLE, 2))) for node in some), start_ms, start_ms + rng.choice((5_000, 30_000)),
                users=() if maintenance else ("ann",), maintenance=maintenance, deadline_s=5.0 if maintenance else 0.0,
            )  # fmt: skip
            if await self.ask(Reserve(reservation)) is not None:
                self.say(f"reserved {reservation}")
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice((1.0, 10.0)))
                await self.ask(Unreserve(name))

    def tree(self) -> tuple[QueueSpec, ...]:
        rng = self.queue_rng

        def amounts(least: int) -> Amounts:
            """Of nothing, or of at least so many GPUs: no job is larger."""
            most = GPUS * self.scenario.nodes + least
            models = {"H100": rng.randint(least, most) * 1000} if rng.random() < 0.5 else {}
            return Amounts(rng.choice((None, rng.randint(least, most) * 1000)), models=models)

        def queue(path: str, **more: Any) -> QueueSpec:
            return QueueSpec(
                path, over_quota_weight=Weights(rng.choice((1.0, 2.0)), models={"H100": 3.0} if rng.random() < 0.3 else {}),
                priority=rng.choice((100, 100, 200)), reclaim_min_runtime_s=rng.choice((None, 0.0, 5.0)),
                preempt_min_runtime_s=rng.choice((None, 10.0)), usage_half_life_s=rng.choice((None, 0.0, 60.0, 300.0)),
                user_fairness=rng.random() < 0.5, **more,
            )  # fmt: skip

        top, default, a, b = ("team", *LEAVES)
        return (
            queue(default), queue(top, quota=amounts(0), limit=amounts(LARGEST)), queue(a, quota=amounts(0), limit=amounts(LARGEST)),
            queue(b, quota=amounts(0)),
        )  # fmt: skip

    async def _hold(self, job: str, held: bool) -> None:
        """Release what was submitted on hold; hold some of the others for a while."""
        rng = self.rng
        if not held and rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 20)
            held = await self.ask(Hold(job, by="client", reason="a while", requeue=rng.random() < 0.5)) is not None
        if held:
            await asyncio.sleep(rng.random() * 20)
            await self.ask(Release(job, by="client"))
            self.say(f"{job} released")

    def conditional(self, spec: JobSpec) -> JobSpec:
        """Return the job as an array, or as one that waits for others or for its time."""
        rng = self.rng
        known = [job for job in self.submitted.values() if job]
        others = rng.sample(known, min(len(known), rng.choice((0, 0, 1, 2))))
        conditions: tuple[Condition, ...] = ("after_ok", "after_any", "after_not_ok", "after_start")
        return msgspec.structs.replace(
            spec, array=parse_array(rng.choice(("0-5%2", "0-9:3", "1,3,5-7%1"))) if rng.random() < 0.4 else None,
            depends_on=tuple(Dependency(job, rng.choice(conditions)) for job in others), hold=rng.random() < 0.2,
            begin_after_s=rng.choice((0.0, 0.0, 15.0)), deadline_after_s=rng.choice((0.0, 0.0, 0.0, 60.0)),
        )  # fmt: skip

    def devices(self) -> Resources:
        """Whole GPUs, parts of one, or MIG instances."""
        rng, cpus = self.rng, self.rng.choice((100, 4_000))
        match rng.randrange(8):
            case 0:
                return Resources(cpus_milli=cpus, gpu_share_milli=rng.choice((100, 330, 500, 700)))
            case 1:
                return Resources(cpus_milli=cpus, gpu_memory_mib=rng.choice((8_000, 26_667, 40_000, 60_001)))
            case 2:
                return Resources(cpus_milli=cpus, mig=rng.choice(MIG_LAYOUTS["H100"].profiles).name, mig_count=rng.choice((1, 1, 2)))
            case _:
                return Resources(gpus=rng.choice((0, 1, 1, 2)), cpus_milli=cpus)

    # ---------------------------------------------------------------- the adversary

    async def adversary(self) -> None:
        acts = [
            self._kill_leader, self._kill_scheduler, self._kill_agent, self._crash_node, self._reinstall_node, self._cut_node, self._cut_node,
            self._cut_leader, self._watches, self._outage, self._compact, self._delete_election, self._drain, self._break_gpu,
        ]  # fmt: skip
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / self.scenario.pace_s))
            act = self.rng.choice(acts)
            self.say(act.__name__)
            await act()

    def _later(self, s: float, do: object) -> None:
        assert callable(do)
        self.loop.call_later(s, do)

    async def _kill_leader(self) -> None:
        s = self.leader()
        if s is not None:
            self._kill(s.name)

    async def _kill_scheduler(self) -> None:
        if self.schedulers:
            self._kill(self.rng.choice(sorted(self.schedulers)))

    def _kill(self, name: str) -> None:
        self.crash_scheduler(name)
        self._later(self.rng.choice((0.0, 1.0, 10.0)), lambda: self.start_scheduler(name))

    def _node(self) -> SimNode:
        return self.nodes[self.rng.choice(sorted(self.nodes))]

    async def _kill_agent(self) -> None:
        node = self._node()
        node.kill_agent()
        self.say(f"agent {node.name}")
        self._later(self.rng.choice((0.01, 1.0, 8.0, 20.0)), node.start_agent)

    async def _crash_node(self) -> None:
        node = self._node()
        node.crash()
        self.say(f"host {node.name}")
        self._later(self.rng.choice((0.1, 2.0, 8.0, 30.0)), node.start_agent)

    async def _reinstall_node(self) -> None:
        if self.rng.random() < 0.5:
            node = self._node()
            node.crash(reinstalled=True)
            self.say(f"host {node.name} reinstalled")
            self._later(self.rng.choice((2.0, 8.0, 30.0)), node.start_agent)

    async def _cut_node(self) -> None:
        self._cut(self._node().name)

    async def _cut_leader(self) -> None:
        s = self.leader()
        if s is not None:
            assert isinstance(s._store, MemoryStore)
            self._cut(s._store.name)

    def _cut(self, name: str) -> None:
        self.faults.partitioned.add(name)
        self.say(f"cut {name}")
        self._later(self.rng.choice((0.5, 3.0, 8.0, 20.0)), lambda: self._mend(name))

    def _mend(self, name: str) -> None:
        if name in self.nodes or any(isinstance(s._store, MemoryStore) and s._store.name == name for s, _ in self.schedulers.values()):
            self.faults.partitioned.discard(name)

    async def _watches(self) -> None:
        self.rng.choice((self.cluster.cut_watches, self.cluster.silence_watches, self.cluster.elect))()

    async def _outage(self) -> None:
        self.faults.unavailable = True

        def over() -> None:
            self.faults.unavailable = False
            self.cluster.elect()

        self._later(self.rng.choice((0.3, 2.0, 12.0)), over)

    async def _compact(self) -> None:
        self.cluster.mvcc.compact(self.cluster.mvcc.revision) if self.cluster.mvcc.revision > self.cluster.mvcc.compacted else None

    async def _delete_election(self) -> None:
        with contextlib.suppress(StoreError):
            await MemoryStore(self.cluster, "operator").delete(KEYS.leader)

    async def _drain(self) -> None:
        node = self._node().name
        action = self.rng.choice(("drain", "undrain", "cordon", "uncordon", "confirm_dead"))
        if action == "confirm_dead" and self.nodes[node].runs and any(not r.ended for r in self.nodes[node].runs):
            return  # that would be a lie
        deadline_s = self.rng.choice((0.0, 5.0))
        self.say(f"{action} {node}")
        self.clients.append(asyncio.create_task(self._administer(Administer(node, action, deadline_s=deadline_s))))

    async def _administer(self, command: Administer) -> None:
        await self.ask(command)

    async def _break_gpu(self) -> None:
        node = self._node()
        gpu = self.rng.choice(sorted(node.gpus))
        node.gpus = node.gpus | {gpu: not node.gpus[gpu]}
        node.wake()

    # ---------------------------------------------------------------- one play

    async def run(self) -> None:
        f, s = self.faults, self.scenario
        f.ambiguous_write, f.stale_read, f.late_write_s = s.ambiguous, s.stale, 0.2
        f.watch_repeat = f.watch_older = f.watch_split = s.watch_trouble
        f.watch_cancel, f.watch_silent = s.watch_trouble / 4, s.watch_trouble / 4
        for i in range(s.schedulers):
            self.start_scheduler(f"s{i}")
        for node in self.nodes.values():
            node.start_agent()
        self.clients = [asyncio.create_task(self.client(i)) for i in range(s.jobs)]
        more = [self.declare(), self.reserve()] if s.queues else []
        trouble = [asyncio.create_task(each) for each in (self.adversary(), *more)]
        await asyncio.sleep(s.duration_s)
        for each in trouble:
            each.cancel()
        await asyncio.wait(trouble)
        await self.heal()
        await self.settle()
        await asyncio.sleep(5.0)
        await self._check()
        await self.end()

    async def heal(self) -> None:
        """End all faults; what dies from now on does so because it was told to."""
        self.say("peace")
        await asyncio.sleep(31.0)  # what the adversary has set for later
        f = self.faults
        f.ambiguous_write = f.stale_read = f.watch_repeat = f.watch_older = f.watch_split = f.watch_cancel = f.watch_silent = 0.0
        f.unavailable = False
        alive = {s._store.name for s, _ in self.schedulers.values() if isinstance(s._store, MemoryStore)}
        f.partitioned -= alive | set(self.nodes)
        self.habits.calm = True
        for name in self.nodes:
            node = self.nodes[name]
            node.gpus = dict.fromkeys(node.gpus, True)
            node.start_agent()
            node.wake()
            node.calm_down()
            await asyncio.wait_for(self._undo(name), 60)
        await asyncio.wait_for(self.ask(SetBrake(False, by="operator")), 60)
        await asyncio.wait_for(asyncio.gather(*self.clients), 120)

    async def _undo(self, node: str) -> None:
        await self.ask(Administer(node, "uncordon"))
        await self.ask(Administer(node, "undrain"))

    async def settle(self) -> None:
        """Wait until nothing is left to do. Raises Violation with what is."""
        until = self.loop.time() + SETTLES_S
        while left := self._unsettled():
            if self.loop.time() > until:
                raise Violation(f"never settles: {left}")
            for name, (_, task) in self.schedulers.items():
                if task.done():
                    raise Violation(f"scheduler {name} has ended: {task.exception()!r}")
            await asyncio.sleep(1.0)

    def _unsettled(self) -> list[str]:
        s = self.leader()
        if s is None:
            return ["nobody leads"]
        open_ = [j for j in s.state.jobs.values() if j.state != "finished"]
        left = [f"{j.id} is {j.state} since {j.since_ms}, generation {j.generation}: {j.deferral}" for j in open_]
        left += [f"{j} holds {h} on {n.id}" for n in s.state.nodes.values() for j, h in n.holdings.items()]
        left += [f"{n.id} is {n.status}" for n in s.state.nodes.values() if n.status != "up"]
        left += [f"{name} is reserved" for name in s.state.reservations]
        left += [f"{n.name} still has {sorted(n.gangs)}" for n in self.nodes.values() if n.gangs]
        left += [f"spec {kv.key!r}" for kv in self.cluster.mvcc.read(KEYS.jobs, KEYS.jobs[:-1] + b"0")]
        others = [o for o, _ in self.schedulers.values() if o is not s]
        left += [f"{o.name} is at {o.state.index} of {s.state.index}" for o in others if o.role != "standby" or o.state.index != s.state.index]
        return left

    async def end(self) -> None:
        for node in self.nodes.values():
            node.kill_agent()
        for s, task in self.schedulers.values():
            await s.stop()
            self.dying.append(task)
        await asyncio.gather(*self.dying, return_exceptions=True)

    # ---------------------------------------------------------------- what must be true

    async def _check(self) -> None:
        """One log that folds; every replica and every recovery is that fold; nothing acknowledged is lost or doubled; ranks run once."""
        leader = self.leader()
        assert leader is not None
        await self._check_log(leader)
        self._check_submissions(leader.state)
        check_runs([r for n in self.nodes.values() for r in n.runs])
        for line in self.journal.getvalue().splitlines():
            if any(f'"{word}"' in line for word in NEVER):
                raise Violation(line)

    async def _check_log(self, leader: Scheduler) -> None:
        frames: dict[int, bytes] = {}
        for name in (f"s{i}" for i in range(self.scenario.schedulers)):
            archive = Archive(self.folder / name / "archive")
            for segment in archive.segments():
                for index, data in archive.read(segment.first, segment.last):
                    if frames.setdefault(index, data) != data:
                        raise Violation(f"two archives differ at {index}")
        async for index, data, _ in Log(MemoryStore(self.cluster, "checker"), KEYS).read(min(await self._first(), leader.state.index)):
            if frames.setdefault(index, data) != data:
                raise Violation(f"archive and log differ at {index}")
        state = State()
        for index in range(1, leader.state.index + 1):
            apply_frame(state, decode_frame(frames[index], index, state.digest))
            check_state(state)
        found = await recover(MemoryStore(self.cluster, "checker"), KEYS)
        for name, other in [("recovery", found.state), *((n, s.state) for n, (s, _) in self.schedulers.items())]:
            if state_digest(other) != state_digest(state):
                raise Violation(f"{name} differs from the fold of the log: {different(unpack_state(other), unpack_state(state))}")

    async def _first(self) -> int:
        return await Log(MemoryStore(self.cluster, "checker"), KEYS).first_index() or 1

    def _check_submissions(self, state: State) -> None:
        for key, job in self.submitted.items():
            held = [j.id for j in state.jobs.values() if j.idempotency_key == key]
            if held != [job]:
                raise Violation(f"{key} was acknowledged as {job}, the log has {held}")


def check_state(state: State) -> None:
    """What must be true of every state."""
    for node in state.nodes.values():
        held = [g for h in node.holdings.values() for g in h.gpus]
        if len(set(held)) != len(held):
            raise Violation(f"index {state.index}: a device of {node.id} is held twice: {node.holdings}")
        held += check_parts(state, node)
        if set(held) & set(node.free_gpus):
            raise Violation(f"index {state.index}: a device of {node.id} is held and free")
        usable = {g.index for g in node.registration.gpus if g.healthy}
        if set(node.free_gpus) != usable - set(held):
            raise Violation(f"index {state.index}: free devices of {node.id} are {node.free_gpus}, not {usable - set(held)}")
        cpus = node.registration.cpus_milli - sum(h.cpus_milli for h in node.holdings.values())
        if cpus != node.free_cpus_milli:
            raise Violation(f"index {state.index}: free CPUs of {node.id} are {node.free_cpus_milli}, not {cpus}")
    check_accounts(state)
    for job in state.jobs.values():
        held_on = [n.id for n in state.nodes.values() if job.id in n.holdings]
        if sorted(held_on) != sorted(job.held_nodes):
            raise Violation(f"index {state.index}: {job.id} holds on {held_on}, and thinks {list(job.held_nodes)}")
        if job.active and not set(job.parts) <= set(held_on):
            raise Violation(f"index {state.index}: {job.id} is {job.state} on {list(job.parts)} and holds on {held_on}")
        if job.active and job.spec.topology.required:
            racks = {state.nodes[n].registration.labels["rack"] for n in job.parts}
            if len(racks) > 1:
                raise Violation(f"index {state.index}: {job.id} is to be in one rack and is in {racks}")
        if (job.id in state.running) != job.active:
            raise Violation(f"index {state.index}: {job.id} is {job.state}, running: {job.id in state.running}")
        if job.active and (job.waits_for or state.at_ms < job.begin_at_ms):
            raise Violation(f"index {state.index}: {job.id} runs before {job.waits_for} or {job.begin_at_ms}")
        check_array(state, job)


def check_array(state: State, array: Job) -> None:
    """No more elements are live than the array allows; when it has ended, each of its elements has ended once."""
    elements, spec = array.elements, array.spec.array
    if elements is None or spec is None:
        return
    live = [j.id for j in state.jobs.values() if j.array == array.id and j.state != "finished"]
    if sorted(live) != sorted(elements.live) or (spec.at_most and len(live) > spec.at_most):
        raise Violation(f"index {state.index}: {array.id} has {live} live, knows of {list(elements.live)}, allows {spec.at_most}")
    ended = [p for runs in (elements.succeeded, elements.failed, elements.cancelled) for a, b in runs for p in range(a, b + 1)]
    if len(set(ended)) != len(ended):
        raise Violation(f"index {state.index}: an element of {array.id} has ended twice: {ended}")
    if array.outcome == "succeeded" and sorted(ended) != list(range(size(spec))):
        raise Violation(f"index {state.index}: {array.id} has succeeded, and only {ended} have ended")


def check_parts(state: State, node: Node) -> list[int]:
    """No device is shared beyond the whole, or partitioned into what overlaps, or used in two ways. Return those with parts."""
    uses: dict[int, list[GpuUse]] = {}
    for holding in node.holdings.values():
        for use in holding.shares:
            uses.setdefault(use.gpu, []).append(use)
    if set(uses) != set(node.parted):
        raise Violation(f"index {state.index}: parts of devices {sorted(uses)} of {node.id} are held, not of {sorted(node.parted)}")
    for gpu, some in uses.items():
        together = reduce(GpuUse.plus, some)
        # What a gang holds for two of its generations may overlap: the younger starts when the older is gone.
        lone = len(some) == 1 and len(together.mig) > 1
        problem = "" if lone else together.problem(80_000)
        if problem or together != node.parted[gpu]:
            raise Violation(f"index {state.index}: device {gpu} of {node.id} {problem or 'is added up wrongly'}: {some}, {node.parted[gpu]}")
        if any(gpu in holding.gpus for holding in node.holdings.values()):
            raise Violation(f"index {state.index}: device {gpu} of {node.id} is held whole and in part")
        if sum(use.milli for use in some) > 1000:
            raise Violation(f"index {state.index}: device {gpu} of {node.id} is shared beyond the whole")
    return list(uses)


def check_accounts(state: State) -> None:
    """What the accounts of usage say is held is what is held on the nodes."""
    held: dict[str, int] = {}
    for node in state.nodes.values():
        for job, holding in node.holdings.items():
            queue = state.jobs[job].spec.queue
            gpus = len(holding.gpus) * 1000 + sum(use.charged for use in holding.shares)
            for path in [spec.path for spec in state.queues.lineage(queue)] if queue in state.queues.specs else []:
                held[path] = held.get(path, 0) + gpus
    for path, account in state.usage.queues.items():
        if account.held[0] != held.get(path, 0) or min(account.used) < 0:
            raise Violation(f"index {state.index}: queue {path} holds {held.get(path, 0)}, and its account says {account}")
        users = state.usage.users.get(path)
        if users is not None and sum(user.held[0] for user in users.values()) != account.held[0]:
            raise Violation(f"index {state.index}: users of {path} hold other than it: {users}, {account}")


def unpack_state(state: State) -> Any:
    return msgpack.unpackb(dump_state(state), raw=False, strict_map_key=False)


def different(a: Any, b: Any, at: str = "") -> list[str]:
    """Where two unpacked states differ, the order of their maps included."""
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        return [d for k in a for d in different(a[k], b[k], f"{at}/{k}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in different(x, y, f"{at}/{i}")]
    return [] if a == b and not isinstance(a, dict) else [f"{at}: {a!r} and {b!r}"[:300]]


def check_runs(runs: list[Run]) -> None:
    """No rank runs twice at once, and no device has two ranks, unless they share it or have different parts of it."""
    by_rank: dict[object, list[Run]] = {}
    by_gpu: dict[tuple[str, int], list[Run]] = {}
    for r in runs:
        by_rank.setdefault((r.job, r.rank), []).append(r)
        for g in r.gpus:
            by_gpu.setdefault((r.node, g), []).append(r)
    for (node, gpu), some in by_gpu.items():
        for r in some:
            beside = [o for o in some if o.began <= r.began < (o.ended or 1e18)]
            uses = [use for o in beside for use in uses_of(o.gpus, o.share) if use.gpu == gpu]
            if len(beside) > 1 and (any(o.share is None for o in beside) or reduce(GpuUse.plus, uses).problem(80_000)):
                raise Violation(f"device {gpu} of {node} is used beyond what it has: {beside}")
    for what, some in by_rank.items():
        some.sort(key=lambda r: r.began)
        for a, b in pairwise(some):
            if not a.ended or a.ended > b.began:
                raise Violation(f"{what} at once: {a} and {b}")
    by_job: dict[str, list[Run]] = {}
    for r in runs:
        by_job.setdefault(r.job, []).append(r)
    for some in by_job.values():
        # Ranks that restart alone run beside older ones, but a whole generation elsewhere must not.
        for a in some:
            for b in some:
                if a.generation < b.generation and a.rank == b.rank and b.began < (a.ended or 1e18):
                    raise Violation(f"two generations at once: {a} and {b}")


def play(seed: int, folder: Path, scenario: Scenario = Scenario(), telemetry: Telemetry | None = None) -> World:  # noqa: B008 - immutable
    """Play one seed. Raises Violation, with the story in its notes."""
    world: list[World] = []

    async def run() -> None:
        world.append(World(seed, scenario, folder, telemetry or setup("sim")))
        await world[0].run()

    with contextlib.ExitStack() as stack:
        for name, value in (("EVERY_ENTRIES", 60), ("KEPT_ENTRIES", 15)):
            stack.enter_context(mock.patch.object(snapshotter, name, value))
        runner = stack.enter_context(asyncio.Runner(loop_factory=SimLoop))
        stack.enter_context(mock.patch.object(time, "monotonic", runner.get_loop().time))
        try:
            runner.run(run())
        except BaseException as e:
            e.add_note(f"seed {seed}")
            if world:
                e.world = world[0]  # type: ignore[attr-defined]
            raise
    return world[0]
