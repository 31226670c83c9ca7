"""Writes the golden log of frame schema 1 with every event in version 1: `python tests/golden/record_v1.py`.

A recorded log stands for clusters that run. So each frame is recorded once, and the script only appends what it has beyond them: when an event
changes, its new version goes into a new golden log (record_v2.py), this one stays as it is and must still fold. `--digest` only writes the
digest anew, which is right after a change of the state's layout (state.STATE_VERSION), and wrong as an answer to a fold that has changed its
mind.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

from gangline.core.model import events as ev
from gangline.core.model.codec import decode_frame, digest, encode_event, encode_frame
from gangline.core.model.documents import DriverReport, Gpu, GpuReport, Registration, XidCount
from gangline.core.model.fold import apply, apply_frame, seal
from gangline.core.model.gpushares import GpuShare, MigSlice
from gangline.core.model.health import Symptom
from gangline.core.model.queues import Amounts, QueueSpec, Weights
from gangline.core.model.reservations import KeptNode, Reservation
from gangline.core.model.spec import (
    ArraySpec,
    Checkpoint,
    Dependency,
    Elastic,
    Gang,
    JobSpec,
    Preemption,
    Resources,
    Restart,
    Role,
    TopologyRequest,
)
from gangline.core.model.state import State
from gangline.core.model.statecodec import state_digest
from gangline.core.model.topologies import Topology
from gangline.core.store.recover import replay

FRAMES = Path(__file__).with_name("v1.frames")
EXPECTED = Path(__file__).with_name("v1.json")
_LENGTH = struct.Struct(">I")


class Recorder:
    """Folds and encodes frame after frame, two seconds apart. What is recorded already is taken as it is: only frames behind it are new."""

    def __init__(self, recorded: list[bytes]) -> None:
        self.recorded = recorded
        self.state = State()
        self.epoch = 0
        self.at_ms = 1_767_225_600_000
        self.frames: list[bytes] = []

    def frame(self, *events: ev.LogEvent) -> None:
        index = self.state.index + 1
        self.at_ms += 2_000
        if index <= len(self.recorded):
            data = self.recorded[index - 1]
            apply_frame(self.state, decode_frame(data, index, self.state.digest))
            self.frames.append(data)
            return
        for event in events:
            apply(self.state, event, index, self.epoch, self.at_ms)
        nonce = digest(f"nonce {index}".encode())[:12]
        data = encode_frame(index, self.epoch, self.at_ms, self.state.digest, nonce, [encode_event(e) for e in events])
        seal(self.state, index, digest(data))
        self.frames.append(data)

    def elected(self, epoch: int, scheduler: str) -> None:
        self.epoch = epoch
        self.frame(ev.LeaderElected(scheduler=scheduler))


def read_frames(path: Path) -> list[bytes]:
    """Return the frames of a golden file: 4 bytes of length, big-endian, before each."""
    content, frames, at = path.read_bytes(), list[bytes](), 0
    while at < len(content):
        (size,) = _LENGTH.unpack_from(content, at)
        frames.append(content[at + _LENGTH.size : at + _LENGTH.size + size])
        at += _LENGTH.size + size
    return frames


def _registration(node: str) -> Registration:
    gpus = tuple(Gpu(index=i, uuid=f"GPU-{node}-{i}", model="H100", memory_mib=81_559, healthy=i < 4) for i in range(5))
    return Registration(
        node=node, identity=f"identity of {node}", boot_id=f"boot of {node}", address=f"{node}.example.org",
        agent_url=f"http://{node}.example.org:7070", gpus=gpus, cpus_milli=64_000, memory_mib=512_000,
        labels={"rack": "r1", "zone": "a"}, agent_version="0.1.0", lease_ttl_s=30.0,
    )  # fmt: skip


def _parts(*nodes: str) -> tuple[ev.PlacedPart, ...]:
    return tuple(ev.PlacedPart(n, (ev.PlacedRank(2 * i, (0,)), ev.PlacedRank(2 * i + 1, (1,)))) for i, n in enumerate(nodes))


def _queues() -> tuple[QueueSpec, ...]:
    """Return a tree in which every field has a value of its own."""
    quota = Amounts(gpus_milli=64_000, cpus_milli=512_500, memory_mib=4 << 20, models={"A100": 32_000, "H100": 32_000})
    above = QueueSpec("shared", quota=quota, limit=Amounts(gpus_milli=96_000), over_quota_weight=Weights(2.5, 2.0, 0.5, {"H100": 3.0}))
    below = QueueSpec(
        "shared/nlp", quota=Amounts(gpus_milli=500), priority=120, reclaim_min_runtime_s=600.0, preempt_min_runtime_s=0.0,
        usage_half_life_s=604_800.0, user_fairness=True, state="hold",
    )  # fmt: skip
    return (QueueSpec("default"), above, below, QueueSpec("research", state="drain"))


def record() -> list[bytes]:
    """Return a day of a small cluster in which everything happens once."""
    r = Recorder(read_frames(FRAMES) if FRAMES.exists() else [])
    train = JobSpec(
        command=("python", "train.py", "--epochs", "3"), name="llama", queue="research", priority=60,
        gang=Gang(ranks=4, min_ranks=2, ranks_per_node=2),
        resources=Resources(gpus=1, gpu_models=("H100", "A100"), cpus_milli=4_000, memory_mib=32_000),
        env={"NCCL_DEBUG": "INFO"}, workdir="/work", time_limit_s=86_400.0, checkpoint=Checkpoint(path="/ckpt/llama", interval_s=600.0),
        restart=Restart(on_rank_failure="rank", max_restarts=3, fail_exit_codes=(2, 3), fail_signals=("SIGABRT",), hang_timeout_s=300.0),
        preemption=Preemption(signal="SIGUSR1", grace_s=60.0),
    )  # fmt: skip
    small = JobSpec(command=("true",))
    keep = JobSpec(command=("serve",), priority=200, preemptible=False, on_disconnect="keep")

    r.elected(17, "scheduler-a")
    r.frame(*(ev.NodeJoined(registration=_registration(n)) for n in ("n1", "n2", "n3")))
    r.frame(
        ev.JobSubmitted(job="train", spec=train, user="ada", idempotency_key="k1", body_digest="d1", trace_id="0af7651916cd43dd"),
        ev.JobSubmitted(job="small", spec=small), ev.JobSubmitted(job="keep", spec=keep), ev.JobSubmitted(job="late", spec=small),
    )  # fmt: skip
    r.frame(
        ev.GangPlaced(job="train", generation=1, parts=_parts("n1", "n2"), reason="fits on two nodes of rack r1"),
        ev.GangsDeferred(jobs=("small", "late"), code="queue_limit", message="over the limit", need={"gpus": 8}, have={"gpus": 4}),
    )
    r.frame(ev.NodePrepared(job="train", generation=1, node="n1", address="10.0.0.1", port=29_500))
    r.frame(ev.PrepareFailed(job="train", generation=1, node="n2", message="port range exhausted"))
    r.frame(
        ev.GangRequeued(
            job="train", generation=1, cause="prepare_failed", failure_class="infrastructure", message="n2 could not prepare",
            avoid=(("n2", r.at_ms + 600_000),), not_before_ms=r.at_ms + 1_000,
        )
    )  # fmt: skip
    r.frame(ev.PartReleased(job="train", node="n1"), ev.PartReleased(job="train", node="n2"))
    r.frame(ev.GangPlaced(job="train", generation=2, parts=_parts("n1", "n3")))
    r.frame(*(ev.NodePrepared(job="train", generation=2, node=n, address=n, port=29_501) for n in ("n1", "n3")))
    r.frame(ev.GangReleased(job="train", generation=2, master_addr="10.0.0.1", master_port=29_501))
    r.frame(*(ev.RanksStarted(job="train", generation=2, node=n, ranks=ranks) for n, ranks in (("n1", (0, 1)), ("n3", (2, 3)))))
    r.frame(ev.ProgressReported(job="train", generation=2, step=1))
    r.frame(ev.CheckpointReported(job="train", generation=2, step=100, path="/ckpt/llama/100"))
    r.frame(ev.RanksExited(job="train", node="n3", exits=(ev.RankExit(3, 2, -9, "oom", "killed by the kernel"),)))
    r.frame(ev.RankRestarting(job="train", generation=2, ranks=(3,), cause="rank_failed", failure_class="application", message="rank 3 died"))
    r.frame(ev.RanksStarted(job="train", generation=3, node="n3", ranks=(3,)))
    r.frame(ev.RanksExited(job="train", node="n1", exits=(ev.RankExit(0, 2, 1),)))
    r.frame(
        ev.GangRestarting(
            job="train", generation=3, cause="rank_failed", failure_class="application", message="rank 0 exited with 1", lost_ranks=(0,)
        )
    )
    r.frame(ev.GangPlaced(job="train", generation=4, parts=_parts("n1", "n3"), reason="same nodes"))
    r.frame(ev.GangPlaced(job="keep", generation=1, parts=(ev.PlacedPart("n2", (ev.PlacedRank(0, ()),)),)))
    r.frame(ev.RanksStarted(job="keep", generation=1, node="n2", ranks=(0,)))
    r.frame(*(ev.NodePrepared(job="train", generation=4, node=n, address=n, port=29_502) for n in ("n1", "n3")))
    r.frame(ev.GangReleased(job="train", generation=4, master_addr="10.0.0.1", master_port=29_502))
    r.frame(*(ev.RanksStarted(job="train", generation=4, node=n, ranks=ranks) for n, ranks in (("n1", (0, 1)), ("n3", (2, 3)))))
    r.frame(ev.NodeAdministered(node="n3", action="cordon", by="root", reason="ECC errors"))
    r.frame(ev.NodeAdministered(node="n3", action="drain", by="root", reason="ECC errors", deadline_s=600.0))
    r.frame(
        ev.GangPreempting(
            job="train", generation=4, cause="drain", message="n3 is drained", deadline_ms=r.at_ms + 60_000, grace_s=60.0
        )
    )  # fmt: skip
    r.frame(ev.StopAcknowledged(job="train", generation=4, node="n1"), ev.StopAcknowledged(job="train", generation=4, node="n3"))
    r.elected(40, "scheduler-b")
    r.frame(
        ev.GangRequeued(
            job="train", generation=4, cause="drain", failure_class="infrastructure", message="n3 is drained", lost_nodes=("n3",),
            lost_ranks=(2, 3), forgive=True,
        )
    )  # fmt: skip
    r.frame(ev.PartReleased(job="train", node="n1"), ev.PartReleased(job="train", node="n3"))
    r.frame(ev.NodeAdministered(node="n3", action="undrain", by="root"), ev.NodeAdministered(node="n3", action="uncordon", by="root"))
    r.frame(ev.NodeLost(node="n2", cause="lease_expired", message="no sign of life for 30 s"))
    r.frame(ev.BrakeSet(on=True, message="1 of 3 nodes lost within 60 s"), ev.BrakeSet(on=False, message="cleared", by="root"))
    r.frame(ev.NodeAdministered(node="n2", action="confirm_dead", by="root"))
    r.frame(ev.GangFinished(job="keep", outcome="failed", cause="node_lost", message="n2 is dead"))
    r.frame(ev.JobStopRequested(job="small", by="ada", reason="not needed"))
    r.frame(ev.GangFinished(job="small", outcome="cancelled", cause="stopped", message="stopped by ada", exit_code=143))
    r.frame(ev.QueuesDeclared(queues=_queues(), by="root", reason="quotas for the new team"))
    r.frame(ev.LeaderResigned(scheduler="scheduler-b"))
    r.elected(41, "scheduler-a")
    # What versions 1 have got since this log was first recorded follows here: the frames above are as they were.
    near = JobSpec(command=("true",), topology=TopologyRequest(required="rack", preferred="nvlink", name="ib"))
    r.frame(
        ev.QueuesDeclared(queues=_queues(), topologies=(Topology("default", ("zone", "rack")), Topology("ib", ("rack", "nvlink"))), by="root")
    )
    r.frame(ev.JobSubmitted(job="near", spec=near))
    sweep = JobSpec(
        command=("true",), name="sweep", array=ArraySpec(((0, 4, 2), (9, 9, 1)), at_most=2), depends_on=(Dependency("near", "after_any"),),
        hold=True, begin_after_s=2.0, deadline_after_s=86_400.0,
    )  # fmt: skip
    r.frame(ev.JobSubmitted(job="sweep", spec=sweep, user="ada"))
    r.frame(ev.GangFinished(job="near", outcome="cancelled", cause="stopped", message="stopped by ada"))
    r.frame(ev.JobReleased(job="sweep", by="ada"), ev.ElementsQueued(job="sweep", indices=(0, 2)))
    r.frame(ev.JobHeld(job="sweep.2", by="ada", reason="looks wrong"), ev.JobStopRequested(job="sweep.4", by="ada"))
    r.frame(ev.GangPlaced(job="sweep.0", generation=1, parts=(ev.PlacedPart("n1", (ev.PlacedRank(0, ()),)),)))
    r.frame(ev.RanksStarted(job="sweep.0", generation=1, node="n1", ranks=(0,)))
    r.frame(ev.RanksExited(job="sweep.0", node="n1", exits=(ev.RankExit(0, 1, 0),)))
    r.frame(ev.GangFinished(job="sweep.0", outcome="succeeded", cause="completed", message="all 1 ranks ended with status 0"))
    r.frame(ev.JobHeld(job="sweep", by="root", reason="the file system is full", requeue=True))
    # Parts of GPUs.
    gpus = tuple(Gpu(i, f"GPU-n4-{i}", "H100", 81_559, mig="H100", links=(0, i)) for i in range(3))
    r.frame(ev.NodeJoined(registration=Registration("n4", "identity of n4", "boot of n4", "n4", "", gpus, 64_000, 512_000)))
    parts = {
        "half": (Resources(gpu_share_milli=500), GpuShare(500)),
        "memory": (Resources(gpu_memory_mib=20_480, gpu_model_mix=True), GpuShare(260, 20_480)),
        "mig": (Resources(mig="3g.40gb", mig_count=1), GpuShare(0, 0, (MigSlice(1, 4, 4, "3g.40gb"),))),
        "beside": (Resources(mig="1g.10gb", mig_count=1), GpuShare(0, 0, (MigSlice(1, 3, 1, "1g.10gb"),))),
    }
    r.frame(*(ev.JobSubmitted(job=job, spec=JobSpec(("true",), resources=res)) for job, (res, _) in parts.items()))
    for job, (_, share) in parts.items():
        rank = ev.PlacedRank(0, (1,) if share.mig else (0,), share)
        r.frame(ev.GangPlaced(job=job, generation=1, parts=(ev.PlacedPart("n4", (rank,)),)))
    for job in ("half", "mig"):
        r.frame(ev.GangFinished(job=job, outcome="cancelled", cause="stopped", message="stopped by ada"))
    r.frame(ev.PartReleased(job="half", node="n4"), ev.PartReleased(job="mig", node="n4"))
    _resize(r)
    # Room that is kept for a waiting gang.
    r.frame(ev.JobSubmitted(job="waits", spec=JobSpec(command=("true",), gang=Gang(ranks=2, min_ranks=2), resources=Resources(gpus=3))))
    kept = (ev.ReservedPart("n1", 3, 1_000, 0), ev.ReservedPart("n3", 3, 1_000, 0))
    r.frame(ev.GangReserved(job="waits", start_ms=r.at_ms + 600_000, parts=kept, message="until wide has ended"))
    r.frame(
        ev.GangPreempting(
            job="memory", generation=1, cause="preempted", message="makes room for waits", deadline_ms=r.at_ms + 30_000, grace_s=30.0,
            beneficiary="waits",
        )
    )  # fmt: skip
    _roles(r)
    # Nodes that are kept for a maintenance, and for some jobs.
    fans = Reservation("fans", (KeptNode("n1"),), r.at_ms, r.at_ms + 600_000, maintenance=True, deadline_s=60.0, by="root", reason="new fans")
    team = Reservation("team", (KeptNode("n3", 2),), r.at_ms + 600_000, r.at_ms + 900_000, queues=("research",), users=("ada",), by="root")
    r.frame(ev.ReservationDeclared(reservation=fans), ev.ReservationDeclared(reservation=team))
    r.frame(ev.ReservationBegun(name="fans"))
    r.frame(ev.ReservationRemoved(name="fans", by="root", reason="done already"))
    _health(r)
    return r.frames


def _health(r: Recorder) -> None:
    """A GPU falls off its bus and is mended, one is too hot, a driver does not answer, and a rank is slow."""
    report = GpuReport("GPU-n4-2", "lost", (XidCount(79, 1, 5),), ecc_corrected=3, slowed=("hw_thermal",))
    gone = Symptom("xid-79", 1000, r.at_ms, "Xid 79", "reboot_node", "half", True)
    hot = Symptom("slowed", 500, r.at_ms, "slowed down: hw_thermal")
    r.frame(ev.HealthReported(node="n4", device="GPU-n4-2", symptoms=(gone, hot), report=report))
    r.frame(ev.HealthChanged(node="n4", device="GPU-n4-2", state="unhealthy", cause="xid-79", message="Xid 79", action="reboot_node"))
    r.frame(ev.HealthReported(node="n4", driver=DriverReport("silent", "no answer for 10 s", r.at_ms, 2)))
    r.frame(ev.HealthChanged(node="n4", state="quarantined", cause="operator", message="smells", until_ms=r.at_ms + 60_000, by="root"))
    r.frame(ev.HealthReported(node="n4", device="GPU-n4-2"))
    r.frame(
        ev.HealthChanged(node="n4", device="GPU-n4-2", state="burn_in", cause="tested", message="is tested", burn_in="burnin1"),
        ev.HealthChanged(node="n4", state="healthy", cause="operator", message="it was the coffee", by="root", clear=True),
    )
    r.frame(ev.RankSlow(job="wide", generation=2, rank=1, node="n1", pace_ms=900, median_ms=300, score_tenths=62))


def _roles(r: Recorder) -> None:
    """Two kinds of rank on two nodes, one of them in two replicas, of which one is there."""
    pair = (Role("server", command=("serve",)), Role("cache", Gang(2, 1), Resources(memory_mib=64), env={"SIZE": "1"}))
    engine = Role("engine", replicas=2, min_replicas=1, roles=pair, topology=TopologyRequest(required="rack", spread="zone", max_skew=1))
    spec = JobSpec(("true",), roles=(Role("router", topology=TopologyRequest(balanced="rack")), engine))
    r.frame(ev.JobSubmitted(job="service", spec=spec))
    parts = (ev.PlacedPart("n1", (ev.PlacedRank(0, ()), ev.PlacedRank(2, ()))), ev.PlacedPart("n3", (ev.PlacedRank(1, ()),)))
    r.frame(ev.GangPlaced(job="service", generation=1, parts=parts, role_sizes=(1, 1, 1, 0, 0)))
    r.frame(*(ev.NodePrepared(job="service", generation=1, node=n, address=n, port=29_504) for n in ("n1", "n3")))
    r.frame(ev.GangReleased(job="service", generation=1, master_addr="n1", master_port=29_504))


def _resize(r: Recorder) -> None:
    """A gang of four ranks goes on with two, and is about to get four again."""
    wide = JobSpec(command=("true",), gang=Gang(ranks=4, min_ranks=2, ranks_per_node=2), elastic=Elastic(grow_after_s=60.0, step=2))
    r.frame(ev.JobSubmitted(job="wide", spec=wide))
    parts = tuple(ev.PlacedPart(n, (ev.PlacedRank(2 * i, ()), ev.PlacedRank(2 * i + 1, ()))) for i, n in enumerate(("n1", "n3")))
    r.frame(ev.GangPlaced(job="wide", generation=1, parts=parts))
    r.frame(*(ev.NodePrepared(job="wide", generation=1, node=n, address=n, port=29_503) for n in ("n1", "n3")))
    r.frame(ev.GangReleased(job="wide", generation=1, master_addr="n1", master_port=29_503))
    r.frame(*(ev.RanksStarted(job="wide", generation=1, node=n, ranks=ranks) for n, ranks in (("n1", (0, 1)), ("n3", (2, 3)))))
    resize = {"job": "wide", "grace_s": 30.0, "deadline_ms": r.at_ms + 32_000}
    r.frame(
        ev.GangResizing(
            generation=1, parts=parts[:1], cause="shrink", message="makes room for near", beneficiary="near",
            avoid=(("n3", r.at_ms + 1),), **resize,
        )
    )  # fmt: skip
    r.frame(ev.StopAcknowledged(job="wide", generation=1, node="n1"), ev.StopAcknowledged(job="wide", generation=1, node="n3"))
    r.frame(ev.GangPlaced(job="wide", generation=2, parts=parts[:1], reason="makes room for near"))
    r.frame(ev.PartReleased(job="wide", node="n3"))
    r.frame(ev.RanksStarted(job="wide", generation=2, node="n1", ranks=(0, 1)))
    r.frame(ev.GangResizing(generation=2, parts=parts, cause="grow", message="there is room", **resize))


def main() -> None:
    if "--digest" not in sys.argv:
        frames = record()
        FRAMES.write_bytes(b"".join(_LENGTH.pack(len(f)) + f for f in frames))
    frames = read_frames(FRAMES)
    state = replay(frames)
    expected = {"frames": len(frames), "log_digest": state.digest.hex(), "state_digest": state_digest(state)}
    EXPECTED.write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
