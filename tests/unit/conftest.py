"""Histories for tests: a scribe that writes frames by folding them, and random legal histories made with it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from gangline.core.model import events as ev
from gangline.core.model.arrays import indices_from, parse_array
from gangline.core.model.codec import encode_event, encode_frame
from gangline.core.model.documents import DriverReport, Gpu, GpuReport, Registration
from gangline.core.model.fold import IllegalTransition, apply, seal
from gangline.core.model.health import Symptom
from gangline.core.model.queues import Amounts, QueueSpec, Weights
from gangline.core.model.spec import Dependency, Gang, JobSpec, Resources
from gangline.core.model.state import Job, Node, State

# Modules that several tests share lie beside this file: it is no package.
sys.path.insert(0, str(Path(__file__).parent))


class Scribe:
    """Writes a log as a leader does: each event is folded before it is part of a frame. Nothing in it is random or read from a clock."""

    def __init__(self, state: State | None = None, *, epoch: int = 1) -> None:
        self.state = State() if state is None else state
        self.epoch = max(epoch, self.state.epoch)
        self.at_ms = self.state.at_ms
        self.frames: list[bytes] = []
        self.nonces: list[bytes] = []

    def write(self, *events: ev.LogEvent) -> bytes:
        """Fold the events as one frame and return its bytes."""
        from gangline.core.model.codec import digest

        index = self.state.index + 1
        self.at_ms += 1_000
        for event in events:
            apply(self.state, event, index, self.epoch, self.at_ms)
        nonce = f"nonce-{self.epoch:04d}-{index:08d}".encode()
        data = encode_frame(index, self.epoch, self.at_ms, self.state.digest, nonce, [encode_event(e) for e in events])
        seal(self.state, index, digest(data))
        self.frames.append(data)
        self.nonces.append(nonce)
        return data

    def elected(self, epoch: int, name: str = "s1") -> bytes:
        self.epoch = epoch
        return self.write(ev.LeaderElected(scheduler=name))

    def joined(self, *nodes: str, gpus: int = 4) -> bytes:
        return self.write(*(ev.NodeJoined(registration=registration(n, gpus)) for n in nodes))

    def submitted(self, *jobs: str, ranks: int = 1, gpus: int = 1) -> bytes:
        return self.write(*(ev.JobSubmitted(job=j, spec=spec(ranks, gpus)) for j in jobs))


def registration(node: str, gpus: int = 4) -> Registration:
    devices = tuple(Gpu(index=i, uuid=f"GPU-{node}-{i}", model="H100", memory_mib=81_559) for i in range(gpus))
    return Registration(
        node=node, identity=f"identity-{node}", boot_id=f"boot-{node}", address=f"{node}.example.org", agent_url="",
        gpus=devices, cpus_milli=64_000, memory_mib=512_000, lease_ttl_s=30.0,
    )  # fmt: skip


def spec(ranks: int = 1, gpus: int = 1, name: str = "") -> JobSpec:
    gang = Gang(ranks=ranks, min_ranks=ranks if ranks < 4 else ranks // 2)
    return JobSpec(command=("python", "train.py"), name=name, gang=gang, resources=Resources(gpus=gpus))


def placement(state: State, job: Job, rng: random.Random) -> ev.GangPlaced | None:
    """Return a placement that fits, one rank after the other on nodes in random order; None when there is none."""
    nodes = [n for n in state.nodes.values() if n.status == "up"]
    rng.shuffle(nodes)
    parts, rank = [], 0
    for node in nodes:
        free = list(node.free_gpus)
        ranks = []
        while rank < job.spec.gang.ranks and len(free) >= job.spec.resources.gpus:
            take, free = free[: job.spec.resources.gpus], free[job.spec.resources.gpus :]
            ranks.append(ev.PlacedRank(rank, tuple(take)))
            rank += 1
        if ranks:
            parts.append(ev.PlacedPart(node.id, tuple(ranks)))
    if rank < job.spec.gang.ranks:
        return None
    return ev.GangPlaced(job=job.id, generation=job.generation + 1, parts=tuple(parts), reason="fits")


def resizing(state: State, job: Job, rng: random.Random) -> ev.GangResizing:
    """Return another size for a gang: some of its nodes, and some of what is free beside them. Not all of these are legal."""
    gang, gpus = job.spec.gang, job.spec.resources.gpus
    size, number, parts = rng.randint(gang.min_ranks, gang.ranks), 0, []
    for node in rng.sample(list(state.nodes.values()), len(state.nodes)):
        own = [g for r in job.parts[node.id].ranks.values() for g in r.gpus] if node.id in job.parts else []
        devices = [*own, *node.free_gpus] if rng.random() < 0.5 else own
        count = min(size - number, len(devices) // gpus if gpus else rng.randint(0, 2))
        if count > 0:
            ranks = (ev.PlacedRank(number + i, tuple(sorted(devices[i * gpus : (i + 1) * gpus]))) for i in range(count))
            parts.append(ev.PlacedPart(node.id, tuple(ranks)))
            number += count
    return ev.GangResizing(
        job=job.id, generation=job.generation, parts=tuple(parts), cause=rng.choice(["grow", "shrink", "node_lost", "prepare_failed"]),
        message="m", deadline_ms=state.at_ms + rng.choice([0, 30_000]), grace_s=30.0, beneficiary=rng.choice([*state.jobs, ""]),
        forgive=rng.random() < 0.2,
    )  # fmt: skip


def declaration(rng: random.Random) -> ev.QueuesDeclared:
    """Return queues of which the jobs' own is mostly a leaf, and mostly takes jobs."""
    default = QueueSpec("default", Amounts(rng.randrange(64_000)), state=rng.choice(["open", "open", "hold", "drain"]))
    research = QueueSpec("research", over_quota_weight=Weights(gpus=rng.random()))
    trees = ((default,), (default, research), (research, QueueSpec("research/nlp"), default), (default, QueueSpec("default/a")))
    return ev.QueuesDeclared(queues=rng.choice(trees), by="ann")


def conditional(state: State, rng: random.Random) -> JobSpec:
    """Return a job that is an array, or waits for others, or for its time."""
    known = rng.sample(list(state.jobs), min(2, len(state.jobs)))
    known += [f"{job}.{rng.randrange(4)}" for job in known if state.jobs[job].elements is not None]
    conditions = ["after_ok", "after_any", "after_not_ok", "after_start"]
    return msgspec.structs.replace(
        spec(1, rng.randint(0, 1)), array=rng.choice([None, parse_array("0-3"), parse_array("0-6:2%2")]),
        depends_on=tuple(Dependency(job, rng.choice(conditions)) for job in known), hold=rng.random() < 0.2,
        begin_after_s=rng.choice([0.0, 5.0]), deadline_after_s=rng.choice([0.0, 60.0]),
    )  # fmt: skip


def proposals(state: State, rng: random.Random, number: int) -> Iterator[ev.LogEvent]:
    """Yield events that could come next in this state; some of them are illegal in it."""
    if rng.random() < 0.1:
        yield ev.NodeJoined(registration=registration(f"n{rng.randrange(6)}", rng.choice([2, 4, 8])))
    if rng.random() < 0.3:
        yield ev.JobSubmitted(job=f"j{number}", spec=spec(rng.randint(1, 6), rng.randint(0, 2)), idempotency_key=f"k{number % 50}")
    if rng.random() < 0.15:
        yield ev.JobSubmitted(job=f"x{number}", spec=conditional(state, rng), user=rng.choice(["", "ada"]))
    nodes = list(state.nodes)
    if nodes and rng.random() < 0.1:
        node = rng.choice(nodes)
        action = rng.choice(["cordon", "uncordon", "drain", "undrain", "confirm_dead"])
        yield rng.choice([ev.NodeLost(node=node, cause="lease", message="gone"), ev.NodeAdministered(node=node, action=action)])
    if nodes and rng.random() < 0.1:
        yield from _about_health(state.nodes[rng.choice(nodes)], state.at_ms, rng)
    if rng.random() < 0.02:
        yield ev.BrakeSet(on=not state.brake.on, message="mass loss")
    if rng.random() < 0.05:
        yield declaration(rng)
    jobs = [j for j in state.jobs.values() if j.state != "finished"]
    for job in rng.sample(jobs, min(3, len(jobs))):
        yield from _proposals_for(state, job, rng)
    for node_id, node in state.nodes.items():
        for job_id, holding in node.holdings.items():
            if holding.leaving_since and rng.random() < 0.5:
                yield ev.PartReleased(job=job_id, node=node_id)


def _about_health(node: Node, at_ms: int, rng: random.Random) -> Iterator[ev.LogEvent]:
    """Yield events about a node or one of its GPUs; a GPU that it never had is among them."""
    device = rng.choice(["", "", f"GPU-{node.id}-9", *(gpu.uuid for gpu in node.registration.gpus)])
    symptom = Symptom("ecc", rng.choice([0, 500, 1000]), at_ms, "m", rng.choice(["", "wait", "reset_gpu"]), rng.choice(["", "j1"]))
    report = GpuReport(device, ecc_corrected=rng.randrange(9)) if device and rng.random() < 0.5 else None
    driver = DriverReport("silent") if not device and rng.random() < 0.5 else None
    yield ev.HealthReported(node=node.id, device=device, symptoms=(symptom,) if rng.random() < 0.7 else (), report=report, driver=driver)
    to = rng.choice(["healthy", "healthy", "suspect", "unhealthy", "quarantined", "repair", "burn_in"])
    until_ms = at_ms + rng.choice([0, 5_000])
    yield ev.HealthChanged(node=node.id, device=device, state=to, cause="c", message="m", until_ms=until_ms, clear=rng.random() < 0.3)


def _proposals_for(state: State, job: Job, rng: random.Random) -> Iterator[ev.LogEvent]:
    j, g = job.id, job.generation
    if rng.random() < 0.1:
        yield rng.choice([ev.JobHeld(job=j, by="ada", reason="r", requeue=rng.random() < 0.5), ev.JobReleased(job=j)])
    if job.elements is not None and job.spec.array is not None:
        coming = [i for i in indices_from(job.spec.array, job.elements.opened) if not rng.random() < 0.1]
        yield ev.ElementsQueued(job=j, indices=tuple(coming[: rng.randint(1, 3)]))
        yield ev.JobStopRequested(job=f"{j}.{rng.randrange(7)}") if rng.random() < 0.2 else ev.GangsDeferred(jobs=(j,), code="held", message="m")
        if rng.random() < 0.2:
            yield ev.GangFinished(job=j, outcome=rng.choice(["succeeded", "failed", "cancelled"]), cause="completed", message="m")
        return
    if job.state in ("queued", "restarting"):
        if rng.random() < 0.3:
            parts = tuple(ev.ReservedPart(n, 1, 100, 0) for n in sorted(state.nodes)[: rng.randrange(3)])
            yield ev.GangReserved(job=j, start_ms=rng.choice([0, state.at_ms + 5_000]), parts=parts, message="m")
        placed = placement(state, job, rng)
        yield placed or ev.GangsDeferred(jobs=(j,), code="gpus", message="too few devices", need={"gpus": 4}, have={"gpus": 0})
        return
    for node, part in job.parts.items():
        waiting = tuple(r for r, x in part.ranks.items() if not x.started)
        running = tuple(r for r, x in part.ranks.items() if x.started and not x.exited)
        if not part.prepared and job.state in ("placed", "preparing") and len(job.parts) > 1:
            yield ev.NodePrepared(job=j, generation=g, node=node, address=node, port=29_500)
            if rng.random() < 0.1:
                yield ev.PrepareFailed(job=j, generation=g, node=node, message="no device")
        if waiting and (job.released or len(job.parts) == 1):
            yield ev.RanksStarted(job=j, generation=g, node=node, ranks=waiting)
        if running and rng.random() < 0.3:
            exits = tuple(ev.RankExit(r, part.ranks[r].generation, rng.choice([0, 1, -9])) for r in running)
            yield ev.RanksExited(job=j, node=node, exits=exits)
        if job.state in ("preempting", "resizing"):
            yield ev.StopAcknowledged(job=j, generation=g, node=node)
    exited = tuple(r for p in job.parts.values() for r, x in p.ranks.items() if x.exited)
    failure = {"job": j, "generation": g, "cause": "rank_failed", "failure_class": rng.choice(["application", "infrastructure"]), "message": "m"}
    if rng.random() < 0.15:
        yield resizing(state, job, rng)
    if job.resize is not None and rng.random() < 0.4:
        yield ev.GangPlaced(job=j, generation=g + 1, parts=job.resize.parts)
    choice = rng.randrange(12)
    if choice == 0:
        yield ev.GangReleased(job=j, generation=g, master_addr="n0", master_port=29_500)
    elif choice == 1:
        yield ev.GangRestarting(**failure)
    elif choice == 2 and exited:
        yield ev.RankRestarting(ranks=exited, **failure)
    elif choice == 3:
        waits = rng.choice([job for _, _, job in state.queue] or [""])
        yield ev.GangPreempting(
            job=j, generation=g, cause="preempted", message="m", deadline_ms=state.at_ms + 30_000, grace_s=30.0, beneficiary=waits
        )
    elif choice == 4:
        yield ev.GangRequeued(avoid=(("n1", state.at_ms + 60_000),), forgive=rng.random() < 0.5, **failure)
    elif choice == 5:
        yield ev.GangFinished(job=j, outcome=rng.choice(["succeeded", "failed", "cancelled"]), cause="completed", message="m")
    elif choice == 6:
        yield ev.ProgressReported(job=j, generation=g, step=rng.randrange(1000))
    elif choice == 7:
        yield ev.CheckpointReported(job=j, generation=g, step=rng.randrange(1000), path="/ckpt")
    elif choice == 8:
        yield ev.JobStopRequested(job=j, by="ada", reason="enough")
    else:
        yield ev.GangReleased(job=j, generation=g, master_addr="n0", master_port=29_500)


def write_history(seed: int, frames: int) -> Scribe:
    """Return a scribe with a random legal log of that many frames; the same for the same seed."""
    rng = random.Random(seed)
    scribe = Scribe()
    scribe.elected(1)
    number = 0
    while len(scribe.frames) < frames:
        if rng.random() < 0.03:
            scribe.elected(scribe.epoch + rng.randint(1, 5), rng.choice(["s1", "s2", "s3"]))
            continue
        number += 1
        for event in list(proposals(scribe.state, rng, number)):
            try:
                scribe.write(event)
            except IllegalTransition:
                continue
    return scribe


@pytest.fixture(scope="session")
def scribe() -> Callable[..., Scribe]:
    """Factory of scribes: `scribe(epoch=1)`."""
    return Scribe


@pytest.fixture(scope="session")
def history() -> Callable[[int, int], Scribe]:
    """Factory of random legal histories: `history(seed, frames)`."""
    return write_history
