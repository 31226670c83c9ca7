"""Placement policies as they were published, exact and small, to compare ours with a rerun of them on the same arrivals.

Each gives the nodes with room for a task a score; the highest wins, of equal ones the first by name (the authors replaced the random choice of
Kubernetes by that). Scores are kept by kind of task, and only nodes that have changed are looked at again. Source: papers and code of Weng et
al., USENIX ATC 2023, and hkust-adsl/kubernetes-scheduler-simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from random import Random

from gangline.core.policy.fragmentation import Kind, Measure
from gangline.core.policy.requests import GPU
from gangline.core.simulate.formats.openb import OpenbNode, OpenbTask

POLICIES = {
    "fgd": "published: the least growth of fragments, in whole hundredths of a logistic function",
    "bestfit": "published: the least CPU and GPU left",
    "packing": "published: GPUs in use first, then idle ones of nodes in use, then idle nodes",
    "random": "any node and any GPU with room",
}
#: typical tasks of the published measure make up so much of all
COVERED = 0.95
#: of the largest node, by which the best fit weighs what is left
_CPU, _GPUS = 128_000, 8 * GPU


@dataclass(slots=True)
class Room:
    """What is idle on a node: CPU in milli-cores, memory in MiB, thousandths of each GPU. `version` rises with each change."""

    name: str
    model: str
    cpu_milli: int
    memory_mib: int
    idle: list[int]
    version: int = 0

    def holds(self, task: OpenbTask) -> bool:
        """Whether the task fits now."""
        if self.cpu_milli < task.cpu_milli or self.memory_mib < task.memory_mib:
            return False
        if not task.gpus:
            return True
        if task.models and self.model not in task.models:
            return False
        return sum(each >= task.gpu_milli for each in self.idle) >= task.gpus


#: score of a node for a task, and the GPU for a share (0 where none is shared)
_Score = tuple[float, int]


class Published:
    """A cluster on which one of the published policies places."""

    def __init__(self, nodes: list[OpenbNode], policy: str, measure: Measure, seed: int) -> None:
        self.rooms = [Room(n.name, n.model, n.cpu_milli, n.memory_mib, [GPU] * n.gpus) for n in nodes]
        self._sizes = [(n.cpu_milli, n.gpus) for n in nodes]
        self._measure, self._random = measure, Random(f"policy {seed}")
        self._score: Callable[[Room, OpenbTask], _Score] = {"fgd": self._fgd, "bestfit": self._bestfit}.get(policy, self._packing)
        self._by_chance = policy == "random"
        self._known: dict[tuple[Kind, int], list[tuple[int, _Score | None]]] = {}
        self._fragments: dict[tuple[str, int, tuple[int, ...]], float] = {}

    def place(self, task: OpenbTask) -> bool:
        """Place a task if it fits anywhere, and say whether."""
        found = self._any(task) if self._by_chance else self._best(task)
        if found is None:
            return False
        room, device = found
        take(room, task, device)
        return True

    def _any(self, task: OpenbTask) -> tuple[Room, int] | None:
        rooms = [room for room in self.rooms if room.holds(task)]
        if not rooms:
            return None
        room = self._random.choice(rooms)
        return room, self._random.choice([d for d, each in enumerate(room.idle) if each >= task.gpu_milli]) if task.gpus else 0

    def _best(self, task: OpenbTask) -> tuple[Room, int] | None:
        known = self._known.setdefault((kind_of(task), task.memory_mib), [(-1, None)] * len(self.rooms))
        best: tuple[float, int, int] | None = None
        for at, room in enumerate(self.rooms):
            version, score = known[at]
            if version != room.version:
                score = self._score(room, task) if room.holds(task) else None
                known[at] = (room.version, score)
            if score is not None and (best is None or score[0] > best[0]):
                best = (score[0], at, score[1])
        return None if best is None else (self.rooms[best[1]], best[2])

    def _fgd(self, room: Room, task: OpenbTask) -> _Score:
        before = self._fragments_of(room.model, room.cpu_milli, room.idle)
        best: _Score | None = None
        for device in sorted({room.idle.index(each) for each in room.idle if each >= task.gpu_milli}) if task.gpus == 1 else [0]:
            idle = list(room.idle)
            take_gpus(idle, task, device)
            less = (before - self._fragments_of(room.model, room.cpu_milli - task.cpu_milli, idle)) / GPU
            if best is None or less > best[0]:
                best = (less, device)
        assert best is not None, f"{task.name} does not fit on {room.name}"
        return int(100 / (1 + exp(-best[0]))), best[1]

    def _fragments_of(self, model: str, cpu_milli: int, idle: list[int]) -> float:
        key = (model, cpu_milli, tuple(sorted(idle)))
        if key not in self._fragments:
            self._fragments[key] = self._measure.fragments(*key)
        return self._fragments[key]

    def _bestfit(self, room: Room, task: OpenbTask) -> _Score:
        left = (room.cpu_milli - task.cpu_milli) / _CPU + (sum(room.idle) - task.total_milli) / _GPUS
        return -left, _tightest(room, task)

    def _packing(self, room: Room, task: OpenbTask) -> _Score:
        """GPUs in use count before idle ones of nodes in use, those before idle nodes."""
        device = _tightest(room, task)
        if task.gpus == 1 and room.idle[device] < GPU:
            return 2, device
        return int(room.version > 0), device


def kind_of(task: OpenbTask) -> Kind:
    """Return the kind of a task: memory plays no part."""
    return Kind(task.cpu_milli, task.gpus, task.gpu_milli, frozenset(task.models))


def take(room: Room, task: OpenbTask, device: int) -> None:
    """Take what a task asks for; a share comes from `device`."""
    room.cpu_milli -= task.cpu_milli
    room.memory_mib -= task.memory_mib
    take_gpus(room.idle, task, device)
    room.version += 1


def take_gpus(idle: list[int], task: OpenbTask, device: int) -> None:
    """Take the GPUs of a task: `device` if it asks for one, else the idle ones with the lowest numbers."""
    if task.gpus == 1:
        idle[device] -= task.gpu_milli
    for at in [at for at, each in enumerate(idle) if each == GPU][: task.gpus] if task.gpus > 1 else ():
        idle[at] = 0


def _tightest(room: Room, task: OpenbTask) -> int:
    """Return the GPU with the least room that a task with one GPU fits on."""
    return min((each, at) for at, each in enumerate(room.idle) if each >= task.gpu_milli)[1] if task.gpus == 1 else 0
