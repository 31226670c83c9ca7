"""The demo's training job in containers: an image with nothing in it, over which the programs of this machine are mounted read only.

That way there is nothing to build or to fetch, and the ranks run the same python on the same libraries as the processes of the other
demo, with a root file system, processes and limits of their own.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import msgspec

from gangline.core.model.spec import JobSpec, Mount
from gangline.nodeagent.nodefile import NodeRules

IMAGE = "localhost/gangline-demo:1"
_FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp", "usr", "var")
#: as distributions have them since they merged /usr; where they are folders, they are mounted too
_LINKS = ("bin", "lib", "lib64", "sbin")


class NoContainers(Exception):
    """This machine cannot run the demo's containers; the message says why."""


def make_image(rules: NodeRules) -> None:
    """Have podman make the image, unless it is there. Raises NoContainers."""
    if _podman(rules, "image", "exists", IMAGE).returncode == 0:
        return
    made = _podman(rules, "import", "-", IMAGE, data=_empty_root())
    if made.returncode != 0:
        raise NoContainers(f"podman cannot make the image: {made.stderr.decode('utf-8', 'replace').strip()[-300:]}")


def _empty_root() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in _FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        for name in _LINKS:
            entry = tarfile.TarInfo(name)
            if Path("/", name).is_symlink():
                entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            else:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
    return out.getvalue()


def contained(spec: JobSpec, tree: Path) -> JobSpec:
    """Return the job with this machine's programs around it; `tree` has the example and the package that it imports."""
    folders = {Path("/usr"), Path(sys.prefix), Path(sys.base_prefix), tree.resolve(), Path(sysconfig.get_path("purelib")).resolve()}
    folders |= {Path("/", name) for name in _LINKS if Path("/", name).is_dir() and not Path("/", name).is_symlink()}
    outer = sorted(f for f in folders if not any(f != other and f.is_relative_to(other) for other in folders))
    return msgspec.structs.replace(spec, image=IMAGE, mounts=tuple(Mount(str(f), str(f), read_only=True) for f in outer))


def remove_left(rules: NodeRules, state_dir: Path) -> None:
    """Remove what podman still knows of containers of these nodes: of a node that was killed nobody else does."""
    for identity in state_dir.glob("n*/identity"):
        name = f"name=^gangline-{identity.read_text()[:12]}-"
        left = _podman(rules, "ps", "--all", "--quiet", "--filter", name).stdout.decode().split()
        if left:
            _podman(rules, "rm", "--force", *left)


def _podman(rules: NodeRules, *words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("podman")
    if program is None:
        raise NoContainers("podman is not installed")
    return subprocess.run([program, *rules.containers.flags, *words], input=data, capture_output=True, check=False)
