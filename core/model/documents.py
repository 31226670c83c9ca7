"""What leader and agents say to each other, as documents in the store: state, never events, so nothing is lost while nobody listens.

    leader  ── nodes/<id>/desired  ──▶  agent        what the node should run
    leader  ── jobs/<id>           ──▶  agent        the immutable spec of a job that the node runs (a JobSpec)
    agent   ── nodes/<id>/alive    ──▶  leader       who the node is and what it has; bound to the agent's lease
    agent   ── nodes/<id>/observed ──▶  leader       what the node runs and what ended and how

All are msgpack of `msgspec.to_builtins`, see `codec.pack`. `VERSION` rises when a change is not readable by the other side.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gangline.core.model.gpushares import GpuShare

VERSION = 1


class Gpu(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One GPU of a node, identified by `uuid`; `index` is its position on this node and may change with a reboot."""

    index: int
    uuid: str
    model: str
    memory_mib: int = 0
    healthy: bool = True
    #: name of the layout (gpufacts.MIG_LAYOUTS) into which MIG can partition it here; empty: it cannot be partitioned
    mig: str = ""
    #: where it hangs, as groups from the coarsest to the finest, such as (NUMA node, PCIe switch): GPUs that agree further are joined by faster
    #: links. All GPUs of a node have as many; empty: not known, or all are equally near
    links: tuple[int, ...] = ()
    #: where it is on the host: PCI bus id (domain:bus:device.function) and NUMA node, "" and -1: not known
    pci: str = ""
    numa: int = -1


class Registration(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The value of `nodes/<id>/alive`: the node introduces itself."""

    node: str
    #: made once per agent state directory and kept there; another agent with this node's name has another one and is refused
    identity: str
    #: changes with each boot of the host; ranks of another boot are dead
    boot_id: str
    #: host name or address at which other nodes reach ranks on this one
    address: str
    #: where the agent serves logs and metrics, "" when it does not
    agent_url: str
    gpus: tuple[Gpu, ...]
    cpus_milli: int
    memory_mib: int
    labels: dict[str, str] = {}
    agent_version: str = ""
    #: time to live of the agent's lease
    lease_ttl_s: float = 0.0
    #: another one with each registration that is not the renewal of a living lease, see `Desired.session`
    session: str = ""
    version: int = VERSION


class DesiredRank(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, gc=False):
    """One rank on this node. A running rank of a lower generation is stopped first, one of the same generation is left alone."""

    rank: int
    #: index among the ranks of its role on this node
    local_rank: int
    #: device indices on this node, ascending
    gpus: tuple[int, ...]
    #: the generation in which this rank was (last) started
    generation: int
    #: what it gets of its devices, None: the whole of each. MIG instances that are not there yet are made before it starts
    share: GpuShare | None = None
    #: position of its role in `DesiredGang.roles`, its number among the ranks of that role, and which replica of the role it is in
    role: int = 0
    role_rank: int = 0
    replica: int = 0


class DesiredRole(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, gc=False):
    """One role of a gang. A job without roles has one, without a name."""

    name: str
    #: its ranks on all nodes
    ranks: int
    #: its ranks on this node are a *group*: the position of that among all groups of the gang, -1 where there is none here
    group: int = -1
    #: host of its first rank, "" where it has none
    leader: str = ""


class RestartNotice(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Why this generation exists: what a training job reads after a restart."""

    #: machine-readable: rank_failed, node_lost, prepare_failed, hang, drain, preempted, resize, operator
    cause: str
    #: one sentence for people
    message: str
    #: "application" or "infrastructure"
    failure_class: str
    #: ranks that failed or were on lost nodes, ascending
    lost_ranks: tuple[int, ...] = ()
    lost_nodes: tuple[str, ...] = ()
    #: nodes of this generation that the previous one did not use
    new_nodes: tuple[str, ...] = ()
    old_world_size: int = 0
    new_world_size: int = 0
    #: log time of the failure
    failed_at_ms: int = 0
    #: last checkpoint that the job reported: step and path; step -1 when there was none
    checkpoint_step: int = -1
    checkpoint_path: str = ""
    #: restarts so far, this one included
    restarts: int = 0


class StopNotice(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The gang is asked to checkpoint and leave: preemption, drain, resize. It may acknowledge at once; at the deadline it is stopped."""

    cause: str
    message: str
    deadline_ms: int
    #: seconds that the gang was given when the notice was decided; agents count it by their own monotonic clock
    grace_s: float
    #: ranks that the next generation is to have, 0 when that is not known
    new_world_size: int = 0


class HealthNotice(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, gc=False):
    """What is not well of the devices that a gang has on a node, or of the node (`device` -1)."""

    #: its index on this node
    device: int
    #: suspect, unhealthy, ... (core/model/health.py)
    state: str
    message: str


class DesiredGang(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """This node's part of one gang.

    `phase` "prepare": stop older generations, check and reserve everything, start nothing. "run": have these ranks running, and start each at
    most once (a rank that ended stays ended). A gang that is not in the document is stopped and forgotten.
    """

    job: str
    generation: int
    phase: Literal["prepare", "run"]
    ranks: tuple[DesiredRank, ...]
    world_size: int
    #: position of this node among the gang's nodes, and how many there are
    node_rank: int
    nodes: int
    #: set from "run" on in gangs of several nodes; a gang of one node leaves both to the agent (port 0)
    master_addr: str = ""
    master_port: int = 0
    restart: RestartNotice | None = None
    notice: StopNotice | None = None
    #: roles of the job that have ranks, in order; and the groups of all nodes: for each node, as many as roles have ranks there
    roles: tuple[DesiredRole, ...] = ()
    groups: int = 0
    #: ranks are told of each once
    health: tuple[HealthNotice, ...] = ()


class Desired(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The value of `nodes/<id>/desired`. Agents refuse a lower epoch or index than they have seen."""

    node: str
    #: index of the log entry that this is true at, and the epoch of the leader that wrote it
    index: int
    epoch: int
    gangs: tuple[DesiredGang, ...] = ()
    #: the node is being drained: new ranks will not come
    draining: bool = False
    #: that of the registration which this was decided for. An agent starts nothing on a document of another one: while it was away, what
    #: it was to start may have been started elsewhere
    session: str = ""
    version: int = VERSION


class ObservedRank(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, gc=False):
    """One rank as the node sees it."""

    rank: int
    generation: int
    state: Literal["starting", "running", "stopping", "exited"]
    pid: int = 0
    #: exit status 0 to 255, or -N when signal N ended it; meaningless before "exited"
    exit_code: int = 0
    #: why it ended when exit status and signal do not tell: "" or start_failed, hang, oom, stopped (we ended it), fenced (ended by the
    #: dead man's switch), node_restart (gone with a reboot), lost (ended while nobody held its status)
    cause: str = ""
    message: str = ""
    started_at_ms: int = 0
    exited_at_ms: int = 0


class ObservedGang(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """This node's part of one gang as it is."""

    job: str
    generation: int
    #: "stopping": ranks of a gang that is no longer desired, or of an older generation, are still there and hold their devices
    phase: Literal["preparing", "prepared", "prepare_failed", "running", "stopping"]
    ranks: tuple[ObservedRank, ...] = ()
    #: rendezvous address and port reserved on this node, when prepared
    address: str = ""
    port: int = 0
    #: why preparing failed, for people
    message: str = ""
    #: highest step that a rank here reported, -1 for none, and the last checkpoint
    step: int = -1
    checkpoint_step: int = -1
    checkpoint_path: str = ""
    #: every rank here has acknowledged the stop notice (or ended)
    acknowledged: bool = False
    #: (rank, milliseconds that a step takes it), of ranks that report steps, smoothed and to two digits: core/policy/stragglers.py
    paces: tuple[tuple[int, int], ...] = ()


class XidCount(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, gc=False):
    """How often the driver has reported one kind of error of a GPU (an Xid, docs.nvidia.com/deploy/xid-errors) since the host was booted."""

    xid: int
    count: int
    #: wall clock of the node at the last one
    last_at_ms: int = 0


class GpuReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What of a GPU is not as it should be, or has ever not been since boot. A GPU that has nothing to report has no report.

    Counters only rise within one boot (they are kept on the node's disk, so an agent that is started again goes on with them), except those that
    a reset of the GPU sets back: the leader compares them with what it has seen.
    """

    uuid: str
    #: "lost": the driver knows it and cannot reach it any more (NVML_ERROR_GPU_IS_LOST, Xid 79); "missing": it was in this node before and the
    #: driver does not name it now; "stale": the driver does not answer, so this is what was seen last
    state: Literal["present", "lost", "missing", "stale"] = "present"
    #: ascending by number; at most 32 of them
    xids: tuple[XidCount, ...] = ()
    #: ECC errors since the driver was loaded or the GPU reset (NVML: volatile)
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    #: rows of memory that were remapped for correctable and uncorrectable errors in its life; one waits for a reset; a remapping has failed
    remapped_corrected: int = 0
    remapped_uncorrected: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    #: why it has been slowed down for the last 10 seconds at least: hw_thermal, sw_thermal, hw_power_brake, hw_slowdown; ascending
    slowed: tuple[str, ...] = ()
    #: errors of all its NVLinks since the driver was loaded (replay, recovery, CRC), and links that were up once and are down now
    nvlink_errors: int = 0
    nvlinks_down: int = 0
    #: what the driver itself says that it needs: gpu_reset, node_reboot, drain_p2p, drain_and_reset, ...; "" for nothing
    needs: str = ""


class DriverReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How the driver of the GPUs is. None where the node has no GPUs of its own to ask about, or they are well."""

    #: "silent": it has not answered within its time; "failed": it has crashed or refuses. Either way GPUs of this node are given to nobody new,
    #: and what runs goes on
    state: Literal["answers", "silent", "failed"]
    message: str = ""
    #: wall clock of the node at which it came into this state
    since_ms: int = 0
    #: how often the process that asks it was started again
    restarts: int = 0


class CheckReport(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, gc=False):
    """What one of the site's own checks of a node says that is not well."""

    name: str
    #: "critical": the node gets nobody new until it is well; "warning": noted; "unknown": the check itself has failed, or took too long
    status: Literal["warning", "critical", "unknown"]
    message: str = ""


class Observed(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The value of `nodes/<id>/observed`. `desired_index` and `epoch` say which desired document it has acted on."""

    node: str
    identity: str
    boot_id: str
    #: rises with each write of one agent process
    sequence: int
    desired_index: int
    epoch: int
    gangs: tuple[ObservedGang, ...] = ()
    #: GPUs with something to report, by their index on the node; what only counts is written at most once in ten seconds
    gpus: tuple[GpuReport, ...] = ()
    driver: DriverReport | None = None
    #: the clock of `exited_at_ms` when this was made: how long ago a rank ended is all that the leader takes from that clock. 0: not known
    at_ms: int = 0
    #: checks of the site that are not well, by name
    checks: tuple[CheckReport, ...] = ()
    version: int = VERSION
