"""Shared fixtures: private etcd servers and a TCP proxy that misbehaves on demand. Tests wait for conditions, never for a time."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ETCD = shutil.which("etcd")

# Below what the kernel gives to outgoing connections (32,768 on), so that a port which is free now stays free for a restart.
_ports = (20_000 + i % 12_000 for i in itertools.count(os.getpid() * 97))


def free_port() -> int:
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable")


class Tls:
    """A certificate authority in a folder, made with the openssl command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = folder / "ca.pem"
        self._openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-keyout", folder / "ca.key", "-out", self.ca, "-subj", "/CN=test ca",
        )  # fmt: skip

    def issue(self, name: str, *, names: str = "DNS:localhost,IP:127.0.0.1", file: str = "") -> tuple[Path, Path]:
        """Return the files of a new certificate with that common name, and its key."""
        cert, key = self.folder / f"{file or name}.pem", self.folder / f"{file or name}.key"
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        self._openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", key, "-out", request, "-subj", f"/CN={name}",
        )  # fmt: skip
        self._openssl(
            "x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.folder / "ca.key", "-CAcreateserial",
            "-days", "2", "-out", cert, "-extfile", extensions,
        )  # fmt: skip
        return cert, key

    @staticmethod
    def _openssl(*args: object) -> None:
        subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)


class Etcd:
    """One etcd member. `endpoint` is host:port, for clients."""

    def __init__(self, folder: Path, name: str = "m0", *, tls: Tls | None = None, args: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.name = name
        self.client_port, self.peer_port = free_port(), free_port()
        self.endpoint = f"127.0.0.1:{self.client_port}"
        self.peer_url = f"http://127.0.0.1:{self.peer_port}"
        self.initial_cluster = f"{name}={self.peer_url}"
        self.args = args
        self._tls = tls
        self._server_files = tls.issue("server") if tls else None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait: bool = True, force_new_cluster: bool = False) -> Etcd:
        assert ETCD is not None
        url = f"{'https' if self._tls else 'http'}://{self.endpoint}"
        command = [
            ETCD, "--name", self.name, "--data-dir", str(self.folder / "data"), "--logger", "zap",
            "--listen-client-urls", url, "--advertise-client-urls", url,
            "--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url,
            "--initial-cluster", self.initial_cluster, "--initial-cluster-token", str(self.folder.parent), *self.args,
        ]  # fmt: skip
        if self._tls and self._server_files:
            cert, key = map(str, self._server_files)
            command += ["--cert-file", cert, "--key-file", key, "--trusted-ca-file", str(self._tls.ca), "--client-cert-auth"]
        if force_new_cluster:
            command.append("--force-new-cluster")
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        if wait:
            self.wait_healthy()
        return self

    def wait_healthy(self, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._healthy():
            assert self._process is not None
            assert self._process.poll() is None, f"etcd ended: {self.log()[-2000:]}"
            assert time.monotonic() < deadline, f"etcd is not healthy after {timeout_s} s: {self.log()[-2000:]}"
            time.sleep(0.05)

    def log(self) -> str:
        return (self.folder / "etcd.log").read_text()

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it in good order."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def ctl(self, *args: str) -> str:
        """Run etcdctl on this member and return what it prints."""
        command = ["etcdctl", "--endpoints", self.endpoint, *args]
        if self._tls:
            cert, key = self._tls.folder / "root.pem", self._tls.folder / "root.key"
            if not cert.exists():
                self._tls.issue("root")
            command += ["--cacert", str(self._tls.ca), "--cert", str(cert), "--key", str(key)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "ETCDCTL_API": "3"})
        return done.stdout

    def is_leader(self) -> bool:
        (status,) = json.loads(self.ctl("endpoint", "status", "-w", "json"))
        return bool(status["Status"]["leader"] == status["Status"]["header"]["member_id"])

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.client_port, timeout=2)
        if self._tls and self._server_files:
            context = ssl.create_default_context(cafile=str(self._tls.ca))
            context.load_cert_chain(*map(str, self._server_files))
            connection = http.client.HTTPSConnection("127.0.0.1", self.client_port, timeout=2, context=context)
        try:
            connection.request("GET", "/health")
            return bool(json.loads(connection.getresponse().read())["health"] == "true")
        except (OSError, ValueError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class TcpProxy:
    """Forwards connections to `target` ("host:port") until told otherwise. `endpoint` is where it listens."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.port = free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        #: seconds that each piece is held back
        self.delay_s = 0.0
        #: accept no new connections
        self.refuse = False
        #: cut each connection after so many bytes to the client, None: never
        self.cut_after: int | None = None
        self.connections = 0
        #: bytes forwarded to clients
        self.forwarded = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._black_holes: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        return self

    def black_hole(self) -> None:
        """Let the connections that are open pass nothing on to the client any more, without ending them."""
        self._black_holes |= self._writers

    def cut(self) -> None:
        """Reset all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        self.connections += 1
        host, _, port = self.target.rpartition(":")
        try:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, up_writer}
        self._writers |= pair
        for source, sink, to_client in ((reader, up_writer, False), (up_reader, writer, True)):
            task = asyncio.create_task(self._pump(source, sink, pair, to_client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, pair: set[asyncio.StreamWriter], to_client: bool
    ) -> None:
        sent = 0
        try:
            while data := await source.read(1 << 16):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if to_client and sink in self._black_holes:
                    continue
                sink.write(data)
                await sink.drain()
                sent += len(data)
                if to_client:
                    self.forwarded += len(data)
                    if self.cut_after is not None and sent >= self.cut_after:
                        break
        except OSError:
            pass
        finally:
            for writer in pair:
                writer.transport.abort()
            self._writers -= pair


async def eventually(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Wait until `condition()`, which may be async, is true."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if isinstance(result, Awaitable):
            result = await result
        if result:
            return
        assert time.monotonic() < deadline, f"still not true after {timeout_s} s"
        await asyncio.sleep(0.01)


def _need_etcd() -> None:
    if ETCD is None:
        pytest.skip("no etcd binary")


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of one etcd for the whole session: use a prefix of your own, and do not compact."""
    _need_etcd()
    member = Etcd(tmp_path_factory.mktemp("etcd") / "m0")
    try:
        yield member.start().endpoint
    finally:
        member.kill()


@pytest.fixture
def start_etcd(tmp_path: Path) -> Iterator[Callable[..., Etcd]]:
    """Factory: `start_etcd(*extra_arguments, tls=None, start=True)` gives a one-member cluster of the test's own."""
    _need_etcd()
    members: list[Etcd] = []

    def factory(*args: str, tls: Tls | None = None, start: bool = True) -> Etcd:
        member = Etcd(tmp_path / f"etcd{len(members)}" / "m0", tls=tls, args=args)
        members.append(member)
        return member.start() if start else member

    yield factory
    for member in members:
        member.kill()


@pytest.fixture
def etcd_cluster3(tmp_path: Path) -> Iterator[Callable[..., list[Etcd]]]:
    """Factory: `etcd_cluster3(*extra_arguments)` gives the members of a running cluster of three."""
    _need_etcd()
    clusters: list[list[Etcd]] = []

    def factory(*args: str) -> list[Etcd]:
        folder = tmp_path / f"cluster{len(clusters)}"
        members = [Etcd(folder / f"m{i}", f"m{i}", args=args) for i in range(3)]
        clusters.append(members)
        cluster = ",".join(member.initial_cluster for member in members)
        for member in members:
            member.initial_cluster = cluster
            member.start(wait=False)
        for member in members:
            member.wait_healthy()
        return members

    yield factory
    for member in itertools.chain.from_iterable(clusters):
        # A frozen process takes SIGKILL all the same.
        member.kill()


@pytest.fixture
def make_tls(tmp_path: Path) -> Callable[[], Tls]:
    """Factory: a new certificate authority."""
    count = itertools.count()
    return lambda: Tls(tmp_path / f"tls{next(count)}")


@pytest.fixture
async def tcp_proxy() -> AsyncIterator[Callable[[str], Awaitable[TcpProxy]]]:
    """Factory: `await tcp_proxy("host:port")` gives a running TcpProxy in the test's event loop."""
    async with contextlib.AsyncExitStack() as stack:

        async def factory(target: str) -> TcpProxy:
            proxy = await TcpProxy(target).start()
            stack.push_async_callback(proxy.close)
            return proxy

        yield factory


@pytest.fixture(name="eventually")
def _eventually() -> Callable[..., Awaitable[None]]:
    """`await eventually(condition, timeout_s=10)`."""
    return eventually
