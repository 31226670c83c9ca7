"""The demo from end to end, as a person starts it: every check of it holds, and nothing of it stays, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process
pytest.importorskip("numpy")
pytest.importorskip("sklearn")

DEMO = [sys.executable, "-m", "gangline.chaos.demo"]


def processes_of(directory: Path) -> list[str]:
    """Command lines of the processes that have something to do with a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(directory) in command or str(directory) in os.readlink(path.with_name("cwd")):
                found.append(command)
    return found


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a short path, since sockets are made below it."""
    directory = tmp_path_factory.mktemp("d")
    yield directory
    subprocess.run([sys.executable, "-m", "gangline.core.client.cli", "down", "--state-dir", str(directory / "demo")], check=False, timeout=60)


@pytest.mark.timeout(175)
def test_the_demo_holds(home: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--state-dir", "demo", "--backend", "ring", "--json"], cwd=home, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["ok"]
    assert len(seen["checks"]) >= 30
    assert all(check["ok"] for check in seen["checks"])
    assert (seen["job"]["state"], seen["job"]["outcome"]) == ("finished", "succeeded")

    rank, node, leader = seen["recoveries"]
    assert rank["nodes_after"] == rank["nodes_before"]
    assert rank["generation_after"] == rank["generation_before"] + 1
    dead = seen["injections"][1]["node"]
    assert dead in node["nodes_before"]
    assert dead not in node["nodes_after"]
    assert leader["generation_after"] == leader["generation_before"]
    assert leader["running_s"] is None
    assert rank["steps_repeated"] > 0
    assert node["steps_repeated"] > 0
    assert leader["steps_repeated"] == 0

    assert seen["training"]["largest_difference"] == 0.0
    assert seen["training"]["accuracy"] > 0.85
    replayed = [seen["replay"]["index"], seen["replay"]["digest"]]
    assert list(seen["replay"]["schedulers"].values()) == [replayed, replayed]

    assert "What happened, from the log" in done.stderr
    assert ">>>  kill -9 node" in done.stderr
    assert processes_of(home) == []
    assert not (home / "demo").exists()


def test_an_interrupted_demo_leaves_no_process(home: Path) -> None:
    demo = subprocess.Popen([*DEMO, "--state-dir", "demo", "--backend", "ring"], cwd=home, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    deadline = time.monotonic() + 60
    for line in demo.stdout:
        assert time.monotonic() < deadline
        if "trains on" in line:
            break
    assert len(processes_of(home)) > 16
    demo.send_signal(signal.SIGINT)
    rest = demo.stdout.read()
    assert demo.wait(timeout=40) == 130
    assert "interrupted; all processes were ended" in rest
    assert processes_of(home) == []
    assert (home / "demo" / "logs").is_dir()


def test_a_directory_with_something_else_in_it_is_not_emptied(home: Path) -> None:
    (home / "demo").mkdir()
    (home / "demo" / "thesis.txt").write_text("mine")
    done = subprocess.run([*DEMO, "--state-dir", "demo"], cwd=home, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "holds something else" in done.stderr
    assert (home / "demo" / "thesis.txt").read_text() == "mine"
