"""For tests of containers: podman as machines without a full set of rights can run it, and a small image made of busybox."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest

from gangline.nodeagent.nodefile import ContainerRules

IMAGE = "localhost/gangline-test:2"
_APPLETS = ("sh", "cat", "sleep", "echo", "id", "touch", "env", "df", "tail", "pwd", "ls", "kill", "hostname", "true", "head", "dd", "stat")

PODMAN = shutil.which("podman") or ""
BUSYBOX = shutil.which("busybox") or ""


def why_not() -> str:
    """Return why containers cannot be tested on this machine, "" if they can."""
    if os.geteuid() != 0:
        return "containers are tested as root"
    if not PODMAN:
        return "podman is not installed (apt-get install podman runc busybox-static)"
    if not BUSYBOX or not _is_static(Path(BUSYBOX).read_bytes()):
        return "there is no static busybox to make an image of (apt-get install busybox-static)"
    return ""


def _is_static(elf: bytes) -> bool:
    """Whether a 64-bit ELF file names no loader (PT_INTERP, 3) among its program headers."""
    offset, size, count = struct.unpack_from("<Q", elf, 32)[0], *struct.unpack_from("<HH", elf, 54)
    return all(struct.unpack_from("<I", elf, offset + i * size)[0] != 3 for i in range(count))


def rules() -> ContainerRules:
    """How podman is to be called here: with runc where it is, and with limits that need no rights to be raised."""
    flags = ("--runtime", "runc") if shutil.which("runc") else ()
    return ContainerRules(runtime="podman", flags=flags, run_flags=("--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000"))


def podman(*words: str) -> subprocess.CompletedProcess[bytes]:
    """Run podman as the tests' agents do."""
    return subprocess.run([PODMAN, *rules().flags, *words], capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False)


def make_image(folder: Path) -> None:
    """Import the test image, or skip the test with what podman says."""
    if podman("image", "exists", IMAGE).returncode != 0:
        archive = folder / "root.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(BUSYBOX, "bin/busybox")
            for name in ("etc", "proc", "sys", "dev", "tmp"):
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
                tar.addfile(entry)
            for name in _APPLETS:
                link = tarfile.TarInfo(f"bin/{name}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
        made = podman("import", str(archive), IMAGE)
        if made.returncode != 0:
            pytest.skip(f"podman cannot import an image here: {made.stderr.decode()[-300:]}")
    tried = podman("run", "--rm", "--network", "host", *rules().run_flags, IMAGE, "/bin/true")
    if tried.returncode != 0:
        pytest.skip(f"podman cannot run a container here: {tried.stderr.decode()[-300:]}")
