"""How long jobs ran that were like this one: learned from those that succeeded.

Jobs of one user in one queue with as many ranks are alike. Of the last three the longest counts, and a quarter more: a prediction that is too
short delays others, one that is too long only keeps the job from some gaps. (Predictions from a user's last few jobs work about as well as
anything: Tsafrir, Etsion, Feitelson, "Backfilling using system-generated predictions rather than user runtime estimates", TPDS 2007.)
"""

from __future__ import annotations

from gangline.core.model.state import Job

#: jobs of a kind that are remembered, and kinds
_LAST = 3
_KINDS = 4_096
#: so many must have ended before anything is said
_LEAST = 2


def kind_of(job: Job) -> str:
    """Return what stands for all jobs that are like this one."""
    return f"{job.user}/{job.spec.queue}/{job.spec.gang.ranks}"


def learn(runtimes: dict[str, tuple[int, ...]], job: Job) -> None:
    """Note the running time of a job that has succeeded. Kinds that were not seen for long are forgotten."""
    kind = kind_of(job)
    runtimes[kind] = (*runtimes.pop(kind, ())[-(_LAST - 1) :], job.ran_ms)
    if len(runtimes) > _KINDS:
        del runtimes[next(iter(runtimes))]


def expected_ms(runtimes: dict[str, tuple[int, ...]], job: Job) -> int | None:
    """Return how long a job will run in all, as far as jobs like it tell; None when too few have ended."""
    seen = runtimes.get(kind_of(job), ())
    return max(seen) * 5 // 4 if len(seen) >= _LEAST else None
