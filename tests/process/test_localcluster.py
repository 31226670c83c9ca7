"""A cluster of real processes on this machine: up, repaired, down without a trace, and up again with all that it knew."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gangline.core.client import exits
from gangline.core.client.localcluster import ClusterError, LocalCluster, SizeConflict, down, up
from gangline.core.client.localcluster.layout import Layout, port_is_free
from gangline.core.client.localcluster.process import is_alive, send, start_time_of

pytestmark = [pytest.mark.process, pytest.mark.etcd, pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd binary")]

JOB = {"name": "sleeper", "gang": {"ranks": 2}, "resources": {"gpus": 4, "cpus": 0.1}, "command": ["sleep", "1000"]}


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "state"
    yield folder
    LocalCluster(folder).stop()


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not true after {timeout_s} s"
        time.sleep(0.05)


def processes_below(folder: Path) -> list[int]:
    """Those that work in the folder or name it on their command line, whoever started them."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid() or start_time_of(int(entry.name))[1] in ("Z", "X"):
            continue
        try:
            where, command = os.readlink(entry / "cwd"), (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if where.startswith(str(folder)) or str(folder) in command:
            found.append(int(entry.name))
    return found


def test_up_repairs_down_leaves_nothing_and_up_again_knows_everything(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def bring_up(nodes: int) -> int:
        return up(nodes=nodes, gpus=8, schedulers=2, state_dir=state)

    assert bring_up(2) == exits.DONE
    cluster = LocalCluster(state, nodes=2)
    first = cluster.processes
    assert sorted(first) == ["e1", "n1", "n2", "s1", "s2"]
    assert all(process.alive for process in first.values())
    described = json.loads((state / "cluster.json").read_text())
    assert described["schedulers"] == cluster.urls
    assert len(cluster.urls) == 2

    # A job runs, on what the nodes say they have.
    client = cluster.client()
    job_id = client.submit(JOB, "a key").body["job"]
    wait_for(lambda: client.job(job_id).body["state"] == "running")

    # Nothing is missing, so nothing is started.
    assert bring_up(2) == exits.DONE
    assert cluster.processes == first

    # One agent dies; only that one is started again, one node more is added, and the ranks of the dead one were never touched.
    assert cluster.kill("n1")
    assert not cluster.processes["n1"].alive
    capsys.readouterr()
    assert bring_up(3) == exits.DONE
    assert "starting agents: n1, n3\n" in capsys.readouterr().err
    second = cluster.processes
    assert {name for name in second if second[name] != first.get(name)} == {"n1", "n3"}
    assert client.job(job_id).body["generation"] == 1

    # It does not shrink by itself.
    assert bring_up(2) == exits.CONFLICT
    assert "n3 would be too many" in capsys.readouterr().err

    assert down(state_dir=state) == exits.DONE
    wait_for(lambda: not processes_below(state))
    assert down(state_dir=state) == exits.DONE
    assert json.loads((state / "cluster.json").read_text())["schedulers"] == described["schedulers"]

    assert bring_up(2) == exits.DONE
    assert cluster.urls == described["schedulers"]
    again = cluster.client()
    assert again.job("sleeper").body["id"] == job_id
    # Its ranks had to go with the cluster. They run again without anybody having asked for it.
    wait_for(lambda: again.job(job_id).body["state"] == "running" and again.job(job_id).body["generation"] == 2)


def test_one_process_at_a_time(state: Path) -> None:
    with LocalCluster(state, nodes=1, gpus=2, schedulers=1) as cluster:
        before = cluster.processes
        assert cluster.leader() == "s1"

        # A paused process takes no notice of SIGTERM until it goes on.
        assert cluster.kill("n1", signal.SIGSTOP)
        wait_for(lambda: start_time_of(before["n1"].pid)[1] == "T")
        assert cluster.restart("n1").pid != before["n1"].pid

        after = cluster.restart("s1", signal.SIGKILL)
        assert after.pid != before["s1"].pid
        assert cluster.leader() == "s1"
        assert cluster.processes["e1"] == before["e1"]

        with pytest.raises(ClusterError, match="no process 'x1'"):
            cluster.start_process("x1")
        with pytest.raises(SizeConflict, match="2 h100 each, not 8 b200"):
            LocalCluster(state, nodes=1, gpus=8, schedulers=1, gpu_model="b200").start()
    assert not cluster.kill("n1")
    assert not processes_below(state)


def test_a_process_that_ends_by_itself_is_named_with_the_end_of_its_log(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state.mkdir()
    # Where etcd wants to have its data there is a file.
    (state / "e1").mkdir()
    (state / "e1" / "member").write_text("in the way")
    assert up(nodes=1, gpus=1, schedulers=1, state_dir=state, quiet=True) == exits.INTERNAL
    said = capsys.readouterr().err
    assert "e1 ended by itself" in said
    assert "not a directory" in said
    assert str(state / "logs" / "e1.log") in said


def test_a_port_that_was_taken_meanwhile_is_replaced(state: Path) -> None:
    cluster = LocalCluster(state)
    with Layout(state).locked():
        cluster._settle()
    assert all(port_is_free(int(url.rpartition(":")[2])) for url in cluster.urls)
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", int(cluster.urls[0].rpartition(":")[2])))
        other.listen()
        before = cluster.urls
        cluster._settle()
        assert cluster.urls[0] != before[0]
        assert cluster.urls[1] == before[1]


def test_a_pid_that_was_given_away_is_not_signalled() -> None:
    start = start_time_of(os.getpid())[0]
    assert is_alive(os.getpid(), start)
    assert not is_alive(os.getpid(), start + 1)
    assert not is_alive(0, 0)
    # It would end this test.
    assert not send(os.getpid(), start + 1, signal.SIGKILL)
