"""`gangline leader`: one scheduler process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click

from gangline.core.model.codec import BadFrame
from gangline.core.model.execwire import good_key
from gangline.core.store.api import StoreError
from gangline.core.store.endpoints import TlsFiles
from gangline.core.store.etcd import EtcdStore
from gangline.core.store.keys import Keys
from gangline.core.telemetry import setup, structured_logging
from gangline.leader.api import ApiOptions, CannotListen, check_listen, serve
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
@click.option("--listen", default="127.0.0.1:7480", help="Address and port of the API; port 0 takes a free one.")
@click.option("--advertise-url", default="", help="URL at which others reach this API; by default made from --listen.")
@click.option("--state-dir", default="./.gangline/leader", type=click.Path(path_type=Path), help="Where the archive of the log goes.")
@click.option("--leader-ttl", default=6.0, help="Seconds after which a silent leader is replaced.")
@click.option("--token-file", type=click.Path(exists=True, path_type=Path), help="Bearer tokens, one a line. Needed beyond loopback.")
@click.option("--exec-key-file", type=click.Path(exists=True, path_type=Path), help="Key that agents have too: for commands in ranks.")
@click.option("--allowed-host", multiple=True, help="Host name under which the API may be called; may be given several times.")
@click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
def main(**options: object) -> None:
    """Run one scheduler. Any number may run; one of them leads."""
    sys.exit(asyncio.run(_run(**options)))  # type: ignore[arg-type]


async def _run(
    cluster: str, etcd: str, etcd_ca: Path | None, etcd_cert: Path | None, etcd_key: Path | None, name: str, listen: str, advertise_url: str,
    state_dir: Path, leader_ttl: float, token_file: Path | None, exec_key_file: Path | None, allowed_host: tuple[str, ...], log_level: str,
) -> int:  # fmt: skip
    calm_garbage_collector()
    journal = structured_logging(log_level, component="leader", scheduler=name)
    host, _, port = listen.rpartition(":")
    try:
        exec_key = good_key(exec_key_file.read_bytes()) if exec_key_file is not None else b""
        options = ApiOptions(
            host=host.strip("[]"), port=int(port), token_file=str(token_file or ""), allowed_hosts=(*allowed_host, *_host_of(advertise_url)),
            exec_key=exec_key,
        )  # fmt: skip
        keys = Keys(cluster)
        check_listen(options.host, options.token_file)
    except (ValueError, CannotListen) as e:
        raise click.UsageError(str(e)) from e
    tls = TlsFiles(ca=etcd_ca, cert=etcd_cert, key=etcd_key) if etcd_ca else None
    store = await EtcdStore.connect(etcd.split(","), tls=tls)
    state_dir.mkdir(parents=True, exist_ok=True)
    telemetry = setup("gangline-leader", cluster=cluster, instance=name)
    scheduler = Scheduler(
        name=name, store=store, keys=keys, url=advertise_url, state_dir=state_dir, ttl_s=leader_ttl, telemetry=telemetry, journal=journal
    )
    listener = await serve(scheduler, options, scheduler.metrics, journal)
    scheduler.url = advertise_url or listener.url
    journal.info("listening", url=scheduler.url, pid=os.getpid())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: loop.create_task(scheduler.stop()))
    try:
        await scheduler.run()
        return 0
    except (StoreError, BadFrame) as e:
        journal.error("stopped", index=scheduler.state.index, message=str(e))
        return EXIT_LOG_UNREADABLE
    finally:
        await listener.close()
        with contextlib.suppress(StoreError):
            await store.close()
        telemetry.shutdown()


def _host_of(url: str) -> tuple[str, ...]:
    """Others call this scheduler by the name that it tells them."""
    host = urlsplit(url).hostname
    return (host,) if host else ()


if __name__ == "__main__":
    main()
