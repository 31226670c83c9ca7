"""The processes that supervise ranks, one after the other: a rank has a supervisor of its own for as long as anything of it lives, and then
that process waits for the next rank. Small imports: a bare interpreter runs it.

A fork copies the interpreter's memory page by page as it is touched, which costs more than everything else about a short rank. So a worker
whose rank is gone, with its end written down and told, says so in a pipe, and is given the next request through a socket of its own. It ends
instead when its rank's end could not be told (the end of its process tells, then), when it is asked to by SIGTERM, when the fork server has
gone, and when the fork server closes its socket because it was idle for a while. That the fork server alone decides about the last keeps a
request from being sent to a worker that is just leaving.
"""

from __future__ import annotations

import marshal
import os
import select
import socket

from gangline.nodeagent import kernel, supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn  # for real it would add a megabyte to the memory that each fork copies

#: idle workers that are kept beyond the next look, and the seconds without a request after which none is
IDLE_MAX = 16
IDLE_S = 10.0
#: a larger request is for a new worker: it would not surely fit into a socket in one piece
_MESSAGE_BYTES_MAX = 1 << 16
_SERIAL_BYTES = 4
_NOTES_BYTES = 1 << 12
_PORT_FDS = 1


class Workers:
    """The fork server's end. One thread, no waiting."""

    def __init__(self, shared: supervisor.Shared, requests: socket.socket) -> None:
        """`requests` is what a forked process must not keep open."""
        self._shared = shared
        self._requests = requests
        self._notes, self._notes_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        #: by serial number: a pid may come back
        self._sockets: dict[int, socket.socket] = {}
        #: the last is the one that was busy last, and its memory is warm
        self._idle: list[int] = []
        self._serial = 0

    def give(self, body: bytes, port_fd: int) -> None:
        """Have a worker start the rank of this marshalled request, one that is idle or a new one. Raises OSError when there can be none."""
        message = self._shared.oom_kills().to_bytes(8, "big") + body
        self._look()
        if len(message) <= _MESSAGE_BYTES_MAX:
            while self._idle:
                if self._send(self._idle.pop(), message, port_fd):
                    return
        self._fork(message, port_fd)

    def rest(self) -> None:
        """Nothing has been asked for a while: let the idle workers end, and forget those that are gone."""
        self._look()
        for serial in self._idle:
            self._drop(serial)
        self._idle.clear()
        self._drop_gone()

    def __len__(self) -> int:
        return len(self._sockets)

    def _look(self) -> None:
        """Learn who has become idle."""
        try:
            notes = os.read(self._notes, _NOTES_BYTES)
        except BlockingIOError:
            return
        for at in range(0, len(notes), _SERIAL_BYTES):
            serial = int.from_bytes(notes[at : at + _SERIAL_BYTES], "big")
            if serial in self._sockets:
                self._idle.append(serial)
        while len(self._idle) > IDLE_MAX:
            self._drop(self._idle.pop(0))

    def _send(self, serial: int, message: bytes, port_fd: int) -> bool:
        """Send a request in one piece. False when the worker has gone, and then it has not got it."""
        try:
            socket.send_fds(self._sockets[serial], [message], [port_fd] if port_fd >= 0 else [], socket.MSG_DONTWAIT)
        except OSError:
            self._drop(serial)
            return False
        return True

    def _fork(self, message: bytes, port_fd: int) -> None:
        self._drop_gone()
        self._serial += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._sockets[self._serial] = ours
            try:
                pid = os.fork()
            except OSError:
                self._drop(self._serial)
                raise
            if pid == 0:
                # Their ends are the fork server's alone: when it is gone, everybody has to hear of it.
                for other in (self._requests, *self._sockets.values()):
                    other.close()
                os.close(self._notes)
                _work(message, port_fd, self._shared, theirs, self._notes_w, self._serial.to_bytes(_SERIAL_BYTES, "big"))

    def _drop_gone(self) -> None:
        poll = select.poll()
        serials = {sock.fileno(): serial for serial, sock in self._sockets.items()}
        for fd in serials:
            poll.register(fd, 0)
        for fd, _ in poll.poll(0):
            self._drop(serials[fd])

    def _drop(self, serial: int) -> None:
        self._sockets.pop(serial).close()


def _work(message: bytes, port_fd: int, shared: supervisor.Shared, inbox: socket.socket, notes: int, serial: bytes) -> NoReturn:
    """Supervise this rank and those that follow, in a process of its own."""
    code = 1
    try:
        wake = supervisor.become_supervisor()
        poll = select.poll()
        for fd in (inbox.fileno(), wake):
            poll.register(fd, select.POLLIN)
        while message:
            request: supervisor.Request = marshal.loads(memoryview(message)[8:])
            request["oom_kills"] = int.from_bytes(message[:8], "big")
            told = supervisor.Supervisor(request, port_fd, shared, wake).run()
            if not told:
                break
            kernel.set_name("gl-idle")
            os.write(notes, serial)
            message, port_fd = _next(inbox, wake, poll)
        code = 0
    finally:
        os._exit(code)


def _next(inbox: socket.socket, wake: int, poll: select.poll) -> tuple[bytes, int]:
    """Wait for the next request and return it with the descriptor of its port or -1; empty when there will be none."""
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if inbox.fileno() in ready:
            message, fds, _, _ = socket.recv_fds(inbox, _MESSAGE_BYTES_MAX, _PORT_FDS)
            return message, fds[0] if fds else -1
        if supervisor.asked_to_end(os.read(wake, 512)):
            # What was sent before this is still read; what is sent after it, is refused.
            inbox.shutdown(socket.SHUT_RD)
