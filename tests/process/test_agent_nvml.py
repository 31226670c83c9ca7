"""A real agent on a real etcd whose GPUs are those of the stand-in for NVML: RELIABILITY.md rows 64, 67 and 68, and parts of GPUs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import stat
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from test_agent import World, alive, gang

from gangline.chaos.injector import process_table
from gangline.core.model.documents import DesiredGang, DesiredRank, Observed, Registration
from gangline.core.model.gpushares import GpuShare, MigSlice
from gangline.nodeagent import cgroups

pytestmark = [pytest.mark.process, pytest.mark.etcd, pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the stand-in with")]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("nvml_stub_state", Path(__file__).parents[1] / "nvml" / "stub.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    made = module.Stub(tmp_path / "nvml")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    for i in range(4):
        made.add(numa=i // 2)
    return made


@pytest.fixture
async def world(etcd_endpoint: str, tmp_path: Path) -> AsyncIterator[World]:
    w = World(etcd_endpoint, tmp_path)
    await w.open()
    try:
        yield w
    finally:
        await w.close()


def start(world: World) -> Any:
    return world.start_agent("--gpus", "auto", "--gpu-interval", "0.2", ttl_s=8.0)


async def registration(world: World, is_so: Callable[[Registration], object]) -> Registration:
    async def look() -> Registration | None:
        seen = await world.registered()
        return seen if is_so(seen) else None

    found: Registration = await world.until(look, 40.0)
    return found


async def observed(world: World, is_so: Callable[[Observed], object]) -> Observed:
    async def look() -> Observed | None:
        seen = await world.observed()
        return seen if seen is not None and is_so(seen) else None

    found: Observed = await world.until(look, 40.0)
    return found


def asking(agent: int) -> list[int]:
    """Pids of what asks the driver for an agent."""
    found = []
    for process, parent in process_table().items():
        with contextlib.suppress(OSError):
            if parent == agent and Path(f"/proc/{process.pid}/comm").read_text().strip() == "gl-gpus":
                found.append(process.pid)
    return found


def metrics(seen: Registration) -> dict[str, float]:
    """The samples of /metrics, with what is in braces left out."""
    with urllib.request.urlopen(f"{seen.agent_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


async def test_row_67_a_driver_that_hangs_costs_no_lease_and_no_rank(
    world: World, stub: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    """The lease lives 8 s, the driver is waited for 10 s, and nobody is fenced meanwhile."""
    await world.submit("j", "echo $CUDA_VISIBLE_DEVICES; exec sleep 600")
    start(world)
    seen = await world.registered()
    assert [(g.model, g.healthy, g.links) for g in seen.gpus] == [("H100", True, (i // 2,)) for i in range(4)]
    await world.desire(gang(2))
    ranks = await world.until_ranks("running")
    stub.state.hang = b"*"
    lost = await registration(world, lambda r: not any(g.healthy for g in r.gpus))
    assert len(lost.gpus) == 4
    report = await observed(world, lambda o: o.driver is not None)
    assert report.driver is not None
    assert report.driver.state == "silent"
    assert all(alive(r.pid) for r in ranks)
    assert metrics(lost)["gangline_agent_gpu_driver_answers"] == 0
    # Nothing new is prepared on them.
    await world.submit("new", "true")
    await world.desire(gang(2), DesiredGang("new", 1, "run", (DesiredRank(0, 0, (3,), 1),), 1, 0, 1))
    await observed(world, lambda o: any(g.job == "new" and "not healthy" in g.message for g in o.gangs))
    # An agent that starts now adopts the ranks, while the driver still hangs.
    await eventually(lambda: asking(world.agents[0].pid))
    left = asking(world.agents[0].pid)
    world.agents[0].send_signal(signal.SIGKILL)
    world.agents[0].wait()
    await eventually(lambda: not any(alive(pid) for pid in left))  # nobody is left in the driver
    start(world)
    await registration(world, lambda r: r.agent_url != lost.agent_url)
    assert [r.pid for r in await world.until_ranks("running")] == [r.pid for r in ranks]
    stub.state.hang = b""
    await registration(world, lambda r: len(r.gpus) == 4 and all(g.healthy for g in r.gpus))
    await observed(world, lambda o: o.driver is None)
    assert all(alive(r.pid) for r in ranks)
    assert "lease_lost" not in world.log()


async def test_row_64_a_lost_gpu_is_told_by_its_uuid(world: World, stub: Any) -> None:
    start(world)
    await world.registered()
    await world.desire()
    stub.gpus[1].lost = 1
    stub.event(1, data=79)
    seen = await registration(world, lambda r: not r.gpus[1].healthy)
    assert [g.healthy for g in seen.gpus] == [True, False, True, True]
    told = await observed(world, lambda o: o.gpus and o.gpus[0].xids and o.gpus[0].state == "lost")
    assert [(r.uuid, r.state, r.xids[0].xid, r.xids[0].count) for r in told.gpus] == [(stub.uuid(1), "lost", 79, 1)]
    assert told.driver is None
    stub.event(2, data=13)
    await observed(world, lambda o: len(o.gpus) == 2)
    figures = metrics(seen)
    assert figures["gangline_agent_gpu_xids_total"] == 2
    assert figures["gangline_agent_gpu_usable"] == 3
    assert figures["gangline_agent_gpu_power_watts"] == 3 * 350
    assert figures["gangline_agent_gpu_memory_used_bytes"] == 3 * (1 << 30)
    assert figures["gangline_agent_gpu_temperature_celsius"] == 3 * 55


async def test_ranks_get_gpus_by_uuid_and_instances_as_decided(world: World, stub: Any) -> None:
    await world.submit("j", "echo $CUDA_VISIBLE_DEVICES $GANGLINE_GPU_MEMORY_MIB; exec sleep 600")
    start(world)
    await world.registered()
    small = GpuShare(0, 0, (MigSlice(2, 6, 1, "1g.10gb"),))
    large = GpuShare(0, 0, (MigSlice(2, 0, 4, "3g.40gb"),))
    ranks = tuple(DesiredRank(i, i, (min(i, 2),), 1, share) for i, share in enumerate((None, GpuShare(500), small, large)))
    await world.desire(DesiredGang("j", 1, "run", ranks, 4, 0, 1))
    await world.until_ranks("running")

    async def printed() -> list[str] | None:
        texts = [world.rank_log(rank=r) for r in range(4)]
        return [text.strip() for text in texts] if all(text.endswith("\n") for text in texts) else None

    whole, half, one, three = await world.until(printed)
    assert (whole, half) == (f"{stub.uuid(0)} 81559", f"{stub.uuid(1)} 40779")
    assert one.startswith("MIG-")
    assert one.endswith(" 9984")
    assert three.endswith(" 40448")
    on_card = {bytes(i.uuid).decode(): (i.start, i.size) for i in stub.gpus[2].instances if i.used and i.compute}
    assert on_card == {one.split()[0]: (6, 1), three.split()[0]: (0, 4)}
    # What the driver refuses, the gang is told.
    await world.desire()
    await world.until_gone()
    stub.gpus[2].processes = 1
    await world.submit("whole", "true")
    await world.desire(DesiredGang("whole", 1, "run", (DesiredRank(0, 0, (2,), 1),), 1, 0, 1))
    seen = await observed(world, lambda o: any(g.phase == "prepare_failed" for g in o.gangs))
    assert "cannot be unmade" in seen.gangs[0].message
    stub.gpus[2].processes = 0


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups need root")
async def test_other_gpus_are_closed_to_a_rank(world: World, stub: Any) -> None:
    """Device files of GPUs without a driver: what may be opened answers that there is no such device, what may not is not permitted."""
    if not cgroups.guarding(cgroups.here()).devices:
        pytest.skip("this kernel does not let us keep devices from a control group")
    files = [world.root / f"nvidia{minor}" for minor in range(10, 14)]
    try:
        for minor, file in enumerate(files, 10):
            stub.gpus[minor - 10].minor = minor
            os.mknod(file, 0o666 | stat.S_IFCHR, os.makedev(195, minor))
        with pytest.raises(OSError, match="No such device"):
            files[0].open("rb")
    except PermissionError as e:
        pytest.skip(f"device files cannot be made, or not be opened, in {world.root}: {e}")
    paths = " ".join(map(str, files))
    await world.submit("j", f"for f in {paths}; do (: < $f) 2>&1; done; sleep 600")
    start(world)
    await world.registered()
    await world.desire(DesiredGang("j", 1, "run", (DesiredRank(0, 0, (2,), 1),), 1, 0, 1))
    await world.until_ranks("running")

    async def printed() -> list[str] | None:
        text = world.rank_log()
        return text.splitlines() if text.count("\n") == 4 else None

    said = [line.rpartition(": ")[2] for line in await world.until(printed)]
    assert [line.startswith("Operation not permitted") for line in said] == [True, True, False, True], said
    assert said[2].startswith("No such device"), said
