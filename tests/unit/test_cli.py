"""The command line and the client against a small real HTTP server that gives canned answers of docs/api.md."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
import pytest

from gangline.core.client import api, cli, exits, output, watch
from gangline.core.client.codes import CODES
from gangline.core.client.commands import events as events_command
from gangline.core.client.commands import nodes as nodes_command
from gangline.core.client.commands import run as run_command
from gangline.core.client.commands.read import gpu_words, runs
from gangline.core.client.fieldoptions import put
from gangline.core.model.jobfile import parse_json_spec
from gangline.core.model.spec import ArraySpec, Dependency, Resources, TopologyRequest

ROOT = Path(__file__).parents[2]


class Request:
    """What a client asked."""

    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        parts = urlsplit(target)
        self.method = method
        self.path = unquote(parts.path)
        self.query = dict(parse_qsl(parts.query))
        self.headers = headers
        self.body = json.loads(body) if body else None


class Reply:
    """What the server says to that."""

    def __init__(self, body: Any = None, status: int = 200, headers: dict[str, str] | None = None, hang_up: bool = False) -> None:
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.status = status
        self.headers = headers or {}
        self.hang_up = hang_up


def refusal(status: int, code: str, detail: str = "it cannot be done", **extra: Any) -> Reply:
    """Return a problem document."""
    problem = {"type": f"urn:gangline:problem:{code}", "title": code, "status": status, "detail": detail, "code": code, **extra}
    return Reply(problem, status, {"Content-Type": "application/problem+json"})


Answering = Reply | Callable[[Request], Reply]


class FakeScheduler:
    """Answers requests by `routes`; an entry may be a list, whose last reply is repeated. Keeps what it was asked."""

    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], Answering | list[Answering]] = {}
        self.requests: list[Request] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                outer.requests.append(request)
                reply = outer._reply(request)
                if reply.hang_up:
                    self.close_connection = True
                    return
                self.send_response(reply.status)
                for name, value in {"Gangline-Index": "7", "Content-Type": "application/json", **reply.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)

            do_GET = do_POST = do_PUT = do_DELETE = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def asked(self, method: str, path: str) -> list[Request]:
        """Return the requests of one route, in order."""
        return [request for request in self.requests if (request.method, request.path) == (method, path)]

    def _reply(self, request: Request) -> Reply:
        found = self.routes.get((request.method, request.path))
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        if found is None:
            return refusal(404, "no_such_job", f"nothing at {request.path}")
        return found if isinstance(found, Reply) else found(request)


def job(job_id: str = "j1", state: str = "running", **fields: Any) -> dict[str, Any]:
    """Return a whole job as the API has it."""
    return {
        "id": job_id, "name": "", "queue": "default", "user": "me", "priority": 50, "state": state, "generation": 1, "ranks": 1, "gpus": 1,
        "nodes": ["n1"], "submitted_at_ms": 1_000, "started_at_ms": None, "ended_at_ms": None, "reason": "", "spec": {"command": ["true"]},
        "outcome": None, "cause": None, "exit_code": None, "placement": [], "restarts": 0, "last_restart": None, "step": None,
        "checkpoint": None, "deferred": None, "master": None, **fields,
    }  # fmt: skip


def finished(job_id: str = "j1", outcome: str = "succeeded", **fields: Any) -> dict[str, Any]:
    """Return a whole job that is over."""
    return job(job_id, "finished", outcome=outcome, **{"started_at_ms": 2_000, "ended_at_ms": 65_000, "exit_code": 0, **fields})


def node(node_id: str = "n1", **fields: Any) -> dict[str, Any]:
    """Return a node as the API has it."""
    return {
        "id": node_id, "state": "up", "schedulable": True, "cordoned": False, "draining": False, "reason": "", "address": "10.0.0.1",
        "gpus_total": 8, "gpus_free": 5, "gpu_model": "H100", "cpus_total": 64, "cpus_free": 60.5, "memory_total_mib": 1024 * 512,
        "memory_free_mib": 1024 * 500 + 7, "jobs": [], "labels": {}, "agent_version": "0.1.0", "lease_ttl_s": 10, **fields,
    }  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeScheduler]:
    fake = FakeScheduler()
    monkeypatch.setenv("GANGLINE_URL", fake.url)
    monkeypatch.setenv("GANGLINE_USER", "me")
    for name in ("GANGLINE_TOKEN_FILE", "GANGLINE_STATE", "NO_COLOR", "CLICOLOR_FORCE", "GANGLINE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(watch, "POLL_S", 0.01)
    monkeypatch.setattr(watch, "IDLE_POLL_S", 0.01)
    yield fake
    fake.close()


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def gangline(*args: str) -> Ran:
        code = cli._run(list(args))
        sys.stdout.flush()
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return gangline


Run = Callable[..., Ran]


@pytest.fixture
def jobfile(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\ngang: {ranks: 2}\ncommand: [python, train.py]\n")
    return str(path)


# ---------------------------------------------------------------- exit codes: docs/cli.md, one test a code


def test_exit_codes_of_the_manual_are_those_of_the_program() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    table = {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.+?) \|$", text, re.MULTILINE)}
    assert table == exits.MEANINGS
    assert list(table) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 124, 130]


def test_every_command_is_in_the_manual() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    assert [name for name in cli.COMMANDS if f"### {name}\n" not in text] == []


def test_exit_0_done(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/jobs/a"] = server.routes["GET", "/v1/jobs/j1"] = Reply(finished())
    ran = run("wait", "a")
    assert ran.code == 0
    assert "j1 succeeded after 1m3s" in ran.err


def test_exit_1_internal_error_without_a_traceback(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/jobs"] = Reply({"unexpected": 1})
    ran = run("ps")
    assert ran.code == 1
    assert "Traceback" not in ran.err
    assert "[GL-2000]" in ran.err
    with pytest.raises(KeyError):
        run("--debug", "ps")
    server.routes["GET", "/v1/jobs"] = refusal(500, "internal")
    assert run("ps").code == 1


def test_exit_2_usage(server: FakeScheduler, run: Run) -> None:
    for args in (
        ["sbumit"],
        ["ps", "--limit", "0"],
        ["logs"],
        ["ps", "-o", "xml"],
        ["wait", "a", "--timeout", "soon"],
        ["run"],
        ["run", "--", ""],
    ):
        assert run(*args).code == 2, args
    assert "Did you mean `gangline submit`?" in run("sbumit").err
    server.routes["GET", "/v1/jobs"] = refusal(400, "bad_input", errors=[{"pointer": "?state", "message": "no.", "code": "GL-1106"}])
    ran = run("ps")
    assert ran.code == 2
    assert "?state: no. [GL-1106]" in ran.err


def test_exit_2_all_problems_of_all_files(server: FakeScheduler, run: Run, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("command: a\ngang: {rank: 1}\n")
    (tmp_path / "two.json").write_text('{"command": ["a"], "priority": -1}')
    ran = run("submit", str(tmp_path / "one.yaml"), str(tmp_path / "two.json"), str(tmp_path / "none.yaml"))
    assert ran.code == 2
    assert f"{tmp_path}/one.yaml:1:10: /command: " in ran.err
    assert f"{tmp_path}/one.yaml:2:8: /gang/rank: " in ran.err
    assert "Did you mean ranks? [GL-1101]" in ran.err
    assert f"{tmp_path}/two.json: /priority: " in ran.err
    assert "none.yaml: no such file or directory [GL-2011]" in ran.err
    assert server.requests == []


@pytest.mark.parametrize(("outcome", "fields"), [("failed", {"reason": "rank 3 exited with 7", "exit_code": 7}), ("cancelled", {})])
def test_exit_3_job_failed(server: FakeScheduler, run: Run, outcome: str, fields: dict[str, Any]) -> None:
    server.routes["GET", "/v1/jobs/j1"] = Reply(finished(outcome=outcome, **fields))
    ran = run("wait", "j1")
    assert ran.code == 3
    assert outcome in ran.err
    assert fields.get("reason", "") in ran.err
    assert run("wait", "--propagate", "j1").code == (7 if fields else 3)


def test_propagated_signal_is_as_in_a_shell(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/jobs/j1"] = Reply(finished(outcome="failed", exit_code=-9))
    assert run("wait", "--propagate", "j1").code == 137


def test_exit_4_impossible(server: FakeScheduler, run: Run) -> None:
    deferred = {"code": "not_enough_gpus", "message": "needs 64 GPUs, 5 are free", "need": {"gpus": 64}, "have": {"gpus": 5}}
    server.routes["GET", "/v1/jobs/j1"] = Reply(job(state="queued", deferred=deferred))
    server.routes["GET", "/v1/nodes"] = Reply({"nodes": [node()]})
    ran = run("wait", "j1")
    assert ran.code == 4
    assert "needs 64 GPUs, and all 1 nodes together have 8" in ran.err


def test_exit_5_still_pending_and_124_timeout(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/nodes"] = Reply({"nodes": [node()]})
    server.routes["GET", "/v1/jobs/j1"] = Reply(job(state="queued", reason="needs 8 GPUs, 5 are free"))
    ran = run("wait", "j1", "--timeout", "50ms")
    assert ran.code == 5
    assert "needs 8 GPUs, 5 are free" in ran.err
    server.routes["GET", "/v1/jobs/j1"] = Reply(job())
    assert run("wait", "j1", "--timeout", "50ms").code == 124


@pytest.mark.parametrize(
    ("status", "word", "code"),
    [(401, "unauthorized", 6), (403, "cross_origin", 6), (404, "no_such_job", 7), (410, "compacted", 7), (409, "name_in_use", 8),
     (422, "idempotency_key_reused", 8), (409, "ambiguous", 2), (413, "too_large", 2), (400, "impossible", 4)],
)  # fmt: skip
def test_exit_6_7_8_what_schedulers_refuse(server: FakeScheduler, run: Run, jobfile: str, status: int, word: str, code: int) -> None:
    server.routes["POST", "/v1/jobs"] = refusal(status, word, "because \x1b[31mof this")
    ran = run("submit", jobfile)
    assert ran.code == code
    assert f"because \\x1b[31mof this. [{word}]" in ran.err


def test_exit_9_unreachable(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(api, "UNREACHABLE_PATIENCE_S", 0.05)
    monkeypatch.setenv("GANGLINE_URL", "http://127.0.0.1:1,http://127.0.0.1:2")
    ran = run("ps")
    assert ran.code == 9
    assert "http://127.0.0.1:2: connection refused" in ran.err
    monkeypatch.delenv("GANGLINE_URL")
    monkeypatch.setenv("GANGLINE_STATE", str(tmp_path))
    ran = run("ps")
    assert ran.code == 9
    assert "GANGLINE_URL" in ran.err
    assert "gangline up" in ran.err
    assert run("--url", "ftp://x", "ps").code == 9


def test_exit_9_nobody_leads(server: FakeScheduler, run: Run, jobfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "LEADERLESS_PATIENCE_S", 0.05)
    server.routes["POST", "/v1/jobs"] = refusal(503, "no_leader", "nobody leads")
    assert run("submit", jobfile).code == 9


def test_exit_130_interrupt_detaches(server: FakeScheduler) -> None:
    server.routes["GET", "/v1/jobs/j1"] = Reply(job())
    environ = {**os.environ, "GANGLINE_URL": server.url}
    process = subprocess.Popen([sys.executable, "-m", "gangline.core.client.cli", "wait", "j1"], env=environ, stderr=subprocess.PIPE, text=True)
    while len(server.requests) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "detached, the job goes on" in err
    assert "gangline logs -f j1" in err


# ---------------------------------------------------------------- submitting


def test_submit_sends_the_normalised_job_with_a_key_and_says_why_it_waits(server: FakeScheduler, run: Run, jobfile: str) -> None:
    server.routes["POST", "/v1/jobs"] = Reply({"job": "j1", "name": "a", "state": "queued", "index": 7}, 201)
    deferred = {"code": "no_nodes", "message": "no node takes new ranks", "need": {}, "have": {}}
    server.routes["GET", "/v1/jobs/j1"] = [Reply(job(state="queued", name="a")), Reply(job(state="queued", name="a", deferred=deferred))]
    ran = run("submit", jobfile)
    assert ran.code == 0
    assert ran.out == "j1 (a) queued: no node takes new ranks\n"
    [request] = server.asked("POST", "/v1/jobs")
    assert request.body["gang"] == {"ranks": 2, "min_ranks": 2}
    assert request.body["command"] == ["python", "train.py"]
    assert len(request.headers["idempotency-key"]) == 32
    assert request.headers["gangline-user"] == "me"


@pytest.mark.parametrize(
    ("options", "out"),
    [
        (["-q"], "j1\n"),
        (["-o", "name"], "j1\n"),
        (["--json", "--fields", "job"], '{\n  "job": "j1"\n}\n'),
        (["--fields", "state"], "state: queued\n"),
    ],
)
def test_submit_for_scripts(server: FakeScheduler, run: Run, jobfile: str, options: list[str], out: str) -> None:
    server.routes["POST", "/v1/jobs"] = Reply({"job": "j1", "name": "a", "state": "queued", "index": 7}, 201)
    assert run("submit", jobfile, *options) == Ran(0, out, "")


def test_submit_several_as_one_batch(server: FakeScheduler, run: Run, tmp_path: Path) -> None:
    (tmp_path / "many.yaml").write_text("command: [a]\n---\ncommand: [b]\n")
    refused = {"status": 409, "code": "name_in_use", "detail": "the name is taken"}
    server.routes["POST", "/v1/jobs:batch"] = Reply({"results": [{"job": "j1", "state": "queued"}, {"problem": refused}], "index": 8})
    server.routes["GET", "/v1/jobs/j1"] = Reply(job())
    ran = run("submit", str(tmp_path / "many.yaml"), "--idempotency-key", "k")
    assert ran.code == 8
    assert ran.out == "j1 running\n"
    assert "the name is taken [name_in_use]" in ran.err
    [request] = server.asked("POST", "/v1/jobs:batch")
    assert [entry["idempotency_key"] for entry in request.body["jobs"]] == ["k-0", "k-1"]


def test_submit_repeats_with_the_same_key_when_the_connection_breaks(server: FakeScheduler, run: Run, jobfile: str) -> None:
    accepted = Reply({"job": "j1", "name": "a", "state": "queued", "index": 7}, 201)
    server.routes["POST", "/v1/jobs"] = [Reply(hang_up=True), refusal(503, "no_leader"), accepted]
    ran = run("submit", "-q", jobfile)
    assert (ran.code, ran.out) == (0, "j1\n")
    assert len({request.headers["idempotency-key"] for request in server.asked("POST", "/v1/jobs")}) == 1


def test_submit_from_standard_input_and_dry_run(server: FakeScheduler, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"command: [true]\nname: x")))
    ran = run("submit", "-", "--dry-run")
    assert ran.code == 2
    assert "<standard input>:1:11: /command/0: true is true or false; needed is a text. Put it in quotes." in ran.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"command: ['true']\nname: x")))
    ran = run("submit", "-", "--dry-run", "--json")
    assert json.loads(ran.out)["name"] == "x"
    assert server.requests == []


def test_run_attaches_prints_every_generation_and_ends_as_the_job_does(server: FakeScheduler, run: Run) -> None:
    server.routes["POST", "/v1/jobs"] = Reply({"job": "j1", "name": "", "state": "queued", "index": 7}, 201)
    states = [
        job(state="queued", generation=0),
        job(state="running"),
        job(state="running", generation=3),
        finished(generation=3, outcome="failed"),
    ]
    server.routes["GET", "/v1/jobs/j1"] = [Reply(state) for state in states]
    logs = {"1": b"first\n", "2": b"second\n", "3": b"third, without an end"}

    def log(request: Request) -> Reply:
        data = logs[request.query["generation"]]
        offset = int(request.query.get("offset", 0))
        return Reply(data[offset:], headers={"Gangline-Log-Offset": str(offset), "Gangline-Log-Size": str(len(data))})

    server.routes["GET", "/v1/jobs/j1/logs"] = log
    ran = run("run", "--gpus", "1", "--memory", "2GiB", "-e", "A=b", "--not-preemptible", "--", "python", "-c", "--x")
    assert ran.code == 3
    assert ran.out == "first\nsecond\nthird, without an end"
    assert "j1 failed" in ran.err
    [request] = server.asked("POST", "/v1/jobs")
    assert request.body["command"] == ["python", "-c", "--x"]
    assert request.body["resources"] == {"gpus": 1, "cpus": 1, "memory": "2GiB"}
    assert request.body["env"] == {"A": "b"}
    assert request.body["preemptible"] is False


def test_run_names_options_in_problems(run: Run) -> None:
    ran = run("run", "--ranks", "0", "--time-limit", "soon", "--gpu-model", "H100", "--fail-exit-code", "999", "-e", "RANK=1", "--", "a")
    assert ran.code == 2
    for option in ("--ranks", "--time-limit", "--gpu-model", "--fail-exit-code", "--env RANK"):
        assert f"{option}: " in ran.err


def test_every_field_of_run_is_one_of_the_job_file() -> None:
    values = {"int": "8", "ints": ("8",), "number": "2", "duration": "60"}
    texts = {"name": "a", "queue": "q", "memory": "1GiB", "workdir": "/a", "checkpoint-path": "/a", "on-rank-failure": "gang",
             "fail-signal": ("SIGABRT",), "on-node-failure": "fail", "preemption-signal": "SIGINT", "on-disconnect": "keep",
             "gpu-model": ("H100",), "topology-balanced": "rack", "topology-spread": "zone",
             "topology-required": "rack", "topology-preferred": "nvlink", "topology-name": "ib",
             "array": "0-9%2", "depends-on": ("prep", "after_any:j7"), "begin": "1h", "deadline": "2099-01-01T00:00:00Z"}  # fmt: skip
    texts |= {"gpu-share": "0.5", "gpu-memory": "20GiB", "mig": "1g.10gb"}
    ways = {("gpus",): Resources(8), ("gpu-share",): Resources(gpu_share_milli=500), ("gpu-memory",): Resources(gpu_memory_mib=20_480),
            ("mig", "mig-count"): Resources(mig="1g.10gb", mig_count=8)}  # fmt: skip
    even = {"topology_balanced": "rack", "topology_spread": "zone", "max_skew": "2"}  # not beside topology-preferred, nor both at once
    for way, resources in ways.items():
        others = {name for other in ways if other != way for name in other}
        given = {name.replace("-", "_"): texts.get(name) or values[kind] for name, (_, kind, _) in run_command.FIELDS.items()}
        given |= {name.replace("-", "_"): None for name in others} | dict.fromkeys(even)
        words: dict[str, Any] = {"command": ["a"]}
        assert put(words, given, run_command.FIELDS)
        spec = parse_json_spec(words)
        assert (spec.array, spec.begin_after_s) == (ArraySpec(((0, 9, 1),), 2), 3600.0)
        assert spec.depends_on == (Dependency("prep"), Dependency("j7", "after_any"))
        assert spec.restart.fail_exit_codes == (8,)
        assert spec.resources == msgspec.structs.replace(resources, gpu_models=("H100",), cpus_milli=2000, memory_mib=1024)
        assert spec.topology == TopologyRequest("rack", "nvlink", "ib")
    for word in ("balanced", "spread"):
        some = dict.fromkeys(given) | {"topology_" + word: even["topology_" + word], "max_skew": "2"}
        words = {"command": ["a"]}
        assert put(words, some, run_command.FIELDS)
        assert parse_json_spec(words).topology == TopologyRequest(max_skew=2, **{word: even["topology_" + word]})


def test_parts_of_gpus_in_tables() -> None:
    shares = [None, {"part": 0.5, "memory_mib": None, "mig": []}, {"part": 0.26, "memory_mib": 20_480, "mig": []}]
    instances = {"part": None, "memory_mib": None, "mig": [{"gpu": 5, "profile": "1g.10gb", "start": 6}]}
    given = [((0, 1, 2), shares[0]), ((3,), shares[1]), ((4,), shares[2]), ((5,), instances)]
    assert gpu_words(given) == "0-2, 3 (0.5), 4 (20GiB), 5 (1g.10gb)"
    assert (gpu_words([]), gpu_words([((), None)])) == ("-", "-")
    parted = [{"gpu": 0, "free": 0, "mig": []}, {"gpu": 1, "free": None, "mig": instances["mig"]}]
    assert nodes_command.parted_words(parted) == "0: 0 free, 1: 1g.10gb"


# ---------------------------------------------------------------- reading


ROW = {k: v for k, v in job().items() if k not in ("spec", "placement")}


def test_ps_formats(server: FakeScheduler, run: Run) -> None:
    rows = [{**ROW, "id": "j2", "name": "evil\x1b[2J", "reason": "=1+1"}, ROW]
    server.routes["GET", "/v1/jobs"] = Reply({"jobs": rows, "cursor": None})
    table = run("ps").out.splitlines()
    assert table[0].split() == ["ID", "NAME", "STATE", "RANKS", "GPUS", "NODES", "SINCE", "REASON"]
    assert "evil\\x1b[2J" in table[1]
    assert len(run("ps", "--no-header").out.splitlines()) == 2
    assert json.loads(run("ps", "--json").out)["jobs"][0]["id"] == "j2"
    assert [json.loads(line)["id"] for line in run("ps", "-o", "jsonl").out.splitlines()] == ["j2", "j1"]
    assert run("ps", "-q").out == "j2\nj1\n"
    assert run("ps", "-o", "csv", "--fields", "id,reason").out == "id,reason\nj2,'=1+1\nj1,\n"
    assert run("ps", "--fields", "id,state").out.split() == ["ID", "STATE", "j2", "running", "j1", "running"]
    assert "id: j2" in run("ps", "-o", "yaml").out
    assert len(run("ps", "-o", "wide").out.splitlines()[0].split()) == 13
    ran = run("ps", "--fields", "stat")
    assert ran.code == 2
    assert "Did you mean state?" in ran.err


def test_ps_pages_until_the_limit(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/jobs"] = [Reply({"jobs": [ROW] * 500, "cursor": "c"}), Reply({"jobs": [ROW] * 100, "cursor": "d"})]
    ran = run("ps", "-a", "--limit", "600", "-q")
    assert len(ran.out.splitlines()) == 600
    assert "--limit" in ran.err
    assert [request.query.get("cursor") for request in server.requests] == [None, "c"]
    assert [request.query["limit"] for request in server.requests] == ["500", "100"]


def test_show_says_everything(server: FakeScheduler, run: Run) -> None:
    deferred = {"code": "fragmented", "message": "enough, but spread", "need": {}, "have": {}}
    server.routes["GET", "/v1/jobs/j1"] = Reply(job(state="queued", deferred=deferred))
    assert "enough, but spread [fragmented]" in run("show", "j1").out
    ranks = [{"rank": i, "gpus": [i], "state": "running", "exit_code": None} for i in range(4)]
    server.routes["GET", "/v1/jobs/j1"] = Reply(
        job(placement=[{"node": "n1", "ranks": ranks}], last_restart={"cause": "hang", "message": "no step"})
    )
    out = run("show", "j1").out
    assert "0-3" in out
    assert "hang: no step" in out
    assert "  command:" in out
    server.routes["GET", "/v1/jobs/j1"] = Reply(finished(outcome="failed", name="a", reason="rank 1 exited with 7"))
    assert "state        failed after 1m3s: rank 1 exited with 7" in run("show", "j1").out


def test_last_is_my_newest_job(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/jobs"] = Reply({"jobs": [ROW], "cursor": None})
    server.routes["GET", "/v1/jobs/j1"] = Reply(finished())
    assert run("show", "@last", "--fields", "outcome").out == "outcome: succeeded\n"
    assert server.requests[0].query == {"user": "me", "limit": "1"}
    server.routes["GET", "/v1/jobs"] = Reply({"jobs": [], "cursor": None})
    assert run("show", "@last").code == 7


def test_hostile_names_stay_one_segment_of_the_path(server: FakeScheduler, run: Run) -> None:
    assert run("show", "../../v1/nodes?x=1").code == 7
    assert server.requests[0].path == "/v1/jobs/../../v1/nodes?x=1"
    assert server.requests[0].query == {}


def test_plan_says_what_would_become_of_a_job(server: FakeScheduler, run: Run, jobfile: str) -> None:
    part = {"node": "n1", "ranks": [0, 1], "gpus": [[0], [1]]}
    found = {"name": "a", "outcome": "starts", "message": "would start now: 2 ranks on 1 node", "placement": [part], "evicted": [],
             "reason": None, "impossible": None}  # fmt: skip
    server.routes["POST", "/v1/jobs:plan"] = Reply(found)
    ran = run("plan", jobfile)
    assert (ran.code, ran.out.splitlines()[0]) == (0, "a: would start now: 2 ranks on 1 node")
    assert "n1    0-1    0-1" in ran.out
    assert server.requests[0].body["gang"]["ranks"] == 2
    assert json.loads(run("plan", jobfile, "--json").out) == found
    reason = {"code": "fragmented", "message": "m", "need": {"gpus": 2}, "have": {"gpus": 1}, "holders": ["q"]}
    waits = {**found, "outcome": "waits", "message": "would wait: m", "placement": [], "reason": reason, "impossible": "too large"}
    server.routes["POST", "/v1/jobs:plan"] = Reply(waits)
    ran = run("plan", jobfile)
    assert (ran.code, ran.out.splitlines()[0]) == (4, "a: would wait: m [fragmented]")
    victim = {"job": "j9", "name": "b", "user": "ada", "queue": "q", "gpus": 8, "by": "reclaim"}
    server.routes["POST", "/v1/jobs:plan"] = Reply({**found, "outcome": "evicts", "placement": [], "evicted": [victim]})
    assert "j9" in run("plan", jobfile).out


def test_why_prints_the_record_the_holders_and_the_remedy(server: FakeScheduler, run: Run) -> None:
    holder = {"job": "j2", "name": "b", "user": "ada", "queue": "q", "gpus": 8, "state": "running", "since_ms": 1_000, "ends_at_ms": None}
    found = {
        "job": "j1", "name": "a", "state": "queued", "since_ms": 1_000, "message": "needs 8 GPUs; 0 GPUs idle or soon so",
        "witness": {"code": "not_enough_gpus", "message": "m", "need": {"gpus": 8}, "have": {"gpus": 0}, "index": 12, "at_ms": 1_000},
        "order": {"queue": "q", "position": 2, "waiting": 3, "gpus_ahead": 4},
        "holders": {"queue": None, "jobs": 1, "gpus": 8, "queues": [{"queue": "q", "jobs": 1, "gpus": 8}], "largest": [holder]},
        "would_change": ["8 more GPUs"], "impossible": None, "last_restart": None, "notice": None, "outcome": None, "cause": None, "records": [],
    }  # fmt: skip
    server.routes["GET", "/v1/jobs/j1/why"] = Reply(found)
    out = run("why", "j1").out
    for text in ("j1 (a) is queued: needs 8 GPUs", "entry 12, ", "[not_enough_gpus]", "2nd of 3 in q, 4 GPUs ahead", "1 jobs with 8 GPUs: q 8"):
        assert text in out
    assert "would change  8 more GPUs" in out
    assert CODES["not_enough_gpus"][2] in out
    assert "no limit" in out
    assert json.loads(run("why", "j1", "--json").out) == found
    record = {"index": 9, "at_ms": 1_000, "event": "gang_finished", "message": "failed"}
    over = {**found, "state": "finished", "message": "failed: it broke", "witness": None, "order": None, "holders": None, "would_change": []}
    server.routes["GET", "/v1/jobs/j1/why"] = Reply({**over, "outcome": "failed", "cause": "rank_failed", "records": [record]})
    out = run("why", "j1").out
    assert "is finished: failed: it broke" in out
    assert "entry 9" in out


def test_when_says_what_it_is_based_on(server: FakeScheduler, run: Run) -> None:
    found = {
        "job": "j1", "name": "a", "state": "queued", "of": "start", "at_ms": 3_600_000, "in_s": 3_600.0, "basis": "if what runs ends",
        "order": {"queue": "q", "position": 1, "waiting": 1, "gpus_ahead": 0}, "gpus_without_limit": 0, "started_at_ms": None,
    }  # fmt: skip
    server.routes["GET", "/v1/jobs/j1/when"] = Reply(found)
    out = run("when", "j1").out
    for text in ("j1 (a) is queued; start: about 19", ", in 1h", "if what runs ends", "1st of 1 in q"):
        assert text in out
    server.routes["GET", "/v1/jobs/j1/when"] = Reply({**found, "at_ms": None, "in_s": None, "basis": "unknown: 8 GPUs"})
    assert "start: cannot be told" in run("when", "j1").out
    server.routes["GET", "/v1/jobs/j1/when"] = Reply({**found, "of": "end", "state": "running", "order": None})
    assert "at the latest, in 1h" in run("when", "j1").out


def test_story_and_events(server: FakeScheduler, run: Run) -> None:
    entries = [{"index": 3, "epoch": 1, "at_ms": 1_000, "event": "gang_placed", "message": "on n1", "body": {"a": 1}}]
    server.routes["GET", "/v1/jobs/j1/story"] = Reply({"job": "j1", "entries": entries})
    assert "gang_placed" in run("story", "j1").out
    server.routes["GET", "/v1/events"] = Reply(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries * 2))
    assert len(run("events", "--no-header").out.splitlines()) == 2
    assert run("events", "-o", "jsonl").out.splitlines() == [json.dumps(entry) for entry in entries * 2]
    server.routes["GET", "/v1/events"] = refusal(410, "compacted")
    assert run("events", "--from", "1").code == 7


def test_events_follow_goes_on_behind_the_last_event(server: FakeScheduler, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_command, "RECONNECT_S", 0.01)

    def lines(*numbers: tuple[int, str]) -> bytes:
        return b"".join(
            json.dumps({"index": i, "epoch": 1, "at_ms": 1, "event": e, "message": "", "body": {}}).encode() + b"\n" for i, e in numbers
        )

    first, second = lines((1, "a"), (2, "b")), lines((2, "b"), (2, "c"), (3, "d"))
    server.routes["GET", "/v1/events"] = [Reply(first), Reply(second), refusal(410, "compacted")]
    ran = run("events", "-f", "-o", "jsonl", "--fields", "event")
    assert [json.loads(line)["event"] for line in ran.out.splitlines()] == ["a", "b", "c", "d"]
    assert [request.query.get("from") for request in server.requests] == [None, "2", "3"]


# ---------------------------------------------------------------- logs


def serve_logs(server: FakeScheduler, logs: dict[int, bytes]) -> None:
    def log(request: Request) -> Reply:
        data = logs.get(int(request.query["rank"]))
        if data is None:
            return refusal(404, "no_such_log")
        offset = int(request.query.get("offset", 0))
        return Reply(data[offset : offset + 4], headers={"Gangline-Log-Offset": str(offset), "Gangline-Log-Size": str(len(data))})

    server.routes["GET", "/v1/jobs/j1/logs"] = log


def test_logs_of_all_ranks_are_read_to_their_end(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/jobs/j1"] = Reply(job(ranks=11))
    serve_logs(server, {0: b"zero zero\nmore\n", 10: b"ten"})
    assert run("logs", "j1").out == "zero zero\nmore\nten"
    assert run("logs", "j1", "--prefix").out == "[ 0] zero zero\n[ 0] more\n[10] ten\n"
    assert run("logs", "j1", "--rank", "9-10").out == "ten"
    assert run("logs", "j1", "--rank", "11").code == 2
    assert run("logs", "j1", "--rank", "x").code == 2


def test_logs_follow_ends_with_the_job(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/jobs/j1"] = [Reply(job()), Reply(job()), Reply(finished(outcome="failed"))]
    serve_logs(server, {0: b"some lines\nof output\n"})
    ran = run("logs", "-f", "j1")
    assert (ran.code, ran.out) == (0, "some lines\nof output\n")
    assert "j1 failed" in ran.err


def test_logs_that_were_rotated_away_say_so(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/jobs/j1"] = Reply(job())
    pages = [(0, b"abc"), (10, b"xyz")]

    def log(request: Request) -> Reply:
        at, data = pages.pop(0)
        return Reply(data, headers={"Gangline-Log-Offset": str(at), "Gangline-Log-Size": "13"})

    server.routes["GET", "/v1/jobs/j1/logs"] = log
    assert run("logs", "j1").out == "abc\n[gangline: 7 bytes of this log are no longer kept]\nxyz"


def test_logs_of_a_node_that_cannot_be_reached_leave_the_others_readable(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/jobs/j1"] = Reply(job(ranks=2))
    lost = refusal(502, "agent_unreachable", "n1 does not answer")
    server.routes["GET", "/v1/jobs/j1/logs"] = lambda request: (
        lost if request.query["rank"] == "0" else Reply(b"one\n" if "offset" not in request.query else b"")
    )
    ran = run("logs", "j1")
    assert (ran.code, ran.out) == (0, "one\n")
    assert ran.err == "gangline: rank 0: n1 does not answer [agent_unreachable]\n"


# ---------------------------------------------------------------- stopping, nodes


def test_stop(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/jobs/a"] = Reply(job(name="a"))
    server.routes["DELETE", "/v1/jobs/j1"] = Reply({"job": "j1", "state": "running", "index": 9}, 202)
    assert run("stop", "a", "--reason", "no need") == Ran(0, "j1 (a) is stopping\n", "")
    assert server.asked("DELETE", "/v1/jobs/j1")[0].query == {"reason": "no need"}
    server.routes["GET", "/v1/jobs/a"] = Reply(finished(name="a"))
    server.routes["DELETE", "/v1/jobs/j1"] = Reply({"job": "j1", "state": "finished", "index": 9}, 200)
    assert run("stop", "a").out == "j1 (a) had already ended\n"


def test_hold_and_release(server: FakeScheduler, run: Run) -> None:
    server.routes["POST", "/v1/jobs/a:hold"] = Reply(job(name="a", state="queued", held=True))
    server.routes["POST", "/v1/jobs/b:hold"] = Reply(job("j2", name="b", held=True))
    server.routes["POST", "/v1/jobs/a:release"] = Reply(job(name="a", state="queued"))
    assert run("hold", "a", "b", "--reason", "data").out == "j1 (a) is held\nj2 (b) is held; what runs of it goes on\n"
    assert server.asked("POST", "/v1/jobs/a:hold")[0].body == {"reason": "data", "requeue": False}
    assert run("hold", "b", "--requeue").out == "j2 (b) is held; asked to leave\n"
    assert run("release", "a") == Ran(0, "j1 (a) is released\n", "")


def test_submit_with_options_in_place_of_what_the_file_says(server: FakeScheduler, run: Run, jobfile: str) -> None:
    server.routes["POST", "/v1/jobs"] = Reply({"job": "j1", "name": "a", "state": "queued", "index": 7}, 201)
    assert run("submit", "-q", jobfile, "--array", "0-3%2", "--depends-on", "prep", "--begin", "60", "--hold").code == 0
    [request] = server.asked("POST", "/v1/jobs")
    body = {word: request.body[word] for word in ("array", "depends_on", "begin", "hold")}
    assert body == {"array": "0-3%2", "depends_on": ["after_ok:prep"], "begin": "1m", "hold": True}
    ran = run("submit", jobfile, "--array", "3-1", "--depends-on", "afterok:prep")
    assert ran.code == 2
    assert "--array: " in ran.err
    assert "--depends-on: " in ran.err


ELEMENTS = {"total": 4, "to_come": 1, "queued": 0, "active": 1, "succeeded": 1, "failed": 1, "cancelled": 0, "at_most": 1, "indices": "0-3",
            "failed_indices": "1"}  # fmt: skip


def test_ps_and_show_of_an_array(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/jobs"] = Reply({"jobs": [job("j1.2", array="j1", array_index=2)], "cursor": None})
    assert "j1.2" in run("ps", "--array", "j1").out
    assert server.requests[-1].query["array"] == "j1"
    assert "state" not in server.requests[-1].query, "of one array, those that have ended are shown too"
    run("ps", "--elements")
    assert server.requests[-1].query["elements"] == "1"
    waits_for = [{"job": "j0", "when": "after_ok"}]
    server.routes["GET", "/v1/jobs/j1"] = Reply(job(elements=ELEMENTS, held=True, held_by="ann", waits_for=waits_for, begin_at_ms=1_000))
    lines = [line.split(maxsplit=1) for line in run("show", "j1").out.split("\nspec")[0].splitlines()]
    shown = {words[0]: words[-1] for words in lines}
    assert shown["elements"] == "4: 1 active, 1 to come, 1 succeeded, 1 failed; at most 1 at once"
    assert (shown["indices"], shown["held"], shown["after_ok"]) == ("0-3; failed: 1", "by ann", "j0")


def test_logs_of_an_array_carry_the_index(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/jobs/j1"] = Reply(finished(elements=ELEMENTS))
    rows = [finished("j1.0", array="j1", array_index=0), finished("j1.7", array="j1", array_index=7, ranks=2)]
    server.routes["GET", "/v1/jobs"] = Reply({"jobs": [*rows, job("j1.8", "queued", array="j1", array_index=8, generation=0)], "cursor": None})
    for element, rank, text in (("j1.0", 0, b"zero\n"), ("j1.7", 0, b"seven"), ("j1.7", 1, b"and one\n")):
        known = server.routes.get(("GET", f"/v1/jobs/{element}/logs"))
        reply = Reply(text, headers={"Gangline-Log-Offset": "0", "Gangline-Log-Size": str(len(text))})
        server.routes["GET", f"/v1/jobs/{element}/logs"] = [*(known if isinstance(known, list) else []), reply]
        assert rank in (0, 1)
    assert run("logs", "j1").out == "[0] zero\n[7/1] and one\n[7/0] seven\n"
    assert run("logs", "j1", "--rank", "0").code == 2


def test_wait_until_running_counts_what_was(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/jobs/j1"] = [
        Reply(job(state="queued")),
        Reply(job(state="placed")),
        Reply(job(state="restarting", started_at_ms=5)),
    ]
    assert run("wait", "--until", "running", "j1").code == 0
    server.routes["GET", "/v1/jobs/j1"] = Reply(finished(outcome="cancelled", started_at_ms=None))
    assert run("wait", "--until", "running", "j1").code == 3


def test_nodes(server: FakeScheduler, run: Run) -> None:
    server.routes["GET", "/v1/nodes"] = Reply({"nodes": [node(), node("n2", state="lost"), node("n3", draining=True, reason="fan")]})
    lines = [line.split() for line in run("nodes").out.splitlines()]
    assert lines[1][:3] == ["n1", "up", "5/8"]
    assert [line[1] for line in lines[2:]] == ["lost", "draining"]
    assert run("nodes", "--state", "draining", "-q").out == "n3\n"
    server.routes["GET", "/v1/nodes/n1"] = Reply(node())
    assert run("nodes", "n1", "-q").out == "n1\n"
    assert run("nodes", "n9").code == 7


@pytest.mark.parametrize("action", ["cordon", "uncordon", "undrain"])
def test_words_about_nodes(server: FakeScheduler, run: Run, action: str) -> None:
    server.routes["POST", f"/v1/nodes/n1:{action}"] = Reply(node())
    assert run(action, "n1").code == 0
    assert server.asked("POST", f"/v1/nodes/n1:{action}")[0].body == {"reason": "", "deadline_s": 0.0}


def test_drain_says_what_is_in_the_way_and_ends_when_nothing_is(server: FakeScheduler, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_command, "DRAIN_POLL_S", 0.01)
    server.routes["POST", "/v1/nodes/n1:drain"] = Reply(node(draining=True))
    server.routes["GET", "/v1/nodes/n1"] = [Reply(node(draining=True, jobs=["j1"]))] * 3 + [Reply(node(draining=True))]
    server.routes["GET", "/v1/jobs/j1"] = Reply(job(spec={"preemptible": False}))
    ran = run("drain", "n1", "--reason", "fan")
    assert ran.code == 0
    assert ran.out == "n1 is draining\nn1 is empty\n"
    assert "j1 running: it is not preemptible and has no time limit, so it may stay for ever" in ran.err
    server.routes["GET", "/v1/nodes/n1"] = Reply(node(draining=True, jobs=["j1"]))
    ran = run("drain", "n1", "--timeout", "30ms", "--deadline", "1h")
    assert ran.code == 124
    assert "left: j1" in ran.err
    assert server.asked("POST", "/v1/nodes/n1:drain")[1].body["deadline_s"] == 3600.0
    server.routes["GET", "/v1/nodes/n1"] = Reply(node(draining=False, jobs=["j1"]))
    assert run("drain", "n1").code == 8


# ---------------------------------------------------------------- queues


def queue_row(path: str, **fields: Any) -> dict[str, Any]:
    """Return a queue as the API has it."""
    none = {"gpus": None, "cpus": None, "memory_mib": None, "models": {}}
    return {
        "id": path, "parent": path.rpartition("/")[0] or None, "leaf": True, "state": "open", "accepts": True, "starts": True, "quota": none,
        "limit": none, "over_quota_weight": {"gpus": 1.0, "cpus": 1.0, "memory": 1.0}, "priority": 100, "reclaim_min_runtime_s": None,
        "preempt_min_runtime_s": None, "usage_half_life_s": None, "user_fairness": False,
        "allocated": {"jobs": 0, "gpus": 0, "cpus": 0, "memory_mib": 0, "models": {}}, "pending": {"jobs": 0, "gpus": 0},
        "fair_share": None, "usage": None, "users": [], **fields,
    }  # fmt: skip


QUEUES = {
    "queues": [
        queue_row("research", quota={"gpus": 64.0, "cpus": 12.5, "memory_mib": 2048, "models": {"H100": 32.0}}, leaf=False),
        queue_row(
            "research/nlp", state="hold", allocated={"jobs": 2, "gpus": 16, "cpus": 32, "memory_mib": 0, "models": {"H100": 12, "A100": 4}},
            quota={"gpus": None, "cpus": None, "memory_mib": None, "models": {"H100": 8.0}},
            limit={"gpus": None, "cpus": None, "memory_mib": None, "models": {"H100": 16.0}},
            fair_share={"gpus": 21.0, "cpus": 1.0, "memory_mib": 1, "models": {"H100": 9.0}}, usage={"gpus": 0.125, "cpus": 0.0, "memory": 0.0},
            users=[
                {"user": "ann", "running": 2, "gpus": 16.0, "pending": 2, "pending_gpus": 4, "usage": {"gpus": 0.1, "cpus": 0.0, "memory": 0.0}},
                {"user": "", "running": 0, "gpus": 0.0, "pending": 1, "pending_gpus": 1, "usage": None},
            ],
        ),
        queue_row("batch", pending={"jobs": 3, "gpus": 24}, reclaim_min_runtime_s=600.0),
    ],
    "declared": {"queues": {"research": {"quota": {"gpus": 64}, "queues": {"nlp": {"state": "hold"}}}, "batch": {}}},
    "index": 7, "at_ms": 1_000, "by": "me", "reason": "",
}  # fmt: skip
NO_DIFF: dict[str, Any] = {"added": [], "removed": [], "changed": [], "reordered": False, "topologies": []}
DIFF = {
    "added": [
        {"queue": "urgent", "fields": {"quota": {"gpus": 8, "models": {"H100": {"gpus": 4}}}, "state": "hold"}},
        {"queue": "x", "fields": {}},
    ],
    "removed": ["old"],
    "changed": [
        {"queue": "research", "field": "quota.gpus", "old": 64, "new": 72},
        {"queue": "research", "field": "limit.memory", "old": None, "new": "2TiB"},
        {"queue": "batch", "field": "reclaim_min_runtime", "old": "10m", "new": None},
    ],
    "reordered": True,
    "topologies": [
        {"topology": "old", "old": ["rack"], "new": None},
        {"topology": "default", "old": ["zone"], "new": ["zone", "rack"]},
        {"topology": "new", "old": None, "new": ["rack"]},
    ],
}
SAID = """\
- old
+ urgent: quota.gpus 8, quota.models.H100.gpus 4, state hold
+ x
~ research: quota.gpus 64 → 72
~ research: limit.memory unlimited → 2TiB
~ batch: reclaim_min_runtime 10m → as above
~ the order of the queues
- topology old
~ topology default: zone → zone > rack
+ topology new: rack
"""


@pytest.fixture
def clusterfile(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text("topologies: {default: [zone, rack]}\nqueues:\n  research: {quota: {gpus: 72, memory: 2048GiB}}\n  urgent:\n")
    return str(path)


def declaring(server: FakeScheduler, diff: Any = DIFF, warnings: Any = ()) -> None:
    server.routes["GET", "/v1/queues"] = Reply(QUEUES)
    server.routes["PUT", "/v1/queues"] = lambda request: Reply(
        {"diff": diff, "warnings": list(warnings), "index": 7 if request.query.get("dry_run") else 8, "dry_run": "dry_run" in request.query}
    )


def test_queues_as_a_tree_and_as_a_file(server: FakeScheduler, run: Run, tmp_path: Path) -> None:
    server.routes["GET", "/v1/queues"] = Reply(QUEUES)
    lines = [re.split("  +", line) for line in run("queues").out.splitlines()]
    assert lines[0][:7] == ["QUEUE", "STATE", "QUOTA", "ALLOCATED", "FAIR SHARE", "USAGE", "LIMIT"]
    assert lines[0][7:] == ["WEIGHT", "PRIORITY", "RUNNING", "PENDING", "PENDING GPUS"]
    assert lines[1] == ["research", "open", "64", "0", "-", "-", "-", "1", "100", "0", "0", "0"]
    assert lines[2] == ["", "nlp", "hold", "-", "16", "21", "12.5%", "-", "1", "100", "2", "0", "0"]
    assert lines[3] == ["batch", "open", "-", "0", "-", "-", "-", "1", "100", "0", "3", "24"]
    wide = run("queues", "-o", "wide").out
    assert "  H100 12, quota 8, limit 16, share 9; A100 4  " in wide
    assert "  ann 16 GPUs, 2 pending, usage 10.0%; (none) 0 GPUs, 1 pending  " in wide
    assert run("queues", "-q").out.split() == ["research", "research/nlp", "batch"]
    wide = run("queues", "-o", "wide").out.splitlines()
    assert "  H100 quota 32  " in wide[1]
    assert "10m" in wide[3]
    assert json.loads(run("queues", "--json").out) == {"queues": QUEUES["queues"]}
    (tmp_path / "same.yaml").write_text(run("queues", "--file").out)
    declaring(server, NO_DIFF)
    assert run("apply", "-f", str(tmp_path / "same.yaml")).code == 0
    assert server.asked("PUT", "/v1/queues")[0].body == QUEUES["declared"]
    server.routes["GET", "/v1/queues"] = Reply({**QUEUES, "queues": [queue_row("default")], "declared": None, "index": 0})
    assert "no queues are declared" in run("queues").err
    assert run("queues", "--file").out == "queues:\n  default: {}\n"


def test_apply_shows_the_difference_and_applies_it(server: FakeScheduler, run: Run, clusterfile: str) -> None:
    declaring(server, warnings=["research: odd"])
    ran = run("apply", "-f", clusterfile, "--reason", "more")
    assert (ran.code, ran.out) == (0, f"{SAID}10 things changed\n")
    assert ran.err == "gangline: warning: research: odd\n"
    planned, applied = server.asked("PUT", "/v1/queues")
    words = {"topologies": {"default": ["zone", "rack"]}, "queues": {"research": {"quota": {"gpus": 72, "memory": "2TiB"}}, "urgent": {}}}
    assert (planned.query, planned.body, planned.headers["if-match"]) == ({"dry_run": "1"}, words, '"7"')
    assert (applied.query, applied.body, applied.headers["if-match"]) == ({}, {**words, "reason": "more"}, '"7"')


def test_apply_dry_run_and_nothing_to_change_write_nothing(server: FakeScheduler, run: Run, clusterfile: str) -> None:
    declaring(server)
    ran = run("apply", "-f", clusterfile, "--dry-run")
    assert (ran.code, ran.out, ran.err) == (0, SAID, "10 things would be changed\n")
    assert run("apply", "-f", clusterfile, "--dry-run", "--detailed-exitcode").code == 2
    assert json.loads(run("apply", "-f", clusterfile, "--dry-run", "--json").out)["diff"] == DIFF
    declaring(server, NO_DIFF)
    for options in ([], ["--dry-run"], ["--detailed-exitcode"], ["-y"]):
        ran = run("apply", "-f", clusterfile, *options)
        assert (ran.code, ran.out) == (0, "nothing to change\n")
    assert all(request.query for request in server.asked("PUT", "/v1/queues"))


def test_apply_asks_a_person_first(server: FakeScheduler, run: Run, clusterfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gangline.core.client.commands import apply as apply_command

    declaring(server)
    monkeypatch.setattr(apply_command, "_on_terminal", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert run("apply", "-f", clusterfile).code == 130
    assert len(server.asked("PUT", "/v1/queues")) == 1
    assert run("apply", "-f", clusterfile, "-y").code == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert run("apply", "-f", clusterfile, "--detailed-exitcode").code == 2
    assert len(server.asked("PUT", "/v1/queues")) == 5


def test_apply_says_all_problems_of_the_file(server: FakeScheduler, run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("queues:\n  a: {quota: {gpu: 1}}\n  B: {}\n")
    (tmp_path / "bad.json").write_text('{"queues": {}}')
    ran = run("apply", "-f", str(tmp_path / "bad.yaml"))
    assert ran.code == 2
    assert f"{tmp_path}/bad.yaml:2:15: /queues/a/quota/gpu: " in ran.err
    assert "Did you mean gpus? [GL-1101]" in ran.err
    assert f"{tmp_path}/bad.yaml:3:3: /queues/B: " in ran.err
    assert run("apply", "-f", str(tmp_path / "bad.json"), "--detailed-exitcode").code == 1
    assert "[GL-2011]" in run("apply", "-f", str(tmp_path / "none.yaml")).err
    assert server.requests == []


@pytest.mark.parametrize(("status", "word", "code"), [(409, "queue_in_use", 8), (412, "queues_changed", 8), (403, "forbidden", 6)])
def test_apply_that_is_refused(server: FakeScheduler, run: Run, clusterfile: str, status: int, word: str, code: int) -> None:
    declaring(server)
    server.routes["PUT", "/v1/queues"] = refusal(status, word)
    ran = run("apply", "-f", clusterfile)
    assert ran.code == code
    assert f"[{word}]" in ran.err


def test_a_queue_that_drains_refuses_by_policy(server: FakeScheduler, run: Run, jobfile: str) -> None:
    server.routes["POST", "/v1/jobs"] = refusal(409, "queue_drains")
    assert run("submit", jobfile).code == 6


def test_explain(run: Run) -> None:
    for code in ("GL-1101", "gl-1101", "[fragmented]"):
        assert run("explain", code).code == 0
    ran = run("explain", "GL-1011")
    assert ran.code == 7
    assert "Did you mean GL-1" in ran.err
    listed = run("explain").out
    source = "".join(path.read_text() for path in [*(ROOT / "core" / "model").glob("*.py"), *(ROOT / "core" / "client").rglob("*.py")])
    assert set(re.findall(r"GL-\d{4}", source)) <= set(re.findall(r"GL-\d{4}", listed))


def test_every_code_of_the_schedulers_is_explained() -> None:
    source = "".join(path.read_text() for folder in ("leader", "core/policy") for path in (ROOT / folder).glob("*.py"))
    found = set(re.findall(r"""(?:Refusal|Refused)\(\s*(?:\d{3}, )?"([a-z_]+)",""", source))
    assert len(found) > 20
    assert found - set(CODES) == set(), "explain these in core/client/codes.py"


# ---------------------------------------------------------------- the client


def test_next_endpoint_is_asked_when_one_cannot_be_reached(server: FakeScheduler) -> None:
    server.routes["GET", "/v1/nodes"] = Reply({"nodes": []})
    client = api.Client(["http://127.0.0.1:1", server.url])
    assert client.nodes() == []
    assert client.get("/v1/nodes").index == 7


def test_token_is_sent_and_never_guessed(server: FakeScheduler, run: Run, tmp_path: Path) -> None:
    server.routes["GET", "/v1/nodes"] = Reply({"nodes": []})
    (tmp_path / "token").write_text("gl_abc\n")
    assert run("--token-file", str(tmp_path / "token"), "nodes").code == 0
    assert server.requests[-1].headers["authorization"] == "Bearer gl_abc"
    (tmp_path / "token").write_text("two words\r\nX: y")
    assert run("--token-file", str(tmp_path / "token"), "nodes").code == 9


def test_local_cluster_is_found_by_its_state_directory(server: FakeScheduler, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANGLINE_URL")
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".gangline").mkdir()
    (tmp_path / ".gangline" / "token").write_text("t")
    cluster = {"cluster": "local", "schedulers": ["http://127.0.0.1:1", server.url], "etcd": [], "token_file": "token"}
    (tmp_path / ".gangline" / "cluster.json").write_text(json.dumps(cluster))
    server.routes["GET", "/v1/nodes"] = Reply({"nodes": []})
    assert run("nodes").code == 0
    assert server.requests[-1].headers["authorization"] == "Bearer t"


def test_write_without_a_key_is_not_repeated_when_its_outcome_is_unknown(server: FakeScheduler) -> None:
    server.routes["POST", "/v1/brake"] = Reply(hang_up=True)
    with pytest.raises(api.Unreachable, match="unknown"):
        api.Client([server.url]).post("/v1/brake", {"on": False})
    assert len(server.requests) == 1


def test_kept_connection_that_was_closed_is_opened_anew(server: FakeScheduler) -> None:
    server.routes["GET", "/v1/nodes"] = [Reply({"nodes": []}), Reply(hang_up=True), Reply({"nodes": []})]
    client = api.Client([server.url])
    assert client.nodes() == client.nodes() == []
    assert len(server.requests) == 3


# ---------------------------------------------------------------- tables


def test_table_fits_the_terminal_and_a_pipe_gets_everything(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    columns = [("ID", lambda r: r["id"]), ("REASON", lambda r: r["reason"])]
    rows = [{"id": "j1", "reason": "x" * 100}]
    output.table(columns, rows)
    assert "x" * 100 in capsys.readouterr().out
    monkeypatch.setattr(output, "terminal_width", lambda: 30)
    output.table(columns, rows)
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) == 30


def test_widths() -> None:
    assert output.fit([5, 100, 40], 60) == [5, 25, 26]
    assert output.fit([20, 20], 10) == [8, 8]
    assert output.width_of("日本é") == 5


def test_runs_of_ranks_are_folded() -> None:
    assert runs([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert runs([]) == "-"


def test_reservations_are_made_listed_and_removed(server: FakeScheduler, run: Run) -> None:
    row = {
        "name": "fans", "state": "planned", "start_ms": 1_785_556_800_000, "end_ms": 1_785_571_200_000, "gpus": 11, "unavailable": [],
        "nodes": [{"node": "n1", "gpus": None}, {"node": "n2", "gpus": 3}], "queues": [], "users": [], "maintenance": True,
        "deadline_s": 0.0, "by": "ann", "reason": "new fans",
    }  # fmt: skip
    server.routes["POST", "/v1/reservations"] = Reply(row)
    server.routes["GET", "/v1/reservations"] = Reply({"reservations": [row]})
    server.routes["DELETE", "/v1/reservations/fans"] = Reply({"name": "fans", "index": 9})
    ran = run("reservation", "create", "fans", "--nodes", "n1,n2", "--start", "2h", "--end", "6h", "--maintenance", "--deadline", "30m")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("fans: n1, n2 (3) for maintenance, ")
    body = server.asked("POST", "/v1/reservations")[0].body
    assert (body["nodes"], body["start_in_s"], body["length_s"], body["deadline_s"]) == (["n1", "n2"], 7200.0, 14_400.0, 1800.0)
    assert run("reservation", "create", "t", "--gpus", "8", "--start", "2026-08-01T06:00Z", "--length", "1h", "--queue", "nlp").code == 0
    body = server.asked("POST", "/v1/reservations")[1].body
    assert (body["gpus"], body["start_ms"], body["length_s"], body["queues"]) == (8, 1_785_564_000_000, 3600.0, ["nlp"])
    assert "fans" in run("reservation", "list").out
    assert run("reservation", "delete", "fans").out == "fans is removed\n"
    for wrong in (
        ("--nodes", "n1", "--gpus", "3", "--length", "1h", "--maintenance"), ("--nodes", "n1", "--length", "1h"),
        ("--nodes", "n1", "--maintenance"), ("--nodes", "n1", "--start", "soon", "--length", "1h", "--maintenance"),
    ):  # fmt: skip
        assert run("reservation", "create", "x", *wrong).code == 2
