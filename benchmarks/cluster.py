"""A real local cluster for a measurement: etcd, schedulers and agents as processes of their own."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from gangline.core.client.api import Client
from gangline.core.client.localcluster.cluster import LocalCluster

#: looks at a condition so often; the resolution of what is measured by looking
POLL_S = 0.005


@contextlib.contextmanager
def cluster(nodes: int, gpus: int, schedulers: int = 1, **options: Any) -> Iterator[LocalCluster]:
    """Run a cluster in a folder of its own and end it."""
    folder = Path(tempfile.mkdtemp(prefix="gangline-bench-"))
    try:
        with LocalCluster(folder, nodes, gpus, schedulers, say=lambda line: click.echo(line, err=True), **options) as c:
            yield c
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> float:
    """Return the seconds until `condition` held. Raises ClickException when it did not in time."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise click.ClickException(f"not within {timeout_s:g} s: {what}")
        time.sleep(POLL_S)
    return time.monotonic() - began


def job(client: Client, job_id: str) -> dict[str, Any]:
    """Return the whole job."""
    return client.get(f"/v1/jobs/{job_id}").body  # type: ignore[no-any-return]
