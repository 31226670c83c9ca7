"""Victims by least lost work: among jobs of one queue and one priority, who has saved most of its work goes first.

The order of FORMAT.md section 4 takes the youngest of equals. Where jobs report checkpoints more is known: what each would lose, as GPU time
since its last checkpoint, or since it runs if it has reported none. So in a class of equal priority in which at least one job reports, the one
with the least unsaved GPU time is the first victim, and the order of FORMAT.md decides between equal losses; where nobody reports, that order
holds as it is. Between priorities, between queues, and between a gang's surplus and its minimum nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gangline.core.model.foldlosses import unsaved_gpu_ms
from gangline.core.model.state import State
from gangline.core.policy.gangs import Job
from gangline.core.policy.waiting import JobKey


@dataclass(frozen=True)
class Losses:
    """What the jobs of the world would lose if they stopped at one time."""

    state: State
    now_ms: int

    def reported(self, job: Job) -> bool:
        """Whether the job has ever reported a checkpoint."""
        known = self.state.jobs.get(job.name)
        return known is not None and known.checkpoint_step >= 0

    def unsaved(self, job: Job) -> int:
        """Return the GPU milliseconds that it would lose."""
        known = self.state.jobs.get(job.name)
        return unsaved_gpu_ms(known, self.now_ms) if known is not None else 0


def victim_keys(jobs: Iterable[Job], key_of: Callable[[Job], JobKey], losses: Losses | None) -> dict[Job, JobKey]:
    """Return the place of each job in the order of its queue, of which victims are taken in reverse: largest first."""
    keys = {job: key_of(job) for job in jobs}
    for priority in {key[0]: None for job, key in keys.items() if losses is not None and losses.reported(job)}:
        assert losses is not None
        some = sorted((job for job, key in keys.items() if key[0] == priority), key=lambda job: keys[job][2:], reverse=True)
        some.sort(key=losses.unsaved)
        for position, job in enumerate(some):
            _, standing, _, name = keys[job]
            keys[job] = (priority, standing, -position, name)
    return keys
