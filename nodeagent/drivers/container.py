"""Ranks in containers, by the command lines of podman, docker or apptainer.

The runtime's `run` is what the rank's supervisor starts, in the foreground: its output is the rank's, a signal that it gets is passed on, and
its end is the rank's. So a container outlives the agent as a process does, and the next agent finds it by its supervisor. Limits are the
runtime's to keep; how a container ended is what the runtime says of it (boxed.py).

Paths that rank and agent have in common (the private working directory, events, socket, checkpoints) are at the same place inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Sequence

import msgspec

from gangline.core.model.documents import DesiredRank
from gangline.core.model.spec import JobSpec
from gangline.nodeagent.adoption import RankStatus
from gangline.nodeagent.cgroups import Limits
from gangline.nodeagent.drivers.driver import Ready, Site, look_at_storage, rank_name
from gangline.nodeagent.isolation import Box, Container, Refused, limits_of
from gangline.nodeagent.launcher import Launch
from gangline.nodeagent.nodefile import RLIMITS
from gangline.nodeagent.storage import Mounted, is_below

#: of preference
RUNTIMES = ("podman", "docker", "apptainer")
_INITS = {"podman": "catatonit", "docker": "docker-init"}
#: the answer to a question about an image or container
_ASK_S = 30.0
_NAME_OF_LIMIT = {number: name for name, number in RLIMITS.items()}
#: words of the pull that are kept for people
_WORDS = 200


class ContainerDriver:
    """See driver.Driver."""

    def __init__(self, site: Site) -> None:
        self._site = site
        #: pulls that are going on, by image: jobs that want the same one wait for the same pull
        self._pulls: dict[str, asyncio.Task[None]] = {}

    # ---------------------------------------------------------------- preparing

    async def prepare(self, job: str, generation: int, spec: JobSpec, say: Callable[[str], None]) -> Ready:
        """Try the storage out, and have the image here."""
        runtime, program = self._runtime()
        ready = await look_at_storage(job, generation, spec, self._site.rules)
        if runtime == "apptainer":
            if not spec.image.startswith("/") or not await asyncio.to_thread(os.path.exists, spec.image):
                raise Refused(f"image {spec.image}: apptainer runs image files that are on the node, by their absolute path")
            return ready
        if not await self._has(program, runtime, spec.image):
            if not self._site.rules.containers.pull:
                raise Refused(f"image {spec.image} is not on this node, and its file says that none is pulled (containers.pull)")
            await self._pull(program, spec.image, say)
        return ready

    def _runtime(self) -> tuple[str, list[str]]:
        """Return the container runtime, and its program with its flags. Raises Refused."""
        rules = self._site.rules.containers
        if rules.runtime == "none":
            raise Refused("this node runs no containers (containers.runtime: none in its file)")
        for name in (rules.runtime,) if rules.runtime else RUNTIMES:
            path = shutil.which(name)
            if path is not None:
                return name, [path, *rules.flags]
        raise Refused(f"this node cannot run an image: there is no {rules.runtime or ', '.join(RUNTIMES)} on it")

    def _runtime_or_name(self) -> tuple[str, list[str]]:
        """The same when it was there while the job was prepared: should it be gone, starting it says so."""
        try:
            return self._runtime()
        except Refused:
            name = next((r for r in RUNTIMES if r == self._site.rules.containers.runtime), RUNTIMES[0])
            return name, [name, *self._site.rules.containers.flags]

    async def _has(self, program: list[str], runtime: str, image: str) -> bool:
        code, words = await _ask(*program, "image", "exists" if runtime == "podman" else "inspect", image)
        if code == 0 or (code == 1 and runtime == "docker"):
            return code == 0
        if code == 1:
            return False
        raise Refused(f"{runtime} does not work on this node: {words}")

    async def _pull(self, program: list[str], image: str, say: Callable[[str], None]) -> None:
        say(f"waits for image {image}")
        task = self._pulls.get(image)
        if task is None:
            task = self._pulls[image] = asyncio.get_running_loop().create_task(_pull(program, image, say))
            task.add_done_callback(lambda _: self._pulls.pop(image, None))
        await asyncio.shield(task)

    # ---------------------------------------------------------------- running

    def box(self, launch: Launch, spec: JobSpec, rank: DesiredRank, ready: Ready) -> Launch:
        """Return the launch of the runtime that runs the rank."""
        site = self._site
        runtime, program = self._runtime_or_name()
        limits = limits_of(spec, rank, site.rules)
        private = launch.workdir if launch.make_workdir else f"{site.state}/work/{launch.job}@{launch.rank}"
        env_file = f"runs/{rank_name(launch.job, launch.generation, launch.rank)}.env"
        # What every process of this node gets is the node's: the search path, the home.
        given = {name: value for name, value in launch.env.items() if site.base_environment.get(name) != value and "\n" not in value}
        lines = {name: value for name, value in launch.env.items() if "\n" in value}
        mounts = _mounts(launch, spec, private, ready)
        workdir = spec.workdir or private
        owner = (ready.user.uid, ready.user.gid) if ready.user is not None else None
        text = "".join(f"{name}={value}\n" for name, value in given.items())
        path = f"{site.state}/{env_file}"
        if runtime == "apptainer":
            command = [*program, *_apptainer(launch, spec, mounts, workdir, path, gpus=not site.simulated), *site.rules.containers.run_flags]
            command += [spec.image, *launch.command]
            name, user = "", ready.user
        else:
            name, user = self._name(launch.job, launch.generation, launch.rank), None
            devices = [] if site.simulated else [uuid for uuid in launch.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]
            command = [
                *program, "run", "--name", name, "--pull", "never", "--network", "host", "--log-driver", "none", "--env-file", path,
                *_variables(lines), "--security-opt", "no-new-privileges", "--oom-score-adj", "500", "--workdir", workdir,
                *_limits(limits, site), *_shm(spec), *_user(ready), *_init(runtime),
                *(f"--device=nvidia.com/gpu={uuid}" for uuid in devices),
                *(f"--mount=type=bind,source={source},target={target}{',readonly' if ro else ''}" for source, target, ro in mounts),
                *site.rules.containers.run_flags, "--entrypoint", launch.command[0], spec.image, *launch.command[1:],
            ]  # fmt: skip
        container = Container(runtime=runtime, program=tuple(program), name=name, env_file=env_file, env_text=text)
        box = Box(user=user, owner=owner, memory_mib=limits.memory_mib, container=container)
        env = {name: site.base_environment[name] for name in ("PATH", "HOME", "LANG") if name in site.base_environment}
        return msgspec.structs.replace(launch, box=box, command=tuple(command), env=env, workdir=private, make_workdir=True)

    def inside(self, status: RankStatus, spec: JobSpec, ready: Ready, command: Sequence[str]) -> list[str]:
        """Run it by the runtime's `exec`."""
        runtime, program = self._runtime()
        if runtime == "apptainer":
            raise Refused("apptainer cannot run a command in a container that it has started")
        return [*program, "exec", self._name(status.job, status.generation, status.rank), *command]

    async def bury(self, status: RankStatus) -> None:
        """Remove its container, if it had one: what runs in it is killed."""
        env_file = f"{self._site.state}/runs/{rank_name(status.job, status.generation, status.rank)}.env"
        with contextlib.suppress(Refused, FileNotFoundError):
            os.unlink(env_file)
            _, program = self._runtime()
            await _ask(*program, "rm", "--force", self._name(status.job, status.generation, status.rank))

    def _name(self, job: str, generation: int, rank: int) -> str:
        return f"{self._site.base}-{job}-{generation}-{rank}"


def _mounts(launch: Launch, spec: JobSpec, private: str, ready: Ready) -> list[Mounted]:
    """Return all that is mounted: what the job says, and what rank and agent have in common."""
    ours: list[Mounted] = [(private, private, False)]
    events, socket = launch.env.get("GANGLINE_EVENTS", ""), launch.env.get("GANGLINE_SOCKET", "")
    if events:
        ours.append((events, events, True))
    if socket:
        # The folder, because a later agent makes the socket anew.
        ours.append((os.path.dirname(socket), os.path.dirname(socket), True))
    checkpoint = spec.checkpoint.path
    if checkpoint.startswith("/") and not any(is_below(checkpoint, target) for _, target, _ in ready.mounts):
        ours.append((checkpoint, checkpoint, False))
    taken = {target for _, target, _ in ready.mounts}
    return [*(m for m in ours if m[1] not in taken), *ready.mounts]


def _variables(lines: dict[str, str]) -> list[str]:
    """Those with more than one line do not go into the file; the others do, because everybody on the node can read a command line."""
    return [f"--env={name}={value}" for name, value in lines.items()]


def _limits(limits: Limits, site: Site) -> list[str]:
    flags = ["--pids-limit", str(limits.pids or -1)]
    if limits.memory_mib:
        flags += ["--memory", f"{limits.memory_mib}m", "--memory-swap", f"{limits.memory_mib}m"]
    if limits.cpu_quota_milli:
        flags += ["--cpus", f"{limits.cpu_quota_milli / 1000:g}"]
    if limits.cpu_share_milli:
        flags += ["--cpu-shares", str(max(2, limits.cpu_share_milli * 1024 // 1000))]
    return flags + [f"--ulimit={_NAME_OF_LIMIT[which]}={most}:{most}" for which, most in site.rules.ranks.rlimits]


def _shm(spec: JobSpec) -> list[str]:
    return ["--shm-size", f"{spec.shm_mib}m"] if spec.shm_mib else []


def _user(ready: Ready) -> list[str]:
    if ready.user is None:
        return []
    others = [group for group in ready.user.groups if group != ready.user.gid]
    return ["--user", f"{ready.user.uid}:{ready.user.gid}", *(f"--group-add={group}" for group in others)]


def _init(runtime: str) -> list[str]:
    """A first process for the container, where the runtime has one: the kernel keeps signals from one that does not handle them."""
    name = _INITS[runtime]
    return ["--init"] if shutil.which(name) or os.path.exists(f"/usr/libexec/podman/{name}") else []


def _apptainer(launch: Launch, spec: JobSpec, mounts: list[Mounted], workdir: str, env_file: str, *, gpus: bool) -> list[str]:
    binds = [f"--bind={source}:{target}{':ro' if read_only else ''}" for source, target, read_only in mounts]
    nv = ["--nv"] if gpus and launch.env.get("CUDA_VISIBLE_DEVICES") else []
    return ["exec", "--containall", "--no-home", "--env-file", env_file, "--pwd", workdir, *nv, *binds]


# ---------------------------------------------------------------- asking the runtime


async def _ask(*command: str) -> tuple[int, str]:
    """Run a program of the runtime; return its exit code and the last line that it said. Raises Refused when it does not answer."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_ASK_S):
            _, err = await process.communicate()
    except TimeoutError:
        raise Refused(f"{os.path.basename(command[0])} does not answer within {_ASK_S:g} s") from None
    finally:
        await _end(process)
    return process.returncode or 0, _last_line(err)


async def _pull(program: list[str], image: str, say: Callable[[str], None]) -> None:
    """Fetch an image and tell how far that is. Raises Refused."""
    process = await asyncio.create_subprocess_exec(
        *program, "pull", image,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    last = ""
    try:
        assert process.stdout is not None
        while data := await process.stdout.read(1 << 16):
            last = _last_line(data) or last
            say(f"pulls image {image}: {last}")
        code = await process.wait()
    finally:
        await _end(process)
    if code != 0:
        raise Refused(f"image {image} cannot be pulled: {last or f'exit code {code}'}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _last_line(data: bytes) -> str:
    """Return the last line of what a program has said, for people."""
    lines = [line.strip() for line in data.decode("utf-8", "replace").replace("\r", "\n").splitlines() if line.strip()]
    return "".join(c if c.isprintable() else " " for c in lines[-1])[-_WORDS:] if lines else ""
