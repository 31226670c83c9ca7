"""The process that forks the supervisors of ranks: a bare interpreter with few imports, so that a fork is cheap. Run by `launcher.py`.

Reads requests from the socket on standard input (4 bytes of length with at most one file descriptor beside them, then a marshalled
dictionary: from the agent alone, and by the same interpreter), hands each to a worker (`workers.py`), and ends when the agent does. What it
has started lives on.
"""

from __future__ import annotations

import gc
import marshal
import mmap
import os
import signal
import socket
import struct

from gangline.nodeagent import kernel, rankfile, supervisor
from gangline.nodeagent.workers import IDLE_S, Workers


def main(state_dir: str, nice: int) -> None:
    """Serve until the agent's end of the socket closes. `nice` is the priority of ranks; the agent's own is better."""
    os.chdir(state_dir)
    if nice != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    requests = socket.socket(fileno=0)
    os.set_inheritable(requests.fileno(), False)
    # Not settimeout: that would ask the kernel twice for each request.
    requests.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("=qq", int(IDLE_S), 0))
    devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    shared = supervisor.Shared(_map_fence(), devnull, rankfile.open_hints())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors that end are not waited for
    supervisor.catch_signals()
    kernel.set_name("gl-forkserver")
    # No collection: it would touch every page that is shared with the supervisors, and there is nothing to collect.
    gc.disable()
    gc.freeze()
    workers = Workers(shared, requests)
    while (received := _receive(requests, workers)) is not None:
        body, port_fd = received
        try:
            workers.give(body, port_fd)
        except OSError as e:
            _report(marshal.loads(body), shared, e)
        if port_fd >= 0:
            # The worker has it: the reserved rendezvous port stays open there for as long as the rank lives.
            os.close(port_fd)
    os._exit(0)


def _map_fence() -> mmap.mmap:
    fd = os.open(rankfile.FENCE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 8, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _receive(requests: socket.socket, workers: Workers) -> tuple[bytes, int] | None:
    """Return the next request and the descriptor of its port or -1; None when the agent has gone."""
    while True:
        try:
            head, fds, _, _ = socket.recv_fds(requests, 4, 1)
            break
        except BlockingIOError:
            workers.rest()
    body = head[4:]
    if len(head) < 4:
        return None
    size = int.from_bytes(head[:4], "big")
    while len(body) < size:
        try:
            more = requests.recv(size - len(body))
        except BlockingIOError:
            continue
        if not more:
            return None
        body += more
    return body, fds[0] if fds else -1


def _report(request: supervisor.Request, shared: supervisor.Shared, error: OSError) -> None:
    """Write the status of a rank whose supervisor could not be forked."""
    status: rankfile.Status = {k: request[k] for k in ("job", "generation", "rank", "gpus", "share", "boot_id")}
    status.update(
        supervisor=0, supervisor_start=0, state="exited", pid=0, pid_start=0, exit_code=127, cause="start_failed",
        message=f"cannot fork: {error.strerror}", started_at_ms=0, exited_at_ms=supervisor.now_ms(), dropped_bytes=0,
    )  # fmt: skip
    fd = rankfile.claim(supervisor.status_path(request), status)
    if fd >= 0:
        os.close(fd)
    rankfile.hint(shared.hints, f"{request['job']} {request['generation']} {request['rank']}\n")
