"""The metrics of a scheduler, listed in docs/telemetry.md. Gauges are read off the folded state at a scrape; counters are fed by `on_frame`.

A scrape asks nobody: not the store, not an agent. It costs time linear in nodes, waiting jobs and active jobs.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable

from gangline.core.model import events as ev
from gangline.core.model.codec import Frame
from gangline.core.model.gpushares import GPU
from gangline.core.model.roles import asked
from gangline.core.model.state import State
from gangline.core.model.usage import usage_of
from gangline.core.policy.shares import queues_with_shares
from gangline.core.telemetry import LONG_SECONDS_BUCKETS, Labels, Telemetry

Samples = Iterable[tuple[float, Labels]]

#: events that are decisions of the policy, by the action that they carry out
_ACTIONS: dict[type[ev.LogEvent], str] = {
    ev.GangPlaced: "place",
    ev.GangsDeferred: "defer",
    ev.GangReleased: "release",
    ev.GangRestarting: "restart",
    ev.RankRestarting: "restart_rank",
    ev.GangPreempting: "preempt",
    ev.GangRequeued: "requeue",
    ev.GangFinished: "finish",
    ev.BrakeSet: "brake",
}


class Metrics:
    """Instruments of one scheduler. `state` gives the folded state, None before there is one; `now_ms` the log time."""

    def __init__(self, telemetry: Telemetry, state: Callable[[], State | None], now_ms: Callable[[], int] | None = None) -> None:
        self.telemetry = telemetry
        self._state = state
        self._now_ms = now_ms
        #: job → log time of the failure that it is recovering from, and of its placement
        self._failed_ms: dict[str, tuple[int, str]] = {}
        self._placed_ms: dict[str, int] = {}
        self._requests: Tally[tuple[str, str, int]] = Tally()
        #: open streams; kept by the API
        self.streams = 0
        t = telemetry
        self._appends = t.counter("gangline.log.appends", "Appends to the log by result: ok, fenced, ambiguous, refused.")
        self._append_seconds = t.histogram("gangline.log.append.duration", "Time from sending an append to knowing its result.")
        self._fences = t.counter("gangline.fence.rejections", "Appends refused because another scheduler leads.")
        self._leader_changes = t.counter("gangline.leader.changes", "Elections seen in the log.")
        self._cycle_seconds = t.histogram("gangline.decision.cycle.duration", "Time of one decision cycle.")
        self._decisions = t.counter("gangline.decisions", "Decisions in the log by action.")
        self._refusals = t.counter("gangline.refusals", "Gangs deferred, by the constraint that bound.")
        self._restarts = t.counter("gangline.gang.restarts", "Restarts of gangs and ranks by cause.")
        self._recovery_seconds = t.histogram(
            "gangline.gang.recovery", "Time from a failure until every rank runs again, by cause.", LONG_SECONDS_BUCKETS
        )
        self._start_seconds = t.histogram("gangline.gang.start.duration", "Time of a start by phase: queue, start.", LONG_SECONDS_BUCKETS)
        self._preemptions = t.counter("gangline.preemptions", "Gangs asked to leave, by reason.")
        self._withheld = t.counter("gangline.evictions.withheld", "Evictions not made because they would break the promise of an end to them.")
        self._finished = t.counter("gangline.gangs.finished", "Gangs that ended, by outcome.")
        self._nodes_lost = t.counter("gangline.nodes.lost", "Nodes declared lost, by cause.")
        self._request_seconds = t.histogram("gangline.http.request.duration", "Time of an HTTP request by route; streams are not timed.")
        self._streams_dropped = t.counter("gangline.stream.dropped", "Streams ended because their client read too slowly.")
        self._store_seconds = t.histogram("gangline.etcd.request.duration", "Time of a request to etcd by operation.")
        t.sums("gangline.http.requests", "HTTP requests by route, method and status.", self._read_requests)
        t.gauge("gangline.stream.clients", "Open event and log streams.", lambda: [(self.streams, {})])
        for name, description, read in (
            ("gangline.log.index", "Last folded log entry.", _log_index),
            ("gangline.leader.info", "1, with the leader and its term as labels.", _leader),
            ("gangline.brake", "1 while the mass-loss brake is on.", lambda s: [(int(s.brake.on), {})]),
            ("gangline.gangs", "Gangs by state.", _gangs),
            ("gangline.gpus", "GPUs by model and state: allocated (whole or in part), free, unusable; they add up to the capacity.", _gpus),
            ("gangline.nodes", "Nodes by state: up, cordoned, draining, lost.", _nodes),
            ("gangline.drain.remaining.gangs", "Gangs that a draining node still has.", _draining),
            ("gangline.queue.pending.gangs", "Waiting gangs by queue and recorded reason.", _pending_gangs),
            ("gangline.queue.pending.gpus", "GPUs that waiting gangs ask for, by queue.", _pending_gpus),
            ("gangline.queue.allocated.gpus", "GPUs that running gangs hold, by queue.", _allocated_gpus),
        ):
            t.gauge(name, description, self._of_state(read))
        t.sums("gangline.queue.lost", "GPU time that evicted gangs had not saved, by the queue that they made room for.", self._lost_work, "s")
        t.gauge("gangline.queue.usage", "Part of what the nodes had that a queue held in the past, decayed by its half-life.", self._usage)
        t.gauge("gangline.queue.fair.share.gpus", "GPUs that a declared queue should have of those that it has or waits for.", self._fair_shares)
        t.gauge("gangline.queue.oldest.wait", "Time that the longest waiting gang of a queue has waited.", self._oldest_wait, "s")

    # ---------------------------------------------------------------- fed by the loop

    def on_frame(self, frame: Frame) -> None:
        """Count what a committed frame says; call it once for each, after the fold."""
        for event in frame.events:
            action = _ACTIONS.get(type(event))
            if action is not None:
                self._decisions.add(1, {"action": action})
            self._count(event, frame.at_ms)

    def appended(self, seconds: float, result: str) -> None:
        """An append has its result."""
        self._appends.add(1, {"result": result})
        self._append_seconds.record(seconds)
        if result == "fenced":
            self._fences.add(1)

    def cycled(self, seconds: float) -> None:
        """A decision cycle is over."""
        self._cycle_seconds.record(seconds)

    def withheld(self) -> None:
        """An eviction was not made because it would break what the policy promises."""
        self._withheld.add(1)

    def asked_store(self, operation: str, seconds: float) -> None:
        """A request to etcd has its answer."""
        self._store_seconds.record(seconds, {"op": operation})

    # ---------------------------------------------------------------- fed by the API

    def answered(self, route: str, method: str, status: int, seconds: float | None) -> None:
        """A request has its answer; `seconds` is None for a stream."""
        self._requests[route, method, status] += 1
        if seconds is not None:
            self._request_seconds.record(seconds, {"route": route})

    def stream_dropped(self) -> None:
        """A client read too slowly."""
        self._streams_dropped.add(1)

    # ---------------------------------------------------------------- below

    def _count(self, event: ev.LogEvent, at_ms: int) -> None:
        match event:
            case ev.LeaderElected():
                self._leader_changes.add(1)
            case ev.GangPlaced():
                self._on_placed(event, at_ms)
            case ev.GangsDeferred():
                self._refusals.add(len(event.jobs), {"reason": event.code})
            case ev.GangRestarting() | ev.RankRestarting() | ev.GangRequeued():
                self._restarts.add(1, {"cause": event.cause})
                self._failed_ms.setdefault(event.job, (at_ms, event.cause))
            case ev.GangPreempting():
                self._preemptions.add(1, {"reason": event.cause})
            case ev.RanksStarted() | ev.RanksExited():
                self._on_started(event.job, at_ms)
            case ev.GangFinished():
                self._finished.add(1, {"outcome": event.outcome})
                self._failed_ms.pop(event.job, None)
                self._placed_ms.pop(event.job, None)
            case ev.NodeLost():
                self._nodes_lost.add(1, {"cause": event.cause})
            case _:
                pass

    def _on_placed(self, event: ev.GangPlaced, at_ms: int) -> None:
        self._placed_ms[event.job] = at_ms
        state = self._state()
        job = state.jobs.get(event.job) if state is not None else None
        if job is not None and event.generation == 1:
            self._start_seconds.record((at_ms - job.submitted_at_ms) / 1000, {"phase": "queue"})

    def _on_started(self, job_id: str, at_ms: int) -> None:
        if job_id not in self._placed_ms and job_id not in self._failed_ms:
            return
        state = self._state()
        job = state.jobs.get(job_id) if state is not None else None
        if job is None or job.state != "running" or not all(r.started for p in job.parts.values() for r in p.ranks.values()):
            return
        placed_ms = self._placed_ms.pop(job_id, None)
        if placed_ms is not None:
            self._start_seconds.record((at_ms - placed_ms) / 1000, {"phase": "start"})
        failed = self._failed_ms.pop(job_id, None)
        if failed is not None:
            self._recovery_seconds.record((at_ms - failed[0]) / 1000, {"cause": failed[1]})

    def _of_state(self, read: Callable[[State], Samples]) -> Callable[[], Samples]:
        def samples() -> Samples:
            state = self._state()
            return read(state) if state is not None else ()

        return samples

    def _read_requests(self) -> Samples:
        return [(n, {"route": route, "method": method, "code": str(status)}) for (route, method, status), n in self._requests.items()]

    def _lost_work(self) -> Samples:
        state = self._state()
        return [] if state is None else [(gpu_ms / 1000, {"queue": queue}) for queue, gpu_ms in state.lost_gpu_ms.items()]

    def _usage(self) -> Samples:
        state = self._state()
        if state is None:
            return []
        now_ms = max(state.at_ms, self._now_ms()) if self._now_ms is not None else state.at_ms
        usages = [(path, usage_of(state.usage, state.queues, path, now_ms)) for path in state.queues.half_lives_ms]
        return [
            (part, {"queue": path, "resource": resource})
            for path, parts in usages if parts is not None for resource, part in zip(("gpus", "cpus", "memory"), parts, strict=True)
        ]  # fmt: skip

    def _fair_shares(self) -> Samples:
        state = self._state()
        if state is None or not state.queues.declared:
            return []
        now_ms = max(state.at_ms, self._now_ms()) if self._now_ms is not None else state.at_ms
        return [(queue.fair_share[0] / 1000, {"queue": path}) for path, queue in queues_with_shares(state, now_ms).items()]

    def _oldest_wait(self) -> Samples:
        state = self._state()
        if state is None:
            return []
        now_ms = self._now_ms() if self._now_ms is not None else state.at_ms
        oldest: dict[str, int] = {}
        for _, _, job_id in state.queue:
            job = state.jobs[job_id]
            oldest[job.spec.queue] = min(oldest.get(job.spec.queue, job.since_ms), job.since_ms)
        return [(max(0, now_ms - since) / 1000, {"queue": queue}) for queue, since in oldest.items()]


def _log_index(state: State) -> Samples:
    return [(state.index, {})]


def _leader(state: State) -> Samples:
    return [(1, {"node": state.leader, "term": str(state.epoch)})] if state.leader else []


def _gangs(state: State) -> Samples:
    count: Tally[str] = Tally(state.jobs[job].state for job in state.running)
    count["queued"], count["finished"] = len(state.queue), len(state.finished)
    names = ("queued", "placed", "preparing", "running", "restarting", "preempting", "resizing", "finished")
    return [(count[name], {"state": name}) for name in names]


def _gpus(state: State) -> Samples:
    count: Tally[tuple[str, str]] = Tally()
    for node in state.nodes.values():
        held = {gpu for holding in node.holdings.values() for gpu in holding.gpus} | set(node.parted)
        for gpu in node.registration.gpus:
            if gpu.index in held:
                count[gpu.model, "allocated"] += 1
            else:
                count[gpu.model, "free" if node.schedulable and gpu.healthy else "unusable"] += 1
    models = sorted({model for model, _ in count})
    return [(count[model, name], {"model": model, "state": name}) for model in models for name in ("allocated", "free", "unusable")]


def _nodes(state: State) -> Samples:
    count: Tally[str] = Tally()
    for node in state.nodes.values():
        count["lost" if node.status == "lost" else "draining" if node.draining else "cordoned" if node.cordoned else "up"] += 1
    return [(count[name], {"state": name}) for name in ("up", "cordoned", "draining", "lost")]


def _draining(state: State) -> Samples:
    return [(len(node.holdings), {"node": node.id}) for node in state.nodes.values() if node.draining and node.status == "up"]


def _pending_gangs(state: State) -> Samples:
    count: Tally[tuple[str, str]] = Tally()
    for _, _, job_id in state.queue:
        job = state.jobs[job_id]
        count[job.spec.queue, job.deferral.code if job.deferral is not None else ""] += 1
    return [(n, {"queue": queue, "reason": reason}) for (queue, reason), n in count.items()]


def _pending_gpus(state: State) -> Samples:
    count: Tally[str] = Tally()
    for _, _, job_id in state.queue:
        spec = state.jobs[job_id].spec
        count[spec.queue] += asked(spec).gpus_milli
    return [(n / GPU, {"queue": queue}) for queue, n in count.items()]


def _allocated_gpus(state: State) -> Samples:
    count: Tally[str] = Tally()
    for job_id in state.running:
        job = state.jobs[job_id]
        count[job.spec.queue] += job.holds().gpus_milli
    return [(n / GPU, {"queue": queue}) for queue, n in count.items()]
