"""Sums over all ranks: a ring of sockets in plain Python, or torch's gloo.

The ring: rank 0 listens on MASTER_ADDR:MASTER_PORT and tells everybody where everybody listens; then each rank connects to the next
one. A vector goes round once while each rank adds its part, and once more as the sum. That is 2 (n - 1) messages one after the other,
which for a small vector is faster than cutting it up, and the order of the additions is always the same.

When a rank dies the kernel closes its sockets: its neighbours fail at the next read, then theirs. A rank that hangs is noticed after
the timeout.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import time
from typing import Protocol

import numpy as np

from gangline.rank import Context


class PeerLost(RuntimeError):
    """Another rank has gone away or is silent."""


class Exchange(Protocol):
    """What training needs of the other ranks."""

    def sum(self, vector: np.ndarray) -> np.ndarray:
        """Return the sum of everybody's vector, the same to the bit on all ranks. Raises PeerLost."""

    def close(self) -> None:
        """Hang up."""


def connect(backend: str, who: Context, timeout_s: float) -> Exchange:
    """Meet the other ranks. `backend` is ring, gloo, or auto: gloo where torch is installed, unless GANGLINE_EXAMPLE_TORCH=0."""
    if backend == "auto":
        wanted = os.environ.get("GANGLINE_EXAMPLE_TORCH", "1") != "0"
        backend = "gloo" if wanted and importlib.util.find_spec("torch") else "ring"
    return Gloo(who, timeout_s) if backend == "gloo" else Ring(who, timeout_s)


class Ring:
    """See the head of this file."""

    def __init__(self, who: Context, timeout_s: float) -> None:
        self.rank, self.size = who.rank, who.world_size
        self._timeout_s = timeout_s
        self._next: socket.socket | None = None
        self._previous: socket.socket | None = None
        if self.size > 1:
            try:
                self._meet(who, time.monotonic() + timeout_s)
            except OSError as error:
                raise PeerLost(f"rank {self.rank} could not meet the others within {timeout_s:g} s: {error}") from None

    def sum(self, vector: np.ndarray) -> np.ndarray:
        if self._next is None or self._previous is None:
            return vector.copy()
        total = np.ascontiguousarray(vector, dtype=np.float64)
        try:
            if self.rank > 0:
                total = self._receive(total.nbytes) + total
            self._next.sendall(total.data)  # the last rank sends the whole sum on to rank 0
            if self.rank < self.size - 1:
                total = self._receive(total.nbytes)
            if self.rank < self.size - 2:
                self._next.sendall(total.data)
        except OSError as error:
            raise PeerLost(f"rank {self.rank} lost its neighbour in the ring: {error}") from None
        return total

    def close(self) -> None:
        for link in (self._next, self._previous):
            if link is not None:
                link.close()

    def _receive(self, size: int) -> np.ndarray:
        assert self._previous is not None
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._previous.recv_into(view)
            if count == 0:
                raise ConnectionError(f"rank {(self.rank - 1) % self.size} has hung up")
            view = view[count:]
        return np.frombuffer(data, dtype=np.float64)

    def _meet(self, who: Context, deadline: float) -> None:
        name = f"{who.job}/{who.generation}"
        if self.rank == 0:
            lobby = _listen_retrying(who.master_addr, who.master_port, self.size, deadline)
            listener = _listen(lobby.getsockname()[0])
            guests: dict[int, tuple[socket.socket | None, object]] = {0: (None, listener.getsockname()[:2])}
            while len(guests) < self.size:
                lobby.settimeout(max(0.01, deadline - time.monotonic()))
                guest, _ = lobby.accept()
                guest.settimeout(5.0)
                try:
                    hello = _read_line(guest)
                except OSError:
                    hello = {}
                number = hello.get("rank")
                if hello.get("name") == name and isinstance(number, int) and 0 < number < self.size:
                    guests[number] = (guest, hello.get("address"))
                else:
                    guest.close()  # a rank of another generation, or a stranger
            table = [guests[rank][1] for rank in range(self.size)]
            for waiting, _ in guests.values():
                if waiting is not None:
                    waiting.sendall(json.dumps({"table": table}).encode() + b"\n")
                    waiting.close()
            lobby.close()
        else:
            while True:
                host = _dial_retrying(who.master_addr, who.master_port, deadline)
                host.settimeout(max(0.01, deadline - time.monotonic()))
                listener = _listen(host.getsockname()[0])
                hello = {"name": name, "rank": self.rank, "address": listener.getsockname()[:2]}
                try:
                    host.sendall(json.dumps(hello).encode() + b"\n")
                    table = _read_line(host).get("table")
                except ConnectionError:
                    table = None
                host.close()
                if isinstance(table, list):
                    break
                listener.close()  # it was the rank 0 of an older generation, on its way out
                time.sleep(0.05)
        host_name, port = table[(self.rank + 1) % self.size]
        self._next = socket.create_connection((host_name, port), timeout=max(0.01, deadline - time.monotonic()))
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        self._previous, _ = listener.accept()
        listener.close()
        for link in (self._next, self._previous):
            link.settimeout(self._timeout_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Gloo:
    """torch.distributed with its own rendezvous, from the same environment variables."""

    def __init__(self, who: Context, timeout_s: float) -> None:
        import datetime

        import torch
        import torch.distributed

        torch.set_num_threads(1)
        self._torch = torch
        self.rank, self.size = who.rank, who.world_size
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{who.master_addr}:{who.master_port}",
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )

    def sum(self, vector: np.ndarray) -> np.ndarray:
        tensor = self._torch.from_numpy(vector.astype(np.float64))
        try:
            self._torch.distributed.all_reduce(tensor)
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank}: {str(error).splitlines()[0]}") from None
        return tensor.numpy()

    def close(self) -> None:
        self._torch.distributed.destroy_process_group()


def _listen(host: str, port: int = 0, backlog: int = 1) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def _listen_retrying(host: str, port: int, backlog: int, deadline: float) -> socket.socket:
    """Listen; the port may still belong to the rank 0 of an older generation that is just ending."""
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    while True:
        try:
            return _listen(str(address), port, backlog)
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(f"{host}:{port}: {error}") from None
        time.sleep(0.02)


def _dial_retrying(host: str, port: int, deadline: float) -> socket.socket:
    """Connect; rank 0 may not listen yet."""
    pause_s = 0.01
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(0.01, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(f"{host}:{port}: {error}") from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _read_line(link: socket.socket) -> dict[str, object]:
    """Return the object in one line; an empty one when the other side hangs up or talks nonsense."""
    with link.makefile("rb") as file:
        try:
            line = json.loads(file.readline(1 << 20) or b"{}")
        except ValueError:
            return {}
    return line if isinstance(line, dict) else {}
