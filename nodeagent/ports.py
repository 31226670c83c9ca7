"""Rendezvous ports that are really reserved, and not only seen free a moment ago."""

from __future__ import annotations

import contextlib
import socket


def reserve(port: int = 0) -> socket.socket:
    """Return a bound socket that never listens: while it is open, the kernel gives its port to nobody who does not ask for that very one.

    The rank can: both sides set SO_REUSEADDR, as every server does (torch's store too), and Linux lets such sockets share a port until
    one of them listens. Raises OSError when the port is taken.
    """
    errors: list[OSError] = []
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            return _bind(family, host, port)
        except OSError as e:
            errors.append(e)
    raise errors[-1]


def _bind(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Both protocols at once, so that the rank may use either.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


class Ports:
    """The reserved ports of this node's gangs."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}

    def reserve(self, job: str) -> int:
        """Return a new port for a gang, instead of the one it had. Raises OSError."""
        self.release(job)
        self._sockets[job] = reserve()
        return int(self._sockets[job].getsockname()[1])

    def adopt(self, job: str, port: int) -> None:
        """Reserve again what an earlier agent had reserved. When a rank listens on it by now, it needs no protection."""
        with contextlib.suppress(OSError):
            self._sockets[job] = reserve(port)

    def fd(self, job: str) -> int:
        """Return the descriptor to hand to the supervisor of rank 0, -1 when there is none."""
        sock = self._sockets.get(job)
        return -1 if sock is None else sock.fileno()

    def release(self, job: str) -> None:
        """Give the gang's port back. Unknown gangs have none."""
        sock = self._sockets.pop(job, None)
        if sock is not None:
            sock.close()

    def close(self) -> None:
        """Give all ports back."""
        for job in list(self._sockets):
            self.release(job)
