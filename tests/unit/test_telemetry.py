import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gangline.core import telemetry
from gangline.leader.metrics import Metrics


def test_prometheus_names_units_and_labels() -> None:
    t = telemetry.setup("scheduler", cluster="test")
    t.counter("gangline.log.appends", "Appends.").add(3, {"result": "ok"})
    t.histogram("gangline.log.append.duration", "Time of an append.").record(0.004)
    t.gauge("gangline.gangs", "Gangs.", lambda: [(2, {"state": "running"})])
    t.sums("gangline.http.requests", "Requests.", lambda: [(5, {"route": "/v1/jobs"})])
    text = t.prometheus().decode()
    assert 'gangline_log_appends_total{result="ok"} 3.0' in text
    assert 'gangline_log_append_duration_seconds_bucket{le="0.005"} 1.0' in text
    assert 'gangline_gangs{state="running"} 2.0' in text
    assert 'gangline_http_requests_total{route="/v1/jobs"} 5.0' in text
    assert "gangline_build_info{" in text
    assert "process_resident_memory_bytes" in text
    assert "otel_scope" not in text


def test_labels_that_are_no_longer_observed_disappear() -> None:
    t = telemetry.setup("scheduler")
    seen = [{"queue": "a"}]
    t.gauge("gangline.queue.pending.gangs", "Waiting.", lambda: [(1, labels) for labels in seen])
    assert 'queue="a"' in t.prometheus().decode()
    seen[:] = [{"queue": "b"}]
    text = t.prometheus().decode()
    assert 'queue="b"' in text
    assert 'queue="a"' not in text


def test_two_in_one_process_do_not_mix() -> None:
    one, two = telemetry.setup("one"), telemetry.setup("two")
    one.counter("gangline.log.appends", "Appends.").add(1)
    assert "gangline_log_appends_total 1.0" in one.prometheus().decode()
    assert "gangline_log_appends_total 1.0" not in two.prometheus().decode()


def test_a_span_that_nobody_sees_is_cheap() -> None:
    t = telemetry.setup("scheduler")
    rounds = 20_000
    began = time.perf_counter()
    for i in range(rounds):
        with t.span("fold", i):
            pass
    assert (time.perf_counter() - began) / rounds < 10e-6  # measured 0.3 µs; the bound allows for a busy machine


def test_spans_in_different_processes_link_by_log_index(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{tmp_path}/trace.jsonl"
    monkeypatch.setenv("GANGLINE_TRACE_FILE", path)
    leader, agent = telemetry.setup("scheduler", cluster="c"), telemetry.setup("agent", cluster="c")
    with leader.span("submit", traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01") as submit:
        assert submit.trace_id == "ab" * 16
        with leader.span("append", 7, events=1):
            pass
        submit.at(7)
    with agent.span("prepare", 7, node="n1"):
        pass
    leader.shutdown()
    agent.shutdown()
    with open(path) as lines:
        spans = {s["name"]: s for s in map(json.loads, lines)}
    appended = {"trace_id": spans["append"]["trace_id"], "span_id": spans["append"]["span_id"]}
    assert spans["prepare"]["links"] == spans["submit"]["links"] == [appended]
    assert spans["submit"]["trace_id"] == "ab" * 16
    assert spans["submit"]["parent_id"] == "cd" * 8
    assert [s["attributes"]["gangline.index"] for s in spans.values()] == [7, 7, 7]
    assert spans["prepare"]["attributes"]["node"] == "n1"


class Stuck(SpanExporter):
    """A collector that takes spans and never answers."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.release.wait(60)
        return SpanExportResult.FAILURE


def test_row_82_a_dead_collector_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    t = telemetry.setup("scheduler")
    stuck = Stuck()
    t.trace_to(stuck)
    began = time.perf_counter()
    for i in range(3 * telemetry.MAX_QUEUED_SPANS):
        with t.span("fold", i):
            pass
    assert time.perf_counter() - began < 10  # it would be 60 if anything waited
    monkeypatch.setattr(telemetry, "FLUSH_S", 0.1)
    began = time.perf_counter()
    t.shutdown()
    assert time.perf_counter() - began < 5
    stuck.release.set()


def test_otlp_without_its_package_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    t = telemetry.setup("scheduler")
    assert not t.tracing
    assert "gangline[otlp]" in t.warnings[0]


def test_log_lines_have_the_event_first_and_fixed_keys_in_order() -> None:
    out = io.StringIO()
    log = telemetry.structured_logging("info", out, node="n1")
    log.debug("unseen")
    log.info("append", message="three events", epoch=2, index=9, cost_s=0.5)
    line = json.loads(out.getvalue())
    assert list(line) == ["event", "time", "level", "index", "epoch", "node", "message", "cost_s"]
    assert line["event"] == "append"
    assert line["time"].endswith("Z")


def test_log_lines_cannot_be_forged() -> None:
    out = io.StringIO()
    log = telemetry.structured_logging("info", out)
    log.bind(gang="j1").warning("rank_exit", message='\n{"event":"forged"}\r\x1b[2J\x9b\u202e', error=ValueError("x\ny"), bad=float("nan"))
    text = out.getvalue()
    assert text.count("\n") == 1
    assert text.isascii()
    assert text[:-1].isprintable()
    assert json.loads(text)["gang"] == "j1"


def test_library_records_become_lines() -> None:
    code = (
        "import logging; from gangline.core.telemetry import structured_logging\n"
        "structured_logging('info', libraries=True)\n"
        "logging.getLogger('aiohttp').error('went %s', 'wrong\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stderr) | {"time": ""} == {
        "event": "library", "time": "", "level": "error", "logger": "aiohttp", "message": "went wrong\n",
    }  # fmt: skip


def test_importing_is_cheap() -> None:
    code = "import sys, gangline.core.telemetry; print(sum(m.startswith(('opentelemetry', 'prometheus')) for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env={**os.environ})
    assert done.stdout.strip() == "0"


def test_the_page_lists_exactly_the_metrics_of_a_scheduler() -> None:
    t = telemetry.setup("scheduler")
    made: list[str] = []
    for kind in ("counter", "observable_counter", "histogram", "observable_gauge"):
        make = getattr(t._meter, f"create_{kind}")

        def note(name: str, *rest: Any, make: Any = make, kind: str = kind, **named: Any) -> Any:
            unit = rest[1] if kind.startswith("observable") else rest[0]
            made.append(name.replace(".", "_") + "_seconds" * (unit == "s") + "_total" * kind.endswith("counter"))
            return make(name, *rest, **named)

        setattr(t._meter, f"create_{kind}", note)
    Metrics(t, lambda: None)
    page = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
    listed = re.findall(r"^\| `(gangline_(?!agent_)\w+)`", page, re.MULTILINE)
    assert sorted(listed) == sorted([*made, "gangline_build_info"])
