"""What is made of what a driver says, and simulated GPUs that break when they are told to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.chaos import gpufaults as g
from gangline.chaos.injector import Injector
from gangline.chaos.targets import Component, Identity, NoTarget
from gangline.core.model.documents import GpuReport
from gangline.core.telemetry import structured_logging
from gangline.nodeagent.devices import simulated
from gangline.nodeagent.gpudata import GpuFacts
from gangline.nodeagent.gpus import GpuWatch
from gangline.nodeagent.gpustate import Memory, count_xid, settle, slowdowns, usable
from gangline.nodeagent.nvmlpaths import groups
from gangline.nodeagent.simgpus import SimulatedGpus

# ---------------------------------------------------------------- which GPU is which

uuids = st.lists(st.sampled_from("abcdefgh"), unique=True)


def facts(names: list[str]) -> tuple[GpuFacts, ...]:
    return tuple(GpuFacts(name, "NVIDIA H100 80GB HBM3", 81_559) for name in names)


@given(st.lists(uuids, min_size=2, max_size=6))
def test_within_one_boot_a_gpu_keeps_its_index(looks: list[list[str]]) -> None:
    gpus = settle((), facts(looks[0]), same_boot=True)
    index = {gpu.uuid: gpu.index for gpu in gpus}
    for names in looks[1:]:
        gpus = settle(gpus, facts(names), same_boot=True)
        assert len({gpu.index for gpu in gpus}) == len(gpus)
        for gpu in gpus:
            assert index.setdefault(gpu.uuid, gpu.index) == gpu.index
            assert gpu.healthy == (gpu.uuid in names)
        assert index.keys() == {gpu.uuid for gpu in gpus}, "none is forgotten"


@given(uuids, uuids)
def test_after_a_boot_they_are_in_the_order_of_the_driver(before: list[str], now: list[str]) -> None:
    known = settle((), facts(before), same_boot=False)
    gpus = settle(known, facts(now), same_boot=False)
    assert [gpu.uuid for gpu in gpus[: len(now)]] == now
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
    # As many are missing as the node has fewer of than before.
    missing = {gpu.uuid for gpu in gpus if not gpu.healthy}
    assert len(missing) == max(0, len(before) - len(now))
    assert missing <= set(before) - set(now)


def test_health_is_what_the_driver_names_and_reaches() -> None:
    gpus = settle((), facts(["a", "b", "c"]), same_boot=True)
    assert [gpu.healthy for gpu in usable(gpus, {"a", "b"}, {"b"}, answers=True)] == [True, False, False]
    assert not any(gpu.healthy for gpu in usable(gpus, {"a", "b"}, set(), answers=False))


def test_all_gpus_of_a_node_have_as_many_groups() -> None:
    known = tuple(msgspec.structs.replace(gpu, links=(gpu.index,)) for gpu in settle((), facts(["a", "b"]), same_boot=True))
    now = tuple(msgspec.structs.replace(f, links=(0, 1)) for f in facts(["a"]))
    assert [len(gpu.links) for gpu in usable(settle(known, now, same_boot=True), {"a"}, set(), answers=True)] == [2, 2]


@pytest.mark.parametrize(
    ("numa", "switch", "bridge", "links"),
    [
        ([0, 0], [0, 1], [0, 1], [(), ()]),  # one socket, nothing else joined
        ([0, 1], [0, 1], [0, 1], [(), ()]),  # two of which each is alone
        ([0, 0, 1, 1], [0, 1, 2, 3], [0, 1, 2, 3], [(0,), (0,), (1,), (1,)]),
        ([0, 0, 1, 1], [0, 0, 2, 2], [0, 1, 2, 3], [(0,), (0,), (1,), (1,)]),  # switches say what sockets say
        ([0] * 4, [0, 0, 2, 2], [0, 1, 2, 3], [(0,), (0,), (1,), (1,)]),
        ([0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 2, 2, 4, 4, 6, 6], list(range(8)), [(i // 4, i // 2) for i in range(8)]),
        ([0, 1, 0, 1], [0, 1, 2, 3], [0, 0, 2, 2], [(0, 0), (0, 1), (1, 0), (1, 1)]),  # bridges across sockets come first
    ],
)
def test_groups_of_near_gpus(numa: list[int], switch: list[int], bridge: list[int], links: list[tuple[int, ...]]) -> None:
    assert groups(numa, switch, bridge) == links


def test_a_slowdown_begins_when_it_is_seen_first() -> None:
    since = slowdowns({}, 0x40 | 0x1, 5.0)
    assert since == {"hw_thermal": 5.0}
    assert slowdowns(since, 0x40 | 0x80, 9.0) == {"hw_thermal": 5.0, "hw_power_brake": 9.0}
    assert slowdowns(since, 0x4, 9.0) == {}, "a power cap is no fault"


def test_kinds_of_xids_are_bounded() -> None:
    memory = Memory("boot")
    for xid in range(1, 100):
        count_xid(memory, "a", xid, 1)
    counts = memory.xids["a"]
    assert len(counts) == 32
    assert sum(n for n, _ in counts.values()) == 99


# ---------------------------------------------------------------- simulated GPUs


class Cluster:
    """A cluster of one node, as `injector.Cluster`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def components(self) -> dict[str, Component]:
        return {"n1": Component("n1", "agent", Identity(1, 1))}

    def node_folders(self) -> dict[str, Path]:
        return {"n1": self.root}

    def leader(self) -> str:
        return ""

    def restart(self, name: str) -> None:
        raise AssertionError(name)


async def watch_at(root: Path, option: str = "sim:h100x8", boot: str = "boot-1", *, look: bool = True) -> GpuWatch:
    watch = GpuWatch("simulated", root, boot, structured_logging("error"))
    cards = simulated(option, "me").gpus
    watch.only({gpu.uuid for gpu in cards})
    watch.backend = SimulatedGpus(cards, root, watch.counted, watch.happened)
    await watch.open()
    if look:
        await watch.look()
    return watch


def unusable(watch: GpuWatch) -> list[int]:
    return [gpu.index for gpu in watch.inventory.gpus if not gpu.healthy]


async def test_they_are_registered_as_they_always_were(tmp_path: Path) -> None:
    for option in ("sim:h100x8", "sim:a100-40gbx2,l40sx1", "sim:rtx4090x1"):
        watch = await watch_at(tmp_path, option)
        assert watch.inventory == simulated(option, "me")
        assert (watch.reports, watch.driver) == ((), None)


async def test_an_xid_is_counted_once_whoever_looks(tmp_path: Path) -> None:
    injector = Injector(Cluster(tmp_path))
    with pytest.raises(NoTarget, match="n1 has no GPUs that its agent remembers"):
        injector.inject(g.GpuXid("n1", 3, 94))
    watch = await watch_at(tmp_path)
    for _ in range(2):
        record = injector.inject(g.GpuXid("n1", 3, 94))
    assert record.to_json()["fault"] == "gpu-xid"
    assert record.targets[0].what == "GPU 3 of n1"
    await watch.look()
    await watch.look()
    (report,) = watch.reports
    assert (report.uuid, report.state, [(x.xid, x.count) for x in report.xids]) == (watch.inventory.gpus[3].uuid, "present", [(94, 2)])
    assert report.xids[0].last_at_ms > 0
    # The next agent says so from the beginning: no report would mean that the GPU is as it should be.
    again = await watch_at(tmp_path, look=False)
    assert again.reports == watch.reports
    await again.look()
    assert again.reports == watch.reports
    assert unusable(again) == []


@pytest.mark.parametrize(
    ("fault", "said", "is_unusable", "after"),
    [
        (g.GpuLost("n1", 2), {"state": "lost"}, True, {}),
        (g.GpuMissing("n1", 2), {"state": "missing"}, True, {}),
        (g.GpuEcc("n1", 2), {"ecc_uncorrected": 1, "remapped_uncorrected": 1, "remap_pending": True, "needs": "gpu_reset"}, False,
         {"remapped_uncorrected": 1}),
        (g.GpuLinkDown("n1", 2), {"nvlinks_down": 1, "nvlink_errors": 100}, False, {"nvlink_errors": 100}),
    ],
)  # fmt: skip
async def test_faults_and_healing(tmp_path: Path, fault: g.GpuFault, said: dict[str, Any], is_unusable: bool, after: dict[str, Any]) -> None:
    watch = await watch_at(tmp_path)
    heard: list[bool] = []
    watch.changed = heard.append
    injector = Injector(Cluster(tmp_path))
    record = injector.inject(fault)
    await watch.look()
    (report,) = watch.reports
    uuid = watch.inventory.gpus[2].uuid
    assert msgspec.structs.replace(report, xids=()) == GpuReport(uuid, **said)
    assert unusable(watch) == ([2] if is_unusable else [])
    assert (True in heard) == is_unusable
    assert False in heard
    assert injector.heal(record) == ["GPU 2 of n1 is as it was"]
    await watch.look()
    assert unusable(watch) == []
    assert msgspec.structs.replace(watch.reports[0], xids=()) == GpuReport(uuid, **after) if watch.reports else not after


async def test_heat_is_reported_when_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = await watch_at(tmp_path)
    g.put(g.GpuHot("n1", 0), tmp_path)
    await watch.look()
    assert watch.reports == ()
    monkeypatch.setattr("gangline.nodeagent.gpustate.SLOWED_S", 0.0)
    await watch.look()
    assert watch.reports[0].slowed == ("hw_thermal",)


async def test_a_silent_driver_keeps_all_of_the_node_from_new_work(tmp_path: Path) -> None:
    watch = await watch_at(tmp_path)
    injector = Injector(Cluster(tmp_path))
    injector.inject(g.GpuXid("n1", 1, 13))
    await watch.look()
    record = injector.inject(g.GpuDriverSilent("n1"))
    await watch.look()
    assert unusable(watch) == list(range(8))
    assert watch.driver is not None
    assert watch.driver.state == "silent"
    assert [(r.state, len(r.xids)) for r in watch.reports] == [("stale", int(i == 1)) for i in range(8)]
    again = await watch_at(tmp_path, look=False)
    assert (again.driver, unusable(again)) == (watch.driver, list(range(8)))
    injector.heal(record)
    await watch.look()
    assert (unusable(watch), watch.driver, len(watch.reports)) == ([], None, 1)


async def test_what_cannot_be_injected(tmp_path: Path) -> None:
    await watch_at(tmp_path)
    injector = Injector(Cluster(tmp_path))
    with pytest.raises(NoTarget, match="n1 has no GPU 8; it has 8"):
        injector.inject(g.GpuLost("n1", 8))
    with pytest.raises(NoTarget, match="there is no node n2"):
        injector.inject(g.GpuLost("n2", 0))
    memory = msgspec.json.decode((tmp_path / "gpus.json").read_bytes(), type=Memory)
    memory.kind = "nvml"
    (tmp_path / "gpus.json").write_bytes(msgspec.json.encode(memory))
    with pytest.raises(NoTarget, match="the GPUs of n1 are real"):
        injector.inject(g.GpuLost("n1", 0))


async def test_a_file_of_faults_that_nobody_can_read_is_a_driver_that_fails(tmp_path: Path) -> None:
    watch = await watch_at(tmp_path)
    (tmp_path / "gpu-faults.json").write_text('{"gpus": {"0": {"losst": true}}}')
    await watch.look()
    assert watch.driver is not None
    assert (watch.driver.state, "gpu-faults.json" in watch.driver.message) == ("failed", True)


async def test_another_number_of_simulated_gpus_is_what_the_command_line_says(tmp_path: Path) -> None:
    await watch_at(tmp_path)
    assert len((await watch_at(tmp_path, "sim:h100x4")).inventory.gpus) == 4
    assert len((await watch_at(tmp_path, "sim:a100x8")).inventory.gpus) == 8


def test_every_gpu_fault_can_be_named() -> None:
    assert len(g.GPU_FAULTS) == 7
    assert all(name.startswith("gpu-") for name in g.GPU_FAULTS)
    assert str(g.GpuLost("n1", 3)) == "gpu-lost GPU 3 of n1"
    assert replace(g.GpuXid("n1", 3, 79), gpu=4).to_json() == {"fault": "gpu-xid", "node": "n1", "gpu": 4, "xid": 79}
