"""The README's first gang, command by command as it is written there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline.core.client.localcluster import LocalCluster

pytestmark = [pytest.mark.process, pytest.mark.etcd, pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd binary")]

README = Path(__file__).parents[2] / "README.md"
BIN = Path(sys.executable).parent


def blocks() -> list[str]:
    section = README.read_text().split("## The first gang in five minutes")[1].split("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    LocalCluster(tmp_path / ".gangline").stop()


def shell(script: str, folder: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GANGLINE_")}
    env["PATH"] = f"{BIN}:{env['PATH']}"
    done = subprocess.run(["sh", "-e"], input=script, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def hello(folder: Path) -> dict[str, object]:
    shown = json.loads(shell("gangline show hello --json", folder))
    assert isinstance(shown, dict)
    return shown


def test_the_first_gang(folder: Path) -> None:
    start, gang, kill, end = blocks()

    set_up, activate, *rest = start.splitlines()
    # The environment in which this test runs is what these two make.
    assert (set_up, activate) == ("make setup", ". .venv/bin/activate")
    nodes = shell("\n".join(rest), folder)
    assert re.findall(r"^(n\d+) +up +8/8", nodes, re.MULTILINE) == ["n1", "n2", "n3", "n4"]

    shown = shell(gang, folder)
    assert re.search(r"hello +running +16 +16 +n1,n2", shown)

    following = re.search(r"^gangline events -f .*$", kill, re.MULTILINE)
    assert following is not None
    shell(kill.replace(following[0], following[0].replace(" -f", "")), folder)
    deadline = time.monotonic() + 40
    while not (hello(folder)["state"] == "running" and hello(folder)["generation"] == 2):
        assert time.monotonic() < deadline, hello(folder)
        time.sleep(0.2)
    assert "node n1 lost" in shell("gangline story hello", folder)

    up, stop, down = end.splitlines()
    shell(up, folder)
    shell(stop, folder)
    shell("gangline wait hello || [ $? = 3 ]", folder)
    shell(down, folder)
    assert not LocalCluster(folder / ".gangline").processes
