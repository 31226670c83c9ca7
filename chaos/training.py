"""What the demo's training job wrote of itself, step by step: where each generation went on, and whether the loss did. Pure.

The job appends one JSON line a step to metrics.jsonl: step, loss, generation, time. A generation that resumes from a checkpoint repeats the
steps after it; since the job is deterministic they must have the loss that they had before.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One finished step."""

    step: int
    loss: float
    generation: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Resume:
    """How one generation went on from an earlier one."""

    generation: int
    #: step of the checkpoint that it started from, 0 for none
    checkpoint: int
    #: last step of the generation before
    reached: int
    #: steps that were done a second time
    repeated: int
    at_s: float
    #: largest relative difference between a repeated step's losses
    difference: float


def parse(text: str) -> list[Step]:
    """Return the steps in the order in which they were written. A line that a dying rank left unfinished is passed over."""
    steps = []
    for line in text.splitlines():
        try:
            raw = json.loads(line)
            steps.append(Step(int(raw["step"]), float(raw["loss"]), int(raw["generation"]), float(raw["time"])))
        except (ValueError, KeyError, TypeError):
            continue
    return steps


def resumes(steps: Sequence[Step]) -> list[Resume]:
    """Return how each generation but the first went on."""
    found: list[Resume] = []
    seen: dict[int, float] = {}
    for i, step in enumerate(steps):
        if i and step.generation != steps[i - 1].generation:
            reached = steps[i - 1].step
            rerun = [s for s in steps[i:] if s.generation == step.generation and s.step <= reached]
            worst = max((_difference(s.loss, seen[s.step]) for s in rerun if s.step in seen), default=math.inf if rerun else 0.0)
            found.append(Resume(step.generation, step.step - 1, reached, len(rerun), step.at_s, worst))
        seen[step.step] = step.loss
    return found


def final(steps: Iterable[Step]) -> dict[int, float]:
    """Return the loss by step; where generations overlap, the newest counts."""
    return {s.step: s.loss for s in steps}


def largest_difference(steps: Iterable[Step]) -> float:
    """Return the largest relative difference between losses of the same step, 0 when no step was repeated."""
    first: dict[int, float] = {}
    worst = 0.0
    for s in steps:
        worst = max(worst, _difference(s.loss, first.setdefault(s.step, s.loss)))
    return worst


def longest_pause_s(steps: Sequence[Step], from_s: float, to_s: float) -> float:
    """Return the longest time without a finished step between two moments."""
    moments = [from_s, *(s.at_s for s in steps if from_s < s.at_s < to_s), to_s]
    return max(b - a for a, b in itertools.pairwise(moments))


def _difference(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


# ---------------------------------------------------------------- the curve


def curve(steps: Sequence[Step], marks: Sequence[tuple[float, str]] = (), width: int = 72, height: int = 10) -> list[str]:
    """Return the loss over time as lines of text, logarithmic. Over time and not over steps, so that the pauses can be seen.

    Below, `marks` are letters at their moments, and ^ is where a generation went on.
    """
    if len(steps) < 2:
        return []
    begin = steps[0].at_s
    span_s = max(steps[-1].at_s - begin, 1e-9)
    columns: dict[int, list[float]] = {}
    for s in steps:
        columns.setdefault(_column(s.at_s, begin, span_s, width), []).append(math.log(max(s.loss, 1e-12)))
    means = {x: sum(values) / len(values) for x, values in columns.items()}
    low, high = min(means.values()), max(means.values())
    span = max(high - low, 1e-9)
    rows = [[" "] * width for _ in range(height)]
    for x, mean in means.items():
        rows[round((high - mean) / span * (height - 1))][x] = "*"
    labels = [math.exp(high - span * y / (height - 1)) for y in range(height)]
    lines = [f"{label:9.4f} |{''.join(row).rstrip()}" for label, row in zip(labels, rows, strict=True)]
    axis = [" "] * width
    for at_s, mark in [*((r.at_s, "^") for r in resumes(steps)), *marks]:
        axis[_column(at_s, begin, span_s, width)] = mark
    lines.append(" " * 10 + "+" + "-" * width)
    lines.append(" " * 11 + "".join(axis).rstrip())
    return lines


def _column(at_s: float, begin: float, span_s: float, width: int) -> int:
    return min(width - 1, max(0, int((at_s - begin) / span_s * width)))
