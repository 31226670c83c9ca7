"""What a run of jobs is measured by. The cost of a measure is that of what changes, and the memory that of a few numbers a job.

    completion time   end − submission                     wait        completion time − duration: all time in which it did not work
    utilisation       GPU time that was held / (GPUs × makespan)
    slowdown          completion time / duration, of at least 10 s each, and at least 1   (bounded slowdown: Feitelson, Rudolph, JSSPP 1998)
    fairness          Jain's index over jobs of 1 / slowdown: 1 if all are slowed down alike   (Jain, Chiu, Hawe, DEC-TR-301, 1984)
    fragmentation     idle GPUs on nodes that are partly used / all GPUs, over time
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from gangline.core.model.state import State
from gangline.core.simulate.virtual import ZERO_MS, Observer, Running

#: below so many seconds a slowdown says little
_SHORT_S = 10.0
#: points of a line in time: when there are twice as many, every second one goes
POINTS = 600
#: sizes of jobs that are told apart: up to so many GPUs
SIZES = (1, 4, 8, 16, 64, 512, 4_096, 65_536)


def size_class(gpus: int) -> str:
    """Return the class of a size: "1", "2-4", "5-8" ..."""
    low = 1
    for high in SIZES:
        if gpus <= high:
            return str(high) if low == high else f"{low}-{high}"
        low = high + 1
    return f"{low}+"


class Line:
    """Values over time, of which a bounded number is kept: the mean of each stretch, and stretches double when there are too many."""

    def __init__(self, step_s: float = 60.0) -> None:
        self.step_s = step_s
        self.sums: list[float] = []
        self._at = self._value = 0.0

    def set(self, at_s: float, value: float) -> None:
        """The value is another one from now on."""
        self._run_to(at_s)
        self._value = value

    def _run_to(self, at_s: float) -> None:
        while at_s > self.step_s * 2 * POINTS:
            self.sums = [a + b for a, b in zip(self.sums[::2], [*self.sums[1::2], 0.0], strict=False)]
            self.step_s *= 2
        while self._at < at_s:
            index = int(self._at / self.step_s + 1e-9)
            end = min(at_s, (index + 1) * self.step_s)
            while len(self.sums) <= index:
                self.sums.append(0.0)
            if end <= self._at:
                break
            self.sums[index] += self._value * (end - self._at)
            self._at = end

    def points(self) -> list[tuple[float, float]]:
        """Return (seconds, mean) of each stretch; of the last one as far as it has gone."""
        ends = [min(self._at, (i + 1) * self.step_s) for i in range(len(self.sums))]
        return [(i * self.step_s, total / max(ends[i] - i * self.step_s, 1e-9)) for i, total in enumerate(self.sums)]

    def total(self) -> float:
        """Return the sum of value × seconds."""
        return sum(self.sums)


class Measures(Observer):
    """Measures one run on a cluster with these numbers of GPUs on its nodes."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self.nodes = {f"n{number:05d}": gpus for number, gpus in enumerate(nodes)}
        self.gpus = sum(self.nodes.values())
        self.completion_s, self.duration_s, self.slowdown = array("d"), array("d"), array("d")
        self.sizes = array("l")
        self.queue_of: list[str] = []
        self.used = dict.fromkeys(self.nodes, 0)
        self.allocated = self.partly = 0
        self.allocation, self.waiting, self.fragmentation = Line(), Line(), Line()
        self.of_queue: dict[str, Line] = {}
        self._held: dict[str, int] = {}
        self.evictions: dict[str, int] = {}
        #: of each job: GPUs, its duration, and the time from its first placement to its end
        self.useful: list[tuple[int, float, float]] = []
        self.starts = self.cut_off = 0
        self.last_s = 0.0
        #: longest time from a submission to the first placement, by size class
        self.longest_first_wait_s: dict[str, float] = {}
        self._map: tuple[int, list[tuple[str, tuple[tuple[str, int], ...]]]] = (0, [])
        self._placed: dict[int, Running] = {}
        self.map_at_s = 0.0

    # ---------------------------------------------------------------- what is told

    def placed(self, at_s: float, job: Running) -> None:
        """Count it from now on."""
        self.starts += 1
        if job.starts == 1:
            size = size_class(job.trace.gpus)
            waited = at_s - (job.submit_ms - ZERO_MS) / 1000
            self.longest_first_wait_s[size] = max(self.longest_first_wait_s.get(size, 0.0), waited)
        self._hold(at_s, job, 1)

    def left(self, at_s: float, job: Running, why: str) -> None:
        """Count it no more."""
        self.evictions[why] = self.evictions.get(why, 0) + 1
        self._hold(at_s, job, -1)

    def finished(self, at_s: float, job: Running, done: bool) -> None:
        """Note how it did."""
        if job.place:
            self._hold(at_s, job, -1)
        completion = at_s - (job.submit_ms - ZERO_MS) / 1000
        self.completion_s.append(completion)
        self.duration_s.append(job.trace.duration_s)
        self.slowdown.append(max(1.0, max(completion, _SHORT_S) / max(job.trace.duration_s, _SHORT_S)))
        self.sizes.append(job.trace.gpus)
        self.queue_of.append(job.trace.queue)
        self.cut_off += not done
        if job.first_ms:
            self.useful.append((job.trace.gpus, job.trace.duration_s, at_s - (job.first_ms - ZERO_MS) / 1000))
        self.last_s = max(self.last_s, at_s)

    def moment(self, at_s: float, state: State, held_back: int) -> None:
        """Take the amounts of this moment."""
        waiting = len(state.queue) + held_back
        self.allocation.set(at_s, self.allocated)
        self.waiting.set(at_s, waiting)
        self.fragmentation.set(at_s, self.partly)
        if waiting * 10 > self._map[0] * 11 or (self._map[0] == 0 and self.allocated and not self._map[1]):
            self._map = (waiting, [(job.trace.name, job.place) for job in self._placed.values()])
            self.map_at_s = at_s

    def _hold(self, at_s: float, job: Running, sign: int) -> None:
        for node, gpus in job.place:
            used, has = self.used[node], self.nodes[node]
            self.partly += (has - used - sign * gpus) * (0 < used + sign * gpus < has) - (has - used) * (0 < used < has)
            self.used[node] = used + sign * gpus
            self.allocated += sign * gpus
        if sign > 0:
            self._placed[id(job)] = job
        else:
            self._placed.pop(id(job), None)
        queue = job.trace.queue
        if queue:
            self._held[queue] = self._held.get(queue, 0) + sign * job.trace.gpus
            if queue in self.of_queue or len(self.of_queue) < 64:
                self.of_queue.setdefault(queue, Line()).set(at_s, self._held[queue])

    # ---------------------------------------------------------------- what comes out

    def figures(self) -> dict[str, Any]:
        """Return the figures of the run, as in --json: seconds, shares from 0 to 1."""
        count = len(self.completion_s)
        waits = [c - d for c, d in zip(self.completion_s, self.duration_s, strict=True)]
        self.allocation.set(self.last_s, self.allocated)
        self.fragmentation.set(self.last_s, self.partly)
        span = max(self.last_s, 1e-9)
        by_size: dict[str, list[float]] = {}
        by_queue: dict[str, list[float]] = {}
        for size, queue, wait in zip(self.sizes, self.queue_of, waits, strict=True):
            by_size.setdefault(size_class(size), []).append(wait)
            by_queue.setdefault(queue or "default", []).append(wait)
        speeds = [1 / s for s in self.slowdown]
        return {
            "jobs": count,
            "cut_off": self.cut_off,
            "mean_jct_s": _mean(self.completion_s),
            "p50_jct_s": percentile(self.completion_s, 50),
            "p99_jct_s": percentile(self.completion_s, 99),
            "mean_wait_s": _mean(waits),
            "p99_wait_s": percentile(waits, 99),
            "max_wait_s": max(waits, default=0.0),
            "mean_slowdown": _mean(self.slowdown),
            "makespan_s": self.last_s,
            "utilisation": self.allocation.total() / (self.gpus * span) if self.gpus else 0.0,
            "fragmentation": self.fragmentation.total() / (self.gpus * span) if self.gpus else 0.0,
            "fairness": sum(speeds) ** 2 / (count * sum(s * s for s in speeds)) if count else 1.0,
            "preemptions": sum(self.evictions.values()),
            "losses": dict(sorted(self.evictions.items())),
            "ettr_by_size": self._ettr(),
            "starts_per_job": self.starts / count if count else 0.0,
            "waits_by_size": {size: _waits(by_size[size]) for size in sorted(by_size, key=_size_order)},
            "waits_by_queue": {queue: _waits(some) for queue, some in sorted(by_queue.items())},
            "longest_first_wait_s": {s: self.longest_first_wait_s[s] for s in sorted(self.longest_first_wait_s, key=_size_order)},
        }

    def _ettr(self) -> dict[str, float]:
        """Return useful time over the time from the first placement to the end, by size class, weighted by GPU time."""
        sums: dict[str, list[float]] = {}
        for gpus, duration, took in self.useful:
            found = sums.setdefault(size_class(gpus), [0.0, 0.0])
            found[0] += gpus * duration
            found[1] += gpus * took
        return {size: sums[size][0] / sums[size][1] for size in sorted(sums, key=_size_order) if sums[size][1]}

    def map(self) -> list[tuple[str, int, list[tuple[str, int]]]]:
        """Return (node, GPUs, [(job, GPUs)]) at the moment when most jobs waited, or at the first that anything was placed."""
        on: dict[str, list[tuple[str, int]]] = {node: [] for node in self.nodes}
        for name, place in self._map[1]:
            for node, gpus in place:
                on[node].append((name, gpus))
        return [(node, gpus, on[node]) for node, gpus in self.nodes.items()]


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that so many percent do not exceed; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-len(ordered) * percent // 100) - 1))] if ordered else 0.0


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def _waits(values: list[float]) -> dict[str, float]:
    return {"jobs": len(values), "mean_s": _mean(values), "p99_s": percentile(values, 99), "max_s": max(values, default=0.0)}


def _size_order(size: str) -> int:
    return int(size.partition("-")[0].rstrip("+"))
