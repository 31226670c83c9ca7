"""LocalCluster: start, repair, look at, hurt and end the processes of a cluster on this machine."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from gangline.core.client.api import Client
from gangline.core.client.localcluster import etcd as etcd_server
from gangline.core.client.localcluster.layout import ClusterError, Description, Layout, SizeConflict, free_ports, port_is_free
from gangline.core.client.localcluster.process import Kind, Process, boot_id, send, send_to_group, spawn, start_time_of, wait_gone

_POLL_S = 0.1
#: what a simulated node says it has beside its GPUs; nothing holds ranks to it
NODE_CPUS = 96
NODE_MEMORY = "1TiB"
#: simulated nodes in a rack: n1 and n2 carry the label rack=r1, n3 and n4 rack=r2
RACK_NODES = 2
#: the kernel's share of the time when a machine with few cores starts many processes
_PATIENCE_S = 60.0
_PATIENCE_PER_PROCESS_S = 6.0
#: how long a process may take to end by itself
_STOP_PATIENCE_S = 20.0
_RANK_PATIENCE_S = 10.0
_KILL_PATIENCE_S = 10.0
#: one that was just being started may show itself only after the others have ended
_RANK_ROUNDS = 3


def _silent(_line: str) -> None:
    pass


class LocalCluster:
    """A cluster in a state directory. It may run already: started by somebody else, found again by what is on disk.

    As a context manager it is started, and ended at the end. The names of processes: e1 … (etcd), s1 … (schedulers), n1 … (agents).
    """

    def __init__(
        self,
        state_dir: Path | str,
        nodes: int = 4,
        gpus: int = 8,
        schedulers: int = 2,
        *,
        gpu_model: str = "h100",
        etcd_members: int = 1,
        lease_ttl_s: float = 8.0,
        leader_ttl_s: float = 6.0,
        cluster: str = "local",
        agent_options: Mapping[str, str] = {},
        etcd_options: Mapping[str, str] = {},
        log_level: str = "info",
        say: Callable[[str], None] = _silent,
    ) -> None:
        """`agent_options` and `etcd_options` are more flags for those processes, without their dashes."""
        self._layout = Layout(Path(state_dir))
        self._nodes = nodes
        self._gpus = gpus
        self._gpu_model = gpu_model
        self._schedulers = schedulers
        self._members = etcd_members
        self._lease_ttl_s = lease_ttl_s
        self._leader_ttl_s = leader_ttl_s
        self._cluster = cluster
        self._agent_options = agent_options
        self._etcd_options = etcd_options
        self._log_level = log_level
        self._say = say
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LocalCluster:
        """Start it; end what was started when that fails."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    # ------------------------------------------------------------ what it is

    @property
    def state_dir(self) -> Path:
        """Where it keeps everything."""
        return self._layout.root

    @property
    def processes(self) -> dict[str, Process]:
        """By name, all that were started and not ended by us; ask each whether it is alive."""
        self._reap()
        return self._layout.processes()

    @property
    def urls(self) -> list[str]:
        """Where the schedulers' API is."""
        return self._described().schedulers

    @property
    def etcd(self) -> list[str]:
        """Members of etcd, each host:port."""
        return self._described().etcd

    def client(self) -> Client:
        """Return a new client of the schedulers."""
        return Client(self.urls)

    def leader(self) -> str:
        """Return the name of the scheduler that leads, "" when none says so."""
        for url in self.urls:
            health = _get(url, "/v1/health")
            if health is not None and health.get("role") == "leader":
                return str(health.get("name", ""))
        return ""

    def log(self, name: str) -> Path:
        """Return the file of what a process prints."""
        return self._layout.log(name)

    # ------------------------------------------------------------ start

    def start(self) -> None:
        """Start what does not run, and return once one scheduler leads and all nodes are up. Raises ClusterError, SizeConflict."""
        with self._layout.locked():
            self._check_size()
            self._settle()
            etcd, schedulers, agents = self._names()
            self._ensure("etcd", etcd)
            self._await_etcd(etcd)
            self._ensure("scheduler", schedulers)
            self._ensure("agent", agents)
            self._await_schedulers(schedulers)
            self._await_nodes(agents)

    def start_process(self, name: str, *, wait: bool = True) -> Process:
        """Start one process unless it runs; with `wait` return once it answers (etcd, a scheduler) or its node is up (an agent)."""
        kind = _kind(name)
        with self._layout.locked():
            self._ensure(kind, [name])
            if wait and kind == "etcd":
                self._await_etcd([name])
            elif wait and kind == "scheduler":
                self._await_schedulers([name])
            elif wait:
                self._await_nodes([name])
        return self._layout.processes()[name]

    def restart(self, name: str, number: int = signal.SIGTERM, *, wait: bool = True) -> Process:
        """End one process with a signal and start it again. The ranks of an agent go on meanwhile, and it adopts them."""
        process = self._layout.processes().get(name)
        if process is not None and process.signal(number):
            process.signal(signal.SIGCONT)
            self._end([process], _STOP_PATIENCE_S)
        return self.start_process(name, wait=wait)

    def kill(self, name: str, number: int = signal.SIGKILL) -> bool:
        """Send a signal to one process and, when it is SIGKILL, wait until it is gone. False when it did not run."""
        process = self._layout.processes().get(name)
        if process is None or not process.signal(number):
            return False
        if number == signal.SIGKILL:
            wait_gone([(process.pid, process.start_time)], _KILL_PATIENCE_S)
            self._reap()
        return True

    # ------------------------------------------------------------ stop

    def stop(self) -> bool:
        """End everything that was started here, ranks too. False when nothing ran. Safe to be called at any time.

        Schedulers go first: a leader that saw all nodes leave would decide something about that, for nobody. Ranks go last of what uses
        etcd, and not by the hand of their agents: how they ended is then on disk, and the next `start` restarts their gangs.
        """
        if not self._layout.root.is_dir():
            return False
        with self._layout.locked():
            processes = list(self.processes.values())
            ran = any(p.alive for p in processes) or bool(self._layout.ranks(boot_id()))
            self._stop_all([p for p in processes if p.kind == "scheduler"], "schedulers")
            self._stop_all([p for p in processes if p.kind == "agent"], "agents")
            self._stop_ranks()
            self._stop_all([p for p in processes if p.kind == "etcd"], "etcd")
            for process in processes:
                self._layout.forget(process.name)
        return ran

    def _stop_all(self, processes: list[Process], what: str) -> None:
        alive = [p for p in processes if p.signal(signal.SIGTERM)]
        if not alive:
            return
        self._say(f"ending {what}: {_list(p.name for p in alive)}")
        for process in alive:
            # One that was paused does not hear SIGTERM before this.
            process.signal(signal.SIGCONT)
        self._end(alive, _STOP_PATIENCE_S)

    def _end(self, processes: list[Process], patience_s: float) -> None:
        """Wait for the end of processes that were told to, and kill those that take too long."""
        named = {(p.pid, p.start_time): p for p in processes}
        for identity in wait_gone(named, patience_s):
            self._say(f"{named[identity].name} has not ended after {patience_s:g} s; killing it")
            send(*identity, signal.SIGKILL)
        wait_gone(named, _KILL_PATIENCE_S)
        self._reap()

    def _stop_ranks(self) -> None:
        """End the ranks: first through their supervisors, which end the whole tree of processes and write down how it ended."""
        for _ in range(_RANK_ROUNDS):
            ranks = self._layout.ranks(boot_id())
            if not ranks:
                return
            self._say(f"ending {len(ranks)} ranks")
            supervisors = [(r.supervisor, r.supervisor_start) for r in ranks]
            for identity in supervisors:
                send(*identity, signal.SIGTERM)
                send(*identity, signal.SIGCONT)
            wait_gone(supervisors, _RANK_PATIENCE_S)
            for rank in self._layout.ranks(boot_id()):
                send_to_group(rank.pid, rank.pid_start, signal.SIGKILL)
            for identity in wait_gone(supervisors, 1.0):
                send(*identity, signal.SIGKILL)
            wait_gone(supervisors, _KILL_PATIENCE_S)

    # ------------------------------------------------------------ sizes and addresses

    def _check_size(self) -> None:
        """Raise SizeConflict when what runs does not fit into what is wanted."""
        running = [p for p in self.processes.values() if p.alive]
        wanted = {name for names in self._names() for name in names}
        surplus = [p.name for p in running if p.name not in wanted]
        now = self._layout.description()
        agents = [p for p in running if p.kind == "agent"]
        problems = []
        if surplus:
            problems.append(f"{_list(surplus)} would be too many")
        if now is not None and agents and (now.gpus, now.gpu_model) != (self._gpus, self._gpu_model):
            problems.append(f"its nodes have {now.gpus} {now.gpu_model} each, not {self._gpus} {self._gpu_model}")
        if problems:
            raise SizeConflict(f"the cluster in {self._layout.root} runs in another size: {'; '.join(problems)}. `gangline down` ends it first.")

    def _settle(self) -> None:
        """Give addresses to what has none, or whose port was taken by somebody else meanwhile, and write cluster.json."""
        known = self._layout.description() or Description(cluster=self._cluster)
        etcd, schedulers, _ = self._names()
        alive = {p.name for p in self._layout.processes().values() if p.alive}
        hosts = [urlsplit(url).netloc for url in known.schedulers]
        self._layout.save_description(
            Description(
                cluster=known.cluster,
                schedulers=[f"http://{host}" for host in _addresses(hosts, schedulers, alive)],
                etcd=_addresses(known.etcd, etcd, alive),
                etcd_peers=_addresses(known.etcd_peers, etcd, alive),
                nodes=self._nodes,
                gpus=self._gpus,
                gpu_model=self._gpu_model,
            )
        )

    def _names(self) -> tuple[list[str], list[str], list[str]]:
        counts = (("e", self._members), ("s", self._schedulers), ("n", self._nodes))
        etcd, schedulers, agents = ([f"{letter}{i}" for i in range(1, count + 1)] for letter, count in counts)
        return etcd, schedulers, agents

    def _described(self) -> Description:
        description = self._layout.description()
        if description is None:
            raise ClusterError(f"there is no cluster in {self._layout.root}; `gangline up` makes one")
        return description

    # ------------------------------------------------------------ processes

    def _ensure(self, kind: Kind, names: list[str]) -> None:
        """Start those of the processes that do not run."""
        self._reap()
        processes = self._layout.processes()
        missing = [name for name in names if name not in processes or not processes[name].alive]
        if not missing:
            return
        description = self._described()
        binary = etcd_server.find_etcd() if kind == "etcd" else ""
        self._say(f"starting {_WORDS[kind]}: {_list(missing)}")
        if binary and not etcd_server.good_for_production(version := etcd_server.version_of(binary)):
            self._say(f"  etcd {version} is good for trying out; production needs 3.5.33 or newer, or 3.6.14 or newer")
        env = {**etcd_server.environment(), "PYTHONUNBUFFERED": "1"}
        # Ranks find the `python` that this runs on, and with it what it has installed.
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
        for name in missing:
            self._spawn(kind, name, self._command(kind, name, description, binary), env)

    def _spawn(self, kind: Kind, name: str, command: list[str], env: dict[str, str]) -> None:
        (self._layout.root / name).mkdir(mode=0o700, exist_ok=True)
        child = spawn(command, log=self._layout.log(name), cwd=self._layout.root, env=env)
        # It is our child and nobody has waited for it, so the pid is its own even if it has ended already.
        self._layout.record(Process(name=name, kind=kind, pid=child.pid, start_time=start_time_of(child.pid)[0], boot_id=boot_id()))
        self._children[child.pid] = child

    def _reap(self) -> None:
        """Let those that have ended go, where we are the parent."""
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                self._children.pop(pid, None)

    def _command(self, kind: Kind, name: str, description: Description, binary: str) -> list[str]:
        data = self._layout.root / name
        if kind == "etcd":
            return etcd_server.command(binary, name, data, description, self._etcd_options)
        common = {
            "cluster": description.cluster, "etcd": ",".join(description.etcd), "state-dir": str(data), "log-level": self._log_level,
            "exec-key-file": str(self._layout.exec_key()),
        }  # fmt: skip
        if kind == "scheduler":
            listen = urlsplit(description.schedulers[int(name[1:]) - 1]).netloc
            options = {"name": name, "listen": listen, "leader-ttl": f"{self._leader_ttl_s:g}", **common}
            return [sys.executable, "-m", "gangline.leader", *_flags(options)]
        options = {
            "node": name, "gpus": f"sim:{description.gpu_model}x{description.gpus}" if description.gpus else "none",
            "cpus": str(NODE_CPUS), "memory": NODE_MEMORY, "labels": f"rack=r{(int(name[1:]) - 1) // RACK_NODES + 1}",
            "lease-ttl": f"{self._lease_ttl_s:g}", **common, **self._agent_options,
        }  # fmt: skip
        return [sys.executable, "-m", "gangline.nodeagent", *_flags(options)]

    # ------------------------------------------------------------ readiness

    def _await_etcd(self, names: list[str]) -> None:
        addresses = {name: self._described().etcd[int(name[1:]) - 1] for name in names}

        def missing() -> str:
            health = {name: _get(f"http://{address}", "/health") or {} for name, address in addresses.items()}
            return _list((name for name, answer in health.items() if answer.get("health") != "true"), " is not healthy")

        self._await(names, missing)

    def _await_schedulers(self, names: list[str]) -> None:
        urls = {name: self._described().schedulers[int(name[1:]) - 1] for name in names}

        def missing() -> str:
            health = {name: _get(url, "/v1/health") for name, url in urls.items()}
            silent = _list((n for n, h in health.items() if h is None), " does not answer")
            return silent or ("" if any(h and h.get("leader") for h in health.values()) and self.leader() else "no scheduler leads yet")

        self._await(names, missing)

    def _await_nodes(self, names: list[str]) -> None:
        def missing() -> str:
            up = self._nodes_up()
            return _list((n for n in names if n not in up), f" is not up yet ({len(up & set(names))} of {len(names)} nodes are)")

        self._await(names, missing)

    def _nodes_up(self) -> set[str]:
        for url in self.urls:
            answer = _get(url, "/v1/nodes")
            if answer is not None:
                return {str(row["id"]) for row in answer["nodes"] if row["state"] == "up"}
        return set()

    def _await(self, names: list[str], missing: Callable[[], str]) -> None:
        """Wait until nothing is missing. Raises ClusterError when one of the processes ends, or it takes too long."""
        patience_s = _PATIENCE_S + _PATIENCE_PER_PROCESS_S * len(names)
        deadline = time.monotonic() + patience_s
        while why := missing():
            self._reap()
            processes = self._layout.processes()
            ended = [n for n in names if n not in processes or not processes[n].alive]
            if ended:
                raise ClusterError(self._with_log(f"{_list(ended)} ended by itself", ended[0]))
            if time.monotonic() > deadline:
                culprit = next((n for n in names if n in why), names[0])
                raise ClusterError(self._with_log(f"{why}, after {patience_s:g} s", culprit))
            time.sleep(_POLL_S)

    def _with_log(self, message: str, name: str) -> str:
        tail = self._layout.tail(name) or "(it has printed nothing)"
        return f"{message}. The end of {self._layout.log(name)}:\n{tail}"


_WORDS: dict[Kind, str] = {"etcd": "etcd", "scheduler": "schedulers", "agent": "agents"}


def _kind(name: str) -> Kind:
    kinds: dict[str, Kind] = {"e": "etcd", "s": "scheduler", "n": "agent"}
    if not name[1:].isdecimal() or name[0] not in kinds:
        raise ClusterError(f"there is no process {name!r}: they are called e1 (etcd), s1 (scheduler), n1 (agent) and so on")
    return kinds[name[0]]


def _addresses(known: list[str], names: list[str], alive: set[str]) -> list[str]:
    """Return an address for each name: the known one if its owner lives or its port is free, else a new one."""
    kept = [a if n in alive or port_is_free(int(a.rpartition(":")[2])) else "" for n, a in zip(names, known, strict=False)]
    kept += [""] * (len(names) - len(kept))
    fresh = iter(free_ports(kept.count("")))
    return [address or f"127.0.0.1:{next(fresh)}" for address in kept]


def _flags(options: Mapping[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def _list(names: Iterable[str], after: str = "") -> str:
    """Return names as a phrase, "" for none: "n1, n2 and 5 more"."""
    given = list(names)
    if not given:
        return ""
    shown = ", ".join(given[:6]) + (f" and {len(given) - 6} more" if len(given) > 6 else "")
    return shown + after


def _get(url: str, path: str) -> dict[str, Any] | None:
    """Return the answer of a server as an object; None when there is none, or it is an error."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=3)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        answer = json.loads(response.read())
        return answer if response.status == 200 and isinstance(answer, dict) else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
