"""Parts of GPUs on a cluster of real processes: what two halves, an instance and an amount of memory find where they run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gangline.chaos.gpufaults import GpuDriverSilent, GpuLost
from gangline.chaos.injector import Injector
from gangline.chaos.local import OnLocalCluster
from gangline.core.client.localcluster import LocalCluster

pytestmark = [pytest.mark.process, pytest.mark.etcd, pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd binary")]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "state", nodes=1, gpus=3, schedulers=1) as started:
        yield started


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not true after {timeout_s} s"
        time.sleep(0.05)


class Jobs:
    """Jobs that write down their environment and then wait for a file."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.client, self.folder = cluster.client(), folder

    def submit(self, name: str, **resources: Any) -> None:
        there = self.folder / name
        line = f"env > {there}.new; mv {there}.new {there}; until [ -e {there}.end ]; do sleep 0.05; done"
        self.client.submit({"name": name, "command": ["sh", "-c", line], "resources": {"cpus": 0.1, **resources}}, name)

    def environment(self, name: str) -> dict[str, str]:
        """What its rank has found."""
        wait_for((self.folder / name).exists)
        pairs = (line.split("=", 1) for line in (self.folder / name).read_text().splitlines() if "=" in line)
        return {k: v for k, v in pairs if k.startswith(("CUDA", "NVIDIA", "GANGLINE_GPU"))}

    def end(self, *names: str) -> None:
        for name in names:
            (self.folder / f"{name}.end").touch()
        for name in names:
            wait_for(lambda name=name: self.client.job(name).body["state"] == "finished")
            assert self.client.job(name).body["outcome"] == "succeeded"


def test_halves_an_instance_and_memory(cluster: LocalCluster, tmp_path: Path) -> None:
    jobs = Jobs(cluster, tmp_path)
    jobs.submit("left", gpu_share=0.5)
    jobs.submit("right", gpu_share=0.5)
    jobs.submit("small", mig="1g.10gb")
    jobs.submit("large", mig="3g.40gb", mig_count=2)
    assert jobs.environment("left") == jobs.environment("right") == {
        "CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "0", "GANGLINE_GPU_SHARE": "0.5", "GANGLINE_GPU_MEMORY_MIB": "40779",
    }  # fmt: skip
    small, large = jobs.environment("small"), jobs.environment("large")
    assert small["GANGLINE_GPU_MEMORY_MIB"] == "9984"
    assert large["GANGLINE_GPU_MEMORY_MIB"] == "40448"
    instances = [*small["CUDA_VISIBLE_DEVICES"].split(","), *large["CUDA_VISIBLE_DEVICES"].split(",")]
    assert len(set(instances)) == 3
    assert all(name.startswith("MIG-") for name in instances)

    # All three GPUs are in use: one shared, two partitioned, of which one has a slice left besides the small instance.
    node = jobs.client.nodes()[0]
    assert (node["gpus_total"], node["gpus_free"]) == (3, 0)
    jobs.submit("memory", gpu_memory="20GiB")
    wait_for(lambda: jobs.client.job("memory").body["deferred"] is not None)
    jobs.end("left")
    assert jobs.environment("memory")["GANGLINE_GPU_MEMORY_MIB"] == "20480"
    assert jobs.environment("memory")["GANGLINE_GPU_SHARE"] == "0.26"

    # What was partitioned is given whole again, as soon as nothing of it is in use.
    jobs.submit("whole", gpus=2)
    jobs.end("small", "large")
    assert jobs.environment("whole")["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert json.loads(next((tmp_path / "state").glob("**/mig.json")).read_text()) == []
    jobs.end("right", "memory", "whole")
    assert jobs.client.nodes()[0]["gpus_free"] == 3


def test_ranks_outlive_their_agent_with_what_they_have(cluster: LocalCluster, tmp_path: Path) -> None:
    jobs = Jobs(cluster, tmp_path)
    jobs.submit("half", gpu_share=0.5)
    jobs.submit("slice", mig="4g.40gb", gpu_model="H100")
    jobs.environment("half")
    jobs.environment("slice")
    cluster.kill("n1")
    cluster.start()
    jobs.submit("other", gpu_share=0.5)
    jobs.submit("beside", mig="3g.40gb")
    assert jobs.environment("other")["CUDA_VISIBLE_DEVICES"] == "0"
    assert jobs.environment("beside")["CUDA_VISIBLE_DEVICES"].startswith("MIG-")
    assert jobs.client.nodes()[0]["gpus_free"] == 1
    assert all(jobs.client.job(name).body["generation"] == 1 for name in ("half", "slice"))
    jobs.end("half", "slice", "other", "beside")


def test_gpus_that_break_get_no_new_work(cluster: LocalCluster, tmp_path: Path) -> None:
    """What runs goes on: what becomes of it is for the rules of health to say."""
    jobs = Jobs(cluster, tmp_path)
    jobs.submit("first", gpus=1)
    assert jobs.environment("first")["CUDA_VISIBLE_DEVICES"] == "0"
    injector = Injector(OnLocalCluster(cluster))
    injector.inject(GpuLost("n1", 1))
    wait_for(lambda: jobs.client.nodes()[0]["gpus_free"] == 1)
    jobs.submit("second", gpus=1)
    assert jobs.environment("second")["CUDA_VISIBLE_DEVICES"] == "2"
    jobs.end("second")
    wait_for(lambda: jobs.client.nodes()[0]["gpus_free"] == 1)
    silent = injector.inject(GpuDriverSilent("n1"))
    wait_for(lambda: jobs.client.nodes()[0]["gpus_free"] == 0)
    jobs.submit("third", gpus=1)
    wait_for(lambda: jobs.client.job("third").body["deferred"] is not None)
    injector.heal(silent)
    assert jobs.environment("third")["CUDA_VISIBLE_DEVICES"] == "2"
    jobs.end("first", "third")
    assert all(jobs.client.job(name).body["generation"] == 1 for name in ("first", "second", "third"))
