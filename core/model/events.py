"""All events of the log. Facts are in the past tense; what the policy decided is marked *decision*.

Rules of change (checked by tests/golden): a new optional field with a default keeps the version; anything else is version + 1 with a pure
upcast of the old body in `UPCASTS`, kept for ever, and a recorded log in tests/golden. Names are stored, so they never change.

A *part* of a gang is what of it is on one node. Times are log time in ms (see leader/clock.py), durations in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from gangline.core.model.documents import CheckReport, DriverReport, GpuReport, Registration
from gangline.core.model.gpushares import GpuShare
from gangline.core.model.health import Action, HealthState, Symptom
from gangline.core.model.queues import QueueSpec
from gangline.core.model.reservations import Reservation
from gangline.core.model.spec import JobSpec
from gangline.core.model.topologies import Topology

FailureClass = Literal["application", "infrastructure"]
ResizeCause = Literal["grow", "shrink", "node_lost", "prepare_failed"]
Outcome = Literal["succeeded", "failed", "cancelled"]


class LogEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Base of all events."""

    NAME: ClassVar[str] = ""
    VERSION: ClassVar[int] = 1


REGISTRY: dict[str, type[LogEvent]] = {}
#: (name, version) → pure function from a body of that version to one of the next
UPCASTS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}

E = TypeVar("E", bound=type[LogEvent])


def _event(name: str, version: int = 1) -> Callable[[E], E]:
    def register(cls: E) -> E:
        if name in REGISTRY:
            raise ValueError(f"event name {name} is taken by {REGISTRY[name].__name__}")
        cls.NAME, cls.VERSION = name, version
        REGISTRY[name] = cls
        return cls

    return register


class PlacedRank(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One rank and the devices it gets, by index on the node, ascending; `share` says what of them, None: the whole of each."""

    rank: int
    gpus: tuple[int, ...]
    share: GpuShare | None = None


class PlacedPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What of a gang is on one node. Its ranks ascend, and the parts are in the order of their lowest ranks: that is the order of node ranks.

    The ranks of one role ascend through the parts. Those of another role may begin again on the first node.
    """

    node: str
    ranks: tuple[PlacedRank, ...]


class RankExit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one rank ended: `code` is an exit status or -N for signal N, `cause` as in documents.ObservedRank, `at_ms` log time.

    Older entries have the wall clock of the node there.
    """

    rank: int
    generation: int
    code: int
    cause: str = ""
    message: str = ""
    at_ms: int = 0


# ---------------------------------------------------------------- leadership


@_event("leader_elected")
class LeaderElected(LogEvent, frozen=True, kw_only=True, gc=False):
    """A scheduler took over. The epoch in the frame is its fencing token, and the first with it."""

    scheduler: str


@_event("leader_resigned")
class LeaderResigned(LogEvent, frozen=True, kw_only=True, gc=False):
    """The leader hands over on purpose; the last event of its epoch."""

    scheduler: str


@_event("brake_set")
class BrakeSet(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: so many nodes vanished at once that the leader suspects itself. While on, nothing is declared lost or moved."""

    on: bool
    message: str
    by: str = ""


# ---------------------------------------------------------------- jobs


@_event("job_submitted")
class JobSubmitted(LogEvent, frozen=True, kw_only=True, gc=False):
    """A job was accepted; its client has, or will get, the job id as the answer."""

    job: str
    spec: JobSpec
    user: str = ""
    #: the client's key and the digest of its request: the same key with the same body is the same submission, for as long as the job is known
    idempotency_key: str = ""
    body_digest: str = ""
    trace_id: str = ""


@_event("job_stop_requested")
class JobStopRequested(LogEvent, frozen=True, kw_only=True, gc=False):
    """Somebody wants the job to end."""

    job: str
    by: str = ""
    reason: str = ""


@_event("job_held")
class JobHeld(LogEvent, frozen=True, kw_only=True, gc=False):
    """Somebody wants the job not to be started until it is released. One that runs goes on, unless `requeue`: then it is asked to leave."""

    job: str
    by: str = ""
    reason: str = ""
    requeue: bool = False


@_event("job_released")
class JobReleased(LogEvent, frozen=True, kw_only=True, gc=False):
    """The job may be started again as far as holding it goes."""

    job: str
    by: str = ""
    reason: str = ""


@_event("elements_queued")
class ElementsQueued(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: these elements of an array become jobs, the next ones in order; the others stay a number in the array."""

    job: str
    indices: tuple[int, ...]


@_event("gang_placed")
class GangPlaced(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: the whole gang gets its nodes and devices, as a new generation."""

    job: str
    generation: int
    parts: tuple[PlacedPart, ...]
    reason: str = ""
    #: ranks of each leaf of the job's roles (core/model/roles.py) when fewer are there than it asks for; empty for a job of one role
    role_sizes: tuple[int, ...] = ()


@_event("gangs_deferred")
class GangsDeferred(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: these gangs cannot be placed now, all for the same reason. Written when the reason changes, not every cycle."""

    jobs: tuple[str, ...]
    #: machine-readable; `gangline explain` has a sentence for each
    code: str
    message: str
    need: dict[str, int] = {}
    have: dict[str, int] = {}


class ReservedPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What of a reservation is on one node: whole devices, CPU and memory."""

    node: str
    gpus: int
    cpus_milli: int
    memory_mib: int


@_event("gang_reserved")
class GangReserved(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: this waiting gang is expected to start then and there, so the room is kept for it. Without parts: no longer."""

    job: str
    #: log time, 0 when nobody knows when what it waits for ends
    start_ms: int = 0
    parts: tuple[ReservedPart, ...] = ()
    message: str = ""


@_event("gang_released")
class GangReleased(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: every node has prepared; all ranks start now and meet at this address."""

    job: str
    generation: int
    master_addr: str
    master_port: int


@_event("gang_restarting")
class GangRestarting(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: all ranks end and start again where they are, not before `not_before_ms`."""

    job: str
    #: the generation that failed
    generation: int
    cause: str
    failure_class: FailureClass
    message: str
    lost_ranks: tuple[int, ...] = ()
    not_before_ms: int = 0


@_event("rank_restarting")
class RankRestarting(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: only these ranks start again (on_rank_failure: rank), as generation + 1 of the gang."""

    job: str
    #: the generation that failed
    generation: int
    ranks: tuple[int, ...]
    cause: str
    failure_class: FailureClass
    message: str


@_event("gang_preempting")
class GangPreempting(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: the gang is asked to checkpoint and leave by `deadline_ms`; then it is queued again."""

    job: str
    generation: int
    cause: str
    message: str
    deadline_ms: int
    grace_s: float
    #: the waiting job that gets the room: it is kept for it (State.earmarks)
    beneficiary: str = ""
    #: it is to have another place at once, which is kept for it as well
    moved: bool = False


@_event("gang_resizing")
class GangResizing(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: the gang goes on with another number of ranks. Its ranks are asked to checkpoint by `deadline_ms`; gang_placed follows.

    New places are held for it from now on; what it gives up comes free when its old ranks have left. Said again, the newest parts count.
    """

    job: str
    #: the generation that is to end
    generation: int
    #: where the next generation runs, ranks that stay included
    parts: tuple[PlacedPart, ...]
    cause: ResizeCause
    message: str
    deadline_ms: int
    grace_s: float
    #: as in gang_placed
    role_sizes: tuple[int, ...] = ()
    #: the job for which it gives places up, "" when there is none
    beneficiary: str = ""
    lost_ranks: tuple[int, ...] = ()
    lost_nodes: tuple[str, ...] = ()
    #: as in gang_requeued
    avoid: tuple[tuple[str, int], ...] = ()
    forgive: bool = False
    #: the cause that ranks are told, where `cause` says less: health, straggler
    why: str = ""


@_event("gang_requeued")
class GangRequeued(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: the gang gives its nodes back whole and waits for new ones."""

    job: str
    #: the generation that ended
    generation: int
    cause: str
    failure_class: FailureClass
    message: str
    lost_ranks: tuple[int, ...] = ()
    lost_nodes: tuple[str, ...] = ()
    #: nodes that this gang is not placed on again before the time given
    avoid: tuple[tuple[str, int], ...] = ()
    not_before_ms: int = 0
    #: the previous restart was this failure in disguise (its ranks died because the node did): it is taken off the job's budget
    forgive: bool = False
    #: the waiting job that gets the room, where the gang had no ranks to ask and left at once
    beneficiary: str = ""
    #: since when the ranks do not work; 0 leaves that to the fold
    failed_at_ms: int = 0


@_event("gang_finished")
class GangFinished(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: the job is over, for ever."""

    job: str
    outcome: Outcome
    #: completed, rank_failed, restarts_exhausted, stopped, time_limit, node_lost, …
    cause: str
    message: str
    exit_code: int = 0


# ---------------------------------------------------------------- what agents report


@_event("node_joined")
class NodeJoined(LogEvent, frozen=True, kw_only=True, gc=False):
    """A node registered, came back, or changed what it says of itself."""

    registration: Registration


@_event("node_lost")
class NodeLost(LogEvent, frozen=True, kw_only=True, gc=False):
    """The node's lease is gone, so its agent has ended its ranks (all but those of jobs with `on_disconnect: keep`).

    `proven`: nothing that ran there can still run, since the node came back rebooted or as another.
    """

    node: str
    cause: str
    message: str
    proven: bool = False


@_event("node_prepared")
class NodePrepared(LogEvent, frozen=True, kw_only=True, gc=False):
    """The node is ready to start its part, and holds this rendezvous port."""

    job: str
    generation: int
    node: str
    address: str = ""
    port: int = 0


@_event("prepare_failed")
class PrepareFailed(LogEvent, frozen=True, kw_only=True, gc=False):
    """The node cannot start its part."""

    job: str
    generation: int
    node: str
    message: str


@_event("ranks_started")
class RanksStarted(LogEvent, frozen=True, kw_only=True, gc=False):
    """These ranks of the node's part are executing. A rank whose end is reported first counts as started."""

    job: str
    generation: int
    node: str
    ranks: tuple[int, ...]


@_event("ranks_exited")
class RanksExited(LogEvent, frozen=True, kw_only=True, gc=False):
    """These ranks have ended and nothing of them is left on the node."""

    job: str
    node: str
    exits: tuple[RankExit, ...]


@_event("part_released")
class PartReleased(LogEvent, frozen=True, kw_only=True, gc=False):
    """Nothing of the job is left on the node but its current generation, if it has one there: other devices it held are free."""

    job: str
    node: str


@_event("progress_reported")
class ProgressReported(LogEvent, frozen=True, kw_only=True, gc=False):
    """A step that the job reported: the first of each generation and then at most one a minute."""

    job: str
    generation: int
    step: int


@_event("checkpoint_reported")
class CheckpointReported(LogEvent, frozen=True, kw_only=True, gc=False):
    """The job wrote a checkpoint that a restart can use."""

    job: str
    generation: int
    step: int
    path: str = ""


@_event("stop_acknowledged")
class StopAcknowledged(LogEvent, frozen=True, kw_only=True, gc=False):
    """Every rank on the node has saved what it wants to save."""

    job: str
    generation: int
    node: str


@_event("health_reported")
class HealthReported(LogEvent, frozen=True, kw_only=True, gc=False):
    """Something was seen of a GPU, or of a node as a whole (`device` ""), that says how well it is; or it is seen no longer."""

    node: str
    #: its UUID
    device: str = ""
    #: what is new in the report (core/model/health.py)
    symptoms: tuple[Symptom, ...] = ()
    #: the whole report, with which the next one is compared; None: there is none, as for a GPU that has nothing to report any more
    report: GpuReport | None = None
    #: of a node: how the driver of its GPUs is
    driver: DriverReport | None = None
    #: of a node: the site's own checks that are not well
    checks: tuple[CheckReport, ...] = ()


@_event("rank_slow")
class RankSlow(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: a rank is slower than its gang (core/policy/stragglers.py): milliseconds for one step, and the median of all ranks."""

    job: str
    generation: int
    rank: int
    node: str
    pace_ms: int
    median_ms: int
    #: by how many times the spread of the gang (median absolute deviation) it is slower, in tenths
    score_tenths: int = 0


# ---------------------------------------------------------------- administration


@_event("health_changed")
class HealthChanged(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: a GPU, or a node as a whole (`device` ""), is in another state of health; by the rules, or by somebody's word (`by`)."""

    node: str
    device: str = ""
    state: HealthState
    #: code of the symptom that decided, or "operator"
    cause: str
    message: str
    #: what has to be done before it is used again
    action: Action = ""
    #: log time before which it does not leave this state by itself, 0: not by itself at all
    until_ms: int = 0
    #: the job that tests it
    burn_in: str = ""
    by: str = ""
    #: what was seen before counts no longer
    clear: bool = False


@_event("node_administered")
class NodeAdministered(LogEvent, frozen=True, kw_only=True, gc=False):
    """An operator's word about a node.

    cordon: no new ranks. drain: cordon, and gangs are asked to move (those that are not preemptible only after `deadline_s`, 0: never).
    confirm_dead: an unreachable node is off for certain, so gangs with `on_disconnect: keep` may be moved.
    """

    node: str
    action: Literal["cordon", "uncordon", "drain", "undrain", "confirm_dead"]
    by: str = ""
    reason: str = ""
    deadline_s: float = 0.0


@_event("reservation_declared")
class ReservationDeclared(LogEvent, frozen=True, kw_only=True, gc=False):
    """Somebody keeps nodes for some jobs, or for maintenance, from now or later on."""

    reservation: Reservation


@_event("reservation_begun")
class ReservationBegun(LogEvent, frozen=True, kw_only=True, gc=False):
    """*Decision*: its start has come; whoever has to leave for it is asked to, once."""

    name: str


@_event("reservation_removed")
class ReservationRemoved(LogEvent, frozen=True, kw_only=True, gc=False):
    """It is over, or somebody has removed it."""

    name: str
    by: str = ""
    reason: str = ""


@_event("queues_declared")
class QueuesDeclared(LogEvent, frozen=True, kw_only=True, gc=False):
    """The queues are these from now on: the whole tree, every queue after its parent (core/model/queues.py). So are the topologies."""

    queues: tuple[QueueSpec, ...]
    by: str = ""
    reason: str = ""
    topologies: tuple[Topology, ...] = ()
