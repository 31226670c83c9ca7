"""The agent: a thin shell that moves bytes between the store, `reconcile` and the gangs of its node.

store ── desired ──▶ reconcile ◀── local state ◀── supervisors, ranks
                         │                 │
                         ▼                 ▼
                      actions     report ── observed ──▶ store
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import secrets
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from gangline.core.model.documents import Desired, Observed, Registration
from gangline.core.model.spec import JobSpec
from gangline.core.store.api import StoreError
from gangline.core.store.node import NodeStore
from gangline.core.telemetry import Log, Telemetry
from gangline.nodeagent import gpumetrics, logs
from gangline.nodeagent.checks import Checks
from gangline.nodeagent.execute import Execute
from gangline.nodeagent.fence import Fence
from gangline.nodeagent.gangs import Gangs, Node
from gangline.nodeagent.gpus import GpuWatch
from gangline.nodeagent.http import AgentHttp
from gangline.nodeagent.kernel import boottime
from gangline.nodeagent.liveness import Liveness, Verdict, ask_schedulers, patience
from gangline.nodeagent.local import Local
from gangline.nodeagent.reconcile import Prepare, Start, Stop, next_look, reconcile, refusal
from gangline.nodeagent.report import barriers, observed_gang
from gangline.nodeagent.reporter import RETRY_S, Reporter
from gangline.nodeagent.specs import Specs
from gangline.nodeagent.statedir import Seen, StateDir

#: how often the schedulers' addresses are read, and old logs removed
_SCHEDULERS_S = 15.0
_PRUNE_S = 300.0
_SWEEP_S = 15.0
_FOREVER_S = 3600.0


class Settings(msgspec.Struct, frozen=True):
    """What the command line decides."""

    node: str
    address: str
    labels: dict[str, str]
    cpus_milli: int
    memory_mib: int
    lease_ttl_s: float
    listen_host: str
    listen_port: int
    stop_ranks: bool = False
    version: str = ""
    #: what schedulers sign commands with, empty: none is run
    exec_key: bytes = b""


class Agent:
    """One node's agent. `run` until `stop`."""

    def __init__(self, settings: Settings, node: Node, state: StateDir, fence: Fence, store: NodeStore, telemetry: Telemetry, log: Log,
                 gpus: GpuWatch | None = None) -> None:
        """Use a locked state directory. `gpus` are open; None for a node without GPUs."""
        self._settings = settings
        self._node = node
        self._state = state
        self._fence = fence
        self._store = store
        self._log = log
        self._gpu_watch = gpus
        self._inventory = node.inventory
        self._desired: Desired | None = None
        self._seen = state.seen()
        self._nonce = secrets.token_hex(4)
        self._look = asyncio.Event()
        self._dirty = asyncio.Event()
        self._stopping = asyncio.Event()
        self._reporter = Reporter(store, self._document, lambda: barriers(self._desired), self._dirty, self._written, self._not_ours, log)
        self._specs = Specs(store.job_specs)
        self._checks = Checks(node.rules.checks, {**node.base_environment, "GANGLINE_NODE": node.name}, self._dirty.set, log)
        self._gangs = Gangs(node, state, job_spec=self._job_spec, changed=self._changed, log=log)
        self._http = AgentHttp(state.root, telemetry, health=self.health, ended=self._rank_ended,
                               execute=Execute(node.name, settings.exec_key, self._gangs.inside, log))  # fmt: skip
        self._url = ""
        self._liveness = Liveness(
            store, self._registration, fence, ttl_s=settings.lease_ttl_s, ask=self._ask, registered=self._registered, log=log
        )
        self._liveness.on_unfenced = self._look.set
        self._register_metrics(telemetry)
        self._gangs.span = telemetry.span
        if gpus is not None:
            gpus.changed = self._gpus_changed
            gpumetrics.register(gpus, telemetry)

    def stop(self) -> None:
        """Make `run` return. Ranks go on running, unless the settings say otherwise."""
        self._stopping.set()

    async def run(self) -> None:
        """Adopt, register, reconcile, report, until stopped. Raises NameTaken, StateError, OSError when the node cannot start."""
        await self._gangs.open()
        port = await self._http.start(self._settings.listen_host, self._settings.listen_port)
        self._url = f"http://{self._settings.address}:{port}"
        self._log.info("agent_started", node=self._node.name, url=self._url, gpus=len(self._inventory.gpus),
                       inventory=self._inventory.reason or self._inventory.kind)  # fmt: skip
        loops = [self._liveness.run, self._watch, self._reconcile, self._reporter.run, self._keep_schedulers, self._prune, self._sweep]
        if self._gpu_watch is not None:
            loops.append(self._gpu_watch.run)
        if self._node.rules.checks:
            loops.append(self._checks.run)
        try:
            await self._run_until_stopped(loops)
        finally:
            await self._http.close()
            await self._gangs.close()

    async def _run_until_stopped(self, loops: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        tasks = [asyncio.ensure_future(loop()) for loop in loops]
        stopped = asyncio.ensure_future(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self._settings.stop_ranks:
                await self._stop_ranks()
            await self._liveness.renew_once()
        finally:
            for task in (stopped, *tasks):
                task.cancel()
            await asyncio.gather(stopped, *tasks, return_exceptions=True)

    async def _stop_ranks(self) -> None:
        """Stop every rank and wait until that is reported. Their gangs are not forgotten: the next agent tells again how they ended."""
        for gang in self._gangs.local.gangs.values():
            if gang.live:
                ranks = tuple(r.key for r in gang.live)
                self._gangs.act(Stop(gang.job, ranks, "stopped", "the agent of this node was stopped with its ranks"))
        while any(g.live for g in self._gangs.local.gangs.values()) or not self._reporter.settled:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    # ---------------------------------------------------------------- what should be

    async def _watch(self) -> None:
        """Take in each desired document; a store that fails is watched again."""
        while True:
            try:
                async for desired in self._store.watch_desired():
                    self._accept(desired)
            except StoreError as e:
                self._log.warning("watch_failed", message="desired is watched again", error=str(e))
            await asyncio.sleep(RETRY_S)

    def _accept(self, desired: Desired) -> None:
        if self._stopping.is_set():
            return
        reason = refusal(desired, node=self._node.name, epoch=self._seen.epoch, index=self._seen.index)
        if reason:
            remedy = f"if the store was replaced on purpose, stop this agent and remove {self._state.root / 'seen'}"
            self._log.error("refused", index=desired.index, epoch=desired.epoch, message=f"{reason}; {remedy}")
            return
        seen = Seen(desired.epoch, desired.index)
        if seen != self._seen:
            self._seen = seen
            try:
                self._state.save_seen(seen)
            except OSError as e:
                self._log.error("seen_not_written", message="the next agent could obey an older document", error=e)
        self._desired = desired
        self._gangs.desired_index, self._gangs.desired_epoch = desired.index, desired.epoch
        self._look.set()

    async def _reconcile(self) -> None:
        """Act whenever something has changed or time has come."""
        while True:
            await self._wait_to_look()
            self._look.clear()
            if self._desired is None:
                continue
            self._gangs.tell_health(self._desired)
            actions = reconcile(self._desired, self._gangs.local, time.monotonic())
            for action in actions:
                if isinstance(action, Prepare | Start) and not self._may_start(self._desired):
                    continue
                self._gangs.act(action)
            self._dirty.set()

    async def _wait_to_look(self) -> None:
        wait_s = _FOREVER_S
        if self._desired is not None:
            wait_s = min(wait_s, next_look(self._desired, self._gangs.local) - time.monotonic())
        with contextlib.suppress(TimeoutError):
            # A moment that has passed was acted on, and what was done about it will be heard of; a pause keeps that from spinning.
            async with asyncio.timeout(max(0.05, wait_s)):
                await self._look.wait()

    def _may_start(self, desired: Desired) -> bool:
        """Whether this document is to be believed in what it starts: while the node was not registered, that may have gone elsewhere."""
        return not self._is_fenced() and not self._stopping.is_set() and desired.session in ("", self._session())

    def _session(self) -> str:
        return f"{self._nonce}.{self._liveness.sessions}"

    def _is_fenced(self) -> bool:
        """Whether the lease may have ended: then nothing new is started until it is renewed, which looks again (`on_unfenced`)."""
        return boottime() >= self._fence.deadline

    # ---------------------------------------------------------------- what is

    def _changed(self) -> None:
        self._look.set()
        self._dirty.set()

    def _document(self) -> Observed | None:
        """Return what to report; None before this agent knows what its node should run, or while it is not registered."""
        if not self._liveness.renewals or self._desired is None:
            return None
        desired = {g.job: g for g in self._desired.gangs}
        gangs = tuple(observed_gang(have, desired.get(job)) for job, have in sorted(self._gangs.local.gangs.items()))
        return Observed(
            node=self._node.name, identity=self._state.identity(), boot_id=self._node.boot_id, sequence=0,
            desired_index=self._desired.index, epoch=self._desired.epoch, gangs=gangs, at_ms=time.time_ns() // 1_000_000,
            gpus=self._gpu_watch.reports if self._gpu_watch is not None else (), driver=self._gpu_watch.driver if self._gpu_watch else None,
            checks=self._checks.reports,
        )  # fmt: skip

    def _gpus_changed(self, inventory: bool) -> None:
        """Report what is new of the GPUs; another set of them, or of those that are of use, is registered."""
        if inventory and self._gpu_watch is not None:
            self._inventory = self._gpu_watch.inventory
            self._gangs.take_inventory(self._inventory)
            self._liveness.register_again()
        self._changed()

    def _written(self, seconds: float) -> None:
        self._write_seconds.record(seconds)

    def _not_ours(self) -> None:
        self._liveness.register_again()

    def _registered(self) -> None:
        self._reporter.again()
        self._look.set()
        self._log.info("registered", node=self._node.name)

    def _registration(self) -> Registration:
        return Registration(
            node=self._node.name, identity=self._state.identity(), boot_id=self._node.boot_id, address=self._node.address,
            agent_url=self._url, gpus=self._inventory.gpus, cpus_milli=self._settings.cpus_milli,
            memory_mib=self._settings.memory_mib, labels=self._settings.labels, agent_version=self._settings.version,
            lease_ttl_s=self._settings.lease_ttl_s, session=self._session(),
        )  # fmt: skip

    async def _job_spec(self, job: str) -> JobSpec | None:
        return await self._specs.get(job)

    # ---------------------------------------------------------------- in the background

    async def _ask(self) -> Verdict:
        return await ask_schedulers(self._state.schedulers(), patience(self._settings.lease_ttl_s))

    async def _keep_schedulers(self) -> None:
        """Keep the schedulers' addresses on disk, for when the store cannot be asked, even by the next agent."""
        known = self._state.schedulers()
        while True:
            with contextlib.suppress(StoreError, OSError):
                found = await self._store.schedulers()
                if found and found != known:
                    self._state.save_schedulers(found)
                    known = found
            await asyncio.sleep(_SCHEDULERS_S if known else 1.0)

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(_PRUNE_S)
            removed = await asyncio.to_thread(logs.prune, self._state.root, set(self._gangs.local.gangs))
            with contextlib.suppress(OSError):
                self._gangs.pruned(removed)

    async def _sweep(self) -> None:
        """Clear away behind short jobs, together and a little later, so that this does not hold up the next ones."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            unswept = self._gangs.take_unswept()
            if unswept:
                await asyncio.to_thread(self._state.sweep, unswept)

    # ---------------------------------------------------------------- telemetry

    def health(self) -> dict[str, object]:
        """Return what /healthz says."""
        local, watch = self._gangs.local, self._gpu_watch
        return {
            "node": self._node.name,
            "store": "ok" if self._liveness.connected else "unreachable",
            "fence_remaining_s": round(self._fence.deadline - boottime(), 3),
            "epoch": self._seen.epoch,
            "index": self._seen.index,
            "gangs": len(local.gangs),
            "ranks": sum(len(g.live) for g in local.gangs.values()),
            "cgroups": self._node.layout.words if self._node.rules.ranks.cgroups else "off",
            "inventory": self._inventory.reason or f"{len(self._inventory.gpus)} {self._inventory.kind} GPUs",
            "gpus_unusable": sum(not gpu.healthy for gpu in self._inventory.gpus),
            "gpu_driver": watch.driver.message if watch is not None and watch.driver is not None else "",
        }

    def _rank_ended(self, job: str, generation: int, rank: int) -> bool:
        gang = self._gangs.local.gangs.get(job)
        return gang is None or not any(r.live and r.key == (rank, generation) for r in gang.ranks)

    def _register_metrics(self, telemetry: Telemetry) -> None:
        gangs, liveness, node = self._gangs, self._liveness, {"node": self._node.name}
        self._write_seconds = telemetry.histogram("gangline.agent.observed.write.duration", "Time to write the observed document.")
        starts = telemetry.histogram("gangline.agent.rank.start.duration", "Time from the request to start a rank until it executes.")
        gangs.ranks.on_start_seconds = starts.record
        telemetry.gauge("gangline.agent.ranks", "Ranks by state.", lambda: _by_state(gangs.local))
        telemetry.gauge("gangline.agent.gangs", "Gangs that this node has something of.", lambda: [(len(gangs.local.gangs), {})])
        telemetry.gauge("gangline.agent.gpus", "GPUs of this node.", lambda: [(len(self._inventory.gpus), {})])
        telemetry.gauge(
            "gangline.agent.fence.remaining", "Time until ranks are killed unless the lease is renewed.",
            lambda: [(self._fence.deadline - boottime(), node)], "s",
        )  # fmt: skip
        telemetry.sums("gangline.agent.rank.starts", "Ranks started.", lambda: [(gangs.started_total, {})])
        telemetry.sums("gangline.agent.rank.ends", "Ranks ended.", lambda: [(n, {"cause": c}) for c, n in gangs.ended_total.items()])
        telemetry.sums("gangline.agent.refusals", "Desired gangs refused as too old.", lambda: [(gangs.refused_total, {})])
        telemetry.sums(
            "gangline.agent.lease.renewals", "Renewals of the node's lease.",
            lambda: [(liveness.renewals, {"result": "ok"}), (liveness.failures, {"result": "failed"})],
        )  # fmt: skip


def _by_state(local: Local) -> list[tuple[float, dict[str, str]]]:
    counts: dict[str, int] = dict.fromkeys(("starting", "running", "stopping", "exited"), 0)
    for gang in local.gangs.values():
        for r in gang.ranks:
            counts[r.state] += 1
    return [(n, {"state": state}) for state, n in counts.items()]


def default_node_name() -> str:
    """Return the host's name without its domain."""
    return platform.node().partition(".")[0].lower() or "node"


def state_dir_of(node: str) -> Path:
    """Return where a node's agent keeps its state unless told otherwise."""
    return Path("/var/lib/gangline") / node
