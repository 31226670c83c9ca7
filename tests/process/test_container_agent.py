"""A node that runs containers, under a real agent: adoption, commands inside, images that are not there. Skipped where podman does not run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import containers
import pytest
from test_agent import World, gang
from test_exec import ExecWorld

from gangline.core.model.documents import ObservedGang

pytestmark = [pytest.mark.process, pytest.mark.etcd]


class ContainerWorld(ExecWorld):
    """A node with podman."""

    def start(self) -> None:
        rules = containers.rules()
        config = {"runtime": "podman", "flags": list(rules.flags), "run_flags": list(rules.run_flags)}
        (self.root / "node.yaml").write_text(json.dumps({"containers": config}))
        self.start_signed("--config", str(self.root / "node.yaml"))

    async def close(self) -> None:
        identity = self.root / "n1/identity"
        name = f"gangline-{identity.read_text()[:12]}" if identity.exists() else "none"
        await super().close()
        for line in containers.podman("ps", "--all", "--format", "{{.Names}}", "--filter", f"name={name}").stdout.decode().split():
            containers.podman("rm", "--force", line)

    def containers(self) -> list[str]:
        name = f"gangline-{(self.root / 'n1/identity').read_text()[:12]}"
        return containers.podman("ps", "--format", "{{.Names}}", "--filter", f"name={name}").stdout.decode().split()


@pytest.fixture
async def world(etcd_endpoint: str, tmp_path: Path) -> AsyncIterator[ContainerWorld]:
    if why_not := containers.why_not():
        pytest.skip(why_not)
    containers.make_image(tmp_path)
    w = ContainerWorld(etcd_endpoint, tmp_path)
    await w.open()
    try:
        yield w
    finally:
        await w.close()


async def printed(world: World, text: str, rank: int = 0) -> None:
    async def there() -> bool:
        return text in world.rank_log(rank=rank)

    await world.until(there, 60.0)


async def test_47_48_containers_go_from_one_agent_to_the_next(world: ContainerWorld) -> None:
    await world.submit("j", "echo up; while [ ! -e go ]; do sleep 0.1; done; exit 6", image=containers.IMAGE, on_disconnect="keep")
    world.start()
    await world.registered()
    await world.desire(gang(2))
    before = await world.until_ranks("running", timeout_s=60.0)
    for rank in (0, 1):
        await printed(world, "up", rank)
    agent = world.agents[0]
    agent.kill()
    agent.wait()
    assert len(world.containers()) == 2
    # One ends while there is no agent, the other under the next one.
    (world.root / "n1/work/j@0/go").touch()
    world.start()

    async def first_ended() -> bool:
        found = await world.gang()
        return found is not None and {r.rank: r.state for r in found.ranks} == {0: "exited", 1: "running"}

    await world.until(first_ended, 60.0)
    assert (await world.run("sh", "-c", "echo $RANK; ls /bin/busybox", rank=1))[:2] == ("1\n/bin/busybox\n", "")
    (world.root / "n1/work/j@1/go").touch()
    after = await world.until_ranks("exited", timeout_s=60.0)
    assert [(r.rank, r.exit_code, r.pid) for r in after] == [(r.rank, 6, r.pid) for r in before]
    assert world.containers() == []


async def test_a_rank_reports_through_the_socket_that_a_later_agent_makes(world: ContainerWorld) -> None:
    """The folder of the socket is mounted, so the rank finds the new socket in it."""
    await world.submit("j", "echo up; ls $(echo $GANGLINE_SOCKET); sleep 60", image=containers.IMAGE, on_disconnect="keep")
    world.start()
    await world.registered()
    await world.desire(gang(1))
    await world.until_ranks("running", timeout_s=60.0)
    await printed(world, "job/sock")
    world.agents[0].kill()
    world.agents[0].wait()
    socket = world.root / "n1/job/sock"
    old = socket.stat().st_ctime_ns
    world.start()

    async def adopted() -> bool:
        if not socket.exists() or socket.stat().st_ctime_ns == old:
            return False
        with contextlib.suppress(aiohttp.ClientError):  # the address of the agent before is still registered
            return (await world.ask("true"))[0] == 200
        return False

    await world.until(adopted, 60.0)
    out, err, code = await world.run("stat", "-c", "%i %Z", str(socket))
    now = socket.stat()
    assert (out, code) == (f"{now.st_ino} {int(now.st_ctime)}\n", 0), err


async def test_a_supervisor_that_is_killed_takes_its_container_with_it(world: ContainerWorld) -> None:
    await world.submit("j", "echo up; sleep 60", image=containers.IMAGE)
    world.start()
    await world.registered()
    await world.desire(gang(1))
    await world.until_ranks("running", timeout_s=60.0)
    await printed(world, "up")
    status = json.loads((world.root / "n1/runs/j@1.0.status").read_text().splitlines()[0])
    os.kill(status["supervisor"], signal.SIGKILL)
    (rank,) = await world.until_ranks("exited", timeout_s=60.0)
    assert rank.cause == "lost"

    async def gone() -> bool:
        return world.containers() == []

    await world.until(gone, 60.0, pause_s=0.3)


async def test_an_image_that_cannot_be_had_is_a_reason_not_to_prepare(world: ContainerWorld) -> None:
    await world.submit("j", "true", image="localhost:1/nope:1")
    world.start()
    await world.registered()
    await world.desire(gang(1))

    async def failed() -> ObservedGang | None:
        found = await world.gang()
        return found if found is not None and found.phase == "prepare_failed" else None

    found = await world.until(failed, 60.0)
    assert "image localhost:1/nope:1 cannot be pulled" in found.message
    assert "pulls image localhost:1/nope:1" in world.log()
