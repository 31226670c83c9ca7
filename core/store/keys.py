"""Names of all keys that Gangline writes: one place, DESIGN section 2."""

from __future__ import annotations

import re

_CLUSTER = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")


class Keys:
    """Key names of one cluster, all as bytes."""

    def __init__(self, cluster: str) -> None:
        """Raise ValueError for a cluster name that is not a DNS label."""
        if not _CLUSTER.match(cluster):
            raise ValueError(f"cluster name {cluster!r} is not 1 to 63 of a-z, 0-9 and '-', with no '-' at an end")
        self.root = f"/gangline/{cluster}/".encode()
        self.log = self.root + b"log/"
        #: the election key; its create revision is the fencing token
        self.leader = self.root + b"leader/elected"
        #: where each running scheduler says how it is reached, bound to its lease
        self.schedulers = self.root + b"leader/schedulers/"
        self.snapshots = self.root + b"snapshot/"
        self.jobs = self.root + b"jobs/"
        self.nodes = self.root + b"nodes/"

    def frame(self, index: int) -> bytes:
        """Key of the frame at `index`; sorts as the number does."""
        return self.log + f"{index:016d}".encode()

    def scheduler(self, name: str) -> bytes:
        """Key under which the scheduler `name` announces its address."""
        return self.schedulers + name.encode()

    def snapshot(self, index: int) -> bytes:
        """Prefix of all chunks of the snapshot that covers the log up to `index`."""
        return self.snapshots + f"{index:016d}/".encode()

    def snapshot_chunk(self, index: int, chunk: int | str) -> bytes:
        """Key of one chunk; the chunk named "manifest" is written last and makes the snapshot valid."""
        return self.snapshot(index) + (chunk if isinstance(chunk, str) else f"{chunk:06d}").encode()

    def job(self, job: str) -> bytes:
        """Key of the immutable job spec for agents."""
        return self.jobs + job.encode()

    def desired(self, node: str) -> bytes:
        """Key of what the node should run."""
        return self.nodes + node.encode() + b"/desired"

    def observed(self, node: str) -> bytes:
        """Key of what the node runs."""
        return self.nodes + node.encode() + b"/observed"

    def alive(self, node: str) -> bytes:
        """Key of the node's registration, bound to the agent's lease."""
        return self.nodes + node.encode() + b"/alive"

    def node_of(self, key: bytes) -> tuple[str, str] | None:
        """Split a key under nodes/ into (node, "desired" | "observed" | "alive"); None when it is no such key."""
        if not key.startswith(self.nodes):
            return None
        node, _, what = key[len(self.nodes) :].decode("utf-8", "replace").partition("/")
        return (node, what) if node and what in ("desired", "observed", "alive") else None
