"""Which processes a fault hits: a pure function of what is known about a cluster.

`View` is that knowledge at one moment, made by `injector.observe` from state files, /proc and the schedulers' API, or by hand in a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gangline.chaos import faults as f

Kind = Literal["etcd", "scheduler", "agent"]


class NoTarget(Exception):
    """The fault hits nothing: what it names does not exist, or does not run now."""


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """One process for ever: its pid, and its start in clock ticks since boot."""

    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class Component:
    """A process that belongs to the cluster itself. An agent has the name of its node."""

    name: str
    kind: Kind
    process: Identity


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank that has not ended, and the supervisor beside it. `process` is None while it is being started."""

    job: str
    rank: int
    generation: int
    node: str
    supervisor: Identity
    process: Identity | None


@dataclass(frozen=True, slots=True)
class View:
    """What is known of a cluster's processes at one moment."""

    components: Mapping[str, Component]
    ranks: tuple[RankProcess, ...] = ()
    #: name of the scheduler that leads, empty when nobody is known to
    leader: str = ""
    #: children of the processes above, and theirs
    children: Mapping[Identity, tuple[Identity, ...]] = field(default_factory=dict)

    def newest(self, job: str) -> dict[int, RankProcess]:
        """Return the ranks of a job by number, each in its newest generation."""
        found: dict[int, RankProcess] = {}
        for rank in sorted((r for r in self.ranks if r.job == job), key=lambda r: (r.rank, r.generation)):
            found[rank.rank] = rank
        return found


@dataclass(frozen=True, slots=True)
class Target:
    """One process that a fault hits. `component` is its name in the cluster, by which it can be restarted; empty for ranks and helpers."""

    what: str
    process: Identity
    component: str = ""


def resolve(fault: f.Fault, view: View) -> tuple[Target, ...]:
    """Return what the fault hits, in the order in which it must be hit. Raises NoTarget."""
    match fault:
        case f.KillRank() | f.FreezeRank():
            return (_rank(view, fault.job, fault.rank),)
        case f.KillNode() | f.FreezeNode():
            return _node(view, fault.node)
        case f.KillAgent():
            return (_component(view, fault.node, "agent"),)
        case f.KillScheduler():
            return (_component(view, fault.scheduler, "scheduler"),)
        case f.KillLeader() | f.FreezeLeader():
            if not view.leader:
                raise NoTarget("no scheduler leads now")
            return (_component(view, view.leader, "scheduler"),)
        case f.KillEtcd() | f.FreezeEtcd():
            return (_component(view, fault.member, "etcd"),)
        case f.FreezeProcess():
            return (_component(view, fault.process),)
        case _:
            raise TypeError(f"{type(fault).__name__} is not a fault that hits processes")


def _component(view: View, name: str, kind: Kind | None = None) -> Target:
    found = view.components.get(name)
    if found is None or (kind is not None and found.kind != kind):
        there = ", ".join(c.name for c in view.components.values() if kind in (None, c.kind)) or "none"
        raise NoTarget(f"no {kind or 'process'} {name} is running; running: {there}")
    return Target(f"{found.kind} {name}", found.process, name)


def _rank(view: View, job: str, number: int) -> Target:
    ranks = view.newest(job)
    found = ranks.get(number)
    if found is None or found.process is None:
        running = [r.rank for r in ranks.values() if r.process is not None]
        there = f"ranks {running[0]} to {running[-1]} are" if running else "none of its ranks is"
        raise NoTarget(f"rank {number} of job {job} is not running; {there}")
    return Target(_rank_name(found), found.process)


def _node(view: View, node: str) -> tuple[Target, ...]:
    """Return everything on a node.

    First come the agent and its helpers, so that nobody reports the end of the others or starts new ones, then supervisors, then ranks.
    """
    agent = view.components.get(node)
    here = [r for r in view.ranks if r.node == node]
    if (agent is None or agent.kind != "agent") and not here:
        there = ", ".join(c.name for c in view.components.values() if c.kind == "agent") or "none"
        raise NoTarget(f"nothing runs on node {node}; nodes: {there}")
    found: list[Target] = []
    if agent is not None and agent.kind == "agent":
        found.append(_component(view, node, "agent"))
        found += [Target(f"helper of agent {node}", p) for p in _below(view, agent.process)]
    found += [Target(f"supervisor of {_rank_name(r)}", r.supervisor) for r in here]
    found += [Target(_rank_name(r), r.process) for r in here if r.process is not None]
    found += [Target(f"started by {_rank_name(r)}", p) for r in here for p in _below(view, r.supervisor) if p != r.process]
    return _distinct(found)


def _rank_name(rank: RankProcess) -> str:
    return f"rank {rank.rank} on {rank.node}"


def _below(view: View, root: Identity) -> list[Identity]:
    found: list[Identity] = []
    todo = [root]
    while todo:
        children = view.children.get(todo.pop(), ())
        found += children
        todo += children
    return found


def _distinct(targets: Iterable[Target]) -> tuple[Target, ...]:
    """Keep the last name of each process, which is the most exact one, at its first place."""
    by_process: dict[Identity, Target] = {}
    for target in targets:
        known = by_process.get(target.process)
        by_process[target.process] = target if known is None or not known.component else known
    return tuple(by_process.values())
