"""What may be moved for whom in production, and whether that is worth it (consolidate.py)."""

from __future__ import annotations

from gangline.core.model.foldlosses import unsaved_gpu_ms
from gangline.core.model.state import Job as StateJob
from gangline.core.model.state import State
from gangline.core.policy.gangs import Job
from gangline.core.policy.sizes import is_elastic

#: a gang is not moved so soon after it was moved, evicted or started
COOL_DOWN_MS = 1_800_000
#: nothing is moved for a job that has not waited so long
WAITED_MS = 60_000
#: jobs for which moves are sought in one session, and how often that is done
_TRIED = 4
AGAIN_MS = 15_000


class Moves:
    """Costs and gains of moves at one time, in GPU milliseconds. Reads the state, changes nothing."""

    def __init__(self, state: State, now_ms: int) -> None:
        self._state, self._now_ms = state, now_ms
        self._tried: dict[str, None] = {}
        models = {node.registration.gpus[0].model for node in state.nodes.values() if node.status == "up" and node.registration.gpus}
        self._one_model = len(models) < 2
        #: names of the gangs that may be moved, in order of placement
        self.movable: list[str] = [job for job in state.running if self._may_be_moved(state.jobs[job])]

    def _may_be_moved(self, job: StateJob) -> bool:
        since = max(job.running_since_ms, job.evicted_at_ms)
        rests = self._now_ms - since < COOL_DOWN_MS
        return job.state == "running" and job.checkpoint_step >= 0 and job.spec.preemptible and not rests and self._fits_anywhere(job)

    def _fits_anywhere(self, job: StateJob) -> bool:
        """Whether all nodes with room are as good: in the what-if, what runs does not ask for more than that."""
        spec, gang = job.spec, job.spec.gang
        asks = spec.topology or spec.roles or spec.resources.gpu_models or gang.ranks_per_node or is_elastic(spec)
        avoids = any(until > self._now_ms for until in job.avoid.values())
        return not asks and not avoids and (self._one_model or gang.ranks == 1 or not spec.resources.gpus)

    def gain(self, job: Job, gpus_milli: int) -> int:
        """Return what the waiting job gains: its GPUs times the wait until its reservation, or as long as it has waited. 0: nothing is tried."""
        known = self._state.jobs.get(job.name)
        if known is None or self._now_ms - known.since_ms < WAITED_MS:
            return 0
        self._tried[job.name] = None
        if len(self._tried) > _TRIED:
            return 0
        start_ms = known.reserved.start_ms if known.reserved is not None else 0
        wait_ms = start_ms - self._now_ms if start_ms else self._now_ms - known.since_ms
        return max(0, wait_ms) * gpus_milli // 1000

    def cost(self, job: Job) -> int:
        """Return what a gang loses that is moved now."""
        known = self._state.jobs.get(job.name)
        return unsaved_gpu_ms(known, self._now_ms) if known is not None else 0
