"""`python -m gangline.nodeagent`: options, signals, exit status. `gangline agent` is the same."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pwd
import re
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from gangline.core.model.problems import BadJob
from gangline.core.model.units import parse_size
from gangline.core.store.endpoints import TlsFiles
from gangline.core.store.etcd import EtcdStore
from gangline.core.store.node import NameTaken
from gangline.core.telemetry import Log, setup, structured_logging
from gangline.nodeagent import cgroups, nodefile, rankfile
from gangline.nodeagent.connection import ConnectingNode
from gangline.nodeagent.devices import Inventory, kind_of, simulated
from gangline.nodeagent.environment import base_environment
from gangline.nodeagent.execute import read_key
from gangline.nodeagent.fence import Fence
from gangline.nodeagent.gangs import Node
from gangline.nodeagent.gpus import GpuWatch
from gangline.nodeagent.loop import Agent, Settings, default_node_name, state_dir_of
from gangline.nodeagent.nvmlgpus import NvmlGpus
from gangline.nodeagent.nvmlpartitions import NvmlPartitions
from gangline.nodeagent.simgpus import SimulatedGpus
from gangline.nodeagent.statedir import StateDir, StateError

_NAME = re.compile(r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")

EXIT_USAGE, EXIT_NAME_TAKEN, EXIT_STATE = 2, 3, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an agent until SIGTERM or SIGINT. Returns the exit status."""
    options = _parser().parse_args(arguments)
    log = structured_logging(options.log_level, libraries=True)
    try:
        asyncio.run(_run(options, log))
    except NameTaken as e:
        log.error("name_taken", node=options.node, message=str(e))
        return EXIT_NAME_TAKEN
    except (StateError, OSError) as e:
        log.error("cannot_start", node=options.node, message=str(e))
        return EXIT_STATE
    except (ValueError, BadJob) as e:
        log.error("bad_option", message=str(e))
        return EXIT_USAGE
    return 0


async def _run(options: argparse.Namespace, log: Log) -> None:
    state = StateDir(options.state_dir or state_dir_of(options.node))
    state.lock()
    boot_id = rankfile.boot_id()
    rules = nodefile.load(options.config)
    layout = cgroups.guarding(cgroups.delegate(cgroups.here())) if rules.ranks.cgroups else cgroups.Layout(reason="switched off")
    gpus = _gpus(options, state, boot_id, log)
    if gpus is not None:
        await gpus.open()
    inventory = gpus.inventory if gpus is not None else Inventory(reason="switched off with --gpus none")
    node = Node(options.node, options.address, boot_id, inventory, _base_environment(), _raise_priority(), options.mps_pipe, rules, layout)
    if gpus is not None and inventory.kind == "nvml":
        partitions = NvmlPartitions(gpus, state.root / "mig-uuids.json", boot_id, options.mps_pipe)
        node = msgspec.structs.replace(node, partitions=partitions, closed=partitions.closed)
    store = ConnectingNode(lambda: EtcdStore.connect(options.etcd, tls=_tls(options)), options.cluster, options.node)
    telemetry = setup("gangline-agent", cluster=options.cluster, node=options.node)
    for warning in telemetry.warnings:
        log.warning("telemetry", message=warning)
    agent = Agent(_settings(options), node, state, Fence(state.root, boot_id=boot_id), store, telemetry, log, gpus)
    loop = asyncio.get_running_loop()
    for s in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(s, agent.stop)
    try:
        await agent.run()
    finally:
        await store.close()
        telemetry.shutdown()
        state.unlock()
    log.info("agent_stopped", node=options.node, message="its ranks were stopped" if options.stop_ranks else "its ranks go on running")


def _gpus(options: argparse.Namespace, state: StateDir, boot_id: str, log: Log) -> GpuWatch | None:
    """Return what looks at the GPUs of this node; None for a node that is to have none."""
    kind = kind_of(options.gpus)
    if kind == "none":
        return None
    watch = GpuWatch(kind, state.root, boot_id, log)
    if kind == "simulated":
        cards = simulated(options.gpus, state.identity()).gpus
        watch.only({g.uuid for g in cards})
        watch.backend = SimulatedGpus(cards, state.root, watch.counted, watch.happened)
    else:
        watch.backend = NvmlGpus(watch.happened, log, interval_s=options.gpu_interval)
    return watch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gangline agent", description="Run this node's part of the cluster.")
    add = parser.add_argument
    add("--cluster", default="main", help="name of the cluster (default: %(default)s)")
    add("--etcd", type=_endpoints, default=["127.0.0.1:2379"], metavar="HOST:PORT,...", help="members of etcd (default: 127.0.0.1:2379)")
    add("--etcd-ca", type=Path, help="certificate authority of etcd; switches TLS on")
    add("--etcd-cert", type=Path, help="our certificate for etcd")
    add("--etcd-key", type=Path, help="the key of our certificate")
    add("--node", type=_node_name, default=default_node_name(), help="name of this node (default: %(default)s)")
    add("--address", default="127.0.0.1", help="where other nodes reach ranks on this one (default: %(default)s)")
    add("--gpus", default="auto", help="auto (ask NVML), none, or sim:MODELxN such as sim:h100x8 (default: %(default)s)")
    add("--gpu-interval", type=_interval, default=5.0, metavar="SECONDS", help="how often figures of real GPUs are read (default: %(default)s)")
    add("--mps-pipe", default="", metavar="DIR",
        help="pipe directory of the MPS control daemon of this node: ranks with a share of a GPU are held to it (default: no MPS)")
    add("--cpus", type=float, default=os.cpu_count() or 1, help="cores that ranks may be given (default: %(default)s)")
    add("--memory", type=_memory, default=_memory_mib(), help="memory that ranks may be given, such as 64GiB (default: this machine's)")
    add("--labels", action="append", type=_label, default=[], metavar="KEY=VALUE", help="a label of this node; may be repeated")
    add("--config", type=Path, metavar="FILE", help="what this node does about isolation, containers and volumes: see docs/nodes.md")
    add("--state-dir", type=Path, help="where this agent keeps its state and logs (default: /var/lib/gangline/NODE)")
    add("--lease-ttl", type=_ttl, default=8.0, metavar="SECONDS", help="time after which a silent node is lost (default: %(default)s)")
    add("--listen", type=_listen, default=("127.0.0.1", 0), metavar="HOST:PORT", help="where logs and metrics are served (default: 127.0.0.1:0)")
    add("--exec-key-file", type=Path, metavar="FILE", help="key of the schedulers that may run commands in ranks (default: none may)")
    add("--stop-ranks", action="store_true", help="at the end, stop the ranks of this node; without it they go on for the next agent")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    host, port = options.listen
    return Settings(
        node=options.node, address=options.address, labels=dict(options.labels), cpus_milli=int(options.cpus * 1000),
        memory_mib=options.memory, lease_ttl_s=options.lease_ttl, listen_host=host, listen_port=port, stop_ranks=options.stop_ranks,
        version=_version(), exec_key=read_key(options.exec_key_file),
    )  # fmt: skip


def _tls(options: argparse.Namespace) -> TlsFiles | None:
    if options.etcd_ca is None:
        if options.etcd_cert or options.etcd_key:
            raise ValueError("--etcd-cert and --etcd-key need --etcd-ca")
        return None
    return TlsFiles(options.etcd_ca, options.etcd_cert, options.etcd_key)


def _base_environment() -> dict[str, str]:
    user = pwd.getpwuid(os.getuid())
    return base_environment(os.environ, user.pw_name, user.pw_dir, user.pw_shell or "/bin/sh")


def _raise_priority() -> int:
    """Let the lease be renewed however busy ranks keep the host, where we may. Return the priority that ranks are to have: the old one."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, before - 10)
    return before


def _endpoints(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _node_name(text: str) -> str:
    if not _NAME.match(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to 63 of a-z, 0-9, '.' and '-', with a letter or digit at both ends")
    return text


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key or len(text) > 256:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not KEY=VALUE")
    return key, value


def _ttl(text: str) -> float:
    seconds = float(text)
    if not 2.0 <= seconds <= 3600.0:
        raise argparse.ArgumentTypeError(f"{text} s: a lease lives 2 to 3600 s")
    return seconds


def _interval(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600.0:
        raise argparse.ArgumentTypeError(f"{text} s: 0.1 to 3600 s")
    return seconds


def _listen(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _memory(text: str) -> int:
    mib = parse_size(text)
    if not mib:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 64GiB")
    return mib


def _memory_mib() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


def _version() -> str:
    try:
        return metadata.version("gangline")
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
