"""What the fold counts against a job, and for whom: failures, work that was lost, and room that was made for another."""

from __future__ import annotations

from gangline.core.model.documents import RestartNotice
from gangline.core.model.gpushares import GPU, charged_milli
from gangline.core.model.state import Earmark, Job, State

#: a generation that ran so long is healthy: failures after it are not "in a row" with those before (RELIABILITY row 43)
HEALTHY_MS = 600_000


#: room that is made for a job is kept for it so long after its victims must have gone
EARMARK_MARGIN_MS = 60_000


def row_of_failures(job: Job, at_ms: int) -> int:
    """Return how many application failures in a row the job has behind it; a healthy generation ends the row."""
    healthy = job.state == "running" and at_ms - job.running_since_ms >= HEALTHY_MS
    return 0 if healthy else job.failures_in_row


def account_failure(job: Job, failure_class: str, at_ms: int) -> None:
    """Only failures of the application use up the budget."""
    job.failures_in_row = row_of_failures(job, at_ms)
    if failure_class == "application":
        oldest = at_ms - int(job.spec.restart.window_s * 1000)
        job.failures_ms = [*(t for t in job.failures_ms if t > oldest), at_ms]
        job.failures_in_row += 1


def forgive(job: Job) -> None:
    """The last application failure of the job was none."""
    if job.failures_ms:
        job.failures_ms.pop()
        job.failures_in_row = max(0, job.failures_in_row - 1)
        job.restarts -= 1


def end_generation(job: Job, at_ms: int) -> None:
    """The running time of the current generation is over."""
    if job.running_since_ms:
        job.ran_ms += at_ms - job.running_since_ms
        job.running_since_ms = 0
    job.slow = ()


def earmark(state: State, victim: Job, beneficiary: str, gone_ms: int, index: int, at_ms: int) -> None:
    """Keep what a victim gives up for the job that it makes room for, until a while after it must have gone."""
    if beneficiary:
        victim.evicted_for, victim.evicted_at_ms = beneficiary, at_ms
    job = state.jobs.get(beneficiary)
    if job is None or job.state == "finished" or job.stop:
        return
    for other, old in list(state.earmarks.items()):
        if old.until_ms <= at_ms:
            del state.earmarks[other]
    mark = state.earmarks.get(beneficiary, Earmark(0))
    victims = (*(v for v in mark.victims if v != victim.id), victim.id)
    state.earmarks[beneficiary] = Earmark(max(mark.until_ms, gone_ms + EARMARK_MARGIN_MS), victims, index)


def unsaved_gpu_ms(job: Job, at_ms: int) -> int:
    """Return the GPU time that a gang would lose if it stopped at `at_ms`: since its last checkpoint, or since it runs, or acknowledged."""
    if not job.running_since_ms:
        return 0
    since = max(job.running_since_ms, job.checkpoint_at_ms, job.saved_at_ms)
    return max(0, at_ms - since) * sum(charged_milli(r.gpus, r.share) for p in job.parts.values() for r in p.ranks.values()) // GPU


def lose_work(state: State, job: Job, beneficiary: str, at_ms: int) -> None:
    """A generation ends before the job does: what it has not saved is lost, and accounted to whoever it made room for."""
    lost = unsaved_gpu_ms(job, at_ms)
    job.lost_gpu_ms += lost
    cause = state.jobs.get(beneficiary)
    if cause is not None and lost:
        cause.cost_gpu_ms += lost
        state.lost_gpu_ms[cause.spec.queue] = state.lost_gpu_ms.get(cause.spec.queue, 0) + lost


def remember_restart(
    job: Job, cause: str, failure_class: str, message: str, lost_ranks: tuple[int, ...], lost_nodes: tuple[str, ...], at_ms: int,
    failed_at_ms: int = 0,
) -> None:  # fmt: skip
    """Keep what the next generation is told about the end of this one."""
    # A failure on the way back from another one is the same outage to the job: it counts from the first.
    ran = job.state == "running" or (job.state == "resizing" and job.running_since_ms)
    failed_at = failed_at_ms or (job.restart.failed_at_ms if job.restart is not None and not ran else 0) or at_ms
    job.restarts += 1
    job.previous_nodes = tuple(job.parts)
    job.restart = RestartNotice(
        cause=cause, message=message, failure_class=failure_class, lost_ranks=lost_ranks, lost_nodes=lost_nodes,
        old_world_size=job.world_size, failed_at_ms=failed_at, checkpoint_step=job.checkpoint_step,
        checkpoint_path=job.checkpoint_path, restarts=job.restarts,
    )  # fmt: skip
