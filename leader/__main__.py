"""`gangline leader`: one scheduler process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import click

from gangline.core.store.api import StoreError
from gangline.core.store.endpoints import TlsFiles
from gangline.core.store.etcd import EtcdStore
from gangline.core.store.keys import Keys
from gangline.core.telemetry import setup, structured_logging
from gangline.leader.api import ApiOptions, check_listen, make_app, serve
from gangline.leader.metrics import Metrics
from gangline.leader.process import calm_garbage_collector
from gangline.leader.scheduler import Scheduler

#: a log that cannot be followed: restarting does not help, a person must look
EXIT_LOG_UNREADABLE = 70


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--cluster", default="main", help="Name of the cluster: all keys are under /gangline/<cluster>/.")
@click.option("--etcd", default="127.0.0.1:2379", help="Endpoints of etcd, separated by commas.")
@click.option("--etcd-ca", type=click.Path(exists=True, path_type=Path), help="CA certificate for TLS to etcd.")
@click.option("--etcd-cert", type=click.Path(exists=True, path_type=Path), help="Client certificate.")
@click.option("--etcd-key", type=click.Path(exists=True, path_type=Path), help="Key of the client certificate.")
@click.option("--name", default=socket.gethostname, help="Name of this scheduler; a restarted one takes over from itself at once.")
@click.option("--listen", default="127.0.0.1:7070", help="Address and port of the API; port 0 takes a free one.")
@click.option("--advertise-url", default="", help="URL at which others reach this API; by default made from --listen.")
@click.option("--state-dir", default="./.gangline/leader", type=click.Path(path_type=Path), help="Where the archive of the log goes.")
@click.option("--leader-ttl", default=6.0, help="Seconds after which a silent leader is replaced.")
@click.option("--token-file", type=click.Path(exists=True, path_type=Path), help="Bearer tokens, one a line. Needed beyond loopback.")
@click.option("--allowed-host", multiple=True, help="Host name under which the API may be called; may be given several times.")
@click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
def main(**options: object) -> None:
    """Run one scheduler. Any number may run; one of them leads."""
    sys.exit(asyncio.run(_run(**options)))  # type: ignore[arg-type]


async def _run(
    cluster: str, etcd: str, etcd_ca: Path | None, etcd_cert: Path | None, etcd_key: Path | None, name: str, listen: str, advertise_url: str,
    state_dir: Path, leader_ttl: float, token_file: Path | None, allowed_host: tuple[str, ...], log_level: str,
) -> int:  # fmt: skip
    calm_garbage_collector()
    journal = structured_logging(log_level, component="leader", scheduler=name)
    host, _, port = listen.rpartition(":")
    try:
        keys = Keys(cluster)
        check_listen(host, token_file)
    except ValueError as e:
        raise click.UsageError(str(e)) from e
    tls = TlsFiles(ca=etcd_ca, cert=etcd_cert, key=etcd_key) if etcd_ca and etcd_cert and etcd_key else None
    store = await EtcdStore.connect(etcd.split(","), tls=tls)
    state_dir.mkdir(parents=True, exist_ok=True)
    telemetry = setup("gangline-leader", cluster=cluster, instance=name)
    scheduler = Scheduler(
        name=name, store=store, keys=keys, url=advertise_url, state_dir=state_dir, ttl_s=leader_ttl, telemetry=telemetry, journal=journal
    )
    metrics = Metrics(telemetry, scheduler)
    scheduler.on_frame.append(metrics.on_frame)
    options = ApiOptions(host=host, port=int(port), token_file=token_file, allowed_hosts=tuple(allowed_host))
    runner, url = await serve(make_app(scheduler, options, telemetry=telemetry, metrics=metrics), options)
    scheduler.url = advertise_url or url
    journal.info("listening", url=scheduler.url, pid=os.getpid())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: loop.create_task(scheduler.stop()))
    try:
        await scheduler.run()
        return 0
    except StoreError as e:
        journal.error("stopped", index=scheduler.state.index, message=str(e))
        return EXIT_LOG_UNREADABLE
    finally:
        await runner.cleanup()
        with contextlib.suppress(StoreError):
            await store.close()
        telemetry.shutdown()


if __name__ == "__main__":
    main()
