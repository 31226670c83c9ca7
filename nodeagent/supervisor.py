"""What the process that stands beside one rank does, from its start until nothing of it is left; it outlives the agent. Each rank has one
of its own; what such a process does before and after is in `workers.py`. Small imports: a bare interpreter runs it.

It holds the exit status, drains the output into the log, obeys the agent's commands (a file, kicked by SIGUSR1), and is the **dead
man's switch**: when the time in the file `fence` has passed by the boottime clock, it kills the rank, whether or not anybody else on the
host is still able to. It does not poll for that: a kernel timer fires at the moment, and at wake-up after a suspend.

As a subreaper it inherits every descendant that lost its parent, so "no children left" means that the whole tree is gone.
"""

from __future__ import annotations

import fcntl  # here, and not where it is used: each fork would load it again
import mmap
import os
import select
import signal
import struct
import time

from gangline.nodeagent import kernel, proctree, rankexec, rankfile
from gangline.nodeagent.ranklog import RankLog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gangline.nodeagent import boxed  # for real only by ranks that have a box: others would carry it along

# Plain numbers: the enumeration's members drag many objects along, and each page that a fork touches is copied.
_SIGCHLD, _SIGUSR1, _SIGTERM, _SIGKILL = map(int, (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL))

#: what the agent sends for each rank, see `launcher.Launch`
Request = dict[str, object]

#: SIGKILL to descendants that ignore SIGTERM after the rank's own process has ended
STRAY_GRACE_S = 2.0
#: a tree that does not want to die is looked at again after this time, then after twice that, and so on up to a second
_KILL_AGAIN_S = 0.05
_PUBLISH_AGAIN_S = 1.0
#: from the end of the runtime's program until what a container runtime has still to do is killed
CONTAINER_GRACE_S = 15.0
#: from the first SIGKILL until it is said that something does not die
UNKILLABLE_S = 10.0
_READ_BYTES = 1 << 18
_DRAIN_BYTES_MAX = 1 << 21
_NEVER = float("inf")


class StartError(Exception):
    """The rank could not be started; the message is for people."""


class Shared:
    """What the fork server opens once for all supervisors."""

    def __init__(self, fence: mmap.mmap, devnull: int, hints: int) -> None:
        self.fence = fence
        self.devnull = devnull
        #: writing end of the FIFO of hints
        self.hints = hints
        self._oom_kills = 0
        self._read_at = float("-inf")

    def oom_kills(self) -> int:
        """Return how many processes the kernel has killed for want of memory since boot, as it was at most a second ago."""
        now = time.monotonic()
        if now > self._read_at + 1.0:
            self._oom_kills, self._read_at = _oom_kills(), now
        return self._oom_kills


def catch_signals() -> None:
    """Give signals a handler that does nothing, in the fork server once for all: supervisors hear of them through their wakeup pipe.

    A handler and not "ignore", because exec gives a caught signal its default back and leaves an ignored one ignored. So the ranks need
    no resetting; that goes for SIGPIPE and SIGXFSZ too, which Python ignores and programs do not expect to be ignored.
    """
    for s in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(s, _do_nothing)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _do_nothing(signum: int, frame: object) -> None:
    pass


def become_supervisor() -> int:
    """Prepare this freshly forked process for what it is to do from now on; return where its signals are read, see `asked_to_end`."""
    os.setsid()
    kernel.become_subreaper()
    wake, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(_SIGCHLD, _do_nothing)
    return wake


def asked_to_end(signals: bytes) -> bool:
    """Whether SIGTERM is among these signals."""
    return _SIGTERM in signals


def now_ms() -> int:
    """Return wall-clock milliseconds, for people only."""
    return time.time_ns() // 1_000_000


class Supervisor:
    """One rank's. `run` once."""

    def __init__(self, request: Request, port_fd: int, shared: Shared, wake: int) -> None:
        """`port_fd` is the reserved port, -1 for none: held by this process while the rank lives. `wake` is where signals are read."""
        self.request = request
        self.port_fd = port_fd
        self.wake_r = wake
        self.shared = shared
        self.rank = _int(request["rank"])
        self.fence = shared.fence if request["fenced"] else None
        self.oom_kills = _int(request["oom_kills"])
        self.pid = 0
        self.lock_fds: list[int] = []
        #: reading ends of the rank's output and of what it says before it executes
        self.out_r = self.exec_r = -1
        self.timer: kernel.BootTimer | None = None
        #: the agent was hinted at the status that was written last
        self.told = False
        #: the rank's own process has ended; nothing of the rank is left
        self.ended = False
        self.gone = False
        self.asked_to_stop = False
        self.strays_asked = False
        #: signals that came before the command ran; they would be lost on the forked copy of this process
        self.early_signals: list[int] = []
        self.kill_at = _NEVER
        self.kill_pause_s = _KILL_AGAIN_S
        #: since when it is being killed; it has been said that that does not help
        self.killing_since = _NEVER
        self.said_unkillable = False
        #: when to write the status again that could not be written
        self.publish_at = _NEVER
        self.control_offset = 0
        self.status: rankfile.Status = {}
        #: what stands around the rank, see boxed.py; None: nothing
        self.box: boxed.Box | None = request["box"]  # type: ignore[assignment]
        #: it is in a container that a runtime knows by its name
        self.container = self.box is not None and self.box["container"] is not None and bool(self.box["container"]["name"])
        #: what such a runtime has said last
        self.last_words = b""

    def run(self) -> bool:
        """See the rank to its end. Returns whether the agent was told of it."""
        kernel.set_name(f"gl-rank-{self.rank}")
        if not self._claim():
            return True
        self.log = RankLog(str(self.request["log"]), _int(self.request["log_part_bytes"]), _int(self.request["log_parts"]))
        try:
            self._check()
            self._start()
            self._loop()
        except StartError as e:
            self._start_failed(str(e))
        return self._finish()

    # Starting.

    def _claim(self) -> bool:
        me = os.getpid()
        self.status = {
            "job": self.request["job"], "generation": self.request["generation"], "rank": self.rank,
            "gpus": self.request["gpus"], "share": self.request["share"], "boot_id": self.request["boot_id"],
            "supervisor": me, "supervisor_start": rankfile.process_start(me),
            "state": "starting", "pid": 0, "pid_start": 0, "exit_code": 0, "cause": "", "message": "",
            "started_at_ms": 0, "exited_at_ms": 0, "dropped_bytes": 0, "ended_boot_ms": 0,
        }  # fmt: skip
        self.status_fd = rankfile.claim(status_path(self.request), self.status)
        return self.status_fd >= 0

    def _check(self) -> None:
        if self._fence_passed():
            self.status["cause"] = "fenced"
            raise StartError("the node had lost its lease when the rank was about to start")
        for path in self.request["locks"]:  # type: ignore[attr-defined]
            self._lock(str(path), fcntl.LOCK_EX)
        for path in self.request["shared_locks"]:  # type: ignore[attr-defined]
            self._lock(str(path), fcntl.LOCK_SH)

    def _lock(self, path: str, kind: int) -> None:
        """Hold a device, or a part of it, for as long as this process lives: the last guard against two ranks on one."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise StartError(f"device {os.path.basename(path)} is still held by another rank") from None
        self.lock_fds.append(fd)

    def _start(self) -> None:
        command: list[str] = self.request["command"]  # type: ignore[assignment]
        env: dict[str, str] = self.request["env"]  # type: ignore[assignment]
        workdir = str(self.request["workdir"])
        if self.request["make_workdir"]:
            try:
                rankexec.make_workdir(workdir)
            except OSError as e:
                raise StartError(f"working directory {workdir}: {e.strerror}") from None
        if self.box is not None:
            self._make_box(self.box, workdir)
        found = rankexec.programs(command[0], env.get("PATH"))
        self.out_r, out_w = os.pipe2(os.O_CLOEXEC)
        self.exec_r, exec_w = os.pipe2(os.O_CLOEXEC)
        me = os.getpid()
        try:
            self.pid = os.fork()
            if self.pid == 0:
                rankexec.become(
                    found, command, env, workdir, devnull=self.shared.devnull, out_w=out_w, exec_w=exec_w, parent=me,
                    box=self.box, private=bool(self.request["make_workdir"]),
                )  # fmt: skip
        except OSError as e:
            raise StartError(f"cannot fork: {e.strerror}") from None
        finally:
            os.close(out_w)
            os.close(exec_w)
        os.set_blocking(self.out_r, False)
        self.status.update(pid=self.pid, pid_start=rankfile.process_start(self.pid), started_at_ms=now_ms())

    def _make_box(self, box: boxed.Box, workdir: str) -> None:
        from gangline.nodeagent import boxed

        try:
            boxed.make_groups(box)
            boxed.give(box, workdir if self.request["make_workdir"] else "")
        except OSError as e:
            raise StartError(f"{e.filename or 'isolation'}: {e.strerror}") from None

    def _start_failed(self, message: str) -> None:
        self.gone = True
        self.status["cause"] = self.status["cause"] or "start_failed"
        self.status["message"] = message[: rankfile.MESSAGE_CHARS_MAX]
        self.log.write(f"[gangline: {message}]\n".encode())

    # Living.

    def _loop(self) -> None:
        self.poll = select.poll()
        for fd in (self.wake_r, self.exec_r, self.out_r):
            self.poll.register(fd, select.POLLIN)
        self._arm_fence()
        self._obey()
        while not self.gone:
            for fd, _ in self.poll.poll(self._timeout_ms()):
                if fd == self.wake_r:
                    self._on_signal()
                elif fd == self.out_r:
                    self._on_output()
                elif fd == self.exec_r:
                    self._on_exec()
                else:
                    self._on_fence()
            now = time.monotonic()
            if now >= self.kill_at:
                self._kill()
            if now >= self.publish_at:
                self._publish()

    def _timeout_ms(self) -> int | None:
        at = min(self.kill_at, self.publish_at)
        return None if at == _NEVER else max(0, int((at - time.monotonic()) * 1000) + 1)

    def _on_exec(self) -> None:
        """Learn whether the command runs: the pipe closes when exec succeeds, and brings the reason when it does not."""
        reason = os.read(self.exec_r, 4096).decode("utf-8", "replace")[: rankfile.MESSAGE_CHARS_MAX]
        self.poll.unregister(self.exec_r)
        os.close(self.exec_r)
        self.exec_r = -1
        if reason:
            self.status.update(cause="start_failed", message=reason)
            self.log.write(f"[gangline: {reason}]\n".encode())
            return
        if self.status["state"] == "starting":
            self.status["state"] = "running"
            self._publish()
        while self.early_signals:
            self._signal(self.early_signals.pop(0))

    def _on_output(self) -> None:
        try:
            data = os.read(self.out_r, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self.log.write(data)
            if self.container:
                self.last_words = (self.last_words + data)[-rankfile.MESSAGE_CHARS_MAX :]
        else:
            self.poll.unregister(self.out_r)
            os.close(self.out_r)
            self.out_r = -1

    def _on_signal(self) -> None:
        signals = os.read(self.wake_r, 512)
        if _SIGCHLD in signals:
            self._reap()
        if _SIGUSR1 in signals:
            self._obey()
        if _SIGTERM in signals:
            self._stop(_int(self.request["grace_s"]), _SIGTERM, "stopped", "the supervisor was asked to end")

    def _reap(self) -> None:
        while True:
            try:
                # The end is looked at before the zombie is taken away: while it is there, its process group id is nobody else's.
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self.gone = True
                return
            if child is None:
                self._ask_strays()
                return
            if child.si_pid == self.pid and not self.ended:
                self._rank_ended(child.si_code, child.si_status)
            os.waitpid(child.si_pid, os.WNOHANG)

    def _ask_strays(self) -> None:
        """SIGTERM, once, to what the rank's own process has left behind outside of its group."""
        if self.ended and not self.strays_asked and not self.container:
            self.strays_asked = True
            proctree.signal_below(os.getpid(), _SIGTERM)

    def _rank_ended(self, how: int, status: int) -> None:
        self.ended = True
        self.status["exit_code"] = status if how == os.CLD_EXITED else -status
        self.status["exited_at_ms"] = now_ms()
        if self.status["exit_code"] and not self.status["cause"] and not self.container:
            self._blame_memory()
        if self.exec_r >= 0:
            self._on_exec()
        if self.container:
            # What is left is the runtime's own, which tidies up; or the container, if somebody has killed the runtime's program.
            grace_s = CONTAINER_GRACE_S if how == os.CLD_EXITED else 0.0
            self.kill_at = min(self.kill_at, time.monotonic() + grace_s)
            return
        _signal_group(self.pid, _SIGTERM)
        self.kill_at = min(self.kill_at, time.monotonic() + STRAY_GRACE_S)

    def _blame_memory(self) -> None:
        """Say so if a rank that has failed was out of memory: past its own limit, or with the whole node."""
        if self.box is not None:
            from gangline.nodeagent import boxed

            if boxed.memory_kills(self.box):
                self.status.update(cause="oom", message=boxed.memory_message(self.box, self.status["exit_code"] == -_SIGKILL))
                return
            if refused := boxed.refused_forks(self.box):
                self.status["message"] = f"the limit of processes and threads was reached, {refused} more were refused"
        if self.status["exit_code"] == -_SIGKILL and _oom_kills() > self.oom_kills:
            self.status.update(cause="oom", message="killed while the kernel was out of memory")

    # Obeying.

    def _obey(self) -> None:
        """Carry out the commands that the agent has appended since the last time."""
        try:
            path = rankfile.control_path(str(self.request["job"]), _int(self.request["generation"]), self.rank)
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        data = os.pread(fd, _READ_BYTES, self.control_offset)
        os.close(fd)
        whole = data[: data.rfind(b"\n") + 1]
        self.control_offset += len(whole)
        for line in whole.decode().splitlines():
            verb, _, rest = line.partition(" ")
            if verb == "signal":
                self._signal(int(rest))
            elif verb == "stop":
                grace, signum, cause, message = rest.split(" ", 3)
                self._stop(float(grace), int(signum), cause, message)

    def _stop(self, grace_s: float, signum: int, cause: str, message: str) -> None:
        """Ask the rank to end, and make it end after `grace_s`. A second stop can only shorten the grace."""
        self.kill_at = min(self.kill_at, time.monotonic() + max(0.0, grace_s))
        if self.ended:
            return
        if not self.status["cause"]:
            self.status.update(cause=cause, message=message[: rankfile.MESSAGE_CHARS_MAX])
        if not self.asked_to_stop:
            self.asked_to_stop = True
            if grace_s > 0:
                self._signal(signum)
            self.status["state"] = "stopping"
            self._publish()

    def _signal(self, signum: int) -> None:
        if self.exec_r >= 0:
            self.early_signals.append(signum)
        elif not self.ended:
            _signal_group(self.pid, signum)

    def _kill(self) -> None:
        """SIGKILL to everything that is left, again and again until it is gone: a fork may have raced us."""
        if not self.ended:
            _signal_group(self.pid, _SIGKILL)
        if self.box is not None:
            from gangline.nodeagent import boxed

            boxed.kill_groups(self.box)
        proctree.signal_below(os.getpid(), _SIGKILL)
        now = time.monotonic()
        self.kill_at = now + self.kill_pause_s
        self.kill_pause_s = min(1.0, self.kill_pause_s * 2)
        self._reap()
        self.killing_since = min(self.killing_since, now)
        if not self.gone and not self.said_unkillable and now > self.killing_since + UNKILLABLE_S:
            self._say_unkillable()

    def _say_unkillable(self) -> None:
        """Tell that something does not die: most often it waits for a device or a file server. Its devices stay held."""
        self.said_unkillable = True
        left = [f"{pid} (state {proctree.state(pid)})" for pid in proctree.descendants(os.getpid())[:5]]
        message = f"SIGKILL has not ended it in {UNKILLABLE_S:.0f} s: process {', '.join(left)}"
        self.status.update(state="stopping", message=f"{self.status['message']}; {message}".removeprefix("; ")[: rankfile.MESSAGE_CHARS_MAX])
        self.log.write(f"[gangline: {message}]\n".encode())
        self._publish()

    # The dead man's switch.

    def _arm_fence(self) -> None:
        if self.fence is not None:
            timer = self.timer = kernel.BootTimer()
            timer.arm(fence_deadline(self.fence))
            self.poll.register(timer.fd, select.POLLIN)

    def _fence_passed(self) -> bool:
        return self.fence is not None and kernel.boottime() >= fence_deadline(self.fence)

    def _on_fence(self) -> None:
        assert self.fence is not None
        assert self.timer is not None
        if not self._fence_passed():
            self.timer.arm(fence_deadline(self.fence))  # the lease has been renewed since
            return
        self.poll.unregister(self.timer.fd)
        if not self.ended:
            # Even when it was being stopped: "fenced" tells the leader that the node was alone when it ended.
            self.status.update(cause="fenced", message="the node could not renew its lease in time", state="stopping")
        self._kill()
        self._publish()

    # Ending.

    def _finish(self) -> bool:
        self._drain()
        if self.box is not None:
            self._take_box_away(self.box)
        self.log.close()
        self._close()
        self.status.update(state="exited", dropped_bytes=self.log.dropped_total, ended_boot_ms=int(kernel.boottime() * 1000))
        self.status["exited_at_ms"] = self.status["exited_at_ms"] or now_ms()
        while not self._publish():
            time.sleep(_PUBLISH_AGAIN_S)  # no space: the exit status must not be lost, so this process waits with it
        os.close(self.status_fd)
        return self.told

    def _take_box_away(self, box: boxed.Box) -> None:
        from gangline.nodeagent import boxed

        if self.container and self.pid:
            end = boxed.container_end(box)
            boxed.explain_end(self.status, end, self.last_words.decode("utf-8", "replace"), oom=_oom_kills() > self.oom_kills)
        boxed.take_away(box)

    def _close(self) -> None:
        """Let go of what was the rank's, before its end is told: whoever hears of it may start the next one on the same devices at once."""
        for fd in (*self.lock_fds, self.out_r, self.exec_r, self.port_fd):
            if fd >= 0:
                os.close(fd)
        if self.timer is not None:
            self.timer.close()

    def _drain(self) -> None:
        """Read what is left in the pipe. Bounded: somebody outside of the tree may hold its other end."""
        left = _DRAIN_BYTES_MAX
        try:
            while self.pid and self.out_r >= 0 and left > 0:
                data = os.read(self.out_r, _READ_BYTES)
                if not data:
                    return
                self.log.write(data)
                left -= len(data)
        except BlockingIOError:
            return

    def _publish(self) -> bool:
        try:
            rankfile.write(self.status_fd, self.status)
        except OSError:
            self.publish_at = time.monotonic() + _PUBLISH_AGAIN_S
            return False
        self.publish_at = _NEVER
        self.told = rankfile.hint(self.shared.hints, f"{self.request['job']} {self.request['generation']} {self.rank}\n")
        return True


def fence_deadline(fence: mmap.mmap) -> float:
    """Return the boottime second after which the node's ranks must not run any more."""
    deadline: float = struct.unpack("=d", fence[:8])[0]
    return deadline


def _oom_kills() -> int:
    try:
        with open("/proc/vmstat", "rb") as f:
            data = f.read()
    except OSError:
        return 0
    at = data.find(b"oom_kill ")
    return int(data[at + 9 :].split(None, 1)[0]) if at >= 0 else 0


def _signal_group(pgid: int, signum: int) -> None:
    try:
        os.killpg(pgid, signum)
    except OSError:
        # The rank has not called setsid yet, then it has no children either. It is ours and not reaped, so its pid is nobody else's.
        try:
            os.kill(pgid, signum)
        except OSError:
            return


def status_path(request: Request) -> str:
    """Return the path of the status file of the rank that is to start."""
    return rankfile.status_path(str(request["job"]), _int(request["generation"]), _int(request["rank"]))


def _int(value: object) -> int:
    assert isinstance(value, int | float)
    return int(value)
