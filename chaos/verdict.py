"""What must be true after each fault, as checks on what was seen before and after it. Pure.

The job must have gone on from its newest checkpoint with the loss that it had before; and each fault must have cost what it may cost and no
more: a killed rank a restart in place, a lost node a move that is free of charge, a killed leader nothing at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gangline.chaos.targets import Identity
from gangline.chaos.training import Resume, Step, final, largest_difference, longest_pause_s

#: two losses of the same step may differ by so much: sums of gloo may be ordered otherwise after a move, those of the ring are equal to the bit
TOLERANCE = 1e-9
#: a rank that noticed a change of the leader would have stood still for about a lease
PAUSE_S = 3.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What was true of the job at one moment, by the API, the state files of the nodes and the metrics of the job."""

    generation: int
    nodes: tuple[str, ...]
    #: GPUs of each rank, as (node, indices)
    devices: Mapping[int, tuple[str, tuple[int, ...]]]
    #: the running process of each rank
    processes: Mapping[int, Identity]
    #: why the generation exists, empty for the first
    cause: str
    failure_class: str
    leader: str
    epoch: int
    #: last finished step, and newest checkpoint on disk
    step: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold. `detail` is what was seen."""

    name: str
    ok: bool
    detail: str


def after_rank_kill(before: Facts, after: Facts, resume: Resume | None) -> list[Check]:
    """A rank was killed: the gang restarts where it is."""
    return [
        Check("rank kill: one generation more", after.generation == before.generation + 1, _change(before.generation, after.generation)),
        Check("rank kill: the cause is rank_failed", after.cause == "rank_failed", after.cause),
        Check("rank kill: restarted in place, on the same GPUs", after.devices == before.devices, _change(before.nodes, after.nodes)),
        Check("rank kill: every rank is a new process", _all_new(before, after), f"{len(after.processes)} ranks"),
        *_resumed("rank kill", before, after, resume),
    ]


def after_node_kill(node: str, before: Facts, after: Facts, resume: Resume | None) -> list[Check]:
    """A node was killed: the whole gang moves."""
    return [
        Check("node kill: a newer generation", after.generation > before.generation, _change(before.generation, after.generation)),
        Check("node kill: the cause is node_lost", after.cause == "node_lost", after.cause),
        Check("node kill: infrastructure is to blame", after.failure_class == "infrastructure", after.failure_class),
        Check(f"node kill: nothing runs on {node}", node not in after.nodes, _change(before.nodes, after.nodes)),
        Check("node kill: the gang is whole", after.processes.keys() == before.processes.keys(), f"{len(after.processes)} ranks"),
        Check("node kill: every rank is a new process", _all_new(before, after), f"{len(after.processes)} ranks"),
        *_resumed("node kill", before, after, resume),
    ]


def after_leader_kill(before: Facts, after: Facts, steps: Sequence[Step], from_s: float, to_s: float) -> list[Check]:
    """The leader was killed at `from_s`, and its successor was at work at `to_s`: the ranks notice nothing."""
    pause_s = longest_pause_s(steps, from_s, to_s)
    meanwhile = sum(1 for s in steps if from_s < s.at_s < to_s)
    return [
        Check("leader kill: another scheduler leads", after.leader not in ("", before.leader), _change(before.leader, after.leader)),
        Check("leader kill: a new epoch", after.epoch > before.epoch, _change(before.epoch, after.epoch)),
        Check("leader kill: the same generation", after.generation == before.generation, _change(before.generation, after.generation)),
        Check("leader kill: every rank is the same process", after.processes == before.processes, _same(before, after)),
        Check("leader kill: the same GPUs", after.devices == before.devices, _change(before.nodes, after.nodes)),
        Check("leader kill: training went on", meanwhile > 0 and pause_s < PAUSE_S, f"{meanwhile} steps, the longest pause was {pause_s:.2f} s"),
    ]


def at_the_end(job: Mapping[str, object], steps: Sequence[Step], wanted: int, accuracy: float | None, expected_resumes: int) -> list[Check]:
    """The job has ended: as if nothing had happened."""
    losses = final(steps)
    reached = sorted(losses)
    worst = largest_difference(steps)
    generations = list(dict.fromkeys(s.generation for s in steps))
    checks = [
        Check("the job has succeeded", job.get("outcome") == "succeeded", f"{job.get('outcome')}: {job.get('reason')}"),
        Check("every step was done", reached == list(range(1, wanted + 1)), f"{len(reached)} of {wanted} steps"),
        Check("repeated steps had the loss that they had before", worst <= TOLERANCE, f"largest relative difference {worst:.1e}"),
        Check("one continuation for each restart", len(generations) == expected_resumes + 1, f"generations that trained: {generations}"),
        Check("the model has learned", accuracy is not None and accuracy >= 0.85, f"accuracy on held-out images {accuracy}"),
    ]
    if reached:
        first, last = losses[reached[0]], losses[reached[-1]]
        checks.append(Check("the loss has fallen to a tenth", last < first / 10, f"{first:.4f} -> {last:.4f}"))
    return checks


def _resumed(what: str, before: Facts, after: Facts, resume: Resume | None) -> list[Check]:
    if resume is None or resume.generation != after.generation:
        return [Check(f"{what}: went on from the newest checkpoint", False, f"generation {after.generation} has finished no step")]
    where, same = f"{what}: went on from the newest checkpoint", f"{what}: repeated steps had the same loss"
    return [
        Check(where, resume.checkpoint == before.checkpoint, _change(before.checkpoint, resume.checkpoint)),
        Check(same, resume.difference <= TOLERANCE, f"{resume.repeated} steps, difference {resume.difference:.1e}"),
    ]


def _all_new(before: Facts, after: Facts) -> bool:
    return len(after.processes) == len(before.processes) and not set(before.processes.values()) & set(after.processes.values())


def _same(before: Facts, after: Facts) -> str:
    return f"{sum(after.processes.get(rank) == p for rank, p in before.processes.items())} of {len(before.processes)} ranks"


def _change(before: object, after: object) -> str:
    return f"{_show(before)} -> {_show(after)}"


def _show(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
