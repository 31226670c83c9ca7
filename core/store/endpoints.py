"""Where an etcd cluster is, and the files that prove who we are: from configuration to what a channel is built of."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

_ENDPOINT = re.compile(r"(?:(?P<scheme>https?)://)?(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})/?")


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files of a TLS connection. They are read again whenever a connection fails, so that they may be replaced at any time.

    `cert` and `key` are ours, with its chain; None when the cluster asks for none. `server_name` must be in every member's
    certificate; when empty, the host of the first endpoint.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""


class Destination(msgspec.Struct, frozen=True):
    """What a channel is built of; a channel is built anew when it differs from the one before."""

    #: gRPC target with all addresses
    target: str
    #: name that the members' certificates must have
    server_name: str = ""
    ca: bytes = b""
    cert: bytes | None = None
    key: bytes | None = None


class Endpoints:
    """The members that a client may speak to.

    Raises ValueError for an endpoint that is not `host:port`, with `https://` before it only when there are TLS files.
    """

    def __init__(self, endpoints: Sequence[str], tls: TlsFiles | None) -> None:
        if not endpoints:
            raise ValueError("no etcd endpoint given: at least one host:port is needed")
        if tls and (tls.cert is None) != (tls.key is None):
            raise ValueError(f"TLS to etcd: cert is {tls.cert} but key is {tls.key}; give both or neither")
        self._hosts = [_parse(endpoint, tls is not None) for endpoint in endpoints]
        self._tls = tls
        self._known: dict[tuple[str, int], list[tuple[socket.AddressFamily, str]]] = {}

    def __str__(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self._hosts)

    async def look_up(self) -> Destination:
        """Resolve the names and read the files. A name that does not resolve now keeps its last addresses.

        Raises OSError when no name resolves or a file cannot be read.
        """
        failure: OSError | None = None
        for host, port in self._hosts:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self._known[host, port] = [(family, str(address[0])) for family, _, _, _, address in found]
            except OSError as error:
                failure = error
        if not self._known:
            raise OSError(f"none of the etcd endpoints {self} resolves: {failure}")
        target = self._target()
        if self._tls is None:
            return Destination(target)
        return await asyncio.to_thread(_with_files, target, self._tls, self._tls.server_name or self._hosts[0][0])

    def _target(self) -> str:
        """Return all addresses as one gRPC target. A target has one address family; every host that has IPv4 speaks that."""
        v4: list[str] = []
        v6: list[str] = []
        for host_port in self._hosts:
            addresses = self._known.get(host_port, [])
            mine = [f"{address}:{host_port[1]}" for family, address in addresses if family == socket.AF_INET]
            v4 += mine
            if not mine:
                v6 += [f"[{address}]:{host_port[1]}" for family, address in addresses if family == socket.AF_INET6]
        scheme, chosen = ("ipv4", v4) if v4 else ("ipv6", v6)
        return f"{scheme}:{','.join(dict.fromkeys(chosen))}"


def _parse(endpoint: str, tls: bool) -> tuple[str, int]:
    match = _ENDPOINT.fullmatch(endpoint.strip())
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(f"etcd endpoint {endpoint!r} is not host:port, such as etcd-1.example.com:2379 or [fd00::1]:2379")
    if match["scheme"] == "https" and not tls:
        raise ValueError(f"etcd endpoint {endpoint!r} needs TLS, but no certificate files are configured")
    if match["scheme"] == "http" and tls:
        raise ValueError(f"etcd endpoint {endpoint!r} is without TLS, but certificate files are configured; write https://")
    return match["v6"] or match["host"], int(match["port"])


def _with_files(target: str, tls: TlsFiles, server_name: str) -> Destination:
    cert = tls.cert.read_bytes() if tls.cert else None
    key = tls.key.read_bytes() if tls.key else None
    return Destination(target, server_name, tls.ca.read_bytes(), cert, key)
