"""A job of two roles on a cluster of real processes: each rank runs what its role says, and a restart in place keeps the roles."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gangline.core.client.localcluster import LocalCluster

pytestmark = [pytest.mark.process, pytest.mark.etcd, pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd binary")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: what a rank says of itself: a file for each rank and generation
SAYS = """
echo "%s" $ROLE_NAME $ROLE_RANK/$ROLE_WORLD_SIZE gpus=$CUDA_VISIBLE_DEVICES $WORLD_SIZE $$ >"$OUT/$RANK.$GANGLINE_GENERATION"
sleep 1000
"""


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not true after {timeout_s} s"
        time.sleep(0.05)


def test_each_rank_runs_what_its_role_says_before_and_after_a_restart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    job = {
        "name": "rl", "env": {"OUT": str(out)}, "resources": {"cpus": 0.1}, "roles": [
            {"name": "learner", "ranks": 2, "resources": {"gpus": 1, "cpus": 0.1}, "command": ["sh", "-c", SAYS % "learns"]},
            {"name": "actor", "ranks": 4, "topology": {"spread": "hostname"}, "command": ["sh", "-c", SAYS % "acts"]},
        ],
    }  # fmt: skip

    def said(generation: int) -> dict[int, list[str]]:
        files = [out / f"{rank}.{generation}" for rank in range(6)]
        wait_for(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files))
        return {rank: file.read_text().split() for rank, file in enumerate(files)}

    with LocalCluster(tmp_path / "state", nodes=2, gpus=2, schedulers=1) as cluster:
        client = cluster.client()
        job_id = client.submit(job, "a key").body["job"]
        wait_for(lambda: client.job(job_id).body["state"] == "running")
        first, words = client.job(job_id).body, said(1)
        assert {rank: said_of[:3] for rank, said_of in words.items()} == {
            0: ["learns", "learner", "0/2"], 1: ["learns", "learner", "1/2"],
            2: ["acts", "actor", "0/4"], 3: ["acts", "actor", "1/4"], 4: ["acts", "actor", "2/4"], 5: ["acts", "actor", "3/4"],
        }  # fmt: skip
        assert all(said_of[4] == "6" for said_of in words.values())
        assert all((said_of[3] != "gpus=") == (rank < 2) for rank, said_of in words.items()), "learners have a GPU, actors none"
        assert [(r["name"], r["ranks"], r["gpus"]) for r in first["roles"]] == [("learner", 2, 1), ("actor", 4, 0)]
        assert first["roles"][1]["nodes"] == ["n1", "n2"], "actors are spread"
        assert first["gpus"] == 2

        os.kill(int(words[3][-1]), signal.SIGKILL)
        wait_for(lambda: (now := client.job(job_id).body)["state"] == "running" and now["generation"] == 2)
        again = said(2)
        assert {rank: w[:-1] for rank, w in again.items()} == {rank: w[:-1] for rank, w in words.items()}, "the same roles, devices and numbers"
        second = client.job(job_id).body
        assert [p["node"] for p in second["placement"]] == [p["node"] for p in first["placement"]]
        assert [[r["rank"] for r in p["ranks"]] for p in second["placement"]] == [[r["rank"] for r in p["ranks"]] for p in first["placement"]]
        assert (second["last_restart"]["cause"], second["last_restart"]["lost_ranks"]) == ("rank_failed", [3])


def test_the_example_goes_on_after_an_actor_is_killed(tmp_path: Path) -> None:
    from gangline.core.model.jobfile import parse_yaml, to_json

    job = to_json(parse_yaml((EXAMPLES / "roles" / "job.yaml").read_text())[0])
    job |= {"workdir": str(EXAMPLES.parent), "checkpoint": {"path": str(tmp_path / "checkpoints")}, "env": {"STEPS": "40"}}
    with LocalCluster(tmp_path / "state", nodes=2, gpus=1, schedulers=1) as cluster:
        client = cluster.client()
        job_id = client.submit(job, "a key").body["job"]
        wait_for(lambda: (client.job(job_id).body["checkpoint"] or {}).get("step", -1) >= 3)
        os.kill(_pid_of(b"actor.py", b"RANK=2", b"GANGLINE_JOB_ID=" + job_id.encode()), signal.SIGKILL)
        wait_for(lambda: client.job(job_id).body["state"] == "finished", 60.0)
        ended = client.job(job_id).body
        assert (ended["outcome"], ended["generation"], ended["step"]) == ("succeeded", 2, 40)


def _pid_of(command: bytes, *env: bytes) -> int:
    for entry in Path("/proc").iterdir():
        try:
            line, around = (entry / "cmdline").read_bytes(), b"\0" + (entry / "environ").read_bytes()
        except OSError:
            continue
        if entry.name.isdecimal() and command in line and all(b"\0" + word + b"\0" in around for word in env):
            return int(entry.name)
    raise AssertionError("the rank is not there")
