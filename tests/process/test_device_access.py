"""Devices denied by the kernel in real control groups, v1 and v2. /dev/null and its like stand for GPUs: character devices too."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline.nodeagent.deviceaccess import deny, instances, others

pytestmark = pytest.mark.process

NULL, ZERO, FULL = (1, 3), (1, 5), (1, 7)
#: opens each device in a group that it joins first, as a rank would find itself in
_TRY = """
import os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as f:
    f.write(str(os.getpid()))
for path in sys.argv[2:]:
    try:
        os.close(os.open(path, os.O_RDWR))
        print("opens", end=" ")
    except PermissionError:
        print("denied", end=" ")
"""


def _hierarchies() -> dict[str, str]:
    """Where groups can be made here, by version."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup" and "devices" in options.split(","):
            found["v1"] = where
        elif kind == "cgroup2":
            found["v2"] = where
    return found


@pytest.fixture(params=["v1", "v2"])
def group(request: pytest.FixtureRequest) -> Iterator[Path]:
    root = _hierarchies().get(request.param)
    if root is None:
        pytest.skip(f"no cgroup {request.param} with devices is mounted here")
    path = Path(root) / f"gangline-test-{uuid.uuid4().hex}"
    try:
        path.mkdir()
    except OSError as e:
        pytest.skip(f"no group can be made in {root}: {e}")
    yield path
    path.rmdir()


def _opens(group: Path, *devices: str) -> list[str]:
    command = [sys.executable, "-c", _TRY, str(group), *(f"/dev/{d}" for d in devices)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.split()


def test_only_what_is_denied_cannot_be_opened(group: Path) -> None:
    assert _opens(group, "null", "zero", "full") == ["opens", "opens", "opens"]
    try:
        deny(str(group), (NULL, FULL))
    except PermissionError as e:
        pytest.skip(f"this kernel does not let us: {e}")
    assert _opens(group, "null", "zero", "full", "urandom") == ["denied", "opens", "denied", "opens"]
    # Nobody outside of the group notices.
    os.close(os.open("/dev/null", os.O_RDWR))


def test_nothing_denied_is_nothing_changed(group: Path) -> None:
    try:
        deny(str(group), ())
    except PermissionError as e:
        pytest.skip(f"this kernel does not let us: {e}")
    assert _opens(group, "null", "zero") == ["opens", "opens"]


def test_many_devices(group: Path) -> None:
    try:
        deny(str(group), (*((195, minor) for minor in range(16)), ZERO))
    except PermissionError as e:
        pytest.skip(f"this kernel does not let us: {e}")
    assert _opens(group, "null", "zero") == ["opens", "denied"]


def test_a_group_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot|No such"):
        deny(str(tmp_path / "nowhere"), (NULL,))


MINORS = """config 1
monitor 2
gpu0/gi0/access 3
gpu0/gi0/ci0/access 4
gpu0/gi1/access 12
gpu0/gi1/ci0/access 13
gpu0/gi2/access 21
gpu1/gi1/access 147
"""
DEVICES = """Character devices:
  1 mem
195 nvidia
235 nvidia-caps
234 nvidia-caps-imex-channels

Block devices:
  8 sd
"""


def test_the_files_of_other_instances() -> None:
    assert instances(MINORS, DEVICES, {0: {1}}) == ((235, 1), (235, 2), (235, 3), (235, 4), (235, 21))
    assert instances(MINORS, DEVICES, {0: {0, 1}, 1: {2}}) == ((235, 1), (235, 2), (235, 21), (235, 147))
    # No instances, no such files, no such driver.
    assert instances(MINORS, DEVICES, {}) == instances("", DEVICES, {0: {1}}) == instances(MINORS, "1 mem\n", {0: {1}}) == ()


def test_the_files_of_other_gpus() -> None:
    assert others({0: 0, 1: 3, 2: 2, 3: -1}, (0, 2)) == ((195, 3),)
    assert others({0: 0, 1: 1}, ()) == ((195, 0), (195, 1))
