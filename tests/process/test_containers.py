"""Ranks in real containers of podman: what is in them, how they end, and what is left. Skipped, with the reason, where podman does not run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import containers
import pytest
from test_isolation import world_folder
from test_supervisor import Bench

from gangline.core.model.documents import DesiredRank
from gangline.core.model.spec import Checkpoint, JobSpec, Mount, Resources
from gangline.nodeagent import cgroups
from gangline.nodeagent.adoption import RankStatus
from gangline.nodeagent.drivers.container import ContainerDriver
from gangline.nodeagent.drivers.driver import Ready, Site
from gangline.nodeagent.isolation import Refused
from gangline.nodeagent.kernel import boottime
from gangline.nodeagent.launcher import Launch
from gangline.nodeagent.nodefile import ContainerRules, NodeRules, RankRules

pytestmark = pytest.mark.process


class ContainerBench(Bench):
    """A bench whose ranks are containers."""

    def __init__(self, root: Path, rules: NodeRules | None = None) -> None:
        super().__init__(root)
        for folder in ("work", "job"):
            (root / folder).mkdir()
        (root / "events").write_text("an event\n")
        self.identity = f"t{os.urandom(5).hex()}"
        self.base = {"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8"}
        self.driver = self.made(rules or NodeRules(containers=containers.rules()))

    def made(self, rules: NodeRules) -> ContainerDriver:
        return ContainerDriver(Site(rules, cgroups.Layout(), self.identity, self.root, True, self.base))

    async def prepare(self, spec: JobSpec) -> Ready:
        return await self.driver.prepare("j", 1, spec, lambda words: None)

    async def box(self, *command: str, env: dict[str, str] | None = None, **fields: Any) -> Launch:
        spec = JobSpec(command=command, image=containers.IMAGE, **fields)
        ready = await self.prepare(spec)
        env = {**self.base, "GANGLINE_EVENTS": str(self.root / "events"), "GANGLINE_SOCKET": str(self.root / "job/sock"), **(env or {})}
        launch = Launch(
            job="j", generation=1, rank=0, gpus=(), boot_id=self.boot_id, command=spec.command, env=env,
            workdir=spec.workdir or str(self.root / "work/j@0"), make_workdir=not spec.workdir, log="logs/j/rank-0.1.log",
            log_part_bytes=1 << 20, log_parts=3, fenced=True, grace_s=1.0, locks=(),
        )  # fmt: skip
        boxed = self.driver.box(launch, spec, DesiredRank(0, 0, (), 1), ready)
        await self.launcher.launch([(boxed, -1)])
        return boxed

    async def ended(self) -> RankStatus:
        return await self.wait("exited", timeout_s=60.0)

    async def up(self) -> RankStatus:
        """Wait until the rank has printed that it is up."""
        await self.until(lambda: b"up" in self.log(), timeout_s=60.0)
        return await self.wait("running")

    def left(self) -> list[str]:
        """Names of the containers that there still are."""
        found = containers.podman("ps", "--all", "--format", "{{.Names}}", "--filter", f"name={self.identity[:12]}")
        return found.stdout.decode().split()

    def close(self) -> None:
        super().close()
        for name in self.left():
            containers.podman("rm", "--force", name)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ContainerBench]:
    if why_not := containers.why_not():
        pytest.skip(why_not)
    containers.make_image(tmp_path)
    b = ContainerBench(tmp_path)
    try:
        yield b
    finally:
        b.close()


async def test_what_a_rank_finds_in_its_container(bench: ContainerBench) -> None:
    world_folder(bench.root / "data")
    world_folder(bench.root / "ckpt", 0o777)
    (bench.root / "data/file").write_text("data\n")
    code = (
        "id -u; pwd; env; cat /in/file $GANGLINE_EVENTS; touch made; touch /in/no || echo refused; df /dev/shm | tail -n 1; ls /bin/busybox; "
        f"touch {bench.root}/ckpt/saved; ls /root || echo closed"
    )
    await bench.box(
        "sh", "-c", code, env={"A": "x y ' \" #", "LINES": "1\n2", "RANK": "0"}, user="nobody", shm_mib=16,
        mounts=(Mount(str(bench.root / "data"), "/in", read_only=True),), checkpoint=Checkpoint(path=str(bench.root / "ckpt")),
    )  # fmt: skip
    status = await bench.ended()
    log = bench.log().decode()
    assert (status.exit_code, status.cause) == (0, ""), log
    lines = log.splitlines()
    assert lines[:2] == ["65534", f"{bench.root}/work/j@0"]
    for line in ("A=x y ' \" #", "LINES=1", "2", "RANK=0", "data", "an event", "refused", "closed", "/bin/busybox"):
        assert line in lines, line
    assert "16384" in next(line for line in lines if line.startswith("shm"))
    assert not any(line.startswith("LANG") for line in lines)
    assert (bench.root / "work/j@0/made").stat().st_uid == 65534
    assert (bench.root / "ckpt/saved").exists()
    assert bench.left() == []
    assert not (bench.root / "runs/j@1.0.env").exists()


async def test_secrets_are_not_on_the_command_line(bench: ContainerBench) -> None:
    launch = await bench.box("sh", "-c", "echo up; sleep 60", env={"GANGLINE_TOKEN": "hush"})
    await bench.up()
    assert not any("hush" in word for word in launch.command)
    assert (bench.root / "runs/j@1.0.env").stat().st_mode & 0o777 == 0o600
    bench.command("stop 0 9 stopped enough")
    await bench.ended()


@pytest.mark.parametrize(("command", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("exit 200", 200)])
async def test_exit_codes(bench: ContainerBench, command: str, code: int) -> None:
    await bench.box("sh", "-c", command)
    status = await bench.ended()
    assert (status.exit_code, status.cause) == (code, "")
    assert bench.left() == []


async def test_54_memory_past_the_limit(bench: ContainerBench) -> None:
    await bench.box("sh", "-c", "tail /dev/zero", resources=Resources(memory_mib=32))
    status = await bench.ended()
    assert (status.exit_code, status.cause) == (-9, "oom"), bench.log()


async def test_53_a_fork_bomb(bench: ContainerBench) -> None:
    bench.driver = bench.made(NodeRules(ranks=RankRules(pids=30), containers=containers.rules()))
    await bench.box("sh", "-c", "f() { f | f & f; }; f 2>&1 || echo; echo up; sleep 60")
    await bench.until(lambda: b"fork" in bench.log(), timeout_s=60.0)
    bench.command("stop 0.1 15 stopped enough")
    assert (await bench.ended()).cause == "stopped"
    assert bench.left() == []


async def test_51_asked_to_stop_then_killed(bench: ContainerBench) -> None:
    await bench.box("sh", "-c", "trap 'echo asked' TERM; echo up; while true; do sleep 0.1; done")
    await bench.up()
    bench.command(f"stop 1.5 {signal.SIGTERM} stopped enough")
    status = await bench.ended()
    assert status.cause == "stopped"
    assert b"asked" in bench.log()
    assert bench.left() == []


async def test_a_rank_that_obeys_ends_as_it_likes(bench: ContainerBench) -> None:
    await bench.box("sh", "-c", "trap 'exit 7' USR1; echo up; while true; do sleep 0.1; done")
    await bench.up()
    bench.command(f"signal {int(signal.SIGUSR1)}")
    status = await bench.ended()
    assert (status.exit_code, status.cause) == (7, "")


async def test_the_dead_mans_switch_ends_containers_too(bench: ContainerBench) -> None:
    bench.fence._cell[0] = boottime() + 5.0
    await bench.box("sh", "-c", "echo up; while true; do touch alive; sleep 0.05; done")
    assert (await bench.ended()).cause == "fenced"
    assert b"up" in bench.log()
    assert bench.left() == []


async def test_a_command_that_is_not_there(bench: ContainerBench) -> None:
    await bench.box("no-such-program")
    status = await bench.ended()
    assert status.cause == "start_failed"
    assert status.message.startswith("container: ")
    assert "No such file" in status.message or "no-such-program" in status.message
    assert bench.left() == []


async def test_47_a_container_outlives_the_agent_and_48_its_end_is_known(bench: ContainerBench) -> None:
    """The fork server dies with the agent; the next agent finds the supervisor, and the supervisor has the end."""
    await bench.box("sh", "-c", "echo up; while [ ! -e go ]; do sleep 0.05; done; exit 5")
    status = await bench.up()
    bench.launcher.close()
    assert bench.state() == "running"
    assert len(bench.left()) == 1
    (bench.root / "work/j@0/go").touch()
    end = await bench.ended()
    assert (end.exit_code, end.pid, end.cause) == (5, status.pid, "")


async def test_a_container_without_its_supervisor_is_buried(bench: ContainerBench) -> None:
    await bench.box("sh", "-c", "echo up; sleep 60")
    status = await bench.up()
    os.kill(status.supervisor, signal.SIGKILL)
    assert len(bench.left()) == 1
    await bench.driver.bury(status)
    assert bench.left() == []


async def test_a_container_whose_program_is_killed_is_not_left_running_and_has_not_succeeded(bench: ContainerBench) -> None:
    await bench.box("sh", "-c", "echo up; while true; do touch alive; sleep 0.05; done")
    status = await bench.up()
    os.kill(status.pid, signal.SIGKILL)
    end = await bench.ended()
    assert (end.exit_code, end.cause) == (-signal.SIGKILL, "")
    assert bench.left() == []
    alive = bench.root / "work/j@0/alive"
    alive.unlink(missing_ok=True)
    await asyncio.sleep(0.2)
    assert not alive.exists()


async def test_a_command_inside(bench: ContainerBench) -> None:
    spec = JobSpec(command=("sh",), image=containers.IMAGE)
    await bench.box("sh", "-c", "echo up; sleep 60", env={"RANK": "0"})
    status = await bench.up()
    inside = bench.driver.inside(status, spec, Ready(), ["sh", "-c", "echo rank $RANK in $(pwd); exit 4"])
    process = await asyncio.create_subprocess_exec(*inside, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert (out.decode(), process.returncode) == (f"rank 0 in {bench.root}/work/j@0\n", 4)


async def test_the_demos_containers_have_this_machines_python(bench: ContainerBench) -> None:
    from gangline.chaos import containers as demo

    rules = NodeRules(containers=containers.rules())
    demo.make_image(rules)
    tree = Path(__file__).resolve().parents[2]
    spec = demo.contained(JobSpec(command=("true",)), tree)
    mounts = [f"--mount=type=bind,source={m.source},target={m.target},readonly" for m in spec.mounts]
    code = "import gangline.rank, os; print(sorted(os.listdir('/')), os.getpid() < 9)"
    ran = containers.podman("run", "--rm", "--network", "host", *rules.containers.run_flags, *mounts, spec.image, sys.executable, "-c", code)
    assert ran.returncode == 0, ran.stderr
    assert b"True" in ran.stdout
    assert all(m.read_only for m in spec.mounts)


# ---------------------------------------------------------------- images


async def refusal(bench: ContainerBench, rules: ContainerRules, image: str = "localhost:1/nope:1") -> str:
    with pytest.raises(Refused) as caught:
        await bench.made(NodeRules(containers=rules)).prepare("j", 1, JobSpec(command=("true",), image=image), lambda words: None)
    return str(caught.value)


async def test_images_are_looked_for_before_anything_starts(bench: ContainerBench) -> None:
    here = containers.rules()
    said: list[str] = []
    spec = JobSpec(command=("true",), image="localhost:1/nope:1")
    with pytest.raises(Refused, match=r"image localhost:1/nope:1 cannot be pulled: .*refused"):
        await bench.driver.prepare("j", 1, spec, said.append)
    assert said[0] == "waits for image localhost:1/nope:1"
    assert any(words.startswith("pulls image localhost:1/nope:1: Trying to pull") for words in said)
    assert "none is pulled" in await refusal(bench, ContainerRules("podman", here.flags, here.run_flags, pull=False))
    assert "runs no containers" in await refusal(bench, ContainerRules("none"))
    assert "podman does not work on this node" in await refusal(bench, ContainerRules("podman", ("--no-such-flag",)))


async def test_an_image_is_pulled_once_for_all_who_want_it(bench: ContainerBench, tmp_path: Path) -> None:
    """From a folder on this disk, by a runtime that is podman but for a name and a count."""
    count, archive = tmp_path / "count", tmp_path / "image.tar"
    assert containers.podman("save", "--output", str(archive), containers.IMAGE).returncode == 0
    script = tmp_path / "podman"
    flags = " ".join(containers.rules().flags)
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = pull ]; then echo x >> {count}; echo Copying; exec {containers.PODMAN} load -q -i {archive}; fi\n'
        f'if [ "$1" = image ]; then exit 1; fi\nexec {containers.PODMAN} {flags} "$@"\n'
    )
    script.chmod(0o755)
    driver = bench.made(NodeRules(containers=ContainerRules("podman")))
    path, os.environ["PATH"] = os.environ["PATH"], f"{tmp_path}:{os.environ['PATH']}"
    try:
        spec = JobSpec(command=("true",), image=containers.IMAGE)
        await asyncio.gather(*(driver.prepare(job, 1, spec, lambda words: None) for job in ("a", "b", "c")))
    finally:
        os.environ["PATH"] = path
    assert count.read_text() == "x\n"


def test_how_devices_limits_and_apptainer_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words for what this machine does not have: CDI devices and apptainer."""
    for name in ("podman", "apptainer"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    launch = Launch(
        job="j", generation=2, rank=3, gpus=(0,), boot_id="b", command=("python", "train.py"), env={"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"},
        workdir="/w", make_workdir=True, log="l", log_part_bytes=1, log_parts=1, fenced=True, grace_s=1.0, locks=(),
    )  # fmt: skip
    spec = JobSpec(command=("python", "train.py"), image="/images/t.sif", resources=Resources(cpus_milli=1500, memory_mib=64))
    rank = DesiredRank(3, 0, (0,), 2)

    def command(runtime: Any) -> str:
        rules = NodeRules(ranks=RankRules(cpus="quota", rlimits=((7, 99),)), containers=ContainerRules(runtime))
        boxed = ContainerDriver(Site(rules, cgroups.Layout(), "id", tmp_path, False)).box(launch, spec, rank, Ready())
        assert boxed.box is not None
        assert boxed.box.container is not None
        assert json.dumps(boxed.box.container.env_text) == '"CUDA_VISIBLE_DEVICES=GPU-a,GPU-b\\n"'
        return " ".join(boxed.command)

    podman = command("podman")
    assert "--device=nvidia.com/gpu=GPU-a --device=nvidia.com/gpu=GPU-b" in podman
    assert "--memory 64m --memory-swap 64m --cpus 1.5 --ulimit=nofile=99:99" in podman
    assert podman.endswith("--entrypoint python /images/t.sif train.py")
    assert "--name gangline-id-j-2-3" in podman
    apptainer = command("apptainer")
    assert f"exec --containall --no-home --env-file {tmp_path}/runs/j@2.3.env --pwd /w --nv --bind=/w:/w" in apptainer
    assert apptainer.endswith("/images/t.sif python train.py")
