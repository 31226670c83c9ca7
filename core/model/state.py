"""What the cluster is, as the log says it: the value that `fold.apply` changes and that `decide` and `project` read.

A job's life, with the event that makes each step:

              job_submitted            gang_placed             node_prepared          gang_released, ranks_started
    (nothing) ─────────────▶ queued ───────────────▶ placed ───────────────▶ preparing ───────────────▶ running
                              ▲  ▲                    ▲                                                   │
                              │  └── gang_requeued ───┼───────────── any of these ◀───────────────────────┤
                              │                       │ gang_placed                                       │
                              │                    restarting ◀───────────── gang_restarting ─────────────┤
                              └── gang_requeued ── preempting ◀───────────── gang_preempting ─────────────┤
                                           placed ◀── gang_placed ── resizing ◀── gang_resizing ──────────┘
    anything but finished ── gang_finished ──▶ finished, and nothing leaves that
    (nothing) ── job_submitted with an array ──▶ array ── elements_queued ──▶ array, and a queued job for each of these elements

A gang of one node goes from placed to running without preparing. What a gang holds on a node is a `Holding` there, from its placement until
the node reports that nothing of it is left; so devices of ranks that are still dying are never given to others.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gangline.core.model.documents import CheckReport, DriverReport, GpuReport, Registration, RestartNotice, StopNotice
from gangline.core.model.events import Outcome, PlacedPart, ReservedPart, ResizeCause
from gangline.core.model.gpushares import GpuShare, GpuUse, charged_milli
from gangline.core.model.health import NODE, Ailment, Death
from gangline.core.model.queues import QueueTree
from gangline.core.model.reservations import Declared
from gangline.core.model.roles import Amounts, amounts, full, leaves, placed
from gangline.core.model.spec import Condition, JobSpec
from gangline.core.model.usage import Usage

#: version of this layout in snapshots
STATE_VERSION = 1

#: label of nodes that take no jobs of their own: a part of a gang moves there when its node is lost or unhealthy (core/policy/spares.py)
SPARE_LABEL = "gangline.io/spare"

#: finished jobs that stay in the state; older ones are only in the log and its archive
FINISHED_KEPT = 10_000
#: finished elements of one live array that stay in the state
ELEMENTS_KEPT = 1_000

#: positions of elements fit into so many bits (arrays.MAX_ELEMENTS)
ELEMENT_BITS = 20

#: "array": a job array that has not ended. It is never placed itself; its elements are jobs, with states of their own
JobState = Literal["queued", "placed", "preparing", "running", "restarting", "preempting", "resizing", "finished", "array"]

#: ranges of positions in an array, (first, last), ascending and apart from each other
Runs = list[tuple[int, int]]


class Rank(msgspec.Struct, omit_defaults=True, gc=False):
    """One rank of the gang's current placement."""

    gpus: tuple[int, ...]
    #: generation in which it (last) starts; lower than the gang's after another rank restarted alone
    generation: int
    #: index of its leaf (core/model/roles.py)
    leaf: int = 0
    #: what it has of its GPUs, None: the whole of each
    share: GpuShare | None = None
    started: bool = False
    exited: bool = False
    #: exit status, or -N for signal N
    exit_code: int = 0
    cause: str = ""
    message: str = ""
    #: log time when it ended, as near as its node could tell; and when that was reported
    exited_at_ms: int = 0
    ended_ms: int = 0


class Part(msgspec.Struct, omit_defaults=True, gc=False):
    """What of a gang is on one node."""

    #: by number, ascending
    ranks: dict[int, Rank]
    #: groups on the parts before it: of each part, as many as roles have ranks there
    groups_before: int = 0
    prepared: bool = False
    address: str = ""
    port: int = 0
    #: why this node cannot start its part; empty while it can
    failed: str = ""
    acknowledged: bool = False
    #: its ranks are dead with their node
    dead: bool = False


class Resize(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The next placement of a gang that goes on with another number of ranks (events.GangResizing). What of it is new is held already."""

    parts: tuple[PlacedPart, ...]
    role_sizes: tuple[int, ...]
    cause: ResizeCause
    message: str
    lost_ranks: tuple[int, ...] = ()
    lost_nodes: tuple[str, ...] = ()
    why: str = ""

    @property
    def world_size(self) -> int:
        """Ranks of the next generation."""
        return sum(len(p.ranks) for p in self.parts)


class Deferral(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Why a queued gang is not placed: the recorded witness."""

    code: str
    message: str
    need: dict[str, int] = {}
    have: dict[str, int] = {}
    index: int = 0


class Elements(msgspec.Struct, omit_defaults=True, gc=False):
    """How far an array is. Positions count from 0 in the order of the indices, so that every array is one run of them.

    Only live elements, and the last that ended, are jobs; of the others there is only what is here, so an array costs what runs of it.
    """

    #: the first so many have been queued, or given up before that
    opened: int = 0
    #: ids of the elements that are jobs and have not ended
    live: dict[str, None] = {}
    #: how many of them wait in the queue, and how many elements have ever run
    queued: int = 0
    started: int = 0
    succeeded: Runs = []
    failed: Runs = []
    cancelled: Runs = []
    #: exit code of the first that failed
    exit_code: int = 0
    #: ids of elements that have ended and are still known, oldest first; empty once the array has ended
    kept: list[str] = []


class Job(msgspec.Struct, omit_defaults=True, gc=False):
    """One job. All times are log time."""

    id: str
    spec: JobSpec
    #: order of submission
    number: int
    submitted_at_ms: int
    submitted_index: int
    user: str = ""
    idempotency_key: str = ""
    body_digest: str = ""
    trace_id: str = ""

    state: JobState = "queued"
    #: since when it is in this state
    since_ms: int = 0
    #: index of the last entry that changed it
    index: int = 0
    #: rises with each placement and each restart; 0 before the first
    generation: int = 0
    #: current placement by node, in order of node rank; empty unless placed
    parts: dict[str, Part] = {}
    #: ranks of the current placement
    world_size: int = 0
    #: ranks of each of its leaves there; empty: see roles.placed
    role_sizes: tuple[int, ...] = ()
    #: nodes on which it holds anything, dying ranks of older generations included
    held_nodes: dict[str, None] = {}
    released: bool = False
    master_addr: str = ""
    master_port: int = 0

    #: since when its nodes have had all that they need for the next step of its start
    placed_at_ms: int = 0
    #: first time that all ranks ran, and when the current generation did
    started_at_ms: int = 0
    running_since_ms: int = 0
    ended_at_ms: int = 0
    #: running time of earlier generations
    ran_ms: int = 0

    stop: str = ""
    stop_by: str = ""
    outcome: Outcome | Literal[""] = ""
    cause: str = ""
    message: str = ""
    exit_code: int = 0

    deferral: Deferral | None = None
    #: not placed before this time
    not_before_ms: int = 0
    #: nodes not to use before a time
    avoid: dict[str, int] = {}
    notice: StopNotice | None = None
    #: set exactly while it is resizing
    resize: Resize | None = None

    #: why the next, or the current, generation exists
    restart: RestartNotice | None = None
    #: nodes and size of the generation before
    previous_nodes: tuple[str, ...] = ()
    restarts: int = 0
    #: placements in a row that a node could not prepare
    prepare_failures: int = 0
    #: times of the application failures that count against the budget, and how many came in a row
    failures_ms: list[int] = []
    failures_in_row: int = 0

    #: ranks that were found to be slower than the others in this generation
    slow: tuple[int, ...] = ()

    #: last logged step, and of which generation and when
    step: int = -1
    step_generation: int = 0
    step_at_ms: int = 0
    checkpoint_step: int = -1
    checkpoint_path: str = ""
    checkpoint_at_ms: int = 0
    #: every node has said, in this generation, that all is saved that was worth saving
    saved_at_ms: int = 0
    #: the job that it was asked to make room for
    beneficiary: str = ""
    reserved: Reserved | None = None
    #: the first start that it was promised since it waits
    promised_ms: int = 0
    #: the last job that it was evicted for, and when
    evicted_for: str = ""
    evicted_at_ms: int = 0
    #: GPU time of its own since the last checkpoint, lost whenever a generation ended before the job did; and lost by others for its sake
    lost_gpu_ms: int = 0
    cost_gpu_ms: int = 0

    #: of an element: the id of its array, its index, and its position in the order of the indices
    array: str = ""
    array_index: int = 0
    position: int = 0
    #: of an array: how far it is
    elements: Elements | None = None
    #: jobs that have to get somewhere first, and where; what is met is taken out
    waits_for: dict[str, Condition] = {}
    #: why a dependency can never be met; "" while it can
    dependency_failed: str = ""
    #: not to be started until it is released, who said so and why; `held_requeue`: nor to go on
    held: bool = False
    held_by: str = ""
    held_reason: str = ""
    held_requeue: bool = False
    #: not placed before, and ended at the latest; 0: no such time
    begin_at_ms: int = 0
    deadline_ms: int = 0
    #: when it was last released, or its last dependency was met; and how long it has waited for its earlier placements (policy/ageing.py)
    cleared_ms: int = 0
    waited_ms: int = 0

    @property
    def order(self) -> int:
        """Age rank among all jobs: by order of submission, the elements of an array by position."""
        return (self.number << ELEMENT_BITS) + self.position

    def nodes(self) -> list[str]:
        """Nodes of the current placement in order of node rank."""
        return list(self.parts)

    def rank(self, rank: int) -> Rank | None:
        """The rank in the current placement."""
        for part in self.parts.values():
            if rank in part.ranks:
                return part.ranks[rank]
        return None

    def sizes(self) -> tuple[int, ...]:
        """Ranks of each leaf (core/model/roles.py): of the placement that it has, or had last; of all that it asks for before the first."""
        return placed(self.spec, self.role_sizes, self.world_size) if self.world_size else full(self.spec)

    def holds(self) -> Amounts:
        """What its ranks hold, see `sizes`."""
        held = amounts(self.spec, self.sizes())
        if self.parts and any(leaf.resources.gpu_memory_mib for leaf in leaves(self.spec)):  # how much that is depends on the GPUs
            ranks = (rank for part in self.parts.values() for rank in part.ranks.values())
            held = held._replace(gpus_milli=sum(charged_milli(rank.gpus, rank.share) for rank in ranks))
        return held

    @property
    def lingering(self) -> list[str]:
        """Nodes outside of the current placement on which ranks of an older generation may still run; none starts before they are gone."""
        return [n for n in self.held_nodes if n not in self.parts and n not in self.pending_nodes]

    @property
    def pending_nodes(self) -> tuple[str, ...]:
        """Nodes that are held for its next size, and on which it has never run anything."""
        return tuple(p.node for p in self.resize.parts if p.node not in self.parts) if self.resize is not None else ()

    @property
    def active(self) -> bool:
        """Neither waiting in a queue nor over."""
        return self.state not in ("queued", "finished", "array")


class Holding(msgspec.Struct, omit_defaults=True, gc=False):
    """What one job holds on one node, its dying ranks included."""

    #: whole ones
    gpus: tuple[int, ...]
    cpus_milli: int
    memory_mib: int
    #: parts of others, by GPU
    shares: tuple[GpuUse, ...] = ()
    #: index of the entry since which the node should have none of it, 0 while it is wanted
    leaving_since: int = 0


class Node(msgspec.Struct, omit_defaults=True, gc=False):
    """One node."""

    registration: Registration
    status: Literal["up", "lost"] = "up"
    joined_at_ms: int = 0
    lost_at_ms: int = 0
    cordoned: bool = False
    draining: bool = False
    #: gangs that are not preemptible are asked to move from then on; 0: never
    drain_deadline_ms: int = 0
    reason: str = ""
    #: by job, in order of placement
    holdings: dict[str, Holding] = {}
    #: GPUs of which nothing is held
    free_gpus: tuple[int, ...] = ()
    #: what is held of GPUs that are shared or partitioned
    parted: dict[int, GpuUse] = {}
    free_cpus_milli: int = 0
    free_memory_mib: int = 0
    #: index of the last entry that changed it
    index: int = 0
    #: by UUID of its GPUs, and under "" the node as a whole: those of which anything is known
    health: dict[str, Ailment] = {}
    #: last reports of GPUs that had something to report, by UUID, and of their driver
    reports: dict[str, GpuReport] = {}
    driver: DriverReport | None = None
    checks: tuple[CheckReport, ...] = ()
    #: UUIDs of GPUs that its agent says cannot be used. `registration` counts those that are withdrawn as not healthy, too
    broken: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Its name."""
        return self.registration.node

    @property
    def withdrawn(self) -> bool:
        """Whether it is withdrawn as a whole for its health."""
        return bool(self.health) and NODE in self.health and self.health[NODE].withdrawn

    @property
    def spare(self) -> bool:
        """Whether it is kept for gangs that lose a node (label `gangline.io/spare`)."""
        return self.registration.labels.get(SPARE_LABEL, "").lower() not in ("", "0", "no", "false")

    @property
    def schedulable(self) -> bool:
        """May take new ranks."""
        return self.status == "up" and not self.cordoned and not self.draining and not self.withdrawn


class Reserved(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where a waiting gang is expected to start, and when: others are kept off unless they end before."""

    parts: tuple[ReservedPart, ...]
    #: log time, 0 when nobody knows
    start_ms: int = 0
    message: str = ""
    index: int = 0


class Earmark(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Room is being made for a waiting job, which is served before all others until it has its place, or until this ends."""

    #: log time
    until_ms: int
    #: gangs that make the room
    victims: tuple[str, ...] = ()
    #: of the last entry that made it
    index: int = 0


class Brake(msgspec.Struct, omit_defaults=True, gc=False):
    """The mass-loss brake (DESIGN section 3)."""

    on: bool = False
    message: str = ""
    since_ms: int = 0
    #: after it was cleared, it does not go on again before this time
    armed_from_ms: int = 0


class Scratch:
    """What changed since the shell last looked. Not part of the state's value: no digest, no snapshot, no decision depends on it alone.

    `jobs` are those whose situation may ask for a decision. Looking at more of them than these changes no decision (tests/laws).
    """

    def __init__(self) -> None:
        self.jobs: dict[str, None] = {}
        self.nodes: dict[str, None] = {}
        #: heap of (due in log ms, job): when the job must be looked at again, at the latest; kept by policy.decide
        self.timers: list[tuple[int, str]] = []
        #: a gang joined the queue, or capacity came free, since the queue was last gone through in vain
        self.queue_dirty = True
        #: log time of the last look at the queues
        self.looked_ms = 0
        #: log time at which moves were last sought (policy/moves.py)
        self.moves_ms = -1 << 60
        #: log time at which a reservation was last planned, by job (policy/reserve.py)
        self.planned: dict[str, int] = {}
        #: nodes whose health may ask for a decision, and a heap of (due in log ms, node): kept by policy.health
        self.unwell: dict[str, None] = {}
        self.health_timers: list[tuple[int, str]] = []
        #: jobs on which the rules failed, and how: for the shell to report
        self.faults: dict[str, str] = {}
        #: jobs for which an eviction was not made because it would break what the policy promises (policy/potential.py), and how
        self.withheld: dict[str, str] = {}
        #: jobs and nodes that are to be taken into the mirror anew (policy/mirror.py), or everything
        self.moved: dict[str, None] = {}
        self.moved_nodes: dict[str, None] = {}
        self.everything_moved = True
        self.mirror: object = None
        #: jobs that the rules tripped over, which are left out until another scheduler leads, and how
        self.poison: dict[str, str] = {}
        #: (queue, user) → by how much the event that is being folded changes what they hold; empty between events
        self.held: dict[tuple[str, str], tuple[int, int, int]] = {}

    def nobody_decides(self) -> None:
        """Forget what has changed: this is a follower, and who decides looks at everything once."""
        self.jobs.clear()
        self.nodes.clear()
        self.unwell.clear()
        self.moved.clear()
        self.moved_nodes.clear()
        self.everything_moved = True


class State(msgspec.Struct):
    """The whole cluster at one log index. Only `fold.apply` may change it."""

    #: last entry that is folded in, its time, epoch and digest
    index: int = 0
    at_ms: int = 0
    epoch: int = 0
    digest: bytes = bytes(32)
    leader: str = ""

    jobs: dict[str, Job] = {}
    nodes: dict[str, Node] = {}
    brake: Brake = msgspec.field(default_factory=Brake)
    #: the declared queues; every live job is in one of its leaves once there are any
    queues: QueueTree = msgspec.field(default_factory=QueueTree)
    #: what queues and users have used, where the past counts
    usage: Usage = msgspec.field(default_factory=Usage)
    submitted: int = 0
    #: idempotency key → job id, for the jobs above
    keys: dict[str, str] = {}
    #: name → id of the live job that has it
    names: dict[str, str] = {}
    #: finished jobs, oldest first
    finished: dict[str, None] = {}
    #: by the job that room is made for, in the order in which that began
    earmarks: dict[str, Earmark] = {}
    #: declared by people, by name
    reservations: dict[str, Declared] = {}
    #: jobs with a reservation, in the order in which they got it
    reserved: dict[str, None] = {}
    #: running times of the last jobs of a kind that succeeded (core/model/runtimes.py)
    runtimes: dict[str, tuple[int, ...]] = {}
    #: ranks that died and took their gangs with them, of each job and node the last one, oldest first (core/policy/blame.py)
    deaths: list[Death] = []
    #: by queue of the job for whose sake it was lost: GPU time of evicted gangs since their last checkpoints
    lost_gpu_ms: dict[str, int] = {}
    #: rises when something that could help a waiting gang has changed
    capacity_version: int = 0

    #: (-priority, order, id) of the queued jobs, sorted: derived, rebuilt on load
    queue: list[tuple[int, int, str]] = []
    #: ids of active jobs in order of placement: derived
    running: dict[str, None] = {}
    #: ids of arrays that have not ended, in order of submission: derived
    arrays: dict[str, None] = {}
    #: id → ids of the jobs that wait for it, or, of an array, for one of its elements: derived
    dependents: dict[str, dict[str, None]] = {}
    #: name → id of the newest job of that name that is known: derived
    named: dict[str, str] = {}
    scratch: Scratch = msgspec.field(default_factory=Scratch)
