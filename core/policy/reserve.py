"""Reserve: the first gangs that find no room get a reservation, so that small jobs do not take for ever what a large one waits for.

After the passes of a session, for the first few blocked jobs in order (of several ranks, or of several GPUs a rank: whatever else waits takes
the first room that comes):

    what runs, by its expected end (profile.py) ─▶ given back one after another, in a what-if ─▶ the earliest time at which the chunk has places

The places are found by the rules of every placement (placing.py), so a reservation is inside the topology domain that the gang asks for. The
next one is planned on what the ones before it leave. `gang_reserved` records nodes, amounts and the time; from then on the room is kept
(holds.py), and others run around it if they end in time (backfill.py).

When too little ends at a known time, nobody can be let in on the strength of it. A gang that has waited long (`PATIENCE_MS`), and is the first
such, gets a reservation without a time: on what those hold who run longest, kept free as it comes free. So large gangs start as long as others
end at all.

Queues in an order by service (service.py) need none: what is to go first there has others leave. To keep room free for a gang that is not first
would only delay what is.

A reservation is planned anew when something that it counts on is gone, when its time has passed, and from time to time in case something
better has come up; it is given up when the gang is no longer among the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from gangline.core.model import events as ev
from gangline.core.model.state import Job as StateJob
from gangline.core.model.state import State
from gangline.core.policy import windows
from gangline.core.policy.gangs import Job, Rank, RankState, charge_of, has_minimum, next_chunk
from gangline.core.policy.holds import Hold, Holds, Want
from gangline.core.policy.placing import Placer
from gangline.core.policy.profile import Profile
from gangline.core.policy.queues import Queue
from gangline.core.policy.refusals import ROOM
from gangline.core.policy.report import Decisions
from gangline.core.policy.waiting import JobKey
from gangline.core.policy.world import World

#: reservations without a time, at a time
_MOST_OPEN = 1
#: a gang waits so long before it gets a reservation without a time
PATIENCE_MS = 600_000
#: reservations that still hold are planned anew after so long, and exchanged if the gang starts so much earlier
AGAIN_MS = 60_000
BETTER_MS = 60_000
#: one that is broken, after so long
BROKEN_MS = 5_000
#: ends of gangs that a plan looks at
_ENDS = 2_000
#: a job that is placed now, and ends in time by what is known, is late by so much at most
SLACK_MS = 60_000
_MIB = 1 << 20


# ---------------------------------------------------------------- what is kept, in a session


def holds_of(state: State, profile: Profile) -> Holds:
    """Return the holds of a session: for each reservation of a gang what will not come from those who end before it; and those of people."""
    holds = [*(_hold(state, profile, state.jobs[job]) for job in state.reserved), *windows.holds(state)]

    def leaves(job: Job, hold: Hold) -> bool:
        known = state.jobs.get(job.name)
        if hold.always:
            return known is not None and windows.admits(state.reservations[hold.reservation], known, profile)
        end = profile.end_if_started(known, learned=hold.trusting) if known is not None else None
        return end is not None and hold.starts_ms is not None and end + SLACK_MS <= hold.starts_ms

    return Holds(holds, leaves)


def _hold(state: State, profile: Profile, job: StateJob) -> Hold:
    reserved = job.reserved
    assert reserved is not None, f"{job.id} is among the reservations and has none"
    wants: list[Want] = []
    for part in reserved.parts:
        gpus, cpus, memory = part.gpus, part.cpus_milli, part.memory_mib
        node = state.nodes.get(part.node)
        for other, holding in node.holdings.items() if node is not None and reserved.start_ms else ():
            if holding.leaving_since or state.jobs[other].state == "preempting":
                continue  # what it has is counted as free later anyway
            end = profile.end(other)
            if end is not None and end <= reserved.start_ms:
                gpus, cpus, memory = gpus - len(holding.gpus), cpus - holding.cpus_milli, memory - holding.memory_mib
        wants.append(Want(part.node, max(0, gpus), max(0, cpus), max(0, memory) * _MIB))
    trusting = profile.now_ms <= job.promised_ms
    return Hold(job.id, reserved.start_ms or None, tuple(wants), trusting=trusting)


# ---------------------------------------------------------------- the pass


def reserve(world: World, placer: Placer, decisions: Decisions, profile: Profile) -> list[ev.GangReserved]:
    """Return the reservations that change after a session that has moved nobody. The world is as the session left it, and is so afterwards."""
    state, now_ms = profile.state, profile.now_ms
    wanted = _first_blocked(world, decisions)
    names = {job.name: None for job in wanted} | {r.rank.job.name: None for r in decisions.reservations}
    out = [ev.GangReserved(job=name, message="others are before it") for name in state.reserved if name not in names]
    planned = {name: at_ms for name, at_ms in state.scratch.planned.items() if name in names}
    state.scratch.planned = planned
    broken = {job: None for job in wanted if not _holds_still(world, state, job, now_ms)}
    due = [job for job in wanted if _is_due(state.jobs[job.name], planned.get(job.name), job in broken, now_ms)]
    if not due:
        return out
    found = _Plan(world, placer, profile).of(wanted)
    for job in due:
        planned[job.name] = now_ms
        new, old = found.get(job), state.jobs[job.name].reserved
        if new is None:
            if old is not None and job in broken:
                out.append(ev.GangReserved(job=job.name, message="nobody knows when it can start"))
        elif old is None or (job in broken and (new.parts, new.start_ms) != (old.parts, old.start_ms)) or _is_better(new, old.start_ms):
            out.append(new)
    return out


def _is_due(job: StateJob, planned_ms: int | None, broken: bool, now_ms: int) -> bool:
    """Whether to plan for a job: at once when it is new, soon when its reservation is broken, else from time to time."""
    if planned_ms is None:
        return True
    return now_ms - planned_ms >= (BROKEN_MS if broken and job.reserved is not None else AGAIN_MS)


def _first_blocked(world: World, decisions: Decisions) -> list[Job]:
    """Return who waits for room, the first of each queue, then the second of each, and so on.

    That is the same whether they were refused one by one or by their shape, and so in one cycle as in the next.
    """
    by_queue: dict[Queue, dict[Job, JobKey]] = {}
    most = world.options.reservations
    for jobs, why in decisions.refusals:
        first = next(iter(jobs), None)
        if first is not None and why.code in ROOM and not first.queue.spec.by_service and _is_large(first):
            by_queue.setdefault(first.queue, {}).update((job, world.job_key(job)) for job in islice(jobs, most))
    ranked = ((at, found[job], job) for found in by_queue.values() for at, job in enumerate(sorted(found, key=found.__getitem__)[:most]))
    return [job for _, _, job in sorted(ranked, key=lambda r: r[:2])[:most]]


def _is_large(job: Job) -> bool:
    """Whether it may wait for ever although room comes free again and again. What takes the first GPU that comes free does not."""
    chunk = next_chunk(job)
    return not has_minimum(job) and bool(chunk) and (len(chunk) > 1 or chunk[0].request.count > 1)


def _holds_still(world: World, state: State, job: Job, now_ms: int) -> bool:
    """Whether a gang has a reservation whose time is ahead, with everything there that it counts on."""
    reserved, hold = state.jobs[job.name].reserved, world.holds.of(job)
    if reserved is None or hold is None or hold.short:
        return False
    nodes = (state.nodes.get(part.node) for part in reserved.parts)
    return (not reserved.start_ms or reserved.start_ms > now_ms) and all(node is not None and node.schedulable for node in nodes)


def _is_patient_no_more(job: StateJob, now_ms: int) -> bool:
    return now_ms - job.since_ms >= PATIENCE_MS


def _is_open(job: StateJob) -> bool:
    return job.reserved is not None and not job.reserved.start_ms


def _is_better(new: ev.GangReserved, old_ms: int) -> bool:
    return bool(new.start_ms) and (not old_ms or old_ms - new.start_ms >= BETTER_MS)


@dataclass
class _Plan:
    """The what-if in which gangs end one after another."""

    world: World
    placer: Placer
    profile: Profile
    #: (end, job) in order; of these, how many have ended here, and where in the journal each did
    ends: list[tuple[int | None, str]] = field(default_factory=list)
    ended: int = 0
    marks: list[int] = field(default_factory=list)
    #: nodes of declared reservations, on which nothing is planned that is not free now
    closed: dict[str, None] = field(default_factory=dict)

    def of(self, jobs: list[Job]) -> dict[Job, ev.GangReserved]:
        """Return a reservation for each job that can have one."""
        mark = self.world.checkpoint()
        for hold in self.world.holds.of_gangs():
            self.world.lift(hold)
        self.closed = {w.node: None for hold in self.world.holds.by_name.values() if hold.always for w in hold.wants}
        self.ends = [(end, job) for end, job in self.profile.in_order() if self.profile.state.jobs[job].state != "preempting"][:_ENDS]
        known = next((at for at, (end, _) in enumerate(self.ends) if end is None), len(self.ends))
        found: dict[Job, ev.GangReserved] = {}
        if not known and not any(_is_patient_no_more(self.profile.state.jobs[job.name], self.profile.now_ms) for job in jobs):
            jobs = []
        open_ones = [job for job in self.profile.state.reserved if _is_open(self.profile.state.jobs[job])]
        for job in jobs:
            waited = _is_patient_no_more(self.profile.state.jobs[job.name], self.profile.now_ms)
            has_turn = job.name in open_ones or len(open_ones) < _MOST_OPEN
            most = len(self.ends) if waited and has_turn else known
            chunk = next_chunk(job)
            if chunk and self._place_earliest(job, chunk, most):
                found[job] = self._reservation(job, chunk)
                if not found[job].start_ms and job.name not in open_ones:
                    open_ones.append(job.name)
        self.world.rollback(mark)
        return found

    def _place_earliest(self, job: Job, chunk: list[Rank], most: int) -> bool:
        """Let as few more gangs end as it takes to place the chunk, and place it. `most` may have ended."""
        if self._place(job, chunk):
            return True
        low, step = self.ended, 1
        while True:
            if self.ended >= most:
                self._end(low)
                return False
            self._end(min(most, self.ended + step))
            if self._fits(job, chunk):
                break
            low, step = self.ended, 2 * step
        high = self.ended
        while high - low > 1:
            self._end((low + high) // 2)
            low, high = (low, self.ended) if self._fits(job, chunk) else (self.ended, high)
        self._end(high)
        return self._place(job, chunk)

    def _end(self, count: int) -> None:
        """Let so many have ended: more than now, or fewer."""
        if count < self.ended:
            self.world.rollback(self.marks[count])
            del self.marks[count:]
        while len(self.marks) < count:
            self.marks.append(self.world.checkpoint())
            job = self.world.jobs.get(self.ends[len(self.marks) - 1][1])
            for rank in job.ranks if job is not None else ():
                if rank.state is RankState.RUNNING and rank.place is not None and rank.place.node.name not in self.closed:
                    self.world.evict(rank)
        self.ended = count

    def _fits(self, job: Job, chunk: list[Rank]) -> bool:
        mark = self.world.checkpoint()
        fits = self._place(job, chunk)
        self.world.rollback(mark)
        return fits

    def _place(self, job: Job, chunk: list[Rank]) -> bool:
        need, free = charge_of(chunk, self.world.smallest_device_mib), self.world.free_later()
        if need[1] > free[1] or need[2] > free[2] or (need[0] > free[0] and not self.world.has_mig):
            return False
        return self.placer.place(job, chunk, reserve_only=True)

    def _reservation(self, job: Job, chunk: list[Rank]) -> ev.GangReserved:
        devices: dict[str, set[int]] = {}
        cpus: dict[str, int] = {}
        memory: dict[str, int] = {}
        for rank in chunk:
            assert rank.reservation is not None, f"{rank.name} was placed and has no place"
            node = rank.reservation.node.name
            devices.setdefault(node, set()).update(rank.reservation.devices)
            cpus[node] = cpus.get(node, 0) + rank.request.cpu_milli
            memory[node] = memory.get(node, 0) + rank.request.memory_bytes // _MIB
        parts = tuple(ev.ReservedPart(node, len(devices[node]), cpus[node], memory[node]) for node in sorted(devices))
        last = self.ends[self.ended - 1] if self.ended else (self.profile.now_ms, "")
        until = "from now on" if not self.ended else f"until {last[1]} has ended" + (f", the last of {self.ended}" if self.ended > 1 else "")
        return ev.GangReserved(job=job.name, start_ms=last[0] or 0, parts=parts, message=until)
