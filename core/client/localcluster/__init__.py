"""A whole cluster on this machine, as separate processes: etcd, schedulers, and agents with simulated GPUs.

`gangline up` and `gangline down` are `up` and `down`; tests, chaos and benchmarks use `LocalCluster`. Nothing here runs inside the cluster:
it starts, finds again, signals and ends processes, each named by its pid *and* start time, and asks the HTTP APIs how they are.
"""

from __future__ import annotations

from gangline.core.client.localcluster.cluster import LocalCluster
from gangline.core.client.localcluster.command import down, status, up
from gangline.core.client.localcluster.layout import ClusterError, Description, SizeConflict
from gangline.core.client.localcluster.process import Process

__all__ = ["ClusterError", "Description", "LocalCluster", "Process", "SizeConflict", "down", "status", "up"]
