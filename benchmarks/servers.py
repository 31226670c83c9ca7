"""A private etcd for a measurement."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import click

_START_S = 20.0


@contextlib.contextmanager
def etcd(started: Callable[[int], None] = lambda pid: None) -> Iterator[str]:
    """Run one etcd member on loopback and yield its endpoint; `started` is told its process id."""
    binary = shutil.which("etcd")
    if binary is None:
        raise click.ClickException("no etcd on PATH: `make setup` installs one")
    folder = tempfile.mkdtemp(prefix="gangline-bench-")
    client, peer = free_port(), free_port()
    url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    with (Path(folder) / "etcd.log").open("wb") as out:
        process = subprocess.Popen(
            [binary, "--data-dir", f"{folder}/data", "--listen-client-urls", url, "--advertise-client-urls", url, "--name", "bench",
             "--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"bench={peer_url}",
             "--quota-backend-bytes", str(4 << 30)],
            stdout=out, stderr=out, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        started(process.pid)
        _wait_until_healthy(url, process)
        yield f"127.0.0.1:{client}"
    finally:
        process.terminate()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
            if json.load(answer).get("health") == "true":
                return
        time.sleep(0.05)
    raise click.ClickException("etcd did not start")


def free_port() -> int:
    """Return a port on loopback that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
