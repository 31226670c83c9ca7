"""Row 73: what is collected of a process that hangs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gangline.nodeagent import stacks

_HANGS = "import time, threading\ndef wait_for_others():\n    time.sleep(1000)\nprint('up', flush=True)\nwait_for_others()\n"


@pytest.fixture
def hung() -> object:
    process = subprocess.Popen([sys.executable, "-c", _HANGS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait()


def test_by_the_kernel_each_thread_says_where_it_waits(
    hung: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks.shutil, "which", lambda name: None)
    while "S (sleeping)" not in Path(f"/proc/{hung.pid}/status").read_text():
        time.sleep(0.01)
    words = asyncio.run(stacks.collect(hung.pid, tmp_path / "logs" / "j" / "rank-0.1.stacks"))
    text = (tmp_path / "logs" / "j" / "rank-0.1.stacks").read_text()
    assert f"thread {hung.pid}" in text
    assert "S (sleeping)" in text
    assert words.startswith("it stood in ")
    assert "\n" not in words
    assert "rank-0.1.stacks" in words


def test_by_py_spy_the_python_frames(hung: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = tmp_path / "py-spy"  # prints what the real one does for this process
    said = 'Process $4: python\n\nThread $4 (idle): "MainThread"\n    wait_for_others (<string>:3)\n    <module> (<string>:5)'
    spy.write_text(f"#!/bin/sh\ncat <<EOF\n{said}\nEOF\n")
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    words = asyncio.run(stacks.collect(hung.pid, tmp_path / "s"))
    assert "it stood in wait_for_others (<string>:3) < <module> (<string>:5)" in words


def test_a_process_that_is_gone_has_no_stacks_and_a_spy_that_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nexec sleep 1000\n")
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(stacks, "TIMEOUT_S", 0.3)
    assert asyncio.run(stacks.collect(os.getpid(), tmp_path / "s")) == ""
