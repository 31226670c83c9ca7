"""Processes in their boxes, on the kernel of this machine: control groups, users, limits, mounts. RELIABILITY.md rows 50, 53, 54 and B32."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from test_supervisor import Bench

from gangline.core.model.documents import DesiredRank
from gangline.core.model.spec import Checkpoint, JobSpec, Mount, Resources
from gangline.nodeagent import boxed, cgroups
from gangline.nodeagent.drivers.driver import Ready, Site
from gangline.nodeagent.drivers.process import ProcessDriver
from gangline.nodeagent.isolation import Refused, User, find_user
from gangline.nodeagent.launcher import Launch
from gangline.nodeagent.nodefile import NodeRules, RankRules, Volume

LAYOUT = cgroups.here()

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: other users, mounts and control groups")]
needs_memory = pytest.mark.skipif("memory" not in LAYOUT.controllers, reason=f"no memory controller here: {LAYOUT.words}")
needs_pids = pytest.mark.skipif("pids" not in LAYOUT.controllers, reason=f"no pids controller here: {LAYOUT.words}")


class BoxBench(Bench):
    """A bench whose ranks are started as an agent with these rules would."""

    identity = ""

    def driver(self, rules: NodeRules) -> ProcessDriver:
        self.identity = self.identity or f"test{os.getpid()}x{os.urandom(3).hex()}"
        return ProcessDriver(Site(rules, LAYOUT, self.identity, self.root, True))

    async def box(
        self, spec: JobSpec, *, rules: NodeRules | None = None, ready: Ready | None = None, gpu: int | None = None, **more: Any
    ) -> Launch:
        driver = self.driver(rules or NodeRules())
        ready = ready or await driver.prepare("j", 1, spec, lambda words: None)
        launch = Launch(
            job="j", generation=1, rank=0, gpus=(), boot_id=self.boot_id, command=spec.command, env={"PATH": os.environ["PATH"]},
            workdir=spec.workdir or str(self.root / "work"), make_workdir=not spec.workdir, log="logs/j/rank-0.1.log",
            log_part_bytes=1 << 20, log_parts=3, fenced=True, grace_s=1.0, locks=(), **more,
        )  # fmt: skip
        boxed_launch = driver.box(launch, spec, DesiredRank(0, 0, () if gpu is None else (gpu,), 1), ready)
        await self.launcher.launch([(boxed_launch, -1)])
        return boxed_launch


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[BoxBench]:
    b = BoxBench(tmp_path)
    try:
        yield b
    finally:
        b.close()


def groups_left(bench: BoxBench) -> list[Path]:
    site = Site(NodeRules(), LAYOUT, bench.identity, bench.root, True)
    return [Path(group.base) for group in LAYOUT.of_rank(site.base, "x", cgroups.Limits(1, 1, 1, 1, ((0, 0),))) if os.path.isdir(group.base)]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


# ---------------------------------------------------------------- devices


@pytest.mark.skipif(not cgroups.guarding(LAYOUT).devices, reason="this kernel does not let us keep devices from a group")
async def test_gpus_of_others_cannot_be_opened(bench: BoxBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/zero and /dev/full stand for two GPUs, of which the rank has the first."""
    code = "import os\nfor d in ('zero', 'full', 'null'):\n try: os.open('/dev/' + d, 2); print(d)\n except PermissionError: print('no', d)"
    driver = bench.driver(NodeRules())
    site = Site(NodeRules(), LAYOUT, bench.identity, bench.root, False, closed=lambda rank: ((1, 7),))
    monkeypatch.setattr(driver, "_site", site)
    monkeypatch.setattr(bench, "driver", lambda rules: driver)
    launch = await bench.box(JobSpec(command=python(code)), gpu=0)
    assert launch.box is not None
    assert (await bench.wait("exited")).exit_code == 0
    assert bench.log().split(b"\n")[:3] == [b"zero", b"no full", b"null"]
    assert groups_left(bench) == []


# ---------------------------------------------------------------- control groups


async def test_a_plain_rank_has_no_box(bench: BoxBench) -> None:
    launch = await bench.box(JobSpec(command=("true",)))
    assert launch.box is None
    assert (await bench.wait("exited")).exit_code == 0


@needs_memory
async def test_54_memory_past_the_limit_is_the_cause(bench: BoxBench) -> None:
    spec = JobSpec(command=python("x = b'x' * (400 << 20); print('never')"), resources=Resources(memory_mib=64))
    await bench.box(spec)
    status = await bench.wait("exited")
    assert (status.exit_code, status.cause) == (-signal.SIGKILL, "oom")
    assert "limit of 64 MiB" in status.message
    assert b"never" not in bench.log()
    assert groups_left(bench) == []


@needs_memory
async def test_54_a_killed_child_is_the_cause_when_the_rank_fails_of_it(bench: BoxBench) -> None:
    child = "x = b'x' * (400 << 20)"
    code = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-S', '-c', {child!r}]).returncode != 0)"
    await bench.box(JobSpec(command=python(code), resources=Resources(memory_mib=64)))
    status = await bench.wait("exited")
    # With v2's memory.oom.group the whole rank goes, on v1 it fails by itself.
    assert status.exit_code in (1, -signal.SIGKILL)
    assert status.cause == "oom"


@needs_memory
async def test_enough_memory_is_no_cause(bench: BoxBench) -> None:
    await bench.box(JobSpec(command=("sh", "-c", "exit 3"), resources=Resources(memory_mib=64)))
    status = await bench.wait("exited")
    assert (status.exit_code, status.cause) == (3, "")
    assert groups_left(bench) == []


@needs_pids
async def test_53_a_fork_bomb_is_held_and_ended(bench: BoxBench) -> None:
    code = "import os, signal\nwhile True:\n  try:\n    os.fork()\n  except OSError:\n    print('full', flush=True)\n    signal.pause()"
    await bench.box(JobSpec(command=python(code)), rules=NodeRules(ranks=RankRules(pids=40)))
    await bench.until(lambda: b"full" in bench.log())
    pids = next(g for g in groups_left(bench) if (g / "j@1.0/pids.max").exists()) / "j@1.0"
    assert len((pids / "cgroup.procs").read_text().split()) <= 40
    # Whoever is outside of the box, as the agent is, starts what it likes.
    assert await (await asyncio.create_subprocess_exec("true")).wait() == 0
    bench.command("stop 0.2 15 stopped enough")
    status = await bench.wait("exited")
    assert status.cause == "stopped"
    assert groups_left(bench) == []


@needs_pids
async def test_50_what_has_left_the_tree_is_ended_by_its_group(bench: BoxBench) -> None:
    await bench.box(JobSpec(command=("sleep", "60")), rules=NodeRules(ranks=RankRules(pids=40)))
    await bench.wait("running")
    # Not a child of the rank or its supervisor: only the group says that it is the rank's.
    stranger = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    for base in groups_left(bench):
        (base / "j@1.0/cgroup.procs").write_text(str(stranger.pid))
    bench.command("stop 0 9 stopped enough")
    await bench.wait("exited")
    assert await asyncio.wait_for(stranger.wait(), 10) == -signal.SIGKILL
    assert groups_left(bench) == []


@needs_pids
async def test_a_rank_without_its_supervisor_is_buried_with_its_group(bench: BoxBench) -> None:
    await bench.box(JobSpec(command=("sleep", "60")), rules=NodeRules(ranks=RankRules(pids=40)))
    status = await bench.wait("running")
    stranger = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    for base in groups_left(bench):
        (base / "j@1.0/cgroup.procs").write_text(str(stranger.pid))
    os.kill(status.supervisor, signal.SIGKILL)
    await bench.driver(NodeRules()).bury(status)
    assert await asyncio.wait_for(stranger.wait(), 10) == -signal.SIGKILL
    assert groups_left(bench) == []


async def test_52_what_does_not_die_is_said_and_holds_its_devices(bench: BoxBench) -> None:
    """A frozen process stands for one that waits for a dead device: SIGKILL changes nothing before it is thawed."""
    freezer = Path("/sys/fs/cgroup/freezer")
    if not (freezer / "cgroup.procs").exists():
        pytest.skip("no v1 freezer here")
    group = freezer / f"gangline-test-{os.getpid()}"
    group.mkdir()
    try:
        await bench.start("sleep", "60", locks=("locks/gpu-0",))
        status = await bench.wait("running")
        (group / "cgroup.procs").write_text(str(status.pid))
        (group / "freezer.state").write_text("FROZEN")
        bench.command("stop 0 9 stopped enough")
        await bench.until(lambda: (s := bench.status()) is not None and "SIGKILL has not ended it" in s.message, 40.0)
        assert bench.state() == "stopping"
        assert f"process {status.pid} (state " in (bench.status() or status).message
        await bench.start("true", rank=1, locks=("locks/gpu-0",))
        assert "still held" in (await bench.wait("exited", rank=1)).message
        (group / "freezer.state").write_text("THAWED")
        end = await bench.wait("exited")
        assert (end.exit_code, end.cause) == (-signal.SIGKILL, "stopped")
    finally:
        (group / "freezer.state").write_text("THAWED")
        await bench.until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


async def test_a_group_that_cannot_be_made_is_a_reason(bench: BoxBench) -> None:
    spec = JobSpec(command=("true",), resources=Resources(memory_mib=64))
    driver = ProcessDriver(Site(NodeRules(), cgroups.Layout(v1={"memory": "/proc/nowhere"}), "x", bench.root, True))
    launch = await BoxBench.box(bench, JobSpec(command=("true",)))
    broken = driver.box(launch, spec, DesiredRank(1, 1, (), 1), Ready())
    await bench.start("true", rank=1, box=broken.box)
    status = await bench.wait("exited", rank=1)
    assert status.cause == "start_failed"
    assert "/proc/nowhere" in status.message


# ---------------------------------------------------------------- users and limits


NOBODY = "nobody"


async def test_b32_runs_as_the_user_and_as_nobody_else(bench: BoxBench) -> None:
    code = (
        "import os; open('made', 'w').close()\n"
        "print(os.getresuid(), os.getresgid(), os.getgroups(), os.getcwd())\n"
        "print([l for l in open('/proc/self/status') if l.startswith(('NoNewPrivs', 'CapEff', 'CapPrm'))])\n"
        "try: os.setuid(0)\nexcept PermissionError: print('stays')"
    )
    spec = JobSpec(command=("/usr/bin/env", "python3", "-c", code), user=NOBODY)
    if not any(os.path.exists(f"{folder}/python3") for folder in ("/usr/bin", "/usr/local/bin")):
        pytest.skip("no python3 that other users can read")
    found = pwd.getpwnam(NOBODY)
    launch = await bench.box(spec)
    assert launch.box is not None
    status = await bench.wait("exited")
    log = bench.log().decode()
    assert status.exit_code == 0, log
    three = (found.pw_uid,) * 3
    assert f"{three} {(found.pw_gid,) * 3} [{found.pw_gid}]" in log
    assert "NoNewPrivs:\\t1" in log
    assert "CapEff:\\t0000000000000000" in log
    assert "stays" in log
    assert (bench.root / "work/made").stat().st_uid == found.pw_uid


async def test_b32_the_superuser_is_refused(bench: BoxBench) -> None:
    driver = bench.driver(NodeRules(ranks=RankRules(refuse_root=True)))
    with pytest.raises(Refused, match="superuser"):
        await driver.prepare("j", 1, JobSpec(command=("true",)), lambda words: None)
    with pytest.raises(Refused, match="no user gl-nobody-here"):
        await driver.prepare("j", 1, JobSpec(command=("true",), user="gl-nobody-here"), lambda words: None)


async def test_a_user_cannot_start_where_it_may_not_be(bench: BoxBench) -> None:
    closed = bench.root / "closed"
    closed.mkdir(mode=0o700)
    await bench.box(JobSpec(command=("true",), workdir=str(closed), user=NOBODY), ready=Ready(user=find_user(NOBODY)))
    status = await bench.wait("exited")
    assert (status.cause, status.exit_code) == ("start_failed", 127)
    assert f"working directory {closed}: Permission denied" in status.message


async def test_resource_limits(bench: BoxBench) -> None:
    import resource

    rules = NodeRules(ranks=RankRules(rlimits=((resource.RLIMIT_NOFILE, 77), (resource.RLIMIT_CORE, 0))))
    await bench.box(JobSpec(command=("sh", "-c", "ulimit -n; ulimit -c")), rules=rules)
    assert (await bench.wait("exited")).exit_code == 0
    assert bench.log() == b"77\n0\n"


async def test_dies_with_its_supervisor_as_another_user_too(bench: BoxBench) -> None:
    await bench.box(JobSpec(command=("sleep", "60"), user=NOBODY))
    status = await bench.wait("running")
    os.kill(status.supervisor, signal.SIGKILL)

    def gone() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return Path(f"/proc/{status.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    await bench.until(gone)


# ---------------------------------------------------------------- storage


def world_folder(path: Path, mode: int = 0o755) -> Path:
    """Make a folder that every user can get to: pytest's own are closed."""
    path.mkdir(mode=mode)
    path.chmod(mode)
    for parent in path.parents:
        if parent.name.startswith("pytest-"):
            parent.chmod(0o755)
    path.parent.chmod(0o755)
    return path


async def test_mounts_are_seen_by_the_rank_alone(bench: BoxBench, tmp_path: Path) -> None:
    source, target = world_folder(tmp_path / "source", 0o777), world_folder(tmp_path / "target")
    (source / "data").write_text("here")
    mounts = (Mount(str(source), str(target)), Mount(str(source), str(target / "ro"), read_only=True))
    (source / "ro").mkdir()
    code = f"cat {target}/data {target}/ro/data; echo made > {target}/new; echo no > {target}/ro/new2 || echo refused"
    await bench.box(JobSpec(command=("sh", "-c", code), mounts=mounts, user=NOBODY), ready=Ready(find_user(NOBODY), ready_mounts(mounts)))
    status = await bench.wait("exited")
    assert status.exit_code == 0, bench.log()
    assert bench.log().startswith(b"herehere")
    assert b"refused" in bench.log()
    assert (source / "new").read_text() == "made\n"
    assert not (source / "new2").exists()
    assert list(target.iterdir()) == []


def ready_mounts(mounts: tuple[Mount, ...]) -> tuple[tuple[str, str, bool], ...]:
    return tuple((m.source, m.target, m.read_only) for m in mounts)


async def test_a_mount_that_the_user_cannot_reach_is_not_made_for_it(bench: BoxBench, tmp_path: Path) -> None:
    """Also when the source has become a link since it was checked."""
    closed = tmp_path / "closed"
    (closed / "secret").mkdir(parents=True)
    closed.chmod(0o700)
    target = world_folder(tmp_path / "target")
    source = tmp_path / "link"
    source.symlink_to(closed / "secret")
    spec = JobSpec(command=("ls", str(target)), user=NOBODY, mounts=(Mount(str(source), str(target)),))
    await bench.box(spec, ready=Ready(find_user(NOBODY), ready_mounts(spec.mounts)))
    status = await bench.wait("exited")
    assert status.cause == "start_failed"
    assert "mounts: Permission denied" in status.message


async def refusal(bench: BoxBench, rules: NodeRules, **fields: Any) -> str:
    with pytest.raises(Refused) as caught:
        await bench.driver(rules).prepare("j", 3, JobSpec(command=("true",), **fields), lambda words: None)
    return str(caught.value)


async def test_storage_is_refused_with_all_reasons_before_anything_starts(bench: BoxBench, tmp_path: Path) -> None:
    ours, theirs = world_folder(tmp_path / "ours", 0o777), world_folder(tmp_path / "theirs")
    volumes = {"data": Volume(str(theirs), read_only=True), "nfs": Volume(str(ours), nfs="server:/export")}
    rules = NodeRules(volumes=volumes, mount_paths=(str(tmp_path),))
    mounts = (Mount("data", "/mnt"), Mount("nope", "/mnt/a"), Mount("/etc", "/mnt/b"), Mount("nfs/x", "/mnt/c"))
    said = await refusal(bench, rules, mounts=mounts)
    assert "volume data is read only on this node: mount it with read_only: true" in said
    assert "no volume nope; it has data, nfs" in said
    assert "lets no job mount /etc" in said
    assert f"server:/export at {ours} on this node, but nothing is mounted there" in said

    said = await refusal(bench, rules, user=NOBODY, mounts=(Mount(str(theirs), str(tmp_path / "no-target")),), workdir=f"{ours}/gone")
    assert f"{tmp_path}/no-target is not there to be mounted over" in said
    assert f"{theirs} cannot be written by nobody" in said
    assert f"working directory {ours}/gone: No such file or directory" in said


async def test_77_checkpoint_directory(bench: BoxBench, tmp_path: Path) -> None:
    ours, theirs = world_folder(tmp_path / "ours", 0o777), world_folder(tmp_path / "theirs")
    driver = bench.driver(NodeRules())

    async def prepare(path: Path, **more: Any) -> Ready:
        return await driver.prepare("j", 3, JobSpec(command=("true",), checkpoint=Checkpoint(path=str(path)), **more), lambda words: None)

    await prepare(ours / "new/run", user=NOBODY)
    assert (ours / "new/run").stat().st_uid == pwd.getpwnam(NOBODY).pw_uid
    assert list((ours / "new/run").iterdir()) == []
    with pytest.raises(Refused, match="cannot be written by nobody: Permission denied"):
        await prepare(theirs / "run", user=NOBODY)
    with pytest.raises(Refused, match="MiB of free space, needed are"):
        await bench.driver(NodeRules(checkpoint_free_mib=1 << 40)).prepare(
            "j", 3, JobSpec(command=("true",), checkpoint=Checkpoint(path=str(ours))), lambda words: None
        )
    # A later generation has it: this one comes from a leader or a node that is behind.
    (ours / ".gangline.fence").write_text('{"owner": "j", "generations": {"j": 4}}')
    with pytest.raises(Refused, match="written by generation 4 of this job, and this one is 3"):
        await prepare(ours)
    (ours / ".gangline.fence").write_text('{"owner": "other", "generations": {"j": 4, "other": 9}}')
    await prepare(ours)


async def test_a_file_system_that_hangs_is_a_reason(bench: BoxBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gangline.nodeagent import storage

    monkeypatch.setattr(storage, "PROBE_S", 0.5)
    # A FIFO in the place of the fence hangs whoever opens it for reading without O_NONBLOCK; the probe does not.
    os.mkfifo(tmp_path / ".gangline.fence")
    await storage.check(storage.Wants(checkpoint=str(tmp_path), job="j", generation=1), None)
    monkeypatch.setattr(storage, "_BOOT", "import time; time.sleep(60)")
    with pytest.raises(Refused, match=f"does not answer within 0.5 s: {tmp_path}"):
        await storage.check(storage.Wants(checkpoint=str(tmp_path), job="j", generation=1), None)


def test_users_by_number() -> None:
    user = find_user("12345")
    assert user == User("12345", 12345, 12345, (12345,), "/", "/bin/sh")
    assert find_user(str(pwd.getpwnam(NOBODY).pw_uid)).name == NOBODY
    assert boxed.members("/nowhere") == []
