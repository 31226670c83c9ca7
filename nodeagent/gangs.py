"""The gangs of this node: carries out the actions of `reconcile`, and keeps the local state that it looks at.

Every action changes the local state before it returns, so that the next `reconcile` does not ask for it again; what takes time goes on in
a task and reports back by changing the local state once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from gangline.core.model.documents import Desired, DesiredGang, DesiredRank, HealthNotice
from gangline.core.model.gpushares import MigSlice
from gangline.core.model.roles import of_role
from gangline.core.model.spec import JobSpec
from gangline.core.store.api import StoreError
from gangline.core.telemetry import Log, SpanKind
from gangline.nodeagent import jobevents, pace, rankfile, stacks
from gangline.nodeagent.adoption import RankStatus, local_rank, read_status, stored_statuses
from gangline.nodeagent.cgroups import Layout
from gangline.nodeagent.devices import Inventory
from gangline.nodeagent.drivers.choice import Drivers
from gangline.nodeagent.drivers.driver import Site, nothing_closed
from gangline.nodeagent.environment import Here, rank_environment, user_environment
from gangline.nodeagent.execute import Inside, NoSuchRank
from gangline.nodeagent.isolation import Refused
from gangline.nodeagent.jobsocket import JobSocket, RankRef
from gangline.nodeagent.journal import RankJournal
from gangline.nodeagent.launcher import Launch, Launcher
from gangline.nodeagent.local import Local, LocalGang, LocalRank
from gangline.nodeagent.nodefile import NodeRules
from gangline.nodeagent.partitions import NoPartitions, Partitions, SimulatedPartitions
from gangline.nodeagent.ports import Ports
from gangline.nodeagent.ranks import Ranks
from gangline.nodeagent.reconcile import Action, FailPrepare, Forget, Notify, Prepare, Refuse, Start, Stop
from gangline.nodeagent.statedir import GangRecord, StateDir, is_safe

#: what a test of a withdrawn device runs (nodeagent/burnin.py): the agent's own Python has it, whatever the job's PATH
BURN_IN = (sys.executable, "-m", "gangline.nodeagent.burnin")
#: a rank that is stopped after its notice has had its time to save already
GRACE_AFTER_NOTICE_S = 5.0
_STORE_RETRY_S = 0.5

LOG_PART_BYTES = 16 << 20
LOG_PARTS = 4


class Node(msgspec.Struct, frozen=True):
    """Facts about the node that its gangs need."""

    name: str
    address: str
    boot_id: str
    inventory: Inventory
    base_environment: dict[str, str]
    #: priority of ranks
    nice: int = 0
    #: where ranks with a share of a GPU find the MPS control daemon, "" when there is none
    mps_pipe: str = ""
    #: what its operator says of isolation, containers and volumes
    rules: NodeRules = NodeRules()
    #: the control groups that ranks may be put in
    layout: Layout = Layout()
    #: what makes its GPUs ready for ranks, None: nothing does, or they are simulated
    partitions: Partitions | None = None
    #: device files, as (major, minor), of what a rank does not have of the GPUs
    closed: Callable[[DesiredRank], tuple[tuple[int, int], ...]] = nothing_closed


class Gangs:
    """All gangs that have something to do with this node. One event loop; nothing here waits except in tasks."""

    def __init__(
        self, node: Node, state: StateDir, *,
        job_spec: Callable[[str], Awaitable[JobSpec | None]], changed: Callable[[], None], log: Log,
    ) -> None:  # fmt: skip
        """`changed` is called whenever the local state has changed."""
        self._node = node
        self._state = state
        self._job_spec = job_spec
        self._changed = changed
        self._log = log
        self._ports = Ports()
        self.take_inventory(node.inventory)
        simulated = node.inventory.kind == "simulated"
        made_up = SimulatedPartitions(state.root / "mig.json", node.inventory.gpus) if simulated else NoPartitions()
        self._partitions: Partitions = node.partitions or made_up
        self._gangs: dict[str, LocalGang] = {}
        self._records: dict[str, GangRecord] = {}
        self._retired: dict[str, int] = {}
        #: what ranks were told last of the health of what they have, by job
        self._told: dict[str, tuple[HealthNotice, ...]] = {}
        #: forgotten gangs whose status files are still there, with their last generation
        self._unswept: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._drivers = Drivers(Site(node.rules, node.layout, state.identity(), state.root, simulated, node.base_environment, node.closed))
        self.ranks = Ranks(state, Launcher(state.root, nice=node.nice), node.boot_id, self._on_status, log)
        self.ranks.bury = self._drivers.bury
        self.socket = JobSocket(state.job_socket, self._on_message)
        self._journal = RankJournal(state.root, node.name, node.boot_id)
        #: opens a span around a piece of work that the log entry of this index asked for
        self.span: Callable[[SpanKind, int], contextlib.AbstractContextManager[object]] = lambda kind, index: contextlib.nullcontext()
        #: log index of the desired document that is being acted on, and the epoch of the leader that wrote it
        self.desired_index = 0
        self.desired_epoch = 0
        #: totals for the metrics
        self.started_total = 0
        self.ended_total: dict[str, int] = {}
        self.refused_total = 0

    @property
    def local(self) -> Local:
        """The local state now."""
        return Local(self._gpus, dict(self._gangs), self._retired, self._facts)

    async def open(self) -> None:
        """Adopt what an earlier agent left, then open the doors for ranks and supervisors."""
        self._adopt()
        self.ranks.open()
        await self.socket.start()
        if self._state.is_open_to_users:
            self._state.open_to_users()  # the new socket too

    async def close(self) -> None:
        """Let go of everything; ranks live on."""
        for task in self._tasks:
            task.cancel()
        self.ranks.close()
        self._journal.close()
        self._ports.close()
        await self.socket.close()

    def take_inventory(self, inventory: Inventory) -> None:
        """From now on the node has these GPUs."""
        self._gpus = {gpu.index: gpu.healthy for gpu in inventory.gpus}
        self._facts = {gpu.index: gpu for gpu in inventory.gpus}

    def tell_health(self, desired: Desired) -> None:
        """Tell ranks what has become of the health of what they have, once for each change."""
        for gang in desired.gangs:
            if gang.health != self._told.get(gang.job, ()):
                have = self._gangs.get(gang.job)
                for generation in sorted({r.generation for r in have.live}) if have is not None else ():
                    self._tell(gang.job, generation, jobevents.health_event(gang, generation, now_ms()))
                self._told[gang.job] = gang.health
        for job in self._told.keys() - {gang.job for gang in desired.gangs}:
            del self._told[job]

    def take_unswept(self) -> dict[str, int]:
        """Return the forgotten gangs whose status files may be removed, with their last generation; the caller does it."""
        unswept, self._unswept = self._unswept, {}
        return unswept

    def pruned(self, jobs: list[str]) -> None:
        """The last traces of these forgotten gangs are gone."""
        for job in jobs:
            self._retired.pop(job, None)
        if jobs:
            self._state.save_forgotten(self._retired)

    def act(self, action: Action) -> None:
        """Carry out one action."""
        match action:
            case Stop():
                self._stop(action)
            case Notify(gang):
                self._notify(gang)
            case Prepare(gang, continued):
                self._prepare(gang, continued)
            case FailPrepare(gang, message):
                self._begin(gang)
                self._fail_prepare(gang, message)
            case Start(gang, ranks):
                self._start(gang, ranks)
            case Forget(job):
                self._forget(job)
            case Refuse(job, message):
                self._refuse(job, message)

    # ---------------------------------------------------------------- ending

    def _refuse(self, job: str, message: str) -> None:
        if self._refused.get(job) != message:
            self._refused[job] = message
            self.refused_total += 1
            self._log.error("refused", gang=job, message=message)

    def _stop(self, action: Stop) -> None:
        gang = self._gangs[action.job]
        grace_s, signum = self._how_to_stop(gang) if action.gently else (0.0, signal.SIGKILL)
        for rank, generation in action.ranks:
            ref = RankRef(gang.job, generation, rank)
            have = self._rank(ref)
            self._change_rank(ref, state="stopping")
            if action.cause == "hang" and have is not None and have.pid:
                # Where it stands is what people ask first; it is gone with the process.
                self._spawn(self._stop_with_stacks(ref, have.pid, action.message))
            else:
                self.ranks.command(ref, f"stop {grace_s} {int(signum)} {action.cause} {action.message}")
        ranks = [rank for rank, _ in action.ranks]
        self._log.info("stop", gang=gang.job, generation=gang.generation, ranks=ranks, cause=action.cause, message=action.message)

    async def _stop_with_stacks(self, ref: RankRef, pid: int, message: str) -> None:
        found = ""
        try:
            found = await stacks.collect(pid, self._state.root / "logs" / ref.job / f"rank-{ref.rank}.{ref.generation}.stacks")
        except OSError as e:
            self._log.warning("no_stacks", gang=ref.job, rank=ref.rank, error=e)
        finally:
            self.ranks.command(ref, f"stop 0.0 {int(signal.SIGKILL)} hang {message}{f'; {found}' if found else ''}")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _how_to_stop(self, gang: LocalGang) -> tuple[float, signal.Signals]:
        record = self._records.get(gang.job)
        spec = record.spec if record is not None else None
        if spec is None:
            return GRACE_AFTER_NOTICE_S, signal.SIGTERM
        if gang.notice is not None:
            return min(GRACE_AFTER_NOTICE_S, spec.preemption.grace_s), signal.SIGTERM
        return spec.preemption.grace_s, signal_of(spec)

    def _notify(self, gang: DesiredGang) -> None:
        assert gang.notice is not None
        have = self._gangs[gang.job]
        spec = self._records[gang.job].spec if gang.job in self._records else None
        for generation in sorted({r.generation for r in have.live}):
            self._tell(gang.job, generation, jobevents.stop_event(gang, generation, gang.notice, now_ms()))
        for r in have.live:
            signum = signal_of(spec) if spec is not None else signal.SIGTERM
            self.ranks.command(RankRef(gang.job, r.generation, r.rank), f"signal {int(signum)}")
        self._change(gang.job, notice=gang.notice, notified_at=time.monotonic(), acknowledged=())
        self._save(gang.job)
        self._log.info("notify", gang=gang.job, generation=gang.generation, cause=gang.notice.cause, message=gang.notice.message)

    def _forget(self, job: str) -> None:
        gang = self._gangs.pop(job)
        for r in gang.ranks:
            self._dismiss(job, r)
        self._ports.release(job)
        self._refused.pop(job, None)
        self._records.pop(job, None)
        self._retired[job] = gang.generation
        if is_safe(job):
            self._unswept[job] = gang.generation
            try:
                self._state.forget(job, gang.generation)
            except OSError as e:
                self._log.error("not_forgotten", gang=job, message="the next agent would take it for one that ended just now", error=e)
        self._log.debug("forget", gang=job, generation=gang.generation)
        self._changed()

    # ---------------------------------------------------------------- preparing

    def _prepare(self, gang: DesiredGang, continued: bool) -> None:
        self._begin(gang)
        self._change(gang.job, phase="preparing")
        task = asyncio.get_running_loop().create_task(self._traced_prepare(gang, continued))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin(self, gang: DesiredGang) -> None:
        """Turn to a generation: what has ended in older ones is history."""
        have = self._gangs.get(gang.job) or LocalGang(gang.job, gang.generation)
        keep = tuple(r for r in have.ranks if r.live or r.key in {(w.rank, w.generation) for w in gang.ranks})
        for r in have.ranks:
            if r not in keep:
                self._dismiss(gang.job, r)
        old = {r.generation for r in have.ranks} - {r.generation for r in keep} - {gang.generation}
        if is_safe(gang.job):
            self._state.remove_runs(gang.job, old)
        # Progress belongs to a generation, unless its ranks go on.
        told = (have.step, have.checkpoint_step, have.checkpoint_path) if any(r.live for r in keep) else (-1, -1, "")
        self._gangs[gang.job] = LocalGang(
            gang.job, gang.generation, ranks=keep, port=have.port, address=have.address,
            step=told[0], checkpoint_step=told[1], checkpoint_path=told[2],
        )  # fmt: skip
        self._records.setdefault(gang.job, GangRecord(gang.job, gang.generation))
        self._changed()

    async def _traced_prepare(self, gang: DesiredGang, continued: bool) -> None:
        with self.span("prepare", self.desired_index):
            await self._prepare_later(gang, continued)

    async def _prepare_later(self, gang: DesiredGang, continued: bool) -> None:
        try:
            spec = await self._spec(gang)
            if spec is None:
                return
            self._state.make_folder(gang.job)
            ready = await self._drivers.of(spec).prepare(gang.job, gang.generation, spec, lambda words: self._say(gang, words))
            if ready.user is not None:
                self._state.open_to_users()
            changed = await self._partitions.arrange(gang.ranks)
            if changed:
                self._log.info("partitioned", gang=gang.job, made=_words(changed.made), unmade=_words(changed.unmade))
            if not self._is_preparing(gang):
                return
            port = self._gangs[gang.job].port if continued else self._reserve(gang)
        except (OSError, LookupError, Refused) as e:
            if self._is_preparing(gang):
                self._fail_prepare(gang, f"cannot prepare: {e}")
            return
        record = self._records[gang.job]
        self._records[gang.job] = msgspec.structs.replace(record, spec=spec, tokens=_tokens(gang, record), ready=ready)
        address = self._node.address if port else ""
        self._change(gang.job, phase="prepared", message="", port=port, address=address, hang_timeout_s=spec.restart.hang_timeout_s)
        self._save(gang.job)
        self._log.debug("prepared", gang=gang.job, generation=gang.generation, port=port)

    def _say(self, gang: DesiredGang, words: str) -> None:
        """Tell how far preparing is."""
        if self._is_preparing(gang) and self._gangs[gang.job].message != words:
            self._change(gang.job, message=words)
            self._log.info("preparing", gang=gang.job, generation=gang.generation, message=words)

    def _fail_prepare(self, gang: DesiredGang, message: str) -> None:
        self._change(gang.job, phase="prepare_failed", message=message)
        self._save(gang.job)
        self._log.error("prepare_failed", gang=gang.job, generation=gang.generation, message=message)

    async def _spec(self, gang: DesiredGang) -> JobSpec | None:
        """Return the job's spec; None when the gang has meanwhile changed. Raises LookupError when there is none."""
        if not is_safe(gang.job):
            raise LookupError(f"job id {gang.job!r} cannot be part of a path")
        known = self._records[gang.job].spec
        while known is None and self._is_preparing(gang):
            try:
                known = await self._job_spec(gang.job)
            except StoreError:
                await asyncio.sleep(_STORE_RETRY_S)
                continue
            if known is None:
                raise LookupError(f"the spec of job {gang.job} is not in the store")
        return known if self._is_preparing(gang) else None

    def _is_preparing(self, gang: DesiredGang) -> bool:
        have = self._gangs.get(gang.job)
        return have is not None and have.generation == gang.generation and have.phase == "preparing"

    def _reserve(self, gang: DesiredGang) -> int:
        """Return a rendezvous port when rank 0's place is here, else 0."""
        self._ports.release(gang.job)
        return self._ports.reserve(gang.job) if gang.nodes <= 1 or any(r.rank == 0 for r in gang.ranks) else 0

    # ---------------------------------------------------------------- starting

    def _start(self, gang: DesiredGang, ranks: tuple[DesiredRank, ...]) -> None:
        job, now = gang.job, time.monotonic()
        record = self._records[job]
        launches = []
        for generation in sorted({r.generation for r in ranks}):
            self._tell(job, generation, jobevents.start_event(gang, now_ms()))
        for r in ranks:
            self.socket.admit(record.tokens[_token_key(r)], RankRef(job, r.generation, r.rank))
            launches.append((self._launch_of(gang, r, record), self._ports.fd(job) if r.rank == 0 else -1))
        new = tuple(LocalRank(r.rank, r.generation, r.gpus, "starting", progress_at=now, share=r.share) for r in ranks)
        self._change(job, ranks=(*self._gangs[job].ranks, *new))
        self.started_total += len(ranks)
        self._journal.started((launch for launch, _ in launches), self.desired_index, self.desired_epoch)
        with self.span("start", self.desired_index):
            self.ranks.start(launches)
        self._log.info("start", gang=job, generation=gang.generation, ranks=[r.rank for r in ranks])

    def _launch_of(self, gang: DesiredGang, r: DesiredRank, record: GangRecord) -> Launch:
        spec, job, generation = record.spec, gang.job, r.generation
        assert spec is not None
        here = Here(
            node=self._node.name, base=user_environment(self._node.base_environment, record.ready.user), gpus=self._facts,
            simulated=self._node.inventory.kind == "simulated", socket=str(self._state.job_socket), port=self._gangs[job].port,
            events=self._state.events(job, generation), token=record.tokens[_token_key(r)],
            instances=tuple(self._partitions.uuid_of(one) for one in r.share.mig) if r.share is not None else (), mps_pipe=self._node.mps_pipe,
        )  # fmt: skip
        launch = Launch(
            job=job, generation=generation, rank=r.rank, gpus=r.gpus, boot_id=self._node.boot_id,
            command=BURN_IN if spec.burn_in else of_role(spec, r.role).command, env=rank_environment(gang, r, spec, here),
            workdir=spec.workdir or self._state.workdir(job, r.rank), make_workdir=not spec.workdir,
            log=f"logs/{job}/rank-{r.rank}.{generation}.log", log_part_bytes=LOG_PART_BYTES, log_parts=LOG_PARTS,
            fenced=spec.on_disconnect == "stop", grace_s=spec.preemption.grace_s, share=r.share, **_locks(r),
        )  # fmt: skip
        return self._drivers.of(spec).box(launch, spec, r, record.ready)

    def inside(self, job: str, rank: int, command: list[str]) -> Inside:
        """Return how to run a command in a running rank. Raises NoSuchRank, Refused."""
        gang, record = self._gangs.get(job), self._records.get(job)
        found = next((r for r in gang.live if r.rank == rank), None) if gang is not None else None
        ref = RankRef(job, found.generation, rank) if found is not None else None
        status = read_status(self._state.root / rankfile.status_path(job, ref.generation, rank)) if ref is not None else None
        if ref is None or status is None or status.state != "running" or record is None or record.spec is None:
            raise NoSuchRank(f"rank {rank} of {job} does not run on this node")
        argv = self._drivers.of(record.spec).inside(status, record.spec, record.ready, command)

        def alive() -> bool:
            now = self._rank(ref)
            return now is not None and now.live

        return Inside(argv, alive)

    # ---------------------------------------------------------------- what ranks and supervisors say

    def _on_status(self, ref: RankRef, status: RankStatus) -> None:
        have = self._rank(ref)
        if have is None:
            if status.state == "exited" and status.generation <= self._retired.get(status.job, -1):
                return  # a second hint at an end that was dealt with at the first
            have = self._take_in(status)
        if not have.live:
            return
        stopping = have.state == "stopping" and status.state != "exited"
        self._change_rank(
            ref, state="stopping" if stopping else status.state, pid=status.pid, exit_code=status.exit_code, cause=status.cause,
            message=status.message, started_at_ms=status.started_at_ms, exited_at_ms=status.exited_at_ms,
        )  # fmt: skip
        if status.state == "exited":
            self._ended(ref, status)

    def _take_in(self, status: RankStatus) -> LocalRank:
        """Take in a rank that nobody here has started, the last breath of an earlier agent; `reconcile` stops it unless it is wanted."""
        rank = local_rank(status, time.monotonic())
        gang = self._gangs.get(status.job) or LocalGang(status.job, status.generation)
        self._gangs[status.job] = msgspec.structs.replace(gang, ranks=(*gang.ranks, rank))
        self._log.warning("stray_rank", gang=status.job, generation=status.generation, rank=status.rank)
        self._changed()
        return rank

    def _ended(self, ref: RankRef, status: RankStatus) -> None:
        cause = status.cause or ("completed" if status.exit_code == 0 else "failed")
        self.ended_total[cause] = self.ended_total.get(cause, 0) + 1
        rank = self._rank(ref)
        assert rank is not None
        self._journal.ended(status)
        self._dismiss(ref.job, rank)
        self._log.info(
            "exit", gang=ref.job, generation=ref.generation, rank=ref.rank, code=status.exit_code, cause=status.cause, message=status.message
        )

    def _on_message(self, ref: RankRef, message: dict[str, object]) -> None:
        """Take in what a rank reports through the socket; its token has told which rank it is."""
        rank = self._rank(ref)
        if rank is None or not rank.live:
            return
        gang = self._gangs[ref.job]
        step, path = message.get("step"), message.get("path")
        if message["type"] == "ack":
            self._change(ref.job, acknowledged=tuple(sorted({*gang.acknowledged, ref.rank})))
        elif isinstance(step, int):
            self._change_rank(ref, **pace.after(rank, step, message.get("busy_ms"), time.monotonic()))
            self._change(ref.job, step=max(step, gang.step))
            if message["type"] == "checkpoint" and step >= gang.checkpoint_step:
                self._change(ref.job, checkpoint_step=step, checkpoint_path=path if isinstance(path, str) else "")
                self._save(ref.job)

    # ---------------------------------------------------------------- from one agent to the next

    def _adopt(self) -> None:
        """Take over the records that an earlier agent left, then the ranks by their status files."""
        self._retired = self._state.forgotten()
        self._unswept = dict(self._retired)
        for record in self._state.records():
            self._adopt_record(record)
        now = time.monotonic()
        for found in stored_statuses(self._state.root / "runs"):
            if found.generation <= self._retired.get(found.job, -1) and found.state == "exited":
                continue
            ref = RankRef(found.job, found.generation, found.rank)
            status = self.ranks.adopt(ref, found)
            if status.state == "exited":
                self._journal.ended(status)  # perhaps once more: the agent before may have come to that
            gang = self._gangs.get(ref.job) or LocalGang(ref.job, ref.generation)
            self._gangs[ref.job] = msgspec.structs.replace(gang, ranks=(*gang.ranks, local_rank(status, now)))
            token = self._records[ref.job].tokens.get(f"{ref.rank}/{ref.generation}") if ref.job in self._records else None
            if token is not None and status.state != "exited":
                self.socket.admit(token, ref)
            self._log.info("adopt", gang=ref.job, generation=ref.generation, rank=ref.rank, state=status.state, cause=status.cause)
        for job, gang in self._gangs.items():
            for generation in sorted({r.generation for r in gang.live}):
                for event in jobevents.read_events(self._state.events(job, generation)):
                    self.socket.publish(job, generation, event)

    def _adopt_record(self, record: GangRecord) -> None:
        phase = record.phase if record.phase in ("prepared", "prepare_failed") else "new"
        here_before = record.boot_id == self._node.boot_id
        self._records[record.job] = record
        gang = LocalGang(record.job, record.generation)
        self._gangs[record.job] = msgspec.structs.replace(
            gang, phase=phase, message=record.message, address=record.address, port=record.port,
            hang_timeout_s=record.spec.restart.hang_timeout_s if record.spec else 0.0,
            notice=record.notice if here_before else None, notified_at=record.notified_at if here_before else 0.0,
            step=record.step, checkpoint_step=record.checkpoint_step, checkpoint_path=record.checkpoint_path,
        )  # fmt: skip
        if record.port:
            self._ports.adopt(record.job, record.port)

    def _save(self, job: str) -> None:
        """Write down what the next agent must know."""
        gang, record = self._gangs[job], self._records.get(job)
        if not is_safe(job) or record is None:
            return
        self._records[job] = msgspec.structs.replace(
            record, generation=gang.generation, phase=gang.phase, message=gang.message, address=gang.address, port=gang.port,
            notice=gang.notice, notified_at=gang.notified_at, boot_id=self._node.boot_id,
            step=gang.step, checkpoint_step=gang.checkpoint_step, checkpoint_path=gang.checkpoint_path,
        )  # fmt: skip
        self._write(self._records[job])

    def _write(self, record: GangRecord) -> None:
        try:
            self._state.save_record(record)
        except OSError as e:
            self._log.error("record_not_written", gang=record.job, message="an agent restart would not know this gang", error=e)

    # ---------------------------------------------------------------- small things

    def _rank(self, ref: RankRef) -> LocalRank | None:
        gang = self._gangs.get(ref.job)
        return next((r for r in gang.ranks if r.key == (ref.rank, ref.generation)), None) if gang is not None else None

    def _change(self, job: str, **fields: Any) -> None:
        self._gangs[job] = msgspec.structs.replace(self._gangs[job], **fields)
        self._changed()

    def _change_rank(self, ref: RankRef, **fields: Any) -> None:
        key = (ref.rank, ref.generation)
        ranks = tuple(msgspec.structs.replace(r, **fields) if r.key == key else r for r in self._gangs[ref.job].ranks)
        self._change(ref.job, ranks=ranks)

    def _dismiss(self, job: str, rank: LocalRank) -> None:
        token = self._records[job].tokens.get(f"{rank.rank}/{rank.generation}") if job in self._records else None
        if token is not None:
            self.socket.dismiss(token)

    def _tell(self, job: str, generation: int, event: dict[str, object]) -> None:
        jobevents.append_event(self._state.events(job, generation), event)
        self.socket.publish(job, generation, event)


def signal_of(spec: JobSpec) -> signal.Signals:
    """Return the signal that asks the job's ranks to stop; SIGTERM for a name that this system does not have."""
    try:
        return signal.Signals[spec.preemption.signal]
    except KeyError:
        return signal.SIGTERM


def now_ms() -> int:
    """Return wall-clock milliseconds, for people only."""
    return time.time_ns() // 1_000_000


def _locks(r: DesiredRank) -> dict[str, Any]:
    """Return the files to lock for the devices of a rank: whole ones alone, others together with those who have parts of them too."""
    devices = tuple(f"locks/gpu-{g}" for g in r.gpus)
    if r.share is None:
        return {"locks": devices}
    slices = tuple(f"locks/gpu-{one.gpu}-{at}" for one in r.share.mig for at in range(one.start, one.start + one.size))
    return {"locks": slices, "shared_locks": devices}


def _words(instances: tuple[MigSlice, ...]) -> list[str]:
    return [f"{one.profile} at {one.start} of GPU {one.gpu}" for one in instances]


def _token_key(r: DesiredRank) -> str:
    return f"{r.rank}/{r.generation}"


def _tokens(gang: DesiredGang, record: GangRecord) -> dict[str, str]:
    """Return a secret for each rank; those of running ranks stay."""
    return {key: record.tokens.get(key) or secrets.token_hex(16) for key in map(_token_key, gang.ranks)}
