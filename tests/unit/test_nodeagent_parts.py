"""The smaller parts of an agent: inventory, environment, events, logs, state directory, the question to the schedulers, StoreNode."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from gangline.core.model.arrays import parse_array
from gangline.core.model.codec import pack
from gangline.core.model.documents import Desired, DesiredGang, DesiredRank, Gpu, Observed, Registration, RestartNotice
from gangline.core.model.spec import Checkpoint, JobSpec, Resources
from gangline.core.store.api import Ambiguous, Definite, LeaseNotFound, Store, StoreError
from gangline.core.store.keys import Keys
from gangline.core.store.memory import MemoryCluster, MemoryStore
from gangline.core.store.node import NameTaken, SchedulerAddress, StoreNode
from gangline.nodeagent import jobevents, launcher, logs, rankfile, statedir
from gangline.nodeagent.devices import simulated
from gangline.nodeagent.environment import Here, base_environment, rank_environment
from gangline.nodeagent.fence import Fence
from gangline.nodeagent.gpunames import model_name
from gangline.nodeagent.liveness import ask_schedulers, margin
from gangline.nodeagent.ranklog import RankLog
from gangline.nodeagent.specs import Specs
from gangline.nodeagent.statedir import GangRecord, Seen, StateDir, StateError, is_safe

# ---------------------------------------------------------------- inventory


def test_simulated_gpus_are_the_same_for_the_same_node():
    first, again, other = (simulated("sim:h100x8", i) for i in ("me", "me", "you"))
    assert first == again
    assert {g.uuid for g in first.gpus}.isdisjoint({g.uuid for g in other.gpus})
    assert [(g.index, g.model, g.memory_mib) for g in first.gpus] == [(i, "H100", 81_559) for i in range(8)]


def test_simulated_nodes_may_be_mixed():
    assert [g.model for g in simulated("sim:h200x1,a100-40gbx2", "me").gpus] == ["H200", "A100-40GB", "A100-40GB"]


@pytest.mark.parametrize("option", ["sim", "sim:", "sim:h100", "sim:h100x0", "sim:h100x-1", "sim:z9x2", "sim:h100x9999", "cuda", "sim:h100x8x8"])
def test_bad_gpu_options_are_refused(option: str):
    with pytest.raises(ValueError, match="--gpus"):
        simulated(option, "me")


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-40GB", "A100-40GB"), ("NVIDIA A100 80GB PCIe", "A100"),
        ("Tesla T4", "T4"), ("NVIDIA L40S", "L40S"), ("NVIDIA Titan Z", "TITAN Z"),
    ],
)  # fmt: skip
def test_short_names_of_models(name: str, model: str):
    assert model_name(name) == model


# ---------------------------------------------------------------- environment and events

GPUS = {i: Gpu(i, f"GPU-{i}", "H100") for i in range(4)}
HERE = Here("n1", {"PATH": "/bin", "HOME": "/root"}, GPUS, False, "/s/job.sock", 4711, "/s/events", "secret")
GANG = DesiredGang("j1", 3, "run", (DesiredRank(4, 0, (1, 3), 3), DesiredRank(5, 1, (), 3)), 8, 1, 2, "10.0.0.1", 29_500)
SPEC = JobSpec(command=("true",), name="train", queue="a/b", resources=Resources(cpus_milli=6500), checkpoint=Checkpoint("/ckpt"))


def test_environment_is_what_torch_expects():
    env = rank_environment(GANG, GANG.ranks[0], SPEC, HERE)
    assert env == {
        "OMP_NUM_THREADS": "6", "PATH": "/bin", "HOME": "/root", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "4",
        "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "4", "ROLE_WORLD_SIZE": "8", "ROLE_NAME": "default", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "j1", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-3", "NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-3", "GANGLINE_GPU_SHARE": "1",
        "GANGLINE_JOB_ID": "j1", "GANGLINE_JOB_NAME": "train",
        "GANGLINE_QUEUE": "a/b", "GANGLINE_NODE": "n1", "GANGLINE_GENERATION": "3", "GANGLINE_RESTARTS": "0",
        "GANGLINE_RESTART_CAUSE": "", "GANGLINE_EVENTS": "/s/events", "GANGLINE_SOCKET": "/s/job.sock", "GANGLINE_TOKEN": "secret",
        "GANGLINE_CHECKPOINT_DIR": "/ckpt", "GANGLINE_ROLE": "", "GANGLINE_REPLICA": "0", "GANGLINE_ROLE_LEADERS": "",
    }  # fmt: skip


def test_a_job_may_set_its_own_but_not_lie_about_the_gang():
    spec = JobSpec(command=("true",), env={"OMP_NUM_THREADS": "1", "PATH": "/opt/bin", "RANK": "99", "GANGLINE_TOKEN": "stolen"})
    env = rank_environment(GANG, GANG.ranks[1], spec, HERE)
    assert (env["OMP_NUM_THREADS"], env["PATH"], env["RANK"], env["GANGLINE_TOKEN"]) == ("1", "/opt/bin", "5", "secret")
    assert env["CUDA_VISIBLE_DEVICES"] == "", "a rank without GPUs sees none"


def test_a_gang_of_one_node_meets_on_the_spot():
    alone = DesiredGang("j1", 1, "run", (DesiredRank(0, 0, (2,), 1),), 1, 0, 1)
    env = rank_environment(alone, alone.ranks[0], SPEC, Here("n1", {}, GPUS, True, "", 4711, "", ""))
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["CUDA_VISIBLE_DEVICES"]) == ("127.0.0.1", "4711", "2")


def test_the_agents_own_environment_stays_its_own():
    env = base_environment({"PATH": "/venv/bin:/bin", "AWS_SECRET": "x", "PYTHONPATH": "/y"}, "me", "/home/me", "/bin/sh")
    assert set(env) == {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG"}
    assert env["PATH"] == "/venv/bin:/bin"


def test_events_survive_what_a_job_writes_between_them(tmp_path: Path):
    notice = RestartNotice("node_lost", "n2 is gone", "infrastructure", lost_ranks=(1, 2), restarts=2)
    path = tmp_path / "events.jsonl"
    event = jobevents.start_event(DesiredGang("j", 2, "run", (), 8, 0, 1, restart=notice), 7)
    jobevents.append_event(path, event)
    with path.open("ab") as f:
        f.write(b'not json\n{"event": NaN}\n{"event":"x","y":Infinity}\n[1]\n' + b"[" * 100_000 + b"\n\xff\xfe\n")
    jobevents.append_event(path, {"event": "drain"})
    (first, second) = jobevents.read_events(path)
    assert (first["event"], first["cause"], first["lost_ranks"], first["world_size"]) == ("restart", "node_lost", [1, 2], 8)
    assert second == {"event": "drain"}
    path.unlink()
    os.mkfifo(path)
    assert jobevents.read_events(path) == []


# ---------------------------------------------------------------- logs


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=60), st.integers(20, 200), st.integers(2, 5))
def test_law_a_log_reads_as_it_was_written_from_any_position(tmp_path_factory: Any, pieces: list[bytes], part: int, parts: int):
    root = tmp_path_factory.mktemp("logs")
    folder = root / "j"
    folder.mkdir(parents=True)
    log = RankLog(str(folder / "rank-0.1.log"), part, parts)
    for p in pieces:
        log.write(p)
    log.close()
    whole = b"".join(pieces)
    everything = logs.read(root, "j", 0, generation=None, offset=None, limit=1 << 20, tail=None)
    assert everything.size == len(whole)
    assert everything.data == whole[everything.offset :]
    assert len(list(folder.iterdir())) <= parts
    for offset in range(0, len(whole) + 1, 7):
        chunk = logs.read(root, "j", 0, generation=1, offset=offset, limit=11, tail=None)
        assert chunk.data == whole[chunk.offset : chunk.offset + 11]
        assert chunk.offset == max(offset, everything.offset)
    assert logs.read(root, "j", 0, generation=1, offset=None, limit=99, tail=5).data == whole[max(everything.offset, len(whole) - 5) :]
    with pytest.raises(ValueError, match="beyond the end"):
        logs.read(root, "j", 0, generation=1, offset=len(whole) + 1, limit=1, tail=None)


@pytest.mark.parametrize("job", ["", "..", ".", "a/b", "../etc", "a\0b", "a b", "x" * 200, "\u202e"])
def test_ids_that_are_no_names_have_no_log(tmp_path: Path, job: str):
    assert not is_safe(job)
    with pytest.raises(logs.NoLog):
        logs.read(tmp_path, job, 0, generation=1, offset=0, limit=1, tail=None)


def test_pruning_keeps_what_is_in_use_and_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "JOBS_KEPT", 2)
    for i in range(5):
        for folder in (f"logs/j{i}", f"work/j{i}@0", "runs"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / f"work/j{i}@0/result").touch()
        (tmp_path / rankfile.status_path(f"j{i}", 1, 0)).touch()
        os.utime(tmp_path / "logs" / f"j{i}", (i, i))
    assert sorted(logs.prune(tmp_path, {"j0"})) == ["j1", "j2"]
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["j0@1.0.status", "j3@1.0.status", "j4@1.0.status"]
    assert sorted(p.name for p in (tmp_path / "work").iterdir()) == ["j0@0", "j3@0", "j4@0"]
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["j0", "j3", "j4"]


def test_a_log_that_cannot_be_written_drops_and_counts(tmp_path: Path):
    log = RankLog(str(tmp_path / "missing" / "rank-0.log"), 100, 2)
    log.write(b"x" * 50)
    log.close()
    assert log.dropped_total >= 50


# ---------------------------------------------------------------- state directory and fence


def test_state_survives(tmp_path: Path):
    state = StateDir(tmp_path)
    assert state.identity() == StateDir(tmp_path).identity()
    assert state.seen() == Seen()
    state.save_seen(Seen(3, 9))
    state.save_record(GangRecord("j", 4, "prepared", spec=SPEC, tokens={"0/4": "t"}))
    state.save_schedulers([SchedulerAddress("s", "http://s")])
    again = StateDir(tmp_path)
    assert again.seen() == Seen(3, 9)
    assert again.records() == [GangRecord("j", 4, "prepared", spec=SPEC, tokens={"0/4": "t"})]
    assert again.schedulers() == [SchedulerAddress("s", "http://s")]


def test_damaged_state_is_noticed_or_left_out(tmp_path: Path):
    state = StateDir(tmp_path)
    (tmp_path / "seen").write_text("{")
    with pytest.raises(StateError, match="seen"):
        state.seen()
    (tmp_path / "gangs").write_text('{"job": "a", "generation": 1}\n{"job": "b", "gener\n{"job": "a", "generation": 2}\n{')
    assert state.records() == [GangRecord("a", 2)]


def test_records_that_count_no_more_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(statedir, "_RECORDS_BYTES", 2_000)
    state = StateDir(tmp_path)
    state.save_record(GangRecord("kept", 1, "prepared", spec=SPEC))
    for i in range(500):
        state.save_record(GangRecord(f"j{i}", 1, "prepared", spec=SPEC, tokens={"0/1": "t" * 32}))
        state.forget(f"j{i}", 1)
    assert (tmp_path / "gangs").stat().st_size < 5_000
    again = StateDir(tmp_path)
    assert [r.job for r in again.records()] == ["kept"]
    again.save_forgotten({})
    assert [r.job for r in StateDir(tmp_path).records()] == ["kept"], "what was forgotten for good has not come back"


def test_an_agent_goes_on_with_the_records_of_the_one_before(tmp_path: Path):
    StateDir(tmp_path).save_record(GangRecord("a", 1))
    again = StateDir(tmp_path)
    again.save_record(GangRecord("b", 1))
    again.save_record(GangRecord("a", 2))
    assert sorted(StateDir(tmp_path).records(), key=lambda r: r.job) == [GangRecord("a", 2), GangRecord("b", 1)]


def test_a_sweep_takes_what_is_over_and_nothing_else(tmp_path: Path):
    state = StateDir(tmp_path)
    names = [rankfile.status_path("j", 1, 0), rankfile.control_path("j", 2, 1), rankfile.events_path("j", 3), rankfile.status_path("k", 1, 0)]
    for name in (*names, "runs/stranger"):
        (tmp_path / name).touch()
    state.sweep({"j": 2})
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["j@3.events", "k@1.0.status", "stranger"]
    state.remove_runs("k", {2, 3})
    state.remove_runs("j", {3})
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["k@1.0.status", "stranger"]


def test_a_state_directory_that_is_too_deep_for_a_socket_is_refused(tmp_path: Path):
    with pytest.raises(StateError, match="shorter"):
        StateDir(tmp_path / ("x" * 100))


def test_the_fence_moves_forward_only_and_starts_anew_with_the_host(tmp_path: Path):
    fence = Fence(tmp_path, boot_id="b1")
    assert fence.deadline == 0.0
    fence.extend(100.0)
    fence.extend(50.0)
    assert fence.deadline == 100.0
    assert Fence(tmp_path, boot_id="b1").deadline == 100.0
    assert Fence(tmp_path, boot_id="b2").deadline == 0.0


def test_margin_leaves_time_to_kill_and_time_to_live():
    assert [margin(t) for t in (2.0, 8.0, 60.0)] == [0.5, 1.0, 2.0]


# ---------------------------------------------------------------- who can be deciding anything


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Any]]:
    runners: list[web.AppRunner] = []

    async def start(status: int, body: bytes, delay_s: float = 0.0) -> SchedulerAddress:
        async def health(request: web.Request) -> web.Response:
            await asyncio.sleep(delay_s)
            return web.Response(status=status, body=body)

        app = web.Application()
        app.router.add_get("/v1/health", health)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert isinstance(site._server, asyncio.Server)
        return SchedulerAddress("s", f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")

    yield start
    for runner in runners:
        await runner.cleanup()


NOBODY = SchedulerAddress("gone", "http://127.0.0.1:1")


async def test_only_unanimous_schedulers_prove_that_nobody_decides(serve: Callable[..., Any]):
    well = await serve(200, b'{"store": "ok"}')
    cut = await serve(503, b'{"store": "unreachable"}')
    odd = await serve(200, b"<html>")
    strange = await serve(200, b'{"store": 7}')
    frozen = await serve(200, b'{"store": "ok"}', 30.0)
    verdicts = {
        "nobody_decides": [[cut], [cut, cut]],
        "somebody_may_decide": [[well], [well, cut], [cut, strange], [well, NOBODY], [cut, NOBODY], [cut, frozen]],
        "no_answer": [[], [NOBODY], [frozen], [odd]],
    }
    for verdict, cases in verdicts.items():
        for case in cases:
            assert await ask_schedulers(case, 0.3) == verdict, case


# ---------------------------------------------------------------- the store as an agent sees it


def registration(identity: str = "me", boot: str = "b1", **more: Any) -> Registration:
    return Registration("n1", identity, boot, "10.0.0.1", "", (), 1000, 1024, **more)


def observed(identity: str = "me") -> Observed:
    return Observed("n1", identity, "b1", 1, 0, 0)


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    s = MemoryStore(MemoryCluster())
    yield s
    await s.close()


async def test_register_and_take_over_with_the_same_lease(store: Store):
    first, again = StoreNode(store, "c", "n1"), StoreNode(store, "c", "n1")
    lease = await first.register(registration(), ttl_s=8.0)
    assert (await again.register(registration(labels={"a": "b"}), ttl_s=8.0)).id == lease.id
    await again.write_observed(observed())
    with pytest.raises(NameTaken):
        await first.write_observed(observed())
    assert await again.keepalive() > 0


@pytest.mark.parametrize("other", [registration("you"), registration("me", "b2")], ids=["another identity", "copied state directory"])
async def test_a_name_belongs_to_one_agent(store: Store, other: Registration):
    lease = await StoreNode(store, "c", "n1").register(registration(), ttl_s=8.0)
    with pytest.raises(NameTaken, match="n1"):
        await StoreNode(store, "c", "n1").register(other, ttl_s=8.0)
    await store.lease_revoke(lease.id)
    assert (await StoreNode(store, "c", "n1").register(other, ttl_s=8.0)).id != lease.id


async def test_keepalive_notices_a_lost_lease_and_a_registration_that_is_another_s(store: Store):
    node = StoreNode(store, "c", "n1")
    lease = await node.register(registration(), ttl_s=8.0)
    await store.delete(Keys("c").alive("n1"))
    with pytest.raises(LeaseNotFound):
        await node.keepalive()
    await store.lease_revoke(lease.id)
    with pytest.raises(LeaseNotFound):
        await node.keepalive()
    assert (await node.register(registration(), ttl_s=8.0)).id != lease.id


async def test_desired_is_given_now_and_then_as_it_changes(store: Store):
    node, key = StoreNode(store, "c", "n1"), Keys("c").desired("n1")
    await store.put(key, pack(Desired("n1", 1, 1)))
    await store.put(key + b"-other", b"junk")
    seen = node.watch_desired()
    assert (await anext(seen)).index == 1
    await store.put(key, pack(Desired("n1", 2, 1)))
    assert (await asyncio.wait_for(anext(seen), 5)).index == 2
    await store.put(key, b"\xc1junk")
    with pytest.raises(Definite, match="desired"):
        await asyncio.wait_for(anext(seen), 5)


async def test_specs_and_schedulers(store: Store):
    node, keys = StoreNode(store, "c", "n1"), Keys("c")
    assert await node.job_spec("j") is None
    await store.put(keys.job("j"), pack(SPEC))
    assert await node.job_spec("j") == SPEC
    await store.put(keys.job("bad"), b"\xff")
    found = await node.job_specs(["j", "none", "bad"])
    assert found["j"] == SPEC
    assert isinstance(found["bad"], StoreError)
    assert set(found) == {"j", "bad"}
    await store.put(keys.scheduler("s1"), pack(SchedulerAddress("s1", "http://s1")))
    assert await node.schedulers() == [SchedulerAddress("s1", "http://s1")]


async def test_specs_that_are_asked_for_together_are_read_together():
    asked: list[list[str]] = []

    async def fetch(jobs: Sequence[str]) -> dict[str, JobSpec | StoreError]:
        asked.append(list(jobs))
        await asyncio.sleep(0)
        if "down" in jobs:
            raise Ambiguous("no answer")
        return {j: Definite("not to be read") if j == "bad" else SPEC for j in jobs if j != "none"}

    specs = Specs(fetch)
    impatient = asyncio.ensure_future(specs.get("a"))
    answers = asyncio.gather(*map(specs.get, ["a", "b", "none", "bad"]), return_exceptions=True)
    await asyncio.sleep(0)
    impatient.cancel()
    a, b, none, bad = await answers
    assert (a, b, none) == (SPEC, SPEC, None)
    assert isinstance(bad, Definite)
    assert asked == [["a", "b", "none", "bad"]]
    with pytest.raises(Ambiguous):
        await specs.get("down")
    assert await specs.get("a") == SPEC
    assert asked[1:] == [["down"], ["a"]]


def test_records_are_readable_by_people(tmp_path: Path):
    state = StateDir(tmp_path)
    state.save_record(GangRecord("j", 1))
    assert json.loads((tmp_path / "gangs").read_text()) == {"job": "j", "generation": 1}


def test_a_status_is_read_whole_or_not_at_all(tmp_path: Path):
    path = str(tmp_path / "rank-0.status")
    assert rankfile.read(path) == b""
    fd = rankfile.claim(path, {"state": "a long one at first"})
    assert rankfile.claim(path, {"state": "x"}) == -1
    rankfile.write(fd, {"state": "b"})
    assert json.loads(rankfile.read(path)) == {"state": "b"}
    whole = Path(path).read_bytes()
    a, b = rankfile.encode({"state": "a"}), rankfile.encode({"state": "b"})
    old = (a + b"\n") * 2
    for torn in range(1, len(old)):
        # A write of "b" over "a" that has come so far.
        Path(path).write_bytes(whole[:torn] + old[torn:])
        assert rankfile.read(path) in (b"", a, b)
    os.close(fd)


@given(st.text(), st.integers(), st.lists(st.integers(0, 7)))
def test_law_a_status_is_json(text: str, number: int, gpus: list[int]):
    read = json.loads(rankfile.encode({"message": text, "pid": number, "gpus": gpus}))
    assert (read["pid"], read["gpus"]) == (number, gpus)
    assert read["message"] == "".join(c if c >= " " else " " for c in text)


def test_an_element_of_an_array_knows_which_it_is() -> None:
    spec = msgspec.structs.replace(SPEC, array=parse_array("0-30:10%2"))
    env = rank_environment(msgspec.structs.replace(GANG, job="jabc.20"), GANG.ranks[0], spec, HERE)
    assert [env[f"GANGLINE_{name}"] for name in ("JOB_ID", "ARRAY_JOB", "ARRAY_INDEX", "ARRAY_SIZE")] == ["jabc.20", "jabc", "20", "4"]
    assert "GANGLINE_ARRAY_JOB" not in rank_environment(GANG, GANG.ranks[0], SPEC, HERE)


def test_what_each_fork_copies_stays_small():
    """The fork server is given its modules as `launcher.py` gives them, and what it has loaded is looked at."""
    boot = launcher._BOOT.partition("from gangline")[0]
    code = f"{boot}import gangline.nodeagent.forkserver\nprint(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code, str(Path(launcher.__file__).parent)]
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split())
    assert "gangline.nodeagent.supervisor" in loaded
    assert not loaded & {"typing", "re", "contextlib", "json", "pathlib", "subprocess", "logging", "asyncio", "msgspec"}
