"""Arrays, dependencies, hold and begin on a cluster of real processes: what ranks are told, and what becomes of those that wait for others."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gangline.core.client import exits
from gangline.core.client.api import Client
from gangline.core.client.localcluster import LocalCluster, up

pytestmark = [pytest.mark.process, pytest.mark.etcd, pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd binary")]

SMALL = {"resources": {"cpus": 0.1}, "restart": {"on_rank_failure": "never"}}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    state = tmp_path / "state"
    assert up(nodes=2, gpus=4, schedulers=1, state_dir=state) == exits.DONE
    try:
        yield LocalCluster(state, nodes=2).client()
    finally:
        LocalCluster(state).stop()


def wait_for(condition: Callable[[], object], timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not true after {timeout_s} s"
        time.sleep(0.1)


def job(name: str, command: str, **more: Any) -> dict[str, Any]:
    return {**SMALL, "name": name, "command": ["sh", "-c", command], **more}


def test_an_array_a_chain_behind_it_and_what_waits_for_its_time(client: Client, tmp_path: Path) -> None:
    here = tmp_path / "seen"
    here.mkdir()
    begun = time.time_ns() // 1_000_000
    # Each element leaves a file while it runs: so many as there are at once is the most that ran at once.
    script = f"""
        cd {here}; i=$GANGLINE_ARRAY_INDEX; touch run.$i; ls run.* | wc -l >> most; sleep 0.5; rm run.$i; touch done.$i
        echo "element $i of $GANGLINE_ARRAY_SIZE"; test $i != 4"""
    jobs = [
        job("sweep", script, array="0-14:2%3", resources={"gpus": 1, "cpus": 0.1}),
        job("one", "true", depends_on=["sweep.6"]),
        job("all", "true", depends_on=["sweep"]),
        job("behind", "true", depends_on=["all"]),
        job("clean", "true", depends_on=["after_not_ok:sweep", "after_any:behind"]),
        job("held", "true", hold=True),
        job("later", "true", begin="3s"),
        job("late", "sleep 100", deadline="2s"),
    ]
    results = client.submit_batch(jobs, "a key").body["results"]
    assert all("job" in result for result in results), results
    sweep = results[0]["job"]

    def shown(name: str) -> dict[str, Any]:
        found: dict[str, Any] = client.job(name).body
        return found

    wait_for(lambda: shown("all")["state"] == "finished" and shown("clean")["state"] == "finished")
    found = shown("sweep")
    assert (found["outcome"], found["reason"]) == ("failed", "1 of 8 elements failed: 4")
    assert {row["id"]: row["outcome"] for row in client.jobs(100, array=sweep)[0]} == {
        f"{sweep}.{i}": "failed" if i == 4 else "succeeded" for i in range(0, 15, 2)
    }
    assert sorted(path.name for path in here.glob("done.*")) == sorted(f"done.{i}" for i in range(0, 15, 2))
    assert max(int(line) for line in (here / "most").read_text().split()) <= 3, "no more than three at once"
    assert b"element 10 of 8\n" in client.logs(f"{sweep}.10", {"rank": 0}).body
    assert {name: (shown(name)["outcome"], shown(name)["cause"]) for name in ("one", "all", "behind", "clean")} == {
        "one": ("succeeded", "completed"), "all": ("cancelled", "dependency_failed"), "behind": ("cancelled", "dependency_failed"),
        "clean": ("succeeded", "completed"),
    }  # fmt: skip

    wait_for(lambda: shown("later")["state"] == shown("late")["state"] == "finished")
    assert shown("later")["started_at_ms"] >= begun + 3_000
    assert (shown("late")["outcome"], shown("late")["cause"]) == ("failed", "deadline")
    assert (shown("held")["state"], shown("held")["deferred"]["code"]) == ("queued", "held")
    client.release("held", "go")
    wait_for(lambda: shown("held")["outcome"] == "succeeded")
