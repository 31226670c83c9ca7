"""Commands beside ranks: through an agent that checks who asks, inside the rank's isolation, and through the whole of a small cluster."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from test_agent import FOREVER, World, gang

from gangline.core.client.localcluster import LocalCluster
from gangline.core.model import execwire as wire
from gangline.core.model.spec import Mount, Resources
from gangline.nodeagent import cgroups

pytestmark = [pytest.mark.process, pytest.mark.etcd]
KEY = secrets.token_hex(32).encode()


class ExecWorld(World):
    """A node whose agent runs commands for whoever has the key."""

    def start_signed(self, *options: str) -> None:
        path = self.root / "exec.key"
        path.touch(0o600)
        path.write_bytes(KEY + b"\n")
        self.start_agent("--exec-key-file", str(path), *options)

    async def ask(self, *command: str, job: str = "j", rank: int = 0, header: str | None = None) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Ask the agent; return the status and the frames, or what it says."""
        url = (await self.registered()).agent_url
        body = json.dumps({"command": command, "user": "tester"}).encode()
        signed = header if header is not None else sign(body, job, rank)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/exec/{job}/{rank}", data=body, headers={wire.AUTHORIZATION: signed}) as answer,
        ):
            data = await answer.read()
            return answer.status, wire.Frames().take(data) if answer.status == 200 else [(b"", data)]

    async def run(self, *command: str, **more: Any) -> tuple[str, str, int]:
        """Return what a command prints on both ways, and its exit code."""
        status, frames = await self.ask(*command, **more)
        assert status == 200, frames
        out, err = (b"".join(data for kind, data in frames if kind == wanted).decode() for wanted in (wire.OUT, wire.ERR))
        assert frames[-1][0] == wire.EXIT, frames
        return out, err, int(frames[-1][1])


def sign(body: bytes, job: str = "j", rank: int = 0) -> str:
    return wire.sign(KEY, "n1", job, rank, body, secrets.token_hex(8), time.time_ns() // 1_000_000 + wire.GOOD_FOR_MS)


@pytest.fixture
async def world(etcd_endpoint: str, tmp_path: Path) -> AsyncIterator[ExecWorld]:
    w = ExecWorld(etcd_endpoint, tmp_path)
    await w.open()
    try:
        yield w
    finally:
        await w.close()


async def test_a_command_is_where_the_rank_is(world: ExecWorld) -> None:
    await world.submit("j", "cd /tmp; " + FOREVER, env={"COLOUR": "blue"})
    (world.root / "node.yaml").write_text("ranks: {rlimits: {nofile: 77}}")
    world.start_signed("--config", str(world.root / "node.yaml"))
    await world.registered()
    await world.desire(gang())
    (first, _) = await world.until_ranks("running")
    words = "pwd; echo $COLOUR $RANK $GANGLINE_JOB_ID; ulimit -n; echo err >&2; grep NoNewPrivs /proc/self/status; exit 9"
    out, err, code = await world.run("sh", "-c", words)
    assert (out, err, code) == ("/tmp\nblue 0 j\n77\nNoNewPrivs:\t1\n", "err\n", 9)
    assert (await world.run("sh", "-c", "echo $RANK", rank=1))[0] == "1\n"
    assert (await world.run("no-such-program"))[2] == 127
    assert (await world.run("sh", "-c", "kill -9 $$"))[2] == -signal.SIGKILL
    assert first.pid
    assert '"event":"exec"' in world.log()
    assert '"user":"tester"' in world.log()


async def test_a_command_has_the_rights_mounts_and_limits_of_the_rank(world: ExecWorld, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: another user and mounts")
    limited = "memory" in cgroups.here().controllers
    for folder in (tmp_path, *(p for p in tmp_path.parents if p.name.startswith("pytest-"))):
        folder.chmod(0o755)
    (tmp_path / "source").mkdir(mode=0o755)
    (tmp_path / "source/data").write_text("mounted\n")
    (tmp_path / "target").mkdir()
    mount = Mount(str(tmp_path / "source"), str(tmp_path / "target"), read_only=True)
    await world.submit("j", FOREVER, user="nobody", mounts=(mount,), resources=Resources(memory_mib=64))
    world.start_signed()
    await world.registered()
    await world.desire(gang(1))
    await world.until_ranks("running")
    words = f"id -u; cat {tmp_path}/target/data; cat /proc/self/cgroup; echo $HOME"
    out, err, code = await world.run("sh", "-c", words)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[:2] == ["65534", "mounted"]
    assert lines[-1] == "/nonexistent"
    if limited:
        assert any(line.endswith("/j@1.0") for line in lines), lines


async def test_it_ends_with_its_rank_and_with_its_request(world: ExecWorld) -> None:
    await world.submit("j", FOREVER)
    world.start_signed()
    await world.registered()
    await world.desire(gang(1))
    (rank,) = await world.until_ranks("running")
    pids = world.root / "pids"
    beside = asyncio.create_task(world.ask("sh", "-c", f"echo $$ > {pids}; sleep 60"))

    async def started() -> bool:
        return pids.exists() and bool(pids.read_text())

    await world.until(started)
    os.kill(rank.pid, signal.SIGKILL)
    status, frames = await asyncio.wait_for(beside, 20)
    assert (status, frames[-1][0]) == (200, wire.FAILED)
    assert not Path(f"/proc/{pids.read_text().strip()}").exists()


async def test_nobody_hears_the_end_of_a_request_that_was_given_up(world: ExecWorld) -> None:
    await world.submit("j", FOREVER)
    world.start_signed()
    await world.registered()
    await world.desire(gang(1))
    await world.until_ranks("running")
    pids = world.root / "pids"
    beside = asyncio.create_task(world.ask("sh", "-c", f"echo $$ > {pids}; sleep 60"))

    async def started() -> bool:
        return pids.exists() and bool(pids.read_text())

    await world.until(started)
    beside.cancel()

    async def gone() -> bool:
        return not Path(f"/proc/{pids.read_text().strip()}").exists()

    await world.until(gone)


async def test_b61_who_is_refused(world: ExecWorld) -> None:
    await world.submit("j", FOREVER)
    world.start_signed()
    await world.registered()
    await world.desire(gang(1))
    await world.until_ranks("running")
    body = json.dumps({"command": ["true"], "user": "tester"}).encode()
    once = sign(body)
    assert (await world.ask("true", header=once))[0] == 200
    for header in ("", once, sign(b"another"), sign(body, "i"), wire.sign(b"x" * 32, "n1", "j", 0, body, "n", 10**13), "1 2 3"):
        assert (await world.ask("true", header=header))[0] == 403, header
    assert (await world.ask("true", rank=5))[0] == 404
    assert (await world.ask("true", job="other"))[0] == 404
    assert (await world.ask())[0] == 400
    assert "exec_refused" in world.log()


async def test_without_a_key_nothing_is_run(world: ExecWorld) -> None:
    world.start_agent()
    status, said = await world.ask("true")
    assert status == 403
    assert b"--exec-key-file" in said[0][1]


async def test_a_key_that_others_can_read_is_none(world: ExecWorld) -> None:
    path = world.root / "key"
    path.write_bytes(KEY)
    path.chmod(0o644)
    assert world.start_agent("--exec-key-file", str(path)).wait(30) == 2
    assert "can be read by others" in world.log()


def test_the_command_line(tmp_path: Path) -> None:
    """`gangline exec` against a cluster of real processes."""
    with LocalCluster(tmp_path / "c", 1, 2, 2):
        env = {**os.environ, "GANGLINE_STATE": str(tmp_path / "c"), "HOME": str(tmp_path)}

        def gangline(*words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "gangline.core.client.cli", *words]
            return subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)

        (tmp_path / "job.yaml").write_text("name: sleeper\ncommand: [sleep, '60']\n")
        made = gangline("submit", str(tmp_path / "job.yaml"))
        assert made.returncode == 0, made.stderr
        deadline = time.monotonic() + 30
        while (ran := gangline("exec", "sleeper", "0", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE; echo e >&2; exit 5")).returncode == 8:
            assert time.monotonic() < deadline, ran.stderr
        assert (ran.stdout, ran.stderr, ran.returncode) == ("0 of 1\n", "e\n", 5)
        assert gangline("exec", "sleeper", "7", "--", "true").returncode == 8
        assert gangline("exec", "nobody", "0", "--", "true").returncode == 7
