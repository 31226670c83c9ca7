"""The virtual cluster: jobs of a trace run on nodes that are not there, in time that does not pass.

    trace ──▶ job_submitted ──▶ ┌───────────────────────────────┐ ──▶ gang_placed, gang_preempting, …
                                │ wake, decide, fold, …, settle │            │
    ranks_started, ranks_exited │  as a leader runs its cycles  │ ◀──────────┘ what agents would report, folded at the time
                                └───────────────────────────────┘              at which they would report it

What decides is `decide` on a `State`, as in production, and what happens to the state is what the fold makes of events. Only agents are played
here: they prepare and start what is placed, acknowledge a notice at once, and report the end of ranks. The time jumps to the next thing that
happens. While jobs wait, the queues are looked at again a few times, as long as time alone may change anything.

A job is a gang of ranks. As many GPUs as fit on one node are one rank; more are ranks of equal size that fill nodes.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import gcd

from gangline.core.model import events as ev
from gangline.core.model.documents import Gpu, Registration
from gangline.core.model.fold import apply, seal
from gangline.core.model.queues import QueueSpec
from gangline.core.model.spec import Gang, JobSpec, Preemption, Resources
from gangline.core.model.state import Job, State
from gangline.core.policy.decide import attend_to_all, decide, settle, wake
from gangline.core.policy.mirror import PRODUCTION, Mirror
from gangline.core.simulate.failures import Failure, Failures
from gangline.core.simulate.formats.jobs import TraceJob

#: log time of the trace's zero
ZERO_MS = 1_000_000
#: while jobs wait, the queues are looked at again so long after anything has changed: when gangs that have just started are no longer protected,
#: when reservations are planned anew, and when all that lasts for minutes is over (potential.py, reserve.py)
LOOKS_MS = (61_000, 121_000, 301_000, 661_000)
#: names of nodes in one rack, for the map
_RACK = 8
_CPUS_MILLI = 1_000_000
_MEMORY_MIB = 4_000_000
_BLANK = bytes(32)


@dataclass(frozen=True)
class Setup:
    """What a run is made on. `nodes` are numbers of GPUs."""

    nodes: tuple[int, ...]
    queues: tuple[QueueSpec, ...] = ()
    #: queues of the trace count; else all jobs go to one
    by_queue: bool = False
    #: time from a placement until its ranks work again: start-up, and loading what was saved
    overhead_s: float = 30.0
    #: the next job is submitted when the one before it was placed: first come, first served, and nobody passes
    one_at_a_time: bool = False
    #: reservations at a time (core/policy/reserve.py)
    reservations: int = PRODUCTION.reservations
    #: what is known of how long a job runs: nothing, what its user asked for, or how long it does
    durations: str = "unknown"
    #: whether anybody may be asked to leave
    preemptible: bool = True
    #: nodes and ranks fail; a job writes a checkpoint this often, and stands still for so long while it does; 0: it never loses anything
    failures: Failures | None = None
    checkpoint_s: float = 0.0
    write_s: float = 0.0


class Running:
    """One job of the trace that was submitted and has not ended."""

    __slots__ = ("first_ms", "generation", "left_ms", "place", "started_ms", "starts", "submit_ms", "trace")

    def __init__(self, trace: TraceJob, submit_ms: int) -> None:
        self.trace = trace
        self.submit_ms = submit_ms
        self.left_ms = max(1, round(trace.duration_s * 1000))
        self.started_ms = 0
        #: when it had its first placement
        self.first_ms = 0
        self.starts = 0
        self.generation = 0
        #: (node, GPUs), of the present placement
        self.place: tuple[tuple[str, int], ...] = ()


class Observer:
    """What a run is watched by; each method is told at the time at which it happens. Times are seconds of the trace."""

    def placed(self, at_s: float, job: Running) -> None:
        """A gang has its places."""

    def left(self, at_s: float, job: Running, why: str) -> None:
        """It has lost them, and waits again."""

    def finished(self, at_s: float, job: Running, done: bool) -> None:
        """It has ended: all done, or cut off by its time limit."""

    def moment(self, at_s: float, state: State, held_back: int) -> None:
        """All of one moment has been decided; so many have arrived and not been submitted yet."""


class Virtual:
    """A virtual cluster. `run` plays a trace."""

    def __init__(self, setup: Setup, watch: Observer) -> None:
        self.setup = setup
        self.watch = watch
        self.state = State()
        self.now_ms = ZERO_MS
        self.running: dict[str, Running] = {}
        self.capacity = sum(setup.nodes)
        #: (log time, number, what, job, generation)
        self._agenda: list[tuple[int, int, Callable[[str, int], None], str, int]] = []
        self._number = 0
        self._changed_ms = ZERO_MS
        #: several generations of agents' reports are folded before the next decision
        self.state.scratch.mirror = Mirror(replace(PRODUCTION, reservations=setup.reservations))
        self._per_node = max(setup.nodes, default=1)
        self._specs: dict[tuple[object, ...], JobSpec] = {}
        #: wall time of a unit of work, with the writing of checkpoints
        self._stretch = 1 + setup.write_s / setup.checkpoint_s if setup.checkpoint_s else 1.0
        self._failures = setup.failures.drawn(len(setup.nodes)) if setup.failures is not None else iter(())
        self._next_failure: Failure | None = next(self._failures, None)
        self._fold([ev.LeaderElected(scheduler="simulation")], epoch=1)
        for number, gpus in enumerate(setup.nodes):
            self._fold([ev.NodeJoined(registration=_registration(number, gpus))])
        if setup.queues:
            self._fold([ev.QueuesDeclared(queues=setup.queues)])
        attend_to_all(self.state)

    # ---------------------------------------------------------------- the loop

    def run(self, jobs: Iterable[TraceJob], tick: Callable[[int], None] = lambda _done: None) -> None:
        """Play jobs, given in the order of their submission, until all have ended. `tick` is told how many have, now and then.

        A job that can never be placed ends the run when nothing else is left to happen: it stays in `running`.
        """
        was_enabled = gc.isenabled()
        gc.disable()  # nothing here is part of a cycle that matters; what is, is looked after below
        try:
            self._run(iter(jobs), tick)
        finally:
            if was_enabled:
                gc.enable()

    def _run(self, coming: Iterator[TraceJob], tick: Callable[[int], None]) -> None:
        following = next(coming, None)
        done = moments = 0
        due: int | None = None
        held_back: deque[TraceJob] = deque()
        self._cycle()
        while True:
            submit_ms = None if following is None else max(self.now_ms, ZERO_MS + round(following.submit_s * 1000))
            self._fail_later()
            ahead = [at for at in (submit_ms, self._agenda[0][0] if self._agenda else None, due) if at is not None]
            if not ahead:
                break
            self.now_ms = max(self.now_ms, min(ahead))
            before = self.state.index
            while self._agenda and self._agenda[0][0] <= self.now_ms:
                _, _, what, job_id, generation = heappop(self._agenda)
                what(job_id, generation)
            batch: list[ev.LogEvent] = []
            while following is not None and ZERO_MS + round(following.submit_s * 1000) <= self.now_ms:
                if self.setup.one_at_a_time:
                    held_back.append(following)
                else:
                    batch.append(self._submit(following))
                following = next(coming, None)
            if held_back and not self.state.queue:
                batch.append(self._submit(held_back.popleft()))
            if batch:
                self._fold(batch)
            due = self._cycle()
            if self.state.index != before:
                self._changed_ms = self.now_ms
            since_ms = self.now_ms - self._changed_ms
            look = next((after for after in LOOKS_MS if after > since_ms), None) if self.state.queue else None
            if look is not None:
                due = min(at for at in (due, self._changed_ms + look) if at is not None)
            if held_back and not self.state.queue:
                due = self.now_ms  # the next one has its turn at once
            self.watch.moment(self._seconds(), self.state, len(held_back))
            moments += 1
            if moments % 256 == 0:
                ended = self.state.submitted - len(self.running)
                if ended != done:
                    done = ended
                    tick(done)
            if moments % 20_000 == 0:
                gc.collect()

    def _cycle(self) -> int | None:
        """Decide until nothing is left to decide at this time, as a leader does, with agents that answer at once."""
        state = self.state
        wake(state, self.now_ms)
        while True:
            decisions = decide(state, self.now_ms)
            if not decisions:
                break
            self._fold(decisions)
            for decision in decisions:
                self._answer(decision)
        return settle(state, self.now_ms)

    # ---------------------------------------------------------------- what agents do

    def _answer(self, decision: ev.LogEvent) -> None:
        if isinstance(decision, ev.GangPlaced):
            self._placed(self.state.jobs[decision.job], decision)
        elif isinstance(decision, ev.GangReleased):
            self._later(self.now_ms + round(self.setup.overhead_s * 1000), self._start, decision.job, decision.generation)
        elif isinstance(decision, ev.GangPreempting):
            self._asked_to_leave(self.state.jobs[decision.job])
        elif isinstance(decision, ev.GangRequeued):
            self._left(decision.job, decision.cause)
        elif isinstance(decision, ev.GangRestarting):
            running = self.running[decision.job]
            self.watch.left(self._seconds(), running, decision.cause)
            running.place = ()
        elif isinstance(decision, ev.GangFinished):
            self._over(decision)

    def _placed(self, job: Job, decision: ev.GangPlaced) -> None:
        running = self.running[job.id]
        running.generation = decision.generation
        running.place = tuple((part.node, sum(len(r.gpus) for r in part.ranks)) for part in decision.parts)
        running.starts += 1
        running.first_ms = running.first_ms or self.now_ms
        self.watch.placed(self._seconds(), running)
        if len(decision.parts) > 1:
            self._fold([ev.NodePrepared(job=job.id, generation=decision.generation, node=part.node, port=1) for part in decision.parts])
        else:
            self._later(self.now_ms + round(self.setup.overhead_s * 1000), self._start, job.id, decision.generation)

    def _start(self, job_id: str, generation: int) -> None:
        job = self.state.jobs.get(job_id)
        if job is None or job.generation != generation or job.state not in ("placed", "preparing"):
            return
        self._fold([
            ev.RanksStarted(job=job_id, generation=generation, node=node, ranks=tuple(part.ranks)) for node, part in job.parts.items()
        ])  # fmt: skip
        running = self.running[job_id]
        running.started_ms = self.now_ms
        self._later(self.now_ms + round(running.left_ms * self._stretch), self._end, job_id, generation)

    def _end(self, job_id: str, generation: int) -> None:
        job = self.state.jobs.get(job_id)
        if job is None or job.generation != generation or job.state != "running":
            return
        self.running[job_id].left_ms = 0
        self._fold([
            ev.RanksExited(job=job_id, node=node, exits=tuple(ev.RankExit(rank, generation, 0) for rank in part.ranks))
            for node, part in job.parts.items()
        ])  # fmt: skip

    def _asked_to_leave(self, job: Job) -> None:
        """It saves all of its work at once."""
        running = self.running[job.id]
        if running.started_ms:
            running.left_ms = max(1, running.left_ms - round((self.now_ms - running.started_ms) / self._stretch))
            running.started_ms = 0
        self._fold([ev.StopAcknowledged(job=job.id, generation=job.generation, node=node) for node in job.parts])

    # ---------------------------------------------------------------- what fails

    def _fail_later(self) -> None:
        """Have the next failure on the agenda, as long as there is anything that could fail."""
        failure = self._next_failure
        if failure is None or not self.running:
            return
        at_ms = max(self.now_ms, ZERO_MS + round((failure.at_s + failure.seen_s) * 1000))
        self._next_failure = None

        def fail(_job: str, _generation: int) -> None:
            self._next_failure = next(self._failures, None)
            self._fail(failure)

        self._later(at_ms, fail, "", 0)

    def _fail(self, failure: Failure) -> None:
        """A failure is noticed: the ranks on the node are gone, and what they have not saved by the time at which it happened."""
        name = f"n{failure.node:05d}"
        node = self.state.nodes[name]
        if node.status != "up":
            return
        for job_id in node.holdings:
            self._lose(self.running[job_id], failure.seen_s)
        if failure.away:
            self._fold([ev.NodeLost(node=name, cause=failure.kind, message=failure.kind, proven=True)])
            again = node.registration
            self._later(self.now_ms + round(failure.repair_s * 1000), lambda _j, _g: self._fold([ev.NodeJoined(registration=again)]), "", 0)
            return
        for job_id in list(node.holdings):
            job = self.state.jobs[job_id]
            if job.state == "running":
                generation = job.generation
                self._fold([
                    ev.RanksExited(job=job_id, node=n, exits=tuple(ev.RankExit(r, generation, -9, "lost", failure.kind) for r in part.ranks))
                    for n, part in job.parts.items()
                ])  # fmt: skip

    def _lose(self, running: Running, unnoticed_s: float) -> None:
        """What a job has done counts up to the last checkpoint before it failed."""
        if not running.started_ms:
            return
        worked_s = max(0.0, (self.now_ms - running.started_ms) / 1000 - unnoticed_s)
        saved_s = worked_s
        if self.setup.checkpoint_s:
            saved_s = worked_s // (self.setup.checkpoint_s + self.setup.write_s) * self.setup.checkpoint_s
        running.left_ms = max(1, running.left_ms - round(saved_s * 1000))
        running.started_ms = 0

    def _left(self, job_id: str, cause: str) -> None:
        running = self.running[job_id]
        self.watch.left(self._seconds(), running, cause)
        running.place = ()
        self._release(job_id)

    def _over(self, decision: ev.GangFinished) -> None:
        running = self.running.pop(decision.job)
        self.watch.finished(self._seconds(), running, decision.outcome == "succeeded")
        self._release(decision.job)

    def _release(self, job_id: str) -> None:
        gone = [ev.PartReleased(job=job_id, node=node) for node in self.state.jobs[job_id].held_nodes]
        if gone:
            self._fold(gone)

    # ---------------------------------------------------------------- jobs

    def _submit(self, job: TraceJob) -> ev.LogEvent:
        job_id = f"j{self.state.submitted + self._pending:07d}"
        self._pending += 1
        self.running[job_id] = Running(job, ZERO_MS + round(job.submit_s * 1000))
        return ev.JobSubmitted(job=job_id, spec=self.spec_of(job), user=job.user)

    _pending = 0

    def spec_of(self, job: TraceJob) -> JobSpec:
        """Return what would be submitted for a job of the trace."""
        limit_s = {"known": job.duration_s, "asked": job.asked_s}.get(self.setup.durations, 0.0)
        queue = (job.queue or "default") if self.setup.by_queue else "default"
        key = (job.gpus, queue, limit_s)
        found = self._specs.get(key)
        if found is None:
            ranks, each = shape(job.gpus, self._per_node)
            grace_s = max(30.0, self.setup.overhead_s)
            found = JobSpec(
                ("trace",), queue=queue, gang=Gang(ranks, ranks), resources=Resources(gpus=each, cpus_milli=0), time_limit_s=limit_s,
                preemption=Preemption(grace_s=grace_s), preemptible=self.setup.preemptible,
            )  # fmt: skip
            if len(self._specs) < 10_000:
                self._specs[key] = found
        return found

    # ---------------------------------------------------------------- steps

    def _fold(self, events: Sequence[ev.LogEvent], epoch: int = 1) -> None:
        state = self.state
        index = state.index + 1
        for event in events:
            apply(state, event, index, epoch, self.now_ms)
        seal(state, index, _BLANK)
        self._pending = 0

    def _later(self, at_ms: int, what: Callable[[str, int], None], job_id: str, generation: int) -> None:
        self._number += 1
        heappush(self._agenda, (at_ms, self._number, what, job_id, generation))

    def _seconds(self) -> float:
        return (self.now_ms - ZERO_MS) / 1000


def shape(gpus: int, per_node: int) -> tuple[int, int]:
    """Return (ranks, GPUs of each) of a job: one rank if that fits on a node, else equal ranks of which whole nodes are made."""
    if gpus <= per_node:
        return 1, gpus
    each = gcd(gpus, per_node)
    return gpus // each, each


def _registration(number: int, gpus: int) -> Registration:
    name = f"n{number:05d}"
    devices = tuple(Gpu(g, f"{name}-{g}", "GPU", 81_559) for g in range(gpus))
    return Registration(name, name, "b", name, "", devices, _CPUS_MILLI, _MEMORY_MIB, {"rack": f"r{number // _RACK:04d}"})
