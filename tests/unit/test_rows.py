from typing import Any

import msgspec

from gangline.core.model import events as ev
from gangline.core.model.documents import Gpu, Registration
from gangline.core.model.events import PlacedPart, PlacedRank, RankExit
from gangline.core.model.fold import apply
from gangline.core.model.spec import Checkpoint, Gang, JobSpec, Resources
from gangline.core.model.state import State
from gangline.leader.rows import HIDDEN, job_row, node_row, whole_job

SPEC = JobSpec(
    command=("python", "train.py"),
    name="llama",
    queue="research",
    gang=Gang(ranks=4, min_ranks=4),
    resources=Resources(gpus=1, memory_mib=1024),
    env={"WANDB_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "KEYBOARD": "de", "LR": "0.1"},
    checkpoint=Checkpoint(path="/ckpt"),
)


def plain(row: msgspec.Struct) -> Any:
    return msgspec.json.decode(msgspec.json.encode(row))


def registration(node: str) -> Registration:
    gpus = tuple(Gpu(i, f"{node}-{i}", "H100") for i in range(4))
    return Registration(
        node=node,
        identity=node,
        boot_id="b",
        address=f"{node}.local",
        agent_url="",
        gpus=gpus,
        cpus_milli=8000,
        memory_mib=8192,
        labels={"rack": "r1"},
        agent_version="0.1.0",
        lease_ttl_s=10.0,
    )


def folded(*events: ev.LogEvent) -> State:
    state = State()
    apply(state, ev.LeaderElected(scheduler="s1"), 1, 1, 1000)
    for i, event in enumerate(events, 2):
        apply(state, event, i, 1, 1000 * i)
        state.index = i
    return state


def test_a_waiting_job() -> None:
    state = folded(
        ev.JobSubmitted(job="j1", spec=SPEC, user="ann"),
        ev.GangsDeferred(jobs=("j1",), code="gpus", message="needs 4 GPUs, 0 are free", need={"gpus": 4}, have={"gpus": 0}),
    )
    row = plain(job_row(state.jobs["j1"]))
    assert row == {
        "id": "j1",
        "name": "llama",
        "queue": "research",
        "user": "ann",
        "priority": 50,
        "state": "queued",
        "outcome": None,
        "generation": 0,
        "ranks": 4,
        "gpus": 4,
        "nodes": [],
        "submitted_at_ms": 2000,
        "started_at_ms": None,
        "ended_at_ms": None,
        "reason": "needs 4 GPUs, 0 are free",
        "array": None,
        "array_index": None,
        "elements": None,
        "held": False,
    }
    whole = plain(whole_job(state.jobs["j1"]))
    assert whole["deferred"] == {"code": "gpus", "message": "needs 4 GPUs, 0 are free", "need": {"gpus": 4}, "have": {"gpus": 0}}
    assert whole["spec"]["gang"]["ranks"] == 4
    assert [whole[k] for k in ("outcome", "cause", "exit_code", "placement", "restarts", "last_restart", "step", "checkpoint", "master")] == [
        None,
        None,
        None,
        [],
        0,
        None,
        None,
        None,
        None,
    ]
    assert row.items() <= whole.items()


def test_a_job_that_runs_restarts_and_ends() -> None:
    parts = (
        PlacedPart("n1", (PlacedRank(0, (0,)), PlacedRank(1, (1,)))),
        PlacedPart("n2", (PlacedRank(2, (0,)), PlacedRank(3, (1,)))),
    )
    events = (
        ev.NodeJoined(registration=registration("n1")),
        ev.NodeJoined(registration=registration("n2")),
        ev.JobSubmitted(job="j1", spec=SPEC),
        ev.GangPlaced(job="j1", generation=1, parts=parts),
        ev.NodePrepared(job="j1", generation=1, node="n1", address="fe80::1", port=29500),
        ev.NodePrepared(job="j1", generation=1, node="n2"),
        ev.GangReleased(job="j1", generation=1, master_addr="fe80::1", master_port=29500),
        ev.RanksStarted(job="j1", generation=1, node="n1", ranks=(0, 1)),
        ev.RanksStarted(job="j1", generation=1, node="n2", ranks=(2, 3)),
        ev.CheckpointReported(job="j1", generation=1, step=40, path="/ckpt/40"),
        ev.RanksExited(job="j1", node="n2", exits=(RankExit(3, 1, -9),)),
        ev.GangRestarting(
            job="j1", generation=1, cause="rank_failed", failure_class="application", message="rank 3 ended by SIGKILL", lost_ranks=(3,)
        ),
    )
    state = folded(*events)
    job = plain(whole_job(state.jobs["j1"]))
    assert job["state"] == "restarting"
    assert job["reason"] == "rank 3 ended by SIGKILL"
    assert job["nodes"] == ["n1", "n2"]
    assert job["placement"][1] == {
        "node": "n2",
        "ranks": [
            {"rank": 2, "role": "", "gpus": [0], "state": "running", "exit_code": None, "share": None},
            {"rank": 3, "role": "", "gpus": [1], "state": "exited", "exit_code": -9, "share": None},
        ],
    }
    assert job["checkpoint"] == {"step": 40, "path": "/ckpt/40"}
    assert job["master"] == "[fe80::1]:29500"
    assert job["restarts"] == 1
    assert job["last_restart"]["lost_ranks"] == [3]
    node = plain(node_row(state.nodes["n1"]))
    assert node == {
        "id": "n1",
        "state": "up",
        "schedulable": True,
        "cordoned": False,
        "draining": False,
        "reason": "",
        "address": "n1.local",
        "gpus_total": 4,
        "gpus_free": 2,
        "gpus_parted": [],
        "gpu_model": "H100",
        "cpus_total": 8.0,
        "cpus_free": 6.0,
        "memory_total_mib": 8192,
        "memory_free_mib": 6144,
        "jobs": ["j1"],
        "labels": {"rack": "r1"},
        "agent_version": "0.1.0",
        "lease_ttl_s": 10.0,
        "health": "healthy",
        "gpus_withdrawn": 0,
        "spare": False,
    }
    state = folded(*events, ev.GangFinished(job="j1", outcome="failed", cause="rank_failed", message="rank 3 ended by SIGKILL", exit_code=137))
    job = plain(whole_job(state.jobs["j1"]))
    assert (job["state"], job["outcome"], job["cause"], job["exit_code"], job["ended_at_ms"]) == (
        "finished",
        "failed",
        "rank_failed",
        137,
        14_000,
    )


def test_secrets_are_not_shown() -> None:
    state = folded(ev.JobSubmitted(job="j1", spec=SPEC))
    assert whole_job(state.jobs["j1"]).spec["env"] == {"WANDB_API_KEY": HIDDEN, "HF_TOKEN": HIDDEN, "KEYBOARD": "de", "LR": "0.1"}
    assert state.jobs["j1"].spec.env["HF_TOKEN"] == "s3cret"
