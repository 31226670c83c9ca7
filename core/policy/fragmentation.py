"""What the idle room of a node is worth to those who are likely to come: an estimate in thousandths of a GPU.

A rank is placed where that worth falls least (fragmentindex.py), with CPU times the cores that stay idle there added to what is lost. The worth
of a node with its idle CPU and the idle amounts of its GPUs is

    - F  +  CAPACITY * K

F, fragmentation, is the measure of Weng et al., "Beware of Fragmentation" (USENIX ATC 2023): what is idle and of no use to the next task. Over
the typical tasks m with their shares p_m of all tasks, F = sum of p_m F(m); F(m) is all that is idle if m needs no GPU or does not fit, else
what is idle on GPUs that have less than m asks of one.

K, capacity, looks further than the next task: how many of m the node could still hold beside each other, as its CPU and its GPUs allow, times
p_m and the root of what one of them takes (in GPUs), times 1000. F does not fall while a node keeps room for one task of a kind, so by itself
it wastes CPU where that is scarce; K falls with each place that is lost. It is why ranks that need much CPU go where there is much of it.

The idle cores decide between near ties: nodes that are in use are filled up before others are begun. The weights were chosen on five lists of
one trace (docs/simulate.md); results hardly change when one of them is halved or doubled.

F is compared exactly, not cut down to one of a hundred steps as the published simulator has it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate
from math import sqrt
from typing import NamedTuple

from gangline.core.policy.requests import GPU

#: of capacity, and of a core that stays idle, against a thousandth of a GPU of fragments
CAPACITY = 0.05
CPU = 0.1
#: typical tasks are the most frequent ones that make up so much of all
COVERED = 0.98
#: values that are kept: a bound for memory only
_KEPT = 200_000


class Kind(NamedTuple):
    """A kind of task: CPU in milli-cores, GPUs, thousandths of each, and the models that will do, none for any."""

    cpu_milli: int
    gpus: int
    milli: int
    models: frozenset[str] = frozenset()


def typical(counts: dict[Kind, int], covered: float = COVERED) -> dict[Kind, float]:
    """Return the most frequent kinds that make up `covered` of all tasks, with shares that add up to 1.

    Of equally frequent ones those come first that ask for less. Empty where there are no tasks.
    """
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0][:3], sorted(item[0].models)))
    goal, seen, chosen = covered * sum(counts.values()), 0, []
    for kind, times in order:
        if seen >= goal:
            break
        chosen.append((kind, times))
        seen += times
    return {kind: times / seen for kind, times in chosen}


class _Size:
    """The typical tasks that ask a node for the same GPUs: they differ in CPU only."""

    __slots__ = ("count", "cpus", "milli", "of", "up_to")

    def __init__(self, count: int, milli: int, kinds: list[tuple[int, float]]) -> None:
        self.count, self.milli = count, milli
        kinds = sorted(kinds)
        self.cpus = [cpu for cpu, _ in kinds]
        #: share of all tasks with CPU up to each of these, after a leading 0
        self.up_to = [0.0, *accumulate(share for _, share in kinds)]
        worth = GPU * sqrt(count * milli / GPU)
        self.of = [(cpu, share * worth) for cpu, share in kinds]


class Measure:
    """The worth of nodes, given the typical tasks and their shares. Values are kept by state, so equal nodes cost one evaluation."""

    def __init__(self, kinds: dict[Kind, float]) -> None:
        self.kinds = kinds
        self._of_model: dict[str, tuple[float, list[_Size]]] = {}
        self._kept: dict[tuple[str, int, tuple[int, ...]], float] = {}

    def worth(self, model: str, cpu_milli: int, idle: tuple[int, ...]) -> float:
        """Return what a node is worth with so much idle CPU, and so many thousandths idle on each of its GPUs, sorted; more is better."""
        key = (model, cpu_milli, idle)
        known = self._kept.get(key)
        if known is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            fragments, capacity = self._parts(model, cpu_milli, idle)
            known = self._kept[key] = CAPACITY * capacity - fragments
        return known

    def fragments(self, model: str, cpu_milli: int, idle: tuple[int, ...]) -> float:
        """Return F of such a node: thousandths of a GPU that are idle and, on average, of no use to the next task."""
        return self._parts(model, cpu_milli, idle)[0]

    def _parts(self, model: str, cpu_milli: int, idle: tuple[int, ...]) -> tuple[float, float]:
        """Return F and K."""
        none, sizes = self._sizes(model)
        total = sum(idle)
        fragments, capacity = none * total, 0.0
        for size in sizes:
            milli, count = size.milli, size.count
            if count == 1:
                holds = 0
                small = 0
                for each in idle:
                    if each < milli:
                        small += each
                    else:
                        holds += each // milli
            else:
                large = [each for each in idle if each >= milli]
                small, holds = total - sum(large), len(large) // count
            if not holds:
                fragments += size.up_to[-1] * total
                continue
            fits = size.up_to[bisect_right(size.cpus, cpu_milli)]
            fragments += (size.up_to[-1] - fits) * total + fits * small
            for cpu, weight in size.of:
                if cpu > cpu_milli:
                    break
                capacity += weight * (min(holds, cpu_milli // cpu) if cpu else holds)
        return fragments, capacity

    def _sizes(self, model: str) -> tuple[float, list[_Size]]:
        """Return the share of the tasks that such a GPU is of no use to, and the others by what they ask of GPUs."""
        found = self._of_model.get(model)
        if found is None:
            none, sizes = 0.0, defaultdict(list)
            for kind, share in self.kinds.items():
                if not kind.gpus or (kind.models and model not in kind.models):
                    none += share
                else:
                    sizes[kind.gpus, kind.milli].append((kind.cpu_milli, share))
            found = self._of_model[model] = (none, [_Size(*size, kinds) for size, kinds in sorted(sizes.items())])
        return found
