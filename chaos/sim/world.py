"""The simulated cluster of one seed: schedulers, nodes, clients and the store; faults, then healing, then the demand that all comes to rest.

    plan ──▶ Adversary ──▶ store, network, processes, disks, GPUs ◀── schedulers, agents, clients: the production code
                                      │
                                      ▼
             trace of all commits ──▶ checker S1 to S16, invariants ──▶ violations

Everything but time, ranks and the store's server is the real code; `play.py` runs it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec

from gangline.chaos.checker import Operation
from gangline.chaos.sim import workload
from gangline.chaos.sim.adversary import Adversary
from gangline.chaos.sim.invariants import Violation
from gangline.chaos.sim.loop import Process
from gangline.chaos.sim.node import Habits, SimNode
from gangline.chaos.sim.scenario import Plan, Scenario
from gangline.core.model.spec import JobSpec
from gangline.core.store.keys import Keys
from gangline.core.store.memory import Faults, MemoryCluster, MemoryStore
from gangline.core.store.watching import Timing
from gangline.core.telemetry import Telemetry, structured_logging
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
    SetHealth,
    Stop,
    Submit,
    Unreserve,
)
from gangline.leader.metrics import Metrics
from gangline.leader.scheduler import Scheduler
from gangline.leader.service import NotLeader, Unavailable
from gangline.nodeagent.liveness import Verdict

LEADER_TTL_S = 3.0
#: quiet must come within this simulated time after the last fault: restarts' backoff, a prepare timeout and its avoidance, three in a row
SETTLES_S = 900.0
#: a connection in which one direction is dead is given up by TCP after this time, and no other can be made
_HALF_DEAD_S = 15.0


class Host(msgspec.Struct):
    """One life of one scheduler."""

    scheduler: Scheduler
    store: MemoryStore
    process: Process
    task: asyncio.Task[None]


class _NoMetrics:
    """Takes whatever a scheduler counts."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry

    def __getattr__(self, name: str) -> Any:
        return _nothing


def _nothing(*args: object) -> None:
    return


class World:
    """One run. `folder` takes the schedulers' archives, `journal` what schedulers log at `level` and above."""

    def __init__(self, seed: int, scenario: Scenario, plan: Plan, folder: Path, telemetry: Telemetry, level: str = "error") -> None:
        self.seed = seed
        self.scenario = scenario
        self.plan = plan
        self.folder = folder
        self.telemetry = telemetry
        self.keys = Keys("test")
        self.faults = Faults(seed)
        self.loop = asyncio.get_running_loop()
        wire = self.rng("wire")
        self.cluster = MemoryCluster(clock=self.loop.time, faults=self.faults, min_lease_ttl_s=1.0, latency=lambda: wire.random() * 0.004)
        self.cluster.mvcc.listeners.insert(0, self._committed)
        self.habits = Habits()
        self.journal = io.StringIO()
        self._level = level
        self.nodes: dict[str, SimNode] = {}
        for i in range(scenario.nodes):
            node = SimNode(self.cluster, f"n{i}", self.rng(f"n{i}"), self.habits, self.verdict, workload.GPUS)
            node.on_agent_death = lambda node=node: self.revive(node.name, node.start_agent)  # type: ignore[misc]
            self.nodes[node.name] = node
        self.schedulers: dict[str, Host] = {}
        #: every life of every scheduler
        self.hosts: list[Host] = []
        self.adversary = Adversary(self)
        #: scheduler or node → when its next life begins after the present one
        self.restart_in: dict[str, float] = {}
        #: idempotency key → job that the client was told; "" for those of unknown outcome
        self.submitted: dict[str, str] = {}
        self.history: list[Operation] = []
        self._finished_clients: set[str] = set()
        self._background: list[asyncio.Task[Any]] = []
        self._client_tasks: list[asyncio.Task[None]] = []
        #: every frame of the log as it was appended: index → (bytes, revision)
        self.frames: dict[int, tuple[bytes, int]] = {}
        self.overwritten: list[int] = []
        #: create revision of the election key now, 0 while there is none; and when each frame was appended
        self._owner = 0
        self.owners: dict[int, int] = {}
        self.ending = False
        #: when the last of what is set for later will have happened
        self.until_s = 0.0
        self.healed_at = 0.0
        self.ended_at = 0.0
        self.story: list[str] = []
        self.trace = hashlib.sha256()
        self.commits = 0
        #: what becomes of the trace, line by line, when somebody wants to read it
        self.tracing: list[str] | None = None

    def rng(self, purpose: str) -> random.Random:
        """Return a generator for one purpose."""
        return random.Random(f"{self.seed}-{purpose}")

    def say(self, what: str) -> None:
        """Put a line into the story of the run."""
        line = f"{self.loop.time():9.3f} {what}"
        self.story.append(line)
        self.trace.update(line.encode())

    def _committed(self) -> None:
        """The store has changed: all of it goes into the trace, and frames of the log are remembered."""
        revision, events = self.cluster.mvcc._log[-1]
        self.commits += 1
        self.trace.update(b"%d %r" % (revision, self.loop.time()))
        for event in events:
            kv = event.kv
            self.trace.update(kv.key + b"\0" + kv.value)
            if self.tracing is not None:
                self.tracing.append(f"{self.loop.time():.6f} {revision} {event.kind} {kv.key!r} {kv.value!r}")
            if kv.key.startswith(self.keys.log) and event.kind == "put":
                index = int(kv.key[len(self.keys.log) :])
                if index in self.frames:
                    self.overwritten.append(index)
                self.frames[index] = (kv.value, revision)
                self.owners[index] = self._owner
            elif kv.key == self.keys.leader:
                self._owner = kv.create_revision if event.kind == "put" else 0

    def background(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start something that nobody waits for."""
        self._background.append(asyncio.create_task(coroutine))

    # ---------------------------------------------------------------- schedulers

    def start_scheduler(self, name: str) -> None:
        """Begin a life of a scheduler."""
        if self.ending or name in self.schedulers:
            return
        life = f"{name}.{len(self.hosts) + 1}"
        store = MemoryStore(self.cluster, life, timeout_s=2.0, timing=Timing(4.0, 1.0))
        s = Scheduler(
            name=name, store=store, keys=self.keys, url=f"http://{name}", state_dir=self.folder / name, ttl_s=LEADER_TTL_S,
            telemetry=self.telemetry, journal=structured_logging(self._level, self.journal, scheduler=life), monotonic=self.loop.time,
            wall_ms=lambda: 1_000_000 + int(self.loop.time() * 1000),
        )  # fmt: skip
        s.metrics = cast(Metrics, _NoMetrics(self.telemetry))
        process = Process(life, lambda: self._scheduler_died(name))
        self.schedulers[name] = host = Host(s, store, process, process.spawn(s.run()))
        self.hosts.append(host)
        self.adversary.reconnect()

    def _scheduler_died(self, name: str) -> None:
        host = self.schedulers.pop(name)
        self.say(f"scheduler {host.process.name} is dead")
        host.store.disconnect()
        self.revive(name, lambda: self.start_scheduler(name))

    def revive(self, name: str, start: Any) -> None:
        """Begin the next life of a scheduler or an agent when it is time."""
        if not self.ending:
            self.later(self.restart_in.get(name, 1.0), start)

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        """Do something before faults are over for good."""
        self.until_s = max(self.until_s, self.loop.time() + seconds)
        self.loop.call_later(seconds, do)

    def is_gone(self, life: int) -> bool:
        """Tell whether a life of a scheduler, by its number, is over."""
        return 0 < life <= len(self.hosts) and self.hosts[life - 1].process.dead

    def verdict(self, node: str) -> Verdict:
        """Return what an agent hears when it asks all schedulers whether they reach the store."""
        if node in self.faults.partitioned | self.faults.mute | self.faults.deaf:
            return "no_answer"
        living = [host.scheduler for host in self.schedulers.values()]
        if not living:
            return "no_answer"
        return "somebody_may_decide" if any(s.store_ok for s in living) else "nobody_decides"

    def leader(self) -> Scheduler | None:
        """Return a scheduler that leads, or thinks so."""
        leads = [h.scheduler for h in self.schedulers.values() if h.scheduler.role == "leader" and h.scheduler.term is not None]
        return max(leads, key=lambda s: s.term.leadership.token if s.term is not None else 0, default=None)

    # ---------------------------------------------------------------- clients

    async def ask(self, command: Command, rng: random.Random | None = None) -> Accepted | None:
        """Send one command to whoever leads, or may, until it is answered; None when it is refused."""
        while True:
            answer = await self._request(command, rng)
            if isinstance(answer, Accepted):
                return answer
            if isinstance(answer, Refused):
                return None
            if answer is not None and not isinstance(answer, Unavailable | NotLeader | asyncio.CancelledError):
                raise answer
            await asyncio.sleep(0.2)

    async def _request(self, command: Command, rng: random.Random | None) -> Accepted | BaseException | None:
        """Send a command once, over a network; None when no answer comes."""
        await asyncio.sleep(self.cluster.latency())
        leader = self.leader()
        names = sorted(self.schedulers)
        name = leader.name if leader is not None and (rng is None or rng.random() < 0.8) else rng.choice(names) if rng and names else ""
        host = self.schedulers.get(name)
        if host is None:
            return None
        serving = host.process.spawn(host.scheduler.execute([command]))
        done, _ = await asyncio.wait([serving], timeout=10.0)
        await asyncio.sleep(self.cluster.latency())
        if not done:
            serving.cancel()
            return None
        try:
            return serving.result()[0]
        except (NotLeader, asyncio.CancelledError) as e:
            return e

    def start_client(self, name: str, life: int = 0) -> None:
        """Begin a life of a client; it submits its job under the same idempotency key as in its lives before."""
        if self.ending or name in self._finished_clients:
            return
        process = Process(f"{name}.{life}", lambda: cast(None, self.loop.call_later(1.0, self.start_client, name, life + 1)))
        rng = self.rng(f"{name}-{life}")
        if life < 3 and rng.random() < 0.3:
            process.die_after(rng.randrange(1, 80))
        self._client_tasks.append(process.spawn(self._client(name, life, rng)))

    async def _client(self, name: str, life: int, rng: random.Random) -> None:
        fixed = self.rng(name)  # the job is the same in every life
        begin_s = fixed.random() * self.scenario.duration_s * 0.8
        await asyncio.sleep(max(0.0, begin_s - self.loop.time()))
        key, tries = f"key-{name}", 0
        spec, user = self._job(name, fixed)
        while True:
            tries += 1
            command = Submit(f"{name}-{life}-{tries}", spec, user, idempotency_key=key, body_digest=name)
            asking = asyncio.create_task(self.ask(command, rng))
            done, _ = await asyncio.wait([asking], timeout=rng.choice((0.01, 0.5, 20.0)))
            if done:
                answer = asking.result()
                if answer is None:
                    raise Violation(f"{key} was refused")
                break
            self.submitted.setdefault(key, "")
            self.history.append(Operation(op="submit", outcome="unknown", key=key))
            asking.cancel()
        job = self.submitted[key] = answer.subject
        self.history.append(Operation(op="submit", outcome="ok", key=key, job=job, index=answer.index))
        if not life:
            self.say(f"{key} is {job}: {spec}")
        await self._read(job, answer.index, rng)
        if self.scenario.conditional:
            await self._hold(job, spec.hold, rng)
        if fixed.random() < 0.25:
            await asyncio.sleep(rng.random() * 30)
            await self.ask(Stop(job, by="client", reason="enough"), rng)
            self.say(f"{job} stopped")
        self._finished_clients.add(name)

    def _job(self, name: str, rng: random.Random) -> tuple[JobSpec, str]:
        # With more than three nodes, one may be lost for ever.
        spec, user = workload.job(rng, max(self.scenario.nodes - 1, min(3, self.scenario.nodes))), ""
        if rng.random() < self.scenario.conditional:
            spec = workload.conditional(rng, spec, sorted({job for job in self.submitted.values() if job} - {self.submitted.get(f"key-{name}")}))
        if "queues" in self.plan.standing:
            spec, user = workload.in_queue(rng, spec)
        return spec, user

    async def _read(self, job: str, index: int, rng: random.Random) -> None:
        """Read one's own write from any scheduler."""
        host = self.schedulers.get(rng.choice(sorted(self.schedulers))) if self.schedulers else None
        if host is None:
            return
        reading = host.process.spawn(host.scheduler.view(index, 3.0))
        done, _ = await asyncio.wait([reading], timeout=5.0)
        if not done:
            reading.cancel()
        elif not reading.cancelled() and reading.exception() is None:
            state = reading.result()
            self.history.append(Operation(op="read", outcome="ok", job=job, after=index, index=state.index, found=job in state.jobs))

    async def _hold(self, job: str, held: bool, rng: random.Random) -> None:
        """Release what was submitted on hold; hold some of the others for a while."""
        if not held and rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 20)
            held = await self.ask(Hold(job, by="client", reason="a while", requeue=rng.random() < 0.5), rng) is not None
        if held:
            await asyncio.sleep(rng.random() * 20)
        # Also what a life before may have held.
        await self.ask(Release(job, by="client"), rng)

    async def _declare(self) -> None:
        """Declare queues, and others with the same names later."""
        rng = self.rng("queues")
        while True:
            leader = self.leader()
            if leader is None:
                await asyncio.sleep(1.0)
                continue
            queues = workload.queues(rng, self.scenario.nodes)
            if await self.ask(DeclareQueues(queues, leader.state.queues.index, by="operator")) is not None:
                self.say(f"declared {queues}")
            await asyncio.sleep(rng.choice((1.0, 20.0, 60.0)))

    async def _reserve(self) -> None:
        """Keep nodes for maintenance or for somebody; some reservations are removed before their end."""
        rng, number = self.rng("reservations"), 0
        while True:
            await asyncio.sleep(rng.choice((5.0, 20.0, 60.0)))
            leader = self.leader()
            if leader is None or not leader.state.nodes:
                continue
            number += 1
            wanted = workload.reservation(rng, f"r{number}", sorted(leader.state.nodes), leader.state.at_ms)
            if await self.ask(Reserve(wanted)) is not None:
                self.say(f"reserved {wanted}")
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice((1.0, 10.0)))
                await self.ask(Unreserve(wanted.name))

    # ---------------------------------------------------------------- one run

    async def run(self) -> None:
        """Faults, healing, rest. Raises Violation when rest does not come."""
        f, s = self.faults, self.scenario
        if "noise" in self.plan.standing:
            f.ambiguous_write, f.stale_read, f.late_write_s = s.ambiguous, s.stale, 0.2
            f.watch_repeat = f.watch_older = f.watch_split = s.watch_trouble
            f.watch_cancel, f.watch_silent = s.watch_trouble / 4, s.watch_trouble / 4
        for i in range(s.schedulers):
            self.start_scheduler(f"s{i}")
        for node in self.nodes.values():
            node.start_agent()
        for job in self.plan.jobs:
            self.start_client(job)
        trouble = []
        if "queues" in self.plan.standing:
            trouble.append(asyncio.create_task(self._declare()))
        if "reservations" in self.plan.standing:
            trouble.append(asyncio.create_task(self._reserve()))
        for fault in self.plan.faults:
            self.loop.call_at(fault.at_s, self.adversary.play, fault.name, f"{self.seed}-{fault.id}")
        await asyncio.sleep(s.duration_s)
        for each in trouble:
            each.cancel()
        if trouble:
            await asyncio.wait(trouble)
        await self.heal()
        await self.settle()
        await asyncio.sleep(5.0)

    async def heal(self) -> None:
        """End all faults but those that last; what dies from now on does so because it was told to."""
        self.say("peace")
        await asyncio.sleep(max(0.0, self.until_s - self.loop.time()) + 0.5)  # what the adversary has set for later
        f = self.faults
        f.ambiguous_write = f.stale_read = f.watch_repeat = f.watch_older = f.watch_split = f.watch_cancel = f.watch_silent = 0.0
        f.watch_late_s, f.unavailable, f.no_space = 0.0, False, False
        for cut in (f.partitioned, f.mute, f.deaf):
            cut.clear()
        for host in self.schedulers.values():
            host.process.dies_at = 0
        self.habits.calm = True
        if "lasting" in self.plan.standing:
            self.adversary.begin_lasting(f"{self.seed}-lasting")
            await asyncio.sleep(_HALF_DEAD_S)
            f.partitioned |= f.mute | f.deaf
            for name in self.adversary.lasting.keys() & self.nodes.keys():
                self.nodes[name].crash()  # and its power is off
        away = self.adversary.lasting.keys()
        for name in (name for name in self.nodes if name not in away):
            node = self.nodes[name]
            node.gpus = dict.fromkeys(node.gpus, True)
            node.start_agent()
            node.wake()
            node.calm_down()
            # Somebody looks after everything that was withdrawn: what was reported so far is settled.
            for device in ("", *(gpu.uuid for gpu in node.registration().gpus)):
                await self._within(60, "nodes are put back", self.ask(SetHealth(name, device, "healthy", by="operator")))
            await self._within(60, "nodes are put back", self.ask(Administer(name, "uncordon")))
            await self._within(60, "nodes are put back", self.ask(Administer(name, "undrain")))
        await self._within(60, "the brake is released", self.ask(SetBrake(False, by="operator")))
        await self._within(200, "every client has its answer", self._clients_finished())
        for name in self.nodes.keys() & away:
            await self._within(60, "a dead node is lost", self._confirm_dead(name))
        self.healed_at = self.loop.time()

    async def _clients_finished(self) -> None:
        while len(self._finished_clients) < len(self.plan.jobs):
            for task in self._client_tasks:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
            await asyncio.sleep(1.0)

    async def _confirm_dead(self, node: str) -> None:
        while await self.ask(Administer(node, "confirm_dead", by="operator")) is None:
            leader = self.leader()
            if leader is not None and node not in leader.state.nodes:
                return
            await asyncio.sleep(1.0)

    async def _within(self, seconds: float, what: str, coroutine: Coroutine[Any, Any, object]) -> None:
        try:
            await asyncio.wait_for(coroutine, seconds)
        except TimeoutError:
            raise Violation(f"never: {what}, within {seconds:g} s after the faults: {self._unsettled()[:5]}") from None

    async def settle(self) -> None:
        """Wait until nothing is left to do. Raises Violation with what is."""
        until = self.loop.time() + SETTLES_S
        while left := self._unsettled():
            if self.loop.time() > until:
                raise Violation(f"never settles: {left}")
            for name, host in self.schedulers.items():
                if host.task.done():
                    raise Violation(f"scheduler {name} has ended: {host.task.exception()!r}")
            await asyncio.sleep(1.0)

    def _unsettled(self) -> list[str]:
        s = self.leader()
        if s is None:
            return ["nobody leads"]
        away = self.adversary.lasting
        nodes = [n for n in s.state.nodes.values() if n.id not in away]
        open_ = [j for j in s.state.jobs.values() if j.state != "finished"]
        left = [f"{j.id} is {j.state} since {j.since_ms}, generation {j.generation}: {j.deferral}" for j in open_]
        left += [f"{j} holds {h} on {n.id}" for n in nodes for j, h in n.holdings.items()]
        left += [f"{n.id} is {n.status}" for n in nodes if n.status != "up"]
        left += [f"{name} is reserved" for name in s.state.reservations]
        left += [f"{n.name} still has {sorted(n.gangs)}" for n in self.nodes.values() if n.gangs and n.name not in away]
        left += [f"spec {kv.key!r}" for kv in self.cluster.mvcc.read(self.keys.jobs, self.keys.jobs[:-1] + b"0")]
        others = [h.scheduler for name, h in self.schedulers.items() if h.scheduler is not s and name not in away]
        left += [f"{o.name} is at {o.state.index} of {s.state.index}" for o in others if o.role != "standby" or o.state.index != s.state.index]
        return left

    def end(self) -> None:
        """Let go of everything: what was cut where it was runs its `finally` now, and reaches nothing."""
        self.ending = True
        self.cluster.closed = True
