"""Parts of GPUs at the agent: what it refuses, what it waits for, how it partitions, and what a rank finds in its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.core.model.documents import Desired, DesiredGang, DesiredRank, Gpu
from gangline.core.model.gpushares import GpuShare, MigSlice
from gangline.core.model.spec import JobSpec
from gangline.nodeagent.adoption import RankStatus, local_rank, read_status, save_status
from gangline.nodeagent.devices import simulated
from gangline.nodeagent.environment import Here, rank_environment
from gangline.nodeagent.local import Local, LocalGang, LocalRank
from gangline.nodeagent.partitions import NoPartitions, SimulatedPartitions, planned
from gangline.nodeagent.reconcile import Action, FailPrepare, Prepare, reconcile

FACTS = {g.index: g for g in simulated("sim:h100x4", "me").gpus}
HALF = GpuShare(500)
SMALL = GpuShare(0, 0, (MigSlice(0, 6, 1, "1g.10gb"),))
LARGE = GpuShare(0, 0, (MigSlice(0, 0, 4, "4g.40gb"),))
LAST = GpuShare(0, 0, (MigSlice(0, 4, 4, "3g.40gb"),))


def gang(job: str, *shares: GpuShare | None, gpu: int = 0, generation: int = 1) -> DesiredGang:
    ranks = tuple(DesiredRank(i, i, (gpu,), generation, share) for i, share in enumerate(shares))
    return DesiredGang(job, generation, "run", ranks, world_size=len(ranks), node_rank=0, nodes=1)


def running(job: str, share: GpuShare | None, gpu: int = 0) -> LocalGang:
    return LocalGang(job, 1, "prepared", (LocalRank(0, 1, (gpu,), "running", share=share),))


def look(desired: list[DesiredGang], *there: LocalGang) -> list[Action]:
    local = Local(dict.fromkeys(FACTS, True), {g.job: g for g in there}, {}, FACTS)
    return reconcile(Desired("n1", 1, 1, tuple(desired)), local, 0.0)


def failure(desired: list[DesiredGang]) -> str:
    return next((a.message for a in look(desired) if isinstance(a, FailPrepare)), "")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (HALF, HALF, ""),
        (HALF, GpuShare(510), "it is shared beyond the whole of it"),
        (HALF, GpuShare(500, 40_779), ""),  # 81,559 MiB have no larger half in whole MiB
        (HALF, GpuShare(510, 40_780), "it is shared beyond the whole of it"),
        (HALF, None, "device 0, and so is rank 0 of a"),
        (None, HALF, "device 0, and so is rank 0 of a"),
        (HALF, SMALL, "it is shared and partitioned at once"),
        (SMALL, LARGE, ""),
        (SMALL, LAST, "it has overlapping MIG instances, 3g.40gb at 4 and 1g.10gb at 6"),
        (SMALL, None, "device 0, and so is rank 0 of a"),
    ],
)
def test_what_two_ranks_may_have_of_one_gpu(first: GpuShare | None, second: GpuShare | None, said: str) -> None:
    assert failure([gang("a", first), gang("b", second)]).endswith(said)
    assert bool(failure([gang("a", first), gang("b", second)])) == bool(said)


def test_instances_that_the_gpu_cannot_have_are_refused() -> None:
    for wrong in (MigSlice(0, 2, 4, "3g.40gb"), MigSlice(0, 0, 2, "1g.10gb"), MigSlice(0, 0, 1, "1g.5gb")):
        assert "which cannot have it" in failure([gang("a", GpuShare(0, 0, (wrong,)))])


# ---------------------------------------------------------------- what is waited for


@pytest.mark.parametrize(
    ("there", "new", "waits"),
    [
        (HALF, HALF, False), (GpuShare(600), HALF, True), (None, HALF, True), (HALF, None, True), (SMALL, LARGE, False), (LAST, SMALL, True),
        (SMALL, HALF, True),
    ],
)  # fmt: skip
def test_a_rank_waits_for_what_has_its_part(there: GpuShare | None, new: GpuShare | None, waits: bool) -> None:
    """`old` is no longer wanted and not yet gone."""
    prepares = [a for a in look([gang("new", new)], running("old", there)) if isinstance(a, Prepare)]
    assert bool(prepares) != waits


# ---------------------------------------------------------------- partitions


def test_only_what_is_in_the_way_is_unmade() -> None:
    there = [SMALL.mig[0], LARGE.mig[0]]
    assert planned(there, gang("a", LAST).ranks) == type(planned([], []))((LAST.mig[0],), (SMALL.mig[0],))
    assert planned(there, gang("a", SMALL).ranks).made == planned(there, gang("a", SMALL).ranks).unmade == ()
    assert planned(there, gang("a", None).ranks).unmade == tuple(there)
    assert planned(there, gang("a", HALF, gpu=1).ranks).unmade == ()


async def test_simulated_gpus_remember_how_they_are_partitioned(tmp_path: Path) -> None:
    cards = SimulatedPartitions(tmp_path / "mig.json", FACTS.values())
    assert await cards.arrange(gang("a", SMALL, LARGE).ranks)
    name = cards.uuid_of(SMALL.mig[0])
    assert name.startswith("MIG-")
    assert name != cards.uuid_of(LARGE.mig[0])
    again = SimulatedPartitions(tmp_path / "mig.json", FACTS.values())
    assert again.uuid_of(SMALL.mig[0]) == name
    assert not await again.arrange(gang("a", SMALL).ranks)
    assert (await again.arrange(gang("b", None).ranks)).unmade == (*SMALL.mig, *LARGE.mig)
    assert again.uuid_of(SMALL.mig[0]) == ""


async def test_a_node_without_partitions_says_so() -> None:
    assert not await NoPartitions().arrange(gang("a", HALF).ranks)
    with pytest.raises(OSError, match="does not partition"):
        await NoPartitions().arrange(gang("a", SMALL).ranks)


# ---------------------------------------------------------------- what a rank finds


def environment(share: GpuShare | None, gpus: dict[int, Gpu] = FACTS, **here: object) -> dict[str, str]:
    of = gang("a", share)
    where = Here("n1", {}, gpus, False, "s", 1, "e", "t", **here)  # type: ignore[arg-type]
    found = rank_environment(of, of.ranks[0], JobSpec(("x",)), where)
    return {k: v for k, v in found.items() if k.startswith(("CUDA", "NVIDIA", "GANGLINE_GPU"))}


def test_a_share_in_the_environment() -> None:
    uuid = FACTS[0].uuid
    assert environment(HALF) == {
        "CUDA_VISIBLE_DEVICES": uuid, "NVIDIA_VISIBLE_DEVICES": uuid, "GANGLINE_GPU_SHARE": "0.5", "GANGLINE_GPU_MEMORY_MIB": "40779",
    }  # fmt: skip
    held = environment(GpuShare(130, 10_240), mps_pipe="/run/mps")
    assert held == {
        "CUDA_VISIBLE_DEVICES": uuid, "NVIDIA_VISIBLE_DEVICES": uuid, "GANGLINE_GPU_SHARE": "0.13", "GANGLINE_GPU_MEMORY_MIB": "10240",
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mps", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "13", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=10240M",
    }  # fmt: skip


def test_mps_is_for_shares_only() -> None:
    assert not [k for k in environment(None, mps_pipe="/run/mps") if "MPS" in k]
    assert environment(None)["GANGLINE_GPU_SHARE"] == "1"


def test_instances_in_the_environment() -> None:
    found = environment(SMALL, instances=("MIG-1",), mps_pipe="/run/mps")
    assert found == {"CUDA_VISIBLE_DEVICES": "MIG-1", "NVIDIA_VISIBLE_DEVICES": "MIG-1", "GANGLINE_GPU_MEMORY_MIB": "9984"}


def test_the_status_file_says_what_part_a_rank_has(tmp_path: Path) -> None:
    """So that the next agent knows it, too."""
    for share in (None, HALF, SMALL):
        status = RankStatus("a", 1, 0, (0,), "boot", 0, 0, 0, 0, "running", 0, "", "", 0, 0, share=share)
        (tmp_path / "status").write_bytes(b"")
        save_status(tmp_path / "status", status)
        assert read_status(tmp_path / "status") == status
        assert local_rank(status, 0.0).share == share


def test_simulated_gpus_can_be_partitioned_and_hang_on_two_sockets() -> None:
    assert [(g.model, g.mig, g.links) for g in simulated("sim:a100-40x4", "me").gpus] == [("A100-40GB",) * 2 + ((i,),) for i in (0, 0, 1, 1)]
    assert [(g.mig, g.links) for g in simulated("sim:l40sx2", "me").gpus] == [("", ())] * 2
