"""A node: its hardware with ranks on it, and the agent: the real `Liveness`, `reconcile`, `report` and `Reporter` over ranks that are timers.

What survives an agent, and what survives the host, are kept apart as on a real node: ranks and the fence outlive the agent, records both.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import random
from collections.abc import Callable
from typing import Any, cast

import msgspec

from gangline.chaos.sim.loop import Process
from gangline.core.model.documents import Desired, DesiredGang, DesiredRank, Gpu, GpuReport, Observed, Registration, XidCount
from gangline.core.model.gpushares import GpuShare
from gangline.core.model.spec import JobSpec
from gangline.core.store.api import Ambiguous, StoreError
from gangline.core.store.memory import MemoryCluster, MemoryStore
from gangline.core.store.node import NameTaken, StoreNode
from gangline.core.store.watching import Timing
from gangline.core.telemetry import Log, structured_logging
from gangline.nodeagent.fence import Fence
from gangline.nodeagent.liveness import Liveness, Verdict
from gangline.nodeagent.local import Local, LocalGang, LocalRank
from gangline.nodeagent.reconcile import Action, FailPrepare, Forget, Notify, Prepare, Refuse, Start, Stop, next_look, reconcile, refusal
from gangline.nodeagent.report import barriers, observed_gang
from gangline.nodeagent.reporter import Reporter

TTL_S = 6.0


class Run(msgspec.Struct):
    """One life of one rank: what the checker reads. Times are simulated seconds, `ended` is 0 while it lives."""

    job: str
    rank: int
    generation: int
    node: str
    gpus: tuple[int, ...]
    fenced: bool
    began: float
    ended: float = 0.0
    code: int = 0
    share: GpuShare | None = None
    #: the document that it was started for
    index: int = 0
    epoch: int = 0


class Habits(msgspec.Struct):
    """How ranks and nodes behave; the world changes it when the faults are over."""

    mean_life_s: float = 20.0
    crash: float = 0.3
    prepare_fails: float = 0.1
    obeys: float = 0.7
    calm: bool = False


class SimFence:
    """As `nodeagent.fence.Fence`, whose deadline outlives the agent: `fall` is called when it has passed."""

    def __init__(self, fall: Callable[[], None]) -> None:
        self.deadline = 0.0
        self._fall = fall
        self._timer: asyncio.TimerHandle | None = None

    def extend(self, deadline: float) -> None:
        """See Fence."""
        if deadline > self.deadline:
            self.deadline = deadline
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(deadline, self._fall)

    def reset(self) -> None:
        """The host has booted: its clock begins anew."""
        self.deadline = 0.0


class SimNode:
    """`up` when its agent runs. All randomness comes from `rng`."""

    def __init__(
        self, cluster: MemoryCluster, name: str, rng: random.Random, habits: Habits, ask: Callable[[str], Verdict], gpus: int
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.rng = rng
        self.habits = habits
        self.runs: list[Run] = []
        self.refusals: list[str] = []
        #: what an agent has died of that no agent may die of
        self.failures: list[BaseException] = []
        self.boot, self.installed = 1, 1
        self.gpus = dict.fromkeys(range(gpus), True)
        #: by GPU: how often the driver has seen each error since boot
        self.errors: dict[int, dict[int, int]] = {}
        self.fence = SimFence(self._fall)
        self.gangs: dict[str, LocalGang] = {}
        self.specs: dict[str, JobSpec] = {}
        self.retired: dict[str, int] = {}
        self.seen = (0, 0)
        self.desired: Desired | None = None
        #: called when the agent has died, of itself or by `kill_agent`
        self.on_agent_death: Callable[[], None] = lambda: None
        self._ask_schedulers = ask
        self._alive: dict[tuple[str, int, int], tuple[Run, asyncio.TimerHandle]] = {}
        self._agent: Process | None = None
        self._liveness: Liveness | None = None
        #: how many agents there were
        self.lives = 0
        self._journal: Log = structured_logging("error", io.StringIO())

    # ---------------------------------------------------------------- hardware

    @property
    def up(self) -> bool:
        """The agent runs."""
        return self._agent is not None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the simulation."""
        return asyncio.get_running_loop()

    def registration(self) -> Registration:
        """Return what the agent says of its node."""
        gpus = tuple(self._facts().values())
        return Registration(
            node=self.name, identity=f"{self.name}-{self.installed}", boot_id=f"{self.installed}.{self.boot}", address=self.name, agent_url="",
            gpus=gpus, cpus_milli=64_000, memory_mib=512_000, lease_ttl_s=TTL_S, session=self._session(),
            labels={"rack": f"r{int(self.name[1:]) // 2}"},
        )  # fmt: skip

    def _facts(self) -> dict[int, Gpu]:
        made = f"{self.name}-{self.installed}"
        return {i: Gpu(i, f"{made}-{i}", "H100", 80_000, healthy, "H100", (i // 2,)) for i, healthy in self.gpus.items()}

    def report_error(self, gpu: int, number: int) -> None:
        """The driver has seen this Xid of a GPU, or, for 0, that it is slowed down for heat or not any more."""
        found = self.errors.setdefault(gpu, {})
        found[number] = found.get(number, 0) + 1
        self.wake()

    def _reports(self) -> tuple[GpuReport, ...]:
        uuids = {i: gpu.uuid for i, gpu in self._facts().items()}
        return tuple(
            GpuReport(
                uuids[gpu], xids=tuple(XidCount(n, count) for n, count in sorted(found.items()) if n),
                slowed=("hw_thermal",) if found.get(0, 0) % 2 else (),
            )
            for gpu, found in sorted(self.errors.items())
        )  # fmt: skip

    def crash(self, *, reinstalled: bool = False) -> None:
        """The host dies, and everything on it."""
        self.kill_agent()
        for key in list(self._alive):
            self._end(key, -9, "node_restart")
        for job, gang in self.gangs.items():
            ranks = tuple(msgspec.structs.replace(r, state="exited", cause="node_restart", exit_code=-9) if r.live else r for r in gang.ranks)
            self.gangs[job] = msgspec.structs.replace(gang, ranks=ranks, notice=None)
        self.boot += 1
        self.errors = {}
        self.fence.reset()
        if reinstalled:
            self.installed += 1
            self.gangs, self.retired, self.specs, self.seen = {}, {}, {}, (0, 0)

    def kill_agent(self) -> None:
        """The agent dies; ranks and the fence go on."""
        if self._agent is not None:
            self._agent.kill()

    def kill_agent_after(self, steps: int) -> None:
        """The agent dies when its tasks have been suspended so many times more."""
        if self._agent is not None:
            self._agent.die_after(steps)

    def _died(self) -> None:
        self._agent, self._liveness = None, None
        self._client.disconnect()
        for job, gang in self.gangs.items():
            phase = gang.phase if gang.phase in ("prepared", "prepare_failed") else "new"
            self.gangs[job] = msgspec.structs.replace(gang, phase=phase, acknowledged=())
        self.on_agent_death()

    def start_agent(self) -> None:
        """Adopt what is there, and go on."""
        if self._agent is not None:
            return
        self.lives += 1
        self._client = MemoryStore(self.cluster, self.name, timeout_s=1.0, timing=Timing(4.0, 1.0))
        self._store = StoreNode(self._client, "test", self.name)
        self._look, self._dirty = asyncio.Event(), asyncio.Event()
        self.desired = None
        self._liveness = live = Liveness(
            self._store, self.registration, cast(Fence, self.fence), ttl_s=TTL_S, ask=self._ask, registered=self._registered, log=self._journal
        )
        live.on_unfenced = self._look.set
        self._reporter = Reporter(
            self._store, self._document, lambda: barriers(self.desired), self._dirty, lambda s: None, live.register_again, self._journal
        )
        self._agent = process = Process(f"{self.name}.{self.lives}", self._died)
        loops = (live.run, self._watch, self._reconcile, self._reporter.run)
        for loop in loops:
            process.spawn(loop()).add_done_callback(functools.partial(self._ended, process))

    def _ended(self, process: Process, task: asyncio.Task[None]) -> None:
        """An agent of which a loop ends is over, as in nodeagent/loop.py: its name is another's. Whoever started it starts it again."""
        if not task.cancelled() and isinstance(error := task.exception(), NameTaken):
            self.refusals.append(str(error))
            process.kill()
        elif not task.cancelled() and error is not None:
            self.failures.append(error)

    def wake(self) -> None:
        """Look again: something about the hardware has changed."""
        if self._liveness is not None:
            self._changed()
            self._liveness.register_again()

    # ---------------------------------------------------------------- ranks

    def _begin(self, job: str, r: DesiredRank, seen: tuple[int, int]) -> None:
        """Execute a rank, unless it was stopped or fenced before."""
        gang = self.gangs.get(job)
        have = next((x for x in gang.ranks if x.key == (r.rank, r.generation)), None) if gang is not None else None
        if have is None or not have.live:
            return
        fenced = self.specs[job].on_disconnect == "stop"
        key = (job, r.rank, r.generation)
        if have.state == "stopping" or (fenced and self.loop.time() >= self.fence.deadline):
            self._status(key, state="exited", exit_code=-15, cause="stopped" if have.state == "stopping" else "fenced")
            return
        run = Run(job, r.rank, r.generation, self.name, r.gpus, fenced, self.loop.time(), share=r.share, index=seen[1], epoch=seen[0])
        self.runs.append(run)
        self._alive[key] = (run, self.loop.call_later(self._life_s(), self._dies, key))
        self._status(key, state="running", pid=1)

    def _life_s(self) -> float:
        return self.rng.uniform(0.1, 2.0) if self.habits.calm else self.rng.expovariate(1 / self.habits.mean_life_s)

    def calm_down(self) -> None:
        """Every rank ends well soon."""
        for key, (run, timer) in list(self._alive.items()):
            timer.cancel()
            self._alive[key] = (run, self.loop.call_later(self._life_s(), self._dies, key))

    def _dies(self, key: tuple[str, int, int]) -> None:
        crashed = not self.habits.calm and self.rng.random() < self.habits.crash
        self._end(key, self.rng.choice((1, -9, -11)) if crashed else 0, "")

    def _end(self, key: tuple[str, int, int], code: int, cause: str) -> None:
        found = self._alive.pop(key, None)
        if found is None:
            return
        run, timer = found
        timer.cancel()
        run.ended, run.code = self.loop.time(), code
        self._status(key, state="exited", exit_code=code, cause=cause, exited_at_ms=int(run.ended * 1000))

    def _status(self, key: tuple[str, int, int], **fields: Any) -> None:
        job, rank, generation = key
        gang = self.gangs.get(job)
        if gang is not None:
            ranks = tuple(msgspec.structs.replace(r, **fields) if r.key == (rank, generation) else r for r in gang.ranks)
            self._change(job, ranks=ranks)

    def _fall(self) -> None:
        for key, (run, _) in list(self._alive.items()):
            if run.fenced:
                self._end(key, -9, "fenced")

    # ---------------------------------------------------------------- the agent's loops

    async def _ask(self) -> Verdict:
        await asyncio.sleep(self.rng.random() * 0.05)
        return self._ask_schedulers(self.name)

    def _session(self) -> str:
        return f"{self.lives}.{self._liveness.sessions if self._liveness is not None else 0}"

    def _registered(self) -> None:
        self._reporter.again()
        self._look.set()

    async def _watch(self) -> None:
        while True:
            try:
                async for desired in self._store.watch_desired():
                    self._accept(desired)
            except StoreError:
                pass
            await asyncio.sleep(0.3)

    def _accept(self, desired: Desired) -> None:
        reason = refusal(desired, node=self.name, epoch=self.seen[0], index=self.seen[1])
        if reason:
            self.refusals.append(reason)
            return
        self.seen = (desired.epoch, desired.index)
        self.desired = desired
        self._look.set()

    async def _reconcile(self) -> None:
        while True:
            wait_s = 1e6
            if self.desired is not None:
                wait_s = next_look(self.desired, self._local()) - self.loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), max(0.05, min(1e6, wait_s)))
            self._look.clear()
            if self.desired is None:
                continue
            for action in reconcile(self.desired, self._local(), self.loop.time()):
                if isinstance(action, Prepare | Start) and not self._may_start(self.desired):
                    continue
                self._act(action)
            self._dirty.set()

    def _may_start(self, desired: Desired) -> bool:
        return self.loop.time() < self.fence.deadline and desired.session == self._session()

    def _local(self) -> Local:
        return Local(self.gpus, dict(self.gangs), dict(self.retired), self._facts())

    def _document(self) -> Observed | None:
        if self._liveness is None or not self._liveness.renewals or self.desired is None:
            return None
        wanted = {g.job: g for g in self.desired.gangs}
        gangs = tuple(observed_gang(have, wanted.get(job)) for job, have in sorted(self.gangs.items()))
        reg = self.registration()
        return Observed(
            node=self.name, identity=reg.identity, boot_id=reg.boot_id, sequence=0, desired_index=self.desired.index,
            epoch=self.desired.epoch, gangs=gangs, at_ms=int(self.loop.time() * 1000), gpus=self._reports(),
        )  # fmt: skip

    def _changed(self) -> None:
        if self._agent is not None:
            self._look.set()
            self._dirty.set()

    # ---------------------------------------------------------------- actions, as nodeagent/gangs.py carries them out

    def _act(self, action: Action) -> None:
        match action:
            case Stop(job, ranks, cause, _, gently):
                for rank, generation in ranks:
                    self._status((job, rank, generation), state="stopping")
                    wait_s = self.rng.random() * self.specs[job].preemption.grace_s if gently else 0.0
                    self.loop.call_later(wait_s, self._end, (job, rank, generation), -15, cause)
            case Notify(gang):
                self._change(gang.job, notice=gang.notice, notified_at=self.loop.time(), acknowledged=())
                for live in self.gangs[gang.job].live:
                    if self.habits.calm or self.rng.random() < self.habits.obeys:
                        self.loop.call_later(self.rng.random(), self._acknowledge, gang.job, live.rank)
            case Prepare(gang, continued):
                self._turn(gang)
                self._change(gang.job, phase="preparing")
                assert self._agent is not None
                self._agent.spawn(self._prepare(gang, continued))
            case FailPrepare(gang, message):
                self._turn(gang)
                self._change(gang.job, phase="prepare_failed", message=message)
            case Start(gang, new):
                starting = [LocalRank(r.rank, r.generation, r.gpus, "starting", progress_at=self.loop.time(), share=r.share) for r in new]
                self._change(gang.job, ranks=(*self.gangs[gang.job].ranks, *starting))
                for wanted in new:
                    self.loop.call_later(self.rng.random() * 0.2, self._begin, gang.job, wanted, self.seen)
            case Forget(job):
                self.retired[job] = self.gangs.pop(job).generation
                self._changed()
            case Refuse(_, message):
                self.refusals.append(message)

    def _acknowledge(self, job: str, rank: int) -> None:
        gang = self.gangs.get(job)
        if gang is not None and gang.notice is not None:
            self._change(job, acknowledged=tuple(sorted({*gang.acknowledged, rank})))

    def _turn(self, gang: DesiredGang) -> None:
        have = self.gangs.get(gang.job) or LocalGang(gang.job, gang.generation)
        keep = tuple(r for r in have.ranks if r.live or r.key in {(w.rank, w.generation) for w in gang.ranks})
        self.gangs[gang.job] = LocalGang(gang.job, gang.generation, ranks=keep, port=have.port, address=have.address)
        self._changed()

    async def _prepare(self, gang: DesiredGang, continued: bool) -> None:
        await asyncio.sleep(self.rng.random() * 0.2)
        message = "bad luck" if not self.habits.calm and self.rng.random() < self.habits.prepare_fails else ""
        while gang.job not in self.specs:
            try:
                spec = await self._store.job_spec(gang.job)
            except Ambiguous:
                await asyncio.sleep(0.5)
                continue
            if spec is None:
                message = "the spec of the job is not in the store"
                break
            self.specs[gang.job] = spec
        have = self.gangs.get(gang.job)
        if have is None or have.generation != gang.generation or have.phase != "preparing":
            return
        if message:
            self._change(gang.job, phase="prepare_failed", message=message)
            return
        port = have.port if continued else 4242 if gang.nodes <= 1 or any(r.rank == 0 for r in gang.ranks) else 0
        hang_timeout_s = self.specs[gang.job].restart.hang_timeout_s
        self._change(gang.job, phase="prepared", port=port, address=self.name if port else "", hang_timeout_s=hang_timeout_s)

    def _change(self, job: str, **fields: Any) -> None:
        self.gangs[job] = msgspec.structs.replace(self.gangs[job], **fields)
        self._changed()
