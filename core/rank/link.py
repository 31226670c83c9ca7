"""The connection to the node agent: one daemon thread, started by the first call that needs it.

Training must never wait for it, nor notice that the agent is away. So what a rank reports is state, not a queue: the newest step, the
newest checkpoint, whether it has acknowledged. The thread sends what differs from what it sent last, at most every COALESCE_S, and
all of it again after each reconnect (a restarted agent knows nothing).

    training thread                         link thread
    link.step = n                           pending = False        before it reads the state, so that no step is missed
    if not pending: pending = True; wake    send what changed

Events come over the socket, and from the events file whenever the socket is away. Both carry the same lines, so those that
were seen already are left out.
"""

# ruff: noqa: TID251  relative imports: the folder is core/rank, the package is gangline.rank
from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from .records import Context, StopNotice, stop_notice

#: steps are reported this often at most
COALESCE_S = 0.1
#: pause before the agent is tried again: doubles from the first to the second
RETRY_FIRST_S = 0.1
RETRY_LAST_S = 2.0
#: an agent that does not take a line within this time is taken for dead
SEND_TIMEOUT_S = 5.0
STEP_MAX = 2**63 - 1
PATH_BYTES_MAX = 4096
LINE_BYTES_MAX = 4 << 20
#: what is beyond this number is not kept (a stop notice still counts)
EVENTS_MAX = 10_000

Event = dict[str, object]


class Link:
    """State to report, and the events heard so far."""

    def __init__(self, context: Context, path: str, token: str) -> None:
        self.step = -1
        #: its own work in a step, 0 when the job does not say
        self.busy_ms = 0
        self.checkpoint: tuple[int, str] | None = None
        self.acknowledged = False
        #: the thread has been woken and has not looked yet
        self.pending = False
        self.stop: StopNotice | None = None
        self._context = context
        self._path = path
        self._token = token
        self._events: list[Event] = []
        self._seen: set[str] = set()
        self._heard = threading.Condition()
        self._listeners: list[_Listener] = []
        self._offset = 0
        self._sent: tuple[int, tuple[int, str] | None, bool] | None = None
        #: connected, or about to try for the first time
        self._hopeful = bool(path)
        self._socket: socket.socket | None = None
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._read_file()
        threading.Thread(target=self._run, name="gangline-link", daemon=True).start()

    # What the training threads call.

    def wake(self) -> None:
        """Make the thread look at the state."""
        self.pending = True
        with contextlib.suppress(OSError):  # full: it is about to wake anyway
            os.write(self._wake_in, b"\0")

    def events(self, timeout_s: float | None) -> Iterator[Event]:
        """Yield the events so far, then each one that comes within `timeout_s` of the one before (None: wait for ever)."""
        index = 0
        while True:
            with self._heard:
                while index >= len(self._events):
                    if not self._heard.wait(timeout_s):
                        return
                event = self._events[index]
            index += 1
            yield dict(event)

    def listen(self, callback: Callable[[Event], object]) -> None:
        """Call back on the link thread for the events so far and for each new one."""
        self._listeners.append(_Listener(callback))
        self.wake()

    def flush(self, timeout_s: float) -> None:
        """Wait until everything has been handed to the agent, unless it is away."""
        deadline = time.monotonic() + timeout_s
        while self._hopeful and self._sent != (self.step, self.checkpoint, self.acknowledged) and time.monotonic() < deadline:
            self.wake()
            time.sleep(0.002)

    def abandon(self) -> None:
        """In a forked child, where the thread does not exist: let go of the parent's descriptors."""
        with contextlib.suppress(OSError):
            os.close(self._wake_in)
            os.close(self._wake_out)
        if self._socket is not None:
            self._socket.close()

    # The thread.

    def _run(self) -> None:
        delay_s = RETRY_FIRST_S
        while True:
            started = time.monotonic()
            if self._path:
                with contextlib.suppress(OSError):
                    self._talk()
            self._hopeful = False
            self._sent = None
            if time.monotonic() - started > RETRY_LAST_S:
                delay_s = RETRY_FIRST_S
            # Ranks of a node spread over half the delay, so that they do not come back to a new agent all at once.
            self._rest(delay_s * (0.75 + os.getpid() % 50 / 100))
            delay_s = min(delay_s * 2, RETRY_LAST_S)

    def _rest(self, delay_s: float) -> None:
        """Wait without an agent: the file still tells the news."""
        deadline = time.monotonic() + delay_s
        poll = select.poll()
        poll.register(self._wake_out, select.POLLIN)
        self._read_file()
        while True:
            self._call_listeners()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return
            if poll.poll(remaining_s * 1000):
                # `pending` stays set: steps need wake nobody until there is an agent to tell.
                self._drain()

    def _talk(self) -> None:
        """One connection, until it breaks."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            self._socket = sock
            sock.settimeout(SEND_TIMEOUT_S)
            sock.connect(self._path)
            sock.sendall(_line({"type": "hello", "token": self._token}))
            self._hopeful = True
            news = select.poll()
            news.register(sock, select.POLLIN)
            both = select.poll()
            both.register(sock, select.POLLIN)
            both.register(self._wake_out, select.POLLIN)
            received = b""
            next_send = 0.0
            while True:
                now = time.monotonic()
                if now >= next_send and self._send_changes(sock):
                    next_send = now + COALESCE_S
                ready = news.poll((next_send - now) * 1000) if now < next_send else both.poll()
                for descriptor, _ in ready:
                    if descriptor == self._wake_out:
                        self._drain()
                        continue
                    chunk = sock.recv(65_536)
                    *lines, received = (received + chunk).split(b"\n")
                    for line in lines:
                        self._take(line)
                    if not chunk or len(received) > LINE_BYTES_MAX:
                        return
                self._call_listeners()

    def _send_changes(self, sock: socket.socket) -> bool:
        """Send what differs from what this connection has carried, and return whether there was something."""
        self.pending = False
        state = step, checkpoint, acknowledged = self.step, self.checkpoint, self.acknowledged
        if state == self._sent:
            return False
        old_step, old_checkpoint, old_acknowledged = self._sent or (-1, None, False)
        lines = b""
        if step != old_step and 0 <= step <= STEP_MAX:
            lines += _line({"type": "progress", "step": step} | ({"busy_ms": self.busy_ms} if self.busy_ms else {}))
        if checkpoint is not None and checkpoint != old_checkpoint and 0 <= checkpoint[0] <= STEP_MAX:
            # The agent hangs up on a path that it could not write down; the step alone is worth reporting.
            path = checkpoint[1] if checkpoint[1].isprintable() and len(checkpoint[1].encode()) <= PATH_BYTES_MAX else ""
            lines += _line({"type": "checkpoint", "step": checkpoint[0], "path": path})
        if acknowledged and not old_acknowledged:
            lines += _line({"type": "ack"})
        sock.sendall(lines)
        self._sent = state
        return True

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            os.read(self._wake_out, 4096)

    def _read_file(self) -> None:
        """Take the complete lines that have been added to the events file since the last time."""
        if not self._context.events_path:
            return
        with contextlib.suppress(OSError), open(self._context.events_path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                self._offset = 0
            file.seek(self._offset)
            data = file.read(LINE_BYTES_MAX)
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.split(b"\n"):
                self._take(line)

    def _take(self, line: bytes) -> None:
        event = parse_event(line, self._context)
        if event is None:
            return
        key = json.dumps(event, sort_keys=True)
        if key in self._seen:
            return
        if event["event"] in ("preemption", "drain") or "deadline_ms" in event:
            self.stop = stop_notice(event)
        if len(self._events) < EVENTS_MAX:
            self._seen.add(key)
            with self._heard:
                self._events.append(event)
                self._heard.notify_all()

    def _call_listeners(self) -> None:
        for listener in list(self._listeners):
            while listener.index < len(self._events):
                event = dict(self._events[listener.index])
                listener.index += 1
                try:
                    listener.callback(event)
                except Exception:  # noqa: BLE001  a callback of the job must not cut the job off from its agent
                    sys.excepthook(*sys.exc_info())


class _Listener:
    def __init__(self, callback: Callable[[Event], object]) -> None:
        self.callback = callback
        self.index = 0


def parse_event(line: bytes, context: Context) -> Event | None:
    """Return the event in a line if it is one of this generation of this job; None for everything else."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str) or event["event"] == "error":
        return None
    if event.get("job", context.job) != context.job or event.get("generation", context.generation) != context.generation:
        return None
    return event


def _line(message: dict[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"
