"""An elastic job on a cluster of real processes: it starts small, grows, gives back what it can do without, and loses no step."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gangline.core.client.localcluster import LocalCluster

pytestmark = [pytest.mark.process, pytest.mark.etcd, pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd binary")]
pytest.importorskip("numpy")
pytest.importorskip("sklearn")

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "digits" / "train.py"
GPUS = 3


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "state", nodes=2, gpus=GPUS, schedulers=1) as cluster:
        yield cluster


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not true after {timeout_s} s"
        time.sleep(0.1)


def job(name: str, command: list[str], **more: Any) -> dict[str, Any]:
    resources = {"gpus": 1, "cpus": 0.1}
    return {"name": name, "gang": {"ranks": GPUS, "ranks_per_node": GPUS}, "resources": resources, "command": command, **more}


def test_training_grows_and_shrinks_with_the_room_and_goes_on_from_its_checkpoint(cluster: LocalCluster, tmp_path: Path) -> None:
    client, checkpoints = cluster.client(), tmp_path / "checkpoints"

    def steps() -> list[dict[str, Any]]:
        path = checkpoints / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def trains(ranks: int, generation: int) -> Callable[[], bool]:
        return lambda: any((s["ranks"], s["generation"]) == (ranks, generation) for s in steps())

    client.submit(job("other", ["sleep", "1000"]), "other")
    wait_for(lambda: client.job("other").body["state"] == "running")
    command = [sys.executable, str(TRAIN), "--backend", "ring", "--steps", "100000", "--checkpoint-every", "1000", "--step-time-ms", "20"]
    elastic = {"gang": {"ranks": 2 * GPUS, "min_ranks": GPUS, "ranks_per_node": GPUS}, "elastic": {"grow_after": "2s"}}
    client.submit(job("train", command, checkpoint={"path": str(checkpoints)}, **elastic), "train")
    wait_for(trains(GPUS, 1))

    client.stop("other", "it is done")
    wait_for(trains(2 * GPUS, 2))

    client.submit(job("vip", ["sleep", "1000"], priority=90), "vip")
    wait_for(trains(GPUS, 3))
    wait_for(lambda: client.job("vip").body["state"] == "running")

    # A node is lost. Its ranks may be missed before it is, so there may be a restart in place on the way.
    client.stop("vip", "it is done")
    wait_for(trains(2 * GPUS, 4))
    assert cluster.kill("n2")
    wait_for(lambda: any(s["ranks"] == GPUS and s["generation"] > 4 for s in steps()))

    seen = steps()
    resized = [s for s in seen if s["generation"] <= 4]
    assert [s["step"] for s in resized] == list(range(1, len(resized) + 1)), "every step once: each size went on where the one before ended"
    client.stop("train", "it is done")
