"""The local cluster (`gangline up`, LocalCluster) as an injector sees it."""

from __future__ import annotations

from pathlib import Path

from gangline.chaos.targets import Component, Identity
from gangline.core.client.localcluster import LocalCluster


class OnLocalCluster:
    """A cluster in a state directory on this machine; implements `injector.Cluster`."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def components(self) -> dict[str, Component]:
        """Return the running processes of the cluster itself by name."""
        running = {name: p for name, p in self._cluster.processes.items() if p.alive}
        return {name: Component(name, p.kind, Identity(p.pid, p.start_time)) for name, p in running.items()}

    def node_folders(self) -> dict[str, Path]:
        """Return the state directory of each node's agent, running or not."""
        root = self._cluster.state_dir
        return {path.parent.name: path.parent for path in sorted(root.glob("n*/runs"))}

    def leader(self) -> str:
        """Return the name of the leading scheduler, empty when nobody is known to lead."""
        return self._cluster.leader()

    def restart(self, name: str) -> None:
        """Start a process again that has ended, and wait until it is of use."""
        self._cluster.start_process(name)
