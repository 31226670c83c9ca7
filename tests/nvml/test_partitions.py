"""MIG instances as the leader decided, through pynvml on the stand-in; and GPUs that forbid sharing."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from gangline.core.model.documents import DesiredRank
from gangline.core.model.gpufacts import MIG_LAYOUTS
from gangline.core.model.gpushares import GpuShare, MigSlice
from gangline.core.policy.migplan import best_start
from gangline.core.telemetry import Log
from gangline.nodeagent import mps
from gangline.nodeagent.gpudata import Partition
from gangline.nodeagent.gpus import GpuWatch
from gangline.nodeagent.nvmlgpus import NvmlGpus
from gangline.nodeagent.nvmlpartitions import NvmlPartitions

SMALL, LARGE, OTHER = MigSlice(0, 6, 1, "1g.10gb"), MigSlice(0, 0, 4, "4g.40gb"), MigSlice(0, 4, 4, "3g.40gb")


def rank(number: int, *mig: MigSlice, gpu: int = 0, share: GpuShare | None = None) -> DesiredRank:
    return DesiredRank(number, number, (gpu,), 1, GpuShare(0, 0, mig) if mig else share)


@pytest.fixture
async def watch(stub: Any, gpus: NvmlGpus, tmp_path: Path, log: Log) -> GpuWatch:
    for _ in range(2):
        stub.add()
    found = GpuWatch("nvml", tmp_path, "boot-1", log)
    found.backend = gpus
    await found.open()
    return found


@pytest.fixture
def partitions(watch: GpuWatch, tmp_path: Path) -> NvmlPartitions:
    return NvmlPartitions(watch, tmp_path / "mig-uuids.json", "boot-1")


def on_card(stub: Any, gpu: int = 0) -> set[tuple[int, int]]:
    """(start, size) of the instances that can be computed in, as the stand-in has them."""
    return {(i.start, i.size) for i in stub.gpus[gpu].instances if i.used and i.compute}


async def test_made_verified_and_unmade(stub: Any, watch: GpuWatch, partitions: NvmlPartitions, tmp_path: Path) -> None:
    change = await partitions.arrange([rank(0, SMALL), rank(1, LARGE)])
    assert set(change.made) == {SMALL, LARGE}
    assert on_card(stub) == {(6, 1), (0, 4)}
    assert stub.gpus[0].mig_on == 1
    assert stub.gpus[1].mig_on == 0
    names = partitions.uuid_of(SMALL), partitions.uuid_of(LARGE)
    assert all(n.startswith("MIG-") for n in names)
    assert len(set(names)) == 2
    # There already: nothing is touched.
    assert not await partitions.arrange([rank(0, SMALL)])
    # An agent that starts meanwhile has the same names; one of another boot has none.
    assert NvmlPartitions(watch, tmp_path / "mig-uuids.json", "boot-1").uuid_of(SMALL) == names[0]
    assert NvmlPartitions(watch, tmp_path / "mig-uuids.json", "boot-2").uuid_of(SMALL) == ""
    # In the way of another one: unmade. In nobody's way: left.
    change = await partitions.arrange([rank(0, OTHER)])
    assert (change.made, change.unmade) == ((OTHER,), (SMALL,))
    assert on_card(stub) == {(0, 4), (4, 4)}
    assert partitions.uuid_of(SMALL) == ""
    # Given whole, it is no longer in MIG mode.
    change = await partitions.arrange([rank(0)])
    assert set(change.unmade) == {LARGE, OTHER}
    assert (on_card(stub), stub.gpus[0].mig_on) == (set(), 0)


async def test_what_is_closed_to_a_rank(stub: Any, watch: GpuWatch, partitions: NvmlPartitions, tmp_path: Path, monkeypatch: Any) -> None:
    assert partitions.closed(rank(0, gpu=1)) == ((195, 0),)
    assert partitions.closed(rank(0, gpu=0, share=GpuShare(500))) == ((195, 1),)
    await partitions.arrange([rank(0, SMALL), rank(1, LARGE)])
    number = {bytes(i.uuid).decode(): i.id for i in stub.gpus[0].instances if i.used}
    small, large = number[partitions.uuid_of(SMALL)], number[partitions.uuid_of(LARGE)]
    minors = tmp_path / "mig-minors"
    minors.write_text(f"config 1\ngpu0/gi{small}/access 30\ngpu0/gi{large}/access 40\ngpu1/gi{large}/access 50\n")
    monkeypatch.setattr("gangline.nodeagent.nvmlpartitions.MIG_MINORS", str(minors))
    major = next(int(line.split()[0]) for line in Path("/proc/devices").read_text().splitlines() if line.split()[1:] == ["mem"])
    monkeypatch.setattr("gangline.nodeagent.deviceaccess.CAPABILITIES", "mem")
    assert partitions.closed(rank(0, SMALL)) == ((195, 1), (major, 1), (major, 40))
    assert partitions.closed(rank(1, LARGE)) == ((195, 1), (major, 1), (major, 30))


async def test_every_place_that_the_scheduler_can_decide_is_one_of_the_driver(stub: Any, partitions: NvmlPartitions) -> None:
    """Fill a GPU with each profile, at the starts that the scheduler would choose."""
    layout = MIG_LAYOUTS["H100"]
    for p in layout.profiles:
        taken: tuple[tuple[int, str], ...] = ()
        while (best := best_start(layout, taken, p.name)) is not None:
            taken = tuple(sorted((*taken, (best[1], p.name))))
        wanted = [MigSlice(0, start, p.size, p.name) for start, _ in taken]
        await partitions.arrange([rank(0)])
        await partitions.arrange([rank(i, one) for i, one in enumerate(wanted)])
        assert on_card(stub) == {(one.start, one.size) for one in wanted}
        assert len({partitions.uuid_of(one) for one in wanted} - {""}) == len(wanted) == p.most


async def test_what_the_driver_refuses_is_said(stub: Any, partitions: NvmlPartitions) -> None:
    with pytest.raises(OSError, match=r"no place for 4g.40gb at 4, only at 0"):
        await partitions.arrange([rank(0, MigSlice(0, 4, 4, "4g.40gb"))])
    with pytest.raises(OSError, match=r"no MIG profile 1g.5gb; it has 1g.10gb"):
        await partitions.arrange([rank(0, MigSlice(0, 0, 1, "1g.5gb"))])
    await partitions.arrange([rank(0, SMALL)])
    stub.gpus[0].processes = 1
    with pytest.raises(OSError, match="cannot be unmade"):
        await partitions.arrange([rank(0, OTHER)])
    with pytest.raises(OSError, match="cannot be unmade"):
        await partitions.arrange([rank(0)])
    assert on_card(stub) == {(6, 1)}


async def test_a_gpu_that_needs_a_reset_for_mig(stub: Any, partitions: NvmlPartitions) -> None:
    """As an A100 does when something has it open."""
    stub.gpus[0].mig_needs_reset = 1
    with pytest.raises(OSError, match="reset the GPU, or boot the node"):
        await partitions.arrange([rank(0, SMALL)])
    stub.gpus[0].mig_needs_reset = 0
    assert await partitions.arrange([rank(0, SMALL)])


async def test_an_instance_without_compute_instance_is_made_anew(stub: Any, gpus: NvmlGpus, partitions: NvmlPartitions) -> None:
    """As one is left behind by an agent that was killed between the two."""
    await partitions.arrange([rank(0, SMALL)])
    next(i for i in stub.gpus[0].instances if i.used).compute = 0
    assert [i.uuid for i in await gpus.partition(Partition(stub.uuid(0)))] == [""]
    await partitions.arrange([rank(0, SMALL)])
    assert on_card(stub) == {(6, 1)}
    assert partitions.uuid_of(SMALL)


async def test_a_failed_instance_leaves_nothing_behind(stub: Any, partitions: NvmlPartitions) -> None:
    stub.state.fail, stub.state.fail_with = b"nvmlGpuInstanceCreateComputeInstance", 23
    with pytest.raises(OSError, match="cannot be computed in"):
        await partitions.arrange([rank(0, SMALL)])
    assert not any(i.used for i in stub.gpus[0].instances)


async def test_compute_modes_that_forbid_it(stub: Any, gpus: NvmlGpus, tmp_path: Path, log: Log) -> None:
    for mode in (0, 3, 2):
        stub.gpus[stub.add()].compute_mode = mode
    watch = GpuWatch("nvml", tmp_path, "boot-1", log)
    watch.backend = gpus
    await watch.open()
    half = GpuShare(500)
    partitions = NvmlPartitions(watch, tmp_path / "uuids", "boot-1")
    await partitions.arrange([rank(0, gpu=0, share=half), rank(1, gpu=1)])
    with pytest.raises(OSError, match=r"GPU 1 is in compute mode exclusive.*nvidia-smi -i 1 -c DEFAULT"):
        await partitions.arrange([rank(0, gpu=1, share=half)])
    with pytest.raises(OSError, match="GPU 2 is in compute mode prohibited"):
        await partitions.arrange([rank(0, gpu=2)])
    with pytest.raises(OSError, match="no pipe directory"):
        await NvmlPartitions(watch, tmp_path / "uuids", "boot-1", str(tmp_path / "mps")).arrange([rank(0, gpu=1, share=half)])


# ---------------------------------------------------------------- MPS


def daemon(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put a control program that says what the real one says on the search path, and return a pipe directory."""
    program = folder / "bin" / mps.CONTROL
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    (folder / "pipe").mkdir(exist_ok=True)
    return str(folder / "pipe")


async def test_the_control_daemon_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    pipe = daemon(tmp_path, f'read line; echo "$line $CUDA_MPS_PIPE_DIRECTORY" > {asked}; echo 4711', monkeypatch)
    assert await mps.problem(pipe) == ""
    assert asked.read_text() == f"get_server_list {pipe}\n"
    daemon(tmp_path, "echo 'Cannot find MPS control daemon process'; exit 1", monkeypatch)
    assert "Cannot find MPS control daemon process" in await mps.problem(pipe)
    daemon(tmp_path, "exec sleep 60", monkeypatch)
    assert "has not answered within 0.2 s" in await mps.problem(pipe, answer_s=0.2)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert "cannot be run" in await mps.problem(pipe)
