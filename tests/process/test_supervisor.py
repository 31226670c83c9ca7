"""One rank under its supervisor, without an agent: exit status, signals, the whole process tree, the log, the dead man's switch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.nodeagent import ports, rankfile
from gangline.nodeagent.adoption import RankStatus, Supervised, hold, read_status
from gangline.nodeagent.fence import Fence
from gangline.nodeagent.kernel import boottime
from gangline.nodeagent.launcher import Launch, Launcher

pytestmark = pytest.mark.process


class Bench:
    """A state directory with a fork server, and nobody else."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("runs", "logs/j", "locks"):
            (root / folder).mkdir(parents=True)
        self.boot_id = rankfile.boot_id()
        self.fence = Fence(root, boot_id=self.boot_id)
        self.fence.extend(boottime() + 600)
        os.mkfifo(root / rankfile.NOTIFY)
        self.launcher = Launcher(root)

    async def start(self, *command: str, rank: int = 0, port_fd: int = -1, **more: Any) -> None:
        launch = Launch(
            job="j", generation=1, rank=rank, gpus=(), boot_id=self.boot_id, command=command,
            env={"PATH": os.environ["PATH"]}, workdir="/", make_workdir=False, log=f"logs/j/rank-{rank}.1.log",
            log_part_bytes=1 << 20, log_parts=3, fenced=True, grace_s=1.0, locks=(),
        )  # fmt: skip
        await self.launcher.launch([(msgspec.structs.replace(launch, **more), port_fd)])

    async def python(self, code: str, **more: Any) -> None:
        await self.start(sys.executable, "-S", "-c", code, **more)

    def status(self, rank: int = 0) -> RankStatus | None:
        return read_status(self.root / rankfile.status_path("j", 1, rank))

    def state(self, rank: int = 0) -> str:
        status = self.status(rank)
        return status.state if status else ""

    async def wait(self, state: str, rank: int = 0, timeout_s: float = 10.0) -> RankStatus:
        deadline = time.monotonic() + timeout_s
        while self.state(rank) != state:
            assert time.monotonic() < deadline, f"rank {rank} is {self.status(rank)}, not {state}; log: {self.log(rank)[-500:]!r}"
            await asyncio.sleep(0.005)
        status = self.status(rank)
        assert status is not None
        return status

    async def until(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s; {self.status()}; log: {self.log()[-500:]!r}"
            await asyncio.sleep(0.005)

    def supervisor(self, rank: int = 0) -> Supervised:
        status = self.status(rank)
        assert status is not None
        held = hold(status, self.boot_id)
        assert held is not None
        return held

    def command(self, line: str, rank: int = 0) -> None:
        with open(self.root / rankfile.control_path("j", 1, rank), "a") as f:
            f.write(line + "\n")
        held = self.supervisor(rank)
        held.kick()
        held.close()

    def log(self, rank: int = 0) -> bytes:
        path = self.root / f"logs/j/rank-{rank}.1.log"
        return path.read_bytes() if path.exists() else b""

    def close(self) -> None:
        self.launcher.close()
        for path in (self.root / "runs").glob("*.status"):
            status = read_status(path)
            if status is not None and status.state != "exited":
                for pid, start in ((status.pid, status.pid_start), (status.supervisor, status.supervisor_start)):
                    if rankfile.process_start(pid) == start != 0:
                        os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    b = Bench(tmp_path)
    try:
        yield b
    finally:
        b.close()


def alive(pid: int) -> bool:
    return rankfile.process_start(pid) != 0


def number_in(data: bytes) -> int:
    return int(data.split(b"\n", 1)[0])


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("code", [0, 1, 255])
async def test_exit_status(bench: Bench, code: int):
    await bench.start("sh", "-c", f"echo out; echo err >&2; exit {code}")
    status = await bench.wait("exited")
    assert (status.exit_code, status.cause) == (code, "")
    assert bench.log() == b"out\nerr\n"
    assert 0 < status.started_at_ms <= status.exited_at_ms


async def test_end_by_signal(bench: Bench):
    await bench.start("sh", "-c", "kill -SEGV $$")
    status = await bench.wait("exited")
    assert (status.exit_code, status.cause) == (-signal.SIGSEGV, "")


@pytest.mark.parametrize(
    ("command", "more", "words"),
    [
        (("no-such-command",), {}, "'no-such-command': No such file"),
        (("/",), {}, "Permission denied"),
        (("true",), {"workdir": "/no/such/folder"}, "working directory /no/such/folder: No such file"),
    ],
    ids=["not found", "not executable", "no workdir"],
)
async def test_start_failed_says_why(bench: Bench, command: tuple[str, ...], more: dict[str, Any], words: str):
    await bench.start(*command, **more)
    status = await bench.wait("exited")
    assert status.cause == "start_failed"
    assert words in status.message
    assert words.encode() in bench.log()


async def test_private_workdir_is_made(bench: Bench):
    where = str(bench.root / "work/j@0")
    await bench.start("pwd", workdir=where, make_workdir=True)
    await bench.wait("exited")
    assert bench.log().decode().strip() == where


async def test_a_rank_is_started_once(bench: Bench):
    await bench.start("sh", "-c", "echo started")
    await bench.wait("exited")
    await bench.start("sh", "-c", "echo started")
    await bench.start("true", rank=1)
    await bench.wait("exited", rank=1)
    assert bench.log() == b"started\n"


async def test_two_ranks_do_not_share_an_exclusive_device(bench: Bench):
    await bench.start("sleep", "60", locks=("locks/gpu-3",))
    await bench.wait("running")
    await bench.start("true", rank=1, locks=("locks/gpu-3",))
    status = await bench.wait("exited", rank=1)
    assert status.cause == "start_failed"
    assert "gpu-3" in status.message
    bench.command("stop 5 15 stopped done")
    await bench.wait("exited")
    await bench.start("true", rank=2, locks=("locks/gpu-3",))
    assert (await bench.wait("exited", rank=2)).cause == ""


async def test_what_a_rank_starts_with(bench: Bench):
    code = """
import os, signal
print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), os.readlink("/proc/self/fd/0"))
print(sorted(int(n) for n in os.listdir("/proc/self/fd"))[:4], sorted(os.environ))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(status["SigIgn"].strip(), status["SigBlk"].strip(), status["NoNewPrivs"].strip())
"""
    await bench.python(code)
    await bench.wait("exited")
    first, second, third = bench.log().decode().splitlines()
    assert first == "True True /dev/null"
    # Descriptor 3 is the listing's own: nothing is inherited.
    assert second.startswith("[0, 1, 2, 3] ['")
    assert "PATH" in second
    # Python itself ignores SIGPIPE (13) and SIGXFSZ (25), and make what glibc keeps for itself (32, 33); nothing else is ignored or blocked.
    assert int(third.split()[0], 16) & ~(1 << 12 | 1 << 24 | 3 << 31) == 0
    assert third.split()[1:] == ["0000000000000000", "1"]


# ---------------------------------------------------------------- stopping


async def test_stop_is_gentle_first(bench: Bench):
    await bench.start("sh", "-c", "trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.05; done")
    await bench.wait("running")
    await bench.until(lambda: b"up" in bench.log())
    bench.command("stop 10 15 stopped because it must")
    status = await bench.wait("exited")
    assert (status.exit_code, status.cause, status.message) == (7, "stopped", "because it must")
    assert bench.log().endswith(b"bye\n")


async def test_a_rank_that_ignores_sigterm_is_killed_after_its_grace(bench: Bench):
    await bench.start("sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done")
    await bench.wait("running")
    await bench.until(lambda: b"up" in bench.log())
    begun = time.monotonic()
    bench.command("stop 0.5 15 stopped x")
    await bench.wait("stopping")
    status = await bench.wait("exited")
    assert (status.exit_code, status.cause) == (-signal.SIGKILL, "stopped")
    assert 0.5 <= time.monotonic() - begun < 5


async def test_stop_without_grace_kills_at_once(bench: Bench):
    await bench.start("sh", "-c", "trap 'echo no' TERM; while :; do sleep 0.05; done")
    await bench.wait("running")
    bench.command("stop 0 9 hang no progress")
    status = await bench.wait("exited")
    assert (status.exit_code, status.cause, status.message) == (-signal.SIGKILL, "hang", "no progress")
    assert bench.log() == b""


async def test_stop_that_comes_before_the_command_runs_is_not_lost(bench: Bench):
    (bench.root / rankfile.control_path("j", 1, 0)).write_text("stop 30 15 stopped early\n")
    await bench.start("sleep", "60")
    status = await bench.wait("exited")
    assert (status.exit_code, status.cause) == (-signal.SIGTERM, "stopped")


async def test_a_signal_reaches_the_whole_group(bench: Bench):
    await bench.start(
        "sh", "-c", "trap 'echo parent' USR1; (trap 'echo child' USR1; echo up; while :; do sleep 0.05; done) & while :; do wait; done"
    )
    await bench.wait("running")
    await bench.until(lambda: b"up" in bench.log())
    bench.command(f"signal {int(signal.SIGUSR1)}")
    await bench.until(lambda: b"parent" in bench.log() and b"child" in bench.log())
    assert bench.state() == "running"
    bench.command("stop 0 9 stopped x")
    await bench.wait("exited")


# ---------------------------------------------------------------- the whole tree

DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        time.sleep(60)
    os._exit(0)
os.wait()
LAST
"""


async def test_a_daemon_that_left_its_session_is_found_and_killed(bench: Bench):
    await bench.python(DAEMON.replace("LAST", "time.sleep(0.1); sys.exit(3)"))
    begun = time.monotonic()
    status = await bench.wait("exited", timeout_s=15)
    assert status.exit_code == 3
    assert time.monotonic() - begun >= 1.5, "the daemon ignores SIGTERM, so the rank cannot have been over before"
    assert not alive(number_in(bench.log()))


async def test_a_daemon_is_asked_before_it_is_killed(bench: Bench):
    polite = DAEMON.replace("signal.SIG_IGN", "lambda *a: (print('bye', flush=True), os._exit(0))")
    await bench.python(polite.replace("LAST", "time.sleep(0.3); sys.exit(3)"))
    begun = time.monotonic()
    await bench.wait("exited")
    assert b"bye" in bench.log()
    assert time.monotonic() - begun < 2.0


async def test_stop_takes_the_daemon_along(bench: Bench):
    await bench.python(DAEMON.replace("LAST", "time.sleep(60)"))
    await bench.wait("running")
    await bench.until(bench.log)
    bench.command("stop 0.3 15 stopped x")
    await bench.wait("exited", timeout_s=15)
    assert not alive(number_in(bench.log()))


async def test_nothing_outlives_a_killed_supervisor(bench: Bench):
    await bench.start("sleep", "60")
    status = await bench.wait("running")
    os.kill(status.supervisor, signal.SIGKILL)
    await bench.until(lambda: not alive(status.pid))


async def test_a_rank_outlives_the_fork_server(bench: Bench):
    await bench.start("sleep", "60")
    status = await bench.wait("running")
    bench.launcher.close()
    await bench.start("true", rank=1)
    await bench.wait("exited", rank=1)
    assert alive(status.pid)
    assert bench.state() == "running"
    bench.command("stop 0 9 stopped x")
    await bench.wait("exited")


# ---------------------------------------------------------------- the log


async def test_log_rotates_and_keeps_positions(bench: Bench):
    code = 'import sys\nfor i in range(400): sys.stdout.write("%05d" % i + "x" * 994 + "\\n"); sys.stdout.flush()'
    await bench.python(code, log_part_bytes=50_000, log_parts=3)
    await bench.wait("exited")
    parts = sorted((bench.root / "logs/j").glob("rank-0.1.log*"), key=lambda p: (p.suffix == ".log", p.name))
    assert len(parts) == 3
    assert sum(p.stat().st_size for p in parts) <= 200_000
    for p in parts[:-1]:
        base = int(p.suffix[1:])
        assert p.read_bytes()[:5] == b"%05d" % (base // 1000)
        assert base % 1000 == 0


async def test_a_flood_neither_blocks_the_rank_nor_fills_the_disk(bench: Bench):
    code = 'import os\nb = b"y" * 65536\nfor i in range(6400): os.write(1, b)\nos.write(2, b"last words\\n")'
    await bench.python(code, log_part_bytes=1 << 20, log_parts=3)
    status = await bench.wait("exited", timeout_s=30)
    assert status.exit_code == 0
    assert sum(p.stat().st_size for p in (bench.root / "logs/j").iterdir()) < 8 << 20
    assert status.dropped_bytes > 0
    assert b"bytes of output dropped" in bench.log()


async def test_binary_and_endless_lines_are_logged_as_they_are(bench: Bench):
    await bench.python("import os\nos.write(1, bytes(range(256)) * 1000)")
    await bench.wait("exited")
    assert bench.log() == bytes(range(256)) * 1000


# ---------------------------------------------------------------- the dead man's switch


async def test_the_fence_kills_at_its_deadline(bench: Bench, tmp_path: Path):
    other = Bench(tmp_path / "other")
    other.fence._cell[0] = boottime() + 0.5
    try:
        await other.start("sh", "-c", "trap '' TERM; sleep 60", rank=0)
        await other.start("sleep", "60", rank=1, fenced=False)
        await other.wait("running", rank=1)
        status = await other.wait("exited")
        assert (status.exit_code, status.cause) == (-signal.SIGKILL, "fenced")
        assert boottime() - other.fence.deadline < 2.0
        assert other.state(1) == "running", "on_disconnect: keep"
    finally:
        other.command("stop 0 9 stopped x", rank=1)
        await other.wait("exited", rank=1)
        other.close()


async def test_a_fence_that_is_moved_in_time_does_not_kill(bench: Bench):
    bench.fence._cell[0] = boottime() + 0.4
    await bench.start("sleep", "1.2")
    for _ in range(8):
        await asyncio.sleep(0.15)
        bench.fence.extend(boottime() + 0.4)
    bench.fence.extend(boottime() + 60)
    assert (await bench.wait("exited")).exit_code == 0


async def test_nothing_starts_behind_the_fence(bench: Bench):
    bench.fence._cell[0] = boottime() - 1
    await bench.start("sh", "-c", "echo started")
    status = await bench.wait("exited")
    assert (status.cause, status.pid) == ("fenced", 0)
    assert b"started" not in bench.log()


# ---------------------------------------------------------------- the rendezvous port


def _can_bind(port: int, family: socket.AddressFamily = socket.AF_INET, reuse: bool = False) -> bool:
    with socket.socket(family) as s:
        if reuse:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError:
            return False
        return True


async def test_a_reserved_port_is_for_the_rank_alone_and_outlives_the_agent(bench: Bench):
    reserved = ports.reserve()
    port = reserved.getsockname()[1]
    assert not _can_bind(port)
    code = f"""
import socket, time
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("", {port})); s.listen()
print("listening", flush=True); c, _ = s.accept(); s.close(); c.close(); time.sleep(60)
"""
    await bench.python(code, port_fd=reserved.fileno())
    reserved.close()
    await bench.until(lambda: b"listening" in bench.log())
    with pytest.raises(OSError, match="in use"):
        ports.reserve(port)
    socket.create_connection(("127.0.0.1", port)).close()
    # The rank listens no more, but its supervisor still holds the port.
    await bench.until(lambda: _can_bind(port, reuse=True))
    assert not _can_bind(port)
    bench.command("stop 0 9 stopped x")
    await bench.wait("exited")


async def test_ten_thousand_ephemeral_ports_do_not_meet_the_reserved_one():
    reserved = ports.reserve()
    port = reserved.getsockname()[1]
    sockets: list[socket.socket] = []
    try:
        with contextlib.suppress(OSError):
            for _ in range(10_000):
                s = socket.socket()
                sockets.append(s)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.bind(("127.0.0.1", 0))
                assert s.getsockname()[1] != port
        assert len(sockets) > 500
    finally:
        for s in [*sockets, reserved]:
            s.close()


# ---------------------------------------------------------------- one rank after the other


def _holding(supervisor: int) -> list[str]:
    return [os.readlink(f"/proc/{supervisor}/fd/{n}") for n in sorted(os.listdir(f"/proc/{supervisor}/fd"), key=int)]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def test_a_supervisor_that_is_done_takes_the_next_rank_and_keeps_nothing_of_the_last(bench: Bench):
    reserved = ports.reserve()
    seen, held = set(), []
    for rank in range(6):
        # Each leaves another mess: output that is not read to its end, a port, a lock, a command that there is not.
        command = ("no-such-command",) if rank == 2 else ("sh", "-c", f"echo {rank}; exit {rank}")
        await bench.start(*command, rank=rank, port_fd=reserved.fileno() if rank % 2 else -1, locks=("locks/gpu-0",))
        status = await bench.wait("exited", rank)
        assert status.exit_code == (127 if rank == 2 else rank)
        assert bench.log(rank) == (b"[gangline: command 'no-such-command': No such file or directory]\n" if rank == 2 else b"%d\n" % rank)
        seen.add(status.supervisor)
        await bench.until(lambda s=status: _name(s.supervisor) == "gl-idle")  # type: ignore[misc]
        held.append(_holding(status.supervisor))
    assert len(seen) == 1
    assert all(h == held[0] for h in held)
    port = reserved.getsockname()[1]
    reserved.close()
    assert _can_bind(port)


async def test_ranks_at_the_same_time_have_a_supervisor_each(bench: Bench):
    for rank in range(4):
        await bench.start("sleep", "60", rank=rank)
    found = {(await bench.wait("running", rank)).supervisor for rank in range(4)}
    assert len(found) == 4
    for rank in range(4):
        bench.command("stop 0 9 stopped x", rank)
    for rank in range(4):
        await bench.wait("exited", rank)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_an_idle_supervisor_that_was_ended_is_not_missed(bench: Bench, number: int):
    await bench.start("true")
    first = await bench.wait("exited")
    await bench.until(lambda: _name(first.supervisor) == "gl-idle")
    os.kill(first.supervisor, number)
    await bench.until(lambda: not alive(first.supervisor))
    await bench.start("true", rank=1)
    assert (await bench.wait("exited", 1)).supervisor != first.supervisor


async def test_idle_supervisors_end_with_the_fork_server_and_busy_ones_after_their_rank(bench: Bench):
    await bench.start("sleep", "60")
    busy = await bench.wait("running")
    await bench.start("true", rank=1)
    idle = await bench.wait("exited", 1)
    bench.launcher.close()
    await bench.until(lambda: not alive(idle.supervisor))
    assert alive(busy.supervisor)
    bench.command("stop 0 9 stopped x")
    await bench.wait("exited")
    await bench.until(lambda: not alive(busy.supervisor))


async def test_a_supervisor_whose_last_word_was_not_heard_ends_so_that_its_end_is(bench: Bench):
    hints = os.open(bench.root / rankfile.NOTIFY, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(hints, b"x" * 4096)
    await bench.start("true")
    status = await bench.wait("exited")
    await bench.until(lambda: not alive(status.supervisor))
    os.close(hints)


async def test_a_request_that_fits_no_socket_is_for_a_new_supervisor(bench: Bench):
    await bench.start("true")
    first = await bench.wait("exited")
    await bench.until(lambda: _name(first.supervisor) == "gl-idle")
    await bench.start("sh", "-c", "echo ${#LARGE}", rank=1, env={"PATH": os.environ["PATH"], "LARGE": "x" * 100_000})
    assert (await bench.wait("exited", 1)).supervisor != first.supervisor
    assert bench.log(1) == b"100000\n"
