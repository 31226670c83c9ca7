"""Many simulated nodes in one process: the agent's own rules over ranks that are timers.

    store ── desired ──▶ reconcile ──▶ timers ──▶ report ──▶ Reporter ── observed ──▶ store

What decides and what is written are the agent's (`reconcile`, `report`, `Reporter`, `StoreNode`, `Specs`), each node with a lease, a watch and
writes of its own; only processes, files, ports and devices are left out. A rank whose command is `sleep SECONDS` runs for so long, any other one
until it is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import time
from typing import Any

import msgspec

from gangline.core.model.documents import Desired, DesiredGang, DesiredRank, Gpu, Observed, Registration
from gangline.core.model.roles import of_role
from gangline.core.model.spec import JobSpec
from gangline.core.store.api import Store, StoreError
from gangline.core.store.etcd import EtcdStore
from gangline.core.store.node import StoreNode
from gangline.core.store.watching import Timing
from gangline.core.telemetry import Log, structured_logging
from gangline.leader.process import calm_garbage_collector
from gangline.nodeagent.local import Local, LocalGang, LocalRank
from gangline.nodeagent.reconcile import Action, FailPrepare, Forget, Notify, Prepare, Refuse, Start, Stop, next_look, reconcile, refusal
from gangline.nodeagent.report import barriers, observed_gang
from gangline.nodeagent.reporter import Reporter
from gangline.nodeagent.specs import Specs

#: long, so that what is measured is not the renewal of leases; 640 nodes still renew ten times a second
TTL_S = 120.0
#: nodes that register at once
_TOGETHER = 32
_RETRY_S = 0.2
#: a quiet watch is checked this often
_QUIET = Timing(60.0, 5.0)
_GPU_MODEL, _GPU_MEMORY_MIB = "H100", 81_559
_MEMORY_MIB = 1 << 20
_PORT = 29_500
_FOREVER_S = 3_600.0


class SimNode:
    """One node and its agent."""

    def __init__(self, store: Store, cluster: str, registration: Registration, log: Log) -> None:
        """Take a registration with a session."""
        self._registration = registration
        self._name = registration.node
        self._store = StoreNode(store, cluster, self._name)
        self._specs_of = Specs(self._store.job_specs)
        self._gpus = {gpu.index: gpu.healthy for gpu in registration.gpus}
        self._facts = {gpu.index: gpu for gpu in registration.gpus}
        self._gangs: dict[str, LocalGang] = {}
        self._specs: dict[str, JobSpec] = {}
        self._retired: dict[str, int] = {}
        self._seen = (0, 0)
        self._desired: Desired | None = None
        self._timers: dict[tuple[str, int, int], asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._look, self._dirty = asyncio.Event(), asyncio.Event()
        self._reporter = Reporter(
            self._store, self._document, lambda: barriers(self._desired), self._dirty, lambda s: None, lambda: None, log
        )
        self._loop = asyncio.get_running_loop()

    async def register(self) -> None:
        """Announce the node."""
        await self._store.register(self._registration, ttl_s=TTL_S)

    async def run(self) -> None:
        """Be the agent for ever."""
        await asyncio.gather(self._renew(), self._watch(), self._reconcile(), self._reporter.run())

    # ---------------------------------------------------------------- the agent's loops

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(TTL_S / 3)
            with contextlib.suppress(StoreError):  # the next one is in time
                await self._store.keepalive()

    async def _watch(self) -> None:
        while True:
            try:
                async for desired in self._store.watch_desired():
                    if not refusal(desired, node=self._name, epoch=self._seen[0], index=self._seen[1]):
                        self._seen = (desired.epoch, desired.index)
                        self._desired = desired
                        self._look.set()
            except StoreError:
                await asyncio.sleep(_RETRY_S)

    async def _reconcile(self) -> None:
        while True:
            wait_s = _FOREVER_S
            if self._desired is not None:
                wait_s = min(_FOREVER_S, max(0.0, next_look(self._desired, self._local()) - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._look.wait()
            self._look.clear()
            if self._desired is None:
                continue
            for action in reconcile(self._desired, self._local(), time.monotonic()):
                if isinstance(action, Prepare | Start) and self._desired.session != self._registration.session:
                    continue
                self._act(action)
            self._dirty.set()

    def _local(self) -> Local:
        return Local(self._gpus, dict(self._gangs), self._retired, self._facts)

    def _document(self) -> Observed | None:
        if self._desired is None:
            return None
        wanted = {g.job: g for g in self._desired.gangs}
        gangs = tuple(observed_gang(have, wanted.get(job)) for job, have in sorted(self._gangs.items()))
        reg = self._registration
        return Observed(self._name, reg.identity, reg.boot_id, 0, self._desired.index, self._desired.epoch, gangs)

    def _changed(self) -> None:
        self._look.set()
        self._dirty.set()

    # ---------------------------------------------------------------- actions, as nodeagent/gangs.py carries them out

    def _act(self, action: Action) -> None:
        match action:
            case Stop(job, ranks, cause, _, _):
                for rank, generation in ranks:
                    self._status((job, rank, generation), state="stopping")
                    self._loop.call_soon(self._end, (job, rank, generation), -15, cause)
            case Notify(gang):
                live = tuple(sorted({r.rank for r in self._gangs[gang.job].live}))
                self._change(gang.job, notice=gang.notice, notified_at=time.monotonic(), acknowledged=live)
            case Prepare(gang, continued):
                self._turn(gang)
                self._change(gang.job, phase="preparing")
                task = self._loop.create_task(self._prepare(gang, continued))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case FailPrepare(gang, message):
                self._turn(gang)
                self._change(gang.job, phase="prepare_failed", message=message)
            case Start(gang, new):
                self._start(gang, new)
            case Forget(job):
                self._retired[job] = self._gangs.pop(job).generation
                self._specs.pop(job, None)
                self._changed()
            case Refuse():
                pass

    def _turn(self, gang: DesiredGang) -> None:
        have = self._gangs.get(gang.job) or LocalGang(gang.job, gang.generation)
        keep = tuple(r for r in have.ranks if r.live or r.key in {(w.rank, w.generation) for w in gang.ranks})
        self._gangs[gang.job] = LocalGang(gang.job, gang.generation, ranks=keep, port=have.port, address=have.address)
        self._changed()

    async def _prepare(self, gang: DesiredGang, continued: bool) -> None:
        spec, message = self._specs.get(gang.job), ""
        while spec is None and not message:
            try:
                spec = await self._specs_of.get(gang.job)
                message = "" if spec is not None else "the spec of the job is not in the store"
            except StoreError:
                await asyncio.sleep(_RETRY_S)
        have = self._gangs.get(gang.job)
        if have is None or have.generation != gang.generation or have.phase != "preparing":
            return
        if spec is None:
            self._change(gang.job, phase="prepare_failed", message=message)
            return
        self._specs[gang.job] = spec
        port = have.port if continued else _PORT if gang.nodes <= 1 or any(r.rank == 0 for r in gang.ranks) else 0
        self._change(gang.job, phase="prepared", port=port, address=self._name if port else "", hang_timeout_s=spec.restart.hang_timeout_s)

    def _start(self, gang: DesiredGang, new: tuple[DesiredRank, ...]) -> None:
        now, now_ms, spec = time.monotonic(), time.time_ns() // 1_000_000, self._specs[gang.job]
        ranks = tuple(
            LocalRank(r.rank, r.generation, r.gpus, "running", pid=1, started_at_ms=now_ms, progress_at=now, share=r.share) for r in new
        )
        self._change(gang.job, ranks=(*self._gangs[gang.job].ranks, *ranks))
        for r in new:
            key = (gang.job, r.rank, r.generation)
            match of_role(spec, r.role).command:
                case ("sleep", seconds) if seconds != "infinity":
                    self._timers[key] = self._loop.call_later(float(seconds), self._end, key, 0, "")

    def _end(self, key: tuple[str, int, int], code: int, cause: str) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        self._status(key, state="exited", exit_code=code, cause=cause, exited_at_ms=time.time_ns() // 1_000_000)

    def _status(self, key: tuple[str, int, int], **fields: Any) -> None:
        job, rank, generation = key
        have = self._gangs.get(job)
        if have is not None:
            same = (rank, generation)
            self._change(job, ranks=tuple(msgspec.structs.replace(r, **fields) if r.live and r.key == same else r for r in have.ranks))

    def _change(self, job: str, **fields: Any) -> None:
        self._gangs[job] = msgspec.structs.replace(self._gangs[job], **fields)
        self._changed()


def registrations(nodes: int, gpus: int, cpus: int, levels: dict[str, int]) -> list[Registration]:
    """Return that many equal nodes; `levels` says for each label how many nodes carry the same value of it."""
    out = []
    for i in range(nodes):
        name = f"n{i:04d}"
        devices = tuple(Gpu(g, f"{name}-{g}", _GPU_MODEL, _GPU_MEMORY_MIB) for g in range(gpus))
        labels = {level: f"{level[0]}{i // size:03d}" for level, size in levels.items()}
        out.append(Registration(name, name, "boot", name, "", devices, cpus * 1_000, _MEMORY_MIB, labels, lease_ttl_s=TTL_S, session="1"))
    return out


async def simulate(endpoint: str, cluster: str, nodes: list[Registration]) -> None:
    """Be the agents of these nodes for ever; says "ready" when all have registered."""
    calm_garbage_collector()
    store = await EtcdStore.connect([endpoint], timing=_QUIET)
    log = structured_logging("error", io.StringIO())
    agents = [SimNode(store, cluster, registration, log) for registration in nodes]
    for at in range(0, len(agents), _TOGETHER):
        await asyncio.gather(*(agent.register() for agent in agents[at : at + _TOGETHER]))
    print("ready", flush=True)
    await asyncio.gather(*(agent.run() for agent in agents))


def main() -> None:
    """Run simulated agents as a process of their own."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("cluster")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cpus", type=int, default=96)
    parser.add_argument("--level", action="append", default=[], metavar="LABEL=NODES")
    given = parser.parse_args()
    levels = {name: int(size) for name, _, size in (level.partition("=") for level in given.level)}
    asyncio.run(simulate(given.endpoint, given.cluster, registrations(given.nodes, given.gpus, given.cpus, levels)))


if __name__ == "__main__":
    main()
