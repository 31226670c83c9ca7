"""The job as it stands in the log: validated, with defaults filled in and units in the names.

`jobfile.py` makes it from what people write. An accepted spec never changes; what the scheduler decides about a job is in `state.py`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gangline.core.model.gpushares import GPU, mig_gpus, share_of_memory
from gangline.core.model.topologies import DEFAULT_TOPOLOGY
from gangline.core.model.units import format_size


class Gang(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How many ranks start and end together."""

    ranks: int = 1
    #: fewest ranks that are worth starting; equal to `ranks` for a gang of fixed size
    min_ranks: int = 1
    #: ranks on each node; 0 leaves it to the scheduler
    ranks_per_node: int = 0


class Elastic(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How a gang of several sizes changes its size while it runs."""

    #: it does not grow before it has run for so long at its present size: each change is a restart
    grow_after_s: float = 300.0
    #: sizes are `min_ranks` and so many more, once or several times; 0: `ranks_per_node`, or one rank
    step: int = 0


class Resources(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one rank holds for itself. At most one of `gpus`, `gpu_share_milli`, `gpu_memory_mib` and `mig` is given."""

    #: whole GPUs
    gpus: int = 0
    #: acceptable models in order of preference, upper case as NVML names them ("H100"); empty accepts any
    gpu_models: tuple[str, ...] = ()
    cpus_milli: int = 1000
    memory_mib: int = 0
    #: thousandths of one GPU
    gpu_share_milli: int = 0
    #: of the memory of one GPU
    gpu_memory_mib: int = 0
    #: MIG profile (core/model/gpufacts.py), and how many instances of it
    mig: str = ""
    mig_count: int = 0
    #: the ranks of a gang may be on GPUs of different models
    gpu_model_mix: bool = False

    @property
    def wants_gpus(self) -> bool:
        """Whether it asks for GPUs, or parts of them, at all."""
        return bool(self.gpus or self.gpu_share_milli or self.gpu_memory_mib or self.mig)

    @property
    def shares_gpu(self) -> bool:
        """Whether it asks for a part of one GPU, on which others may have parts too, MIG instances apart."""
        return bool(self.gpu_share_milli or self.gpu_memory_mib)

    @property
    def gpu_words(self) -> str:
        """What one rank asks for, in words; "" for no GPUs."""
        if self.mig:
            return f"{self.mig_count} MIG instance{'' if self.mig_count == 1 else 's'} of {self.mig}"
        if self.gpu_memory_mib:
            return f"{format_size(self.gpu_memory_mib)} of a GPU"
        milli = self.gpu_share_milli or self.gpus * GPU
        return f"{milli / GPU:g} GPU{'' if milli <= GPU else 's'}" if milli else ""

    def charged_milli(self, device_memory_mib: int = 0) -> int:
        """Return the thousandths of GPUs that a queue is charged for one rank; memory counts as its part of a device with so much, 0: not."""
        if self.mig:
            return self.mig_count * mig_gpus(self.mig) * GPU
        if self.gpu_memory_mib:
            return share_of_memory(self.gpu_memory_mib, device_memory_mib) if device_memory_mib else 0
        return self.gpu_share_milli or self.gpus * GPU


class TopologyRequest(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How near each other the ranks are to be, as levels of a topology of the cluster (core/model/topologies.py). Empty: no such wish.

    At most one of `preferred`, `balanced` and `spread` is given. Of a role with replicas, `required` and `preferred` hold for each of them, and
    what is balanced or spread are whole replicas instead of ranks.
    """

    #: all ranks in one domain of this level, or the gang waits
    required: str = ""
    #: in one domain of this level where that is possible, else in as few as possible
    preferred: str = ""
    #: the topology that has these levels
    name: str = DEFAULT_TOPOLOGY
    #: in as few domains of this level as possible, equal numbers in each
    balanced: str = ""
    #: in as many domains of this level as possible, equal numbers in each
    spread: str = ""
    #: how far these numbers may differ, or the gang waits; 0: they are as equal as the room allows, and nothing waits for that
    max_skew: int = 0

    def __bool__(self) -> bool:
        return bool(self.required or self.preferred or self.balanced or self.spread)

    def levels(self) -> tuple[str, ...]:
        """Return the levels that it names."""
        return tuple(level for level in (self.required, self.preferred, self.balanced, self.spread) if level)


class Role(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One kind of rank of a job, or a group of roles that are placed together. core/model/roles.py says what follows from them.

    A role with `roles` is a group: its own `gang`, `resources`, `command` and `env` say nothing.
    """

    #: of no other role of the job
    name: str
    #: ranks of each replica
    gang: Gang = Gang()
    resources: Resources = Resources()
    #: empty: that of the job
    command: tuple[str, ...] = ()
    #: what is added to the variables of the job, or takes their place
    env: dict[str, str] = {}
    topology: TopologyRequest = TopologyRequest()
    #: how many times the role is there, each time whole; and how many of these are worth starting
    replicas: int = 1
    min_replicas: int = 1
    roles: tuple[Role, ...] = ()


class Checkpoint(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where the job keeps its checkpoints, so that ranks are told and lost work can be counted."""

    path: str = ""
    #: how often the job intends to write one; 0 when it did not say
    interval_s: float = 0.0


class Restart(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What happens after a failure (DESIGN section 5)."""

    on_rank_failure: Literal["gang", "rank", "never"] = "gang"
    on_node_failure: Literal["reschedule", "fail"] = "reschedule"
    #: application failures that are restarted inside `window_s`; infrastructure failures are not counted
    max_restarts: int = 10
    window_s: float = 86_400.0
    #: delay before the second application restart in a row; the first one is immediate. It doubles up to `backoff_max_s`
    #: and starts again from nothing once a generation has run for ten minutes
    backoff_initial_s: float = 1.0
    backoff_max_s: float = 300.0
    #: no reported progress for so long is a failure; 0 switches it off. The clock starts with the rank
    hang_timeout_s: float = 0.0
    #: exit codes that end the job at once as failed
    fail_exit_codes: tuple[int, ...] = ()
    #: signals ("SIGABRT") that end the job at once as failed when a rank dies by one
    fail_signals: tuple[str, ...] = ()


class Preemption(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How ranks are asked to stop: `signal`, then SIGKILL to what is left after `grace_s`."""

    signal: str = "SIGTERM"
    grace_s: float = 30.0


#: what is asked of the job that another one depends on: that it succeeded, ended in any way, ended otherwise, or has started
Condition = Literal["after_ok", "after_any", "after_not_ok", "after_start"]


class Dependency(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, gc=False):
    """A job that has to get so far before this one takes part. A whole array counts as one job: its last element decides."""

    #: as it was written (an id, a name, an element) until the job is accepted, the id from then on
    job: str
    when: Condition = "after_ok"


class ArraySpec(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Many jobs from one spec, the elements; core/model/arrays.py reads and writes the notation."""

    #: (first, last, step) of the indices, ascending and apart from each other
    ranges: tuple[tuple[int, int, int], ...]
    #: elements that are live at once; 0: as many as find room
    at_most: int = 0


class Mount(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What ranks see at another place than the node has it."""

    #: absolute path of the node, or the name of one of its volumes, with a path below it after a slash
    source: str
    #: absolute path
    target: str
    read_only: bool = False


class Health(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What becomes of a gang whose hardware goes bad (core/policy/health.py)."""

    #: "move": it is asked to checkpoint and goes on without what is bad; "restart": at once, without being asked; "warn": it is only told, and
    #: moved when it restarts for another reason. Where its work is lost already (the GPU is gone, its memory was wrong) it never waits
    on_unhealthy: Literal["move", "restart", "warn"] = "move"
    #: a rank that is slower than its gang: "report" it, "replace" it, "ignore" it
    stragglers: Literal["report", "replace", "ignore"] = "report"


class JobSpec(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One job: a gang of ranks that start together and end together.

    With `roles`, these say what ranks there are: `gang` and `resources` of the job say nothing then.
    """

    #: what each rank runs; with roles, those that have none of their own
    command: tuple[str, ...]
    #: empty: the job goes by its id
    name: str = ""
    queue: str = "default"
    #: higher runs first; below 100 a job is preemptible unless it says otherwise
    priority: int = 50
    preemptible: bool = True
    gang: Gang = Gang()
    elastic: Elastic = Elastic()
    resources: Resources = Resources()
    topology: TopologyRequest = TopologyRequest()
    roles: tuple[Role, ...] = ()
    env: dict[str, str] = {}
    #: absolute; empty: a private directory of the rank
    workdir: str = ""
    #: running time after which the job is stopped and failed; 0 is no limit
    time_limit_s: float = 0.0
    checkpoint: Checkpoint = Checkpoint()
    restart: Restart = Restart()
    preemption: Preemption = Preemption()
    health: Health = Health()
    #: what an isolated node does with the job: stop it in time for a new generation elsewhere, or keep it running
    on_disconnect: Literal["stop", "keep"] = "stop"
    array: ArraySpec | None = None
    depends_on: tuple[Dependency, ...] = ()
    #: accepted, and not started before somebody releases it
    hold: bool = False
    #: not placed before: unix time in ms, or so long after the submission
    begin_at_ms: int = 0
    begin_after_s: float = 0.0
    #: over by then or not started at all: unix time in ms, or so long after the submission; 0 for both is no deadline
    deadline_ms: int = 0
    deadline_after_s: float = 0.0
    #: name or number of the user that ranks run as; empty: that of the agent
    user: str = ""
    #: container image that ranks run in; empty: they are processes of the node
    image: str = ""
    #: size of /dev/shm in their containers; 0: as the container runtime has it
    shm_mib: int = 0
    mounts: tuple[Mount, ...] = ()
    #: set for tests of withdrawn devices only, which the scheduler itself submits: the node that is tested
    burn_in: str = ""
