"""Metrics, traces and log lines of one process: `setup` and `structured_logging`.

Metrics go through the OpenTelemetry SDK and come out as Prometheus text. Spans cost next to nothing until somebody asks for them, with
`GANGLINE_TRACE_FILE` (JSON lines) or `OTEL_EXPORTER_OTLP_ENDPOINT` (and the `otlp` extra); then they wait in a bounded queue for a thread
of their own, so that a dead collector costs its spans and nothing else.

Traces do not cross the log as parents and children: an entry has many causes and many effects, hours apart. Instead the span that appends
entry N has ids that follow from the cluster and N, so every other span that has to do with that entry links to it without being told more
than the index, in whatever process it is.

Everything heavy is imported on the first `setup`: a process that only logs pays for neither SDK.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Observation
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Link, Span
    from prometheus_client import CollectorRegistry

SpanKind = Literal["submit", "append", "fold", "decide", "project", "prepare", "start"]
Labels = Mapping[str, str]

#: spans that wait for the exporter; more are dropped
MAX_QUEUED_SPANS = 2048

#: how long a process that ends waits for the last spans to be written
FLUSH_S = 2.0

#: a duration from a network round trip to a stuck disk
SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
#: a duration that people wait for
LONG_SECONDS_BUCKETS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 1800.0, 7200.0)

#: longest text of one field in a log line
MAX_FIELD = 8192

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
#: keys of a log line after event, time and level, in this order, when they are given
_FIXED_KEYS = ("index", "revision", "epoch", "gang", "generation", "rank", "node", "queue")


def setup(service: str, **resource: str) -> Telemetry:
    """Return the telemetry of a process that is called `service`; `resource` says more about it (cluster, instance).

    Several may live in one process: nothing global is touched.
    """
    return Telemetry(service, resource)


class Telemetry:
    """Instruments and spans of one process."""

    def __init__(self, service: str, resource: Mapping[str, str]) -> None:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource
        from prometheus_client import CollectorRegistry, ProcessCollector

        self.service = service
        #: what is wrong with the configuration, for the caller to log
        self.warnings: list[str] = []
        self._namespace = resource.get("cluster", "")
        self._resource = Resource({"service.name": service, **resource})
        self._registry: CollectorRegistry = CollectorRegistry()
        reader = PrometheusMetricReader(scope_info_enabled=False, registry=self._registry)
        self._metrics = MeterProvider([reader], resource=self._resource, shutdown_on_exit=False)
        self._meter = self._metrics.get_meter("gangline")
        ProcessCollector(registry=self._registry)
        build = {"version": _version(), "python": ".".join(map(str, sys.version_info[:3])), "service": service}
        self.gauge("gangline.build.info", "Version of the running code.", lambda: [(1, build)])
        self._provider: TracerProvider | None = None
        self._ids: _Ids | None = None
        exporter = _exporter_from_environment(self.warnings)
        if exporter is not None:
            self.trace_to(exporter)

    # ---------------------------------------------------------------- metrics

    def counter(self, name: str, description: str, unit: str = "") -> Counter:
        """Return a counter; `gangline.log.appends` is read as `gangline_log_appends_total`."""
        return self._meter.create_counter(name, unit, description)

    def histogram(self, name: str, description: str, buckets: Sequence[float] = SECONDS_BUCKETS, unit: str = "s") -> Histogram:
        """Return a histogram; unit "s" adds `_seconds` to the name."""
        return self._meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=list(buckets))

    def gauge(self, name: str, description: str, read: Callable[[], Iterable[tuple[float, Labels]]], unit: str = "") -> None:
        """Have `read` called at each scrape; labels that it no longer gives are gone from the answer."""
        self._meter.create_observable_gauge(name, [_observe(read)], unit, description)

    def sums(self, name: str, description: str, read: Callable[[], Iterable[tuple[float, Labels]]], unit: str = "") -> None:
        """Have `read` called at each scrape for the totals of a counter that somebody else keeps."""
        self._meter.create_observable_counter(name, [_observe(read)], unit, description)

    def prometheus(self) -> bytes:
        """Return every metric in the Prometheus text format. Reads memory only."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    # ---------------------------------------------------------------- traces

    @property
    def tracing(self) -> bool:
        """Spans go somewhere."""
        return self._provider is not None

    def span(self, kind: SpanKind, index: int = 0, traceparent: str = "", **attributes: str | int | float) -> _NoSpan:
        """Return a context manager around a piece of work that has to do with log entry `index` (0: not known yet, see `at`).

        `traceparent` is the header of a client (W3C trace context): the span becomes a child of the client's.
        """
        if self._provider is None:
            return _NO_SPAN
        return _LiveSpan(self, kind, index, traceparent, attributes)

    def trace_to(self, exporter: SpanExporter) -> None:
        """Send spans to `exporter` from now on, from a bounded queue in a thread of its own."""
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._ids = _Ids(self._namespace)
        provider = TracerProvider(resource=self._resource, id_generator=self._ids.generator(), shutdown_on_exit=False)
        queue = BatchSpanProcessor(exporter, MAX_QUEUED_SPANS, schedule_delay_millis=1000, max_export_batch_size=MAX_QUEUED_SPANS // 4)
        provider.add_span_processor(queue)
        self._tracer = provider.get_tracer("gangline")
        self._provider = provider

    def shutdown(self) -> None:
        """Write what is queued, for at most FLUSH_S, and stop. A collector that does not answer delays nothing longer."""
        provider, self._provider = self._provider, None
        if provider is not None:
            flusher = threading.Thread(target=provider.shutdown, name="telemetry-flush", daemon=True)
            flusher.start()
            flusher.join(FLUSH_S)
        self._metrics.shutdown()


class _NoSpan:
    """A span that nobody sees."""

    __slots__ = ()

    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def at(self, index: int) -> None:
        """The work turned out to belong to log entry `index`."""

    def set(self, key: str, value: str | int | float) -> None:
        """Set an attribute."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, empty when nothing is traced."""
        return ""


_NO_SPAN = _NoSpan()


class _LiveSpan(_NoSpan):
    """A span that is exported when it ends."""

    __slots__ = ("_attributes", "_current", "_index", "_kind", "_span", "_telemetry", "_traceparent")

    def __init__(self, telemetry: Telemetry, kind: SpanKind, index: int, traceparent: str, attributes: dict[str, Any]) -> None:
        self._telemetry = telemetry
        self._kind = kind
        self._index = index
        self._traceparent = traceparent
        self._attributes = attributes

    def __enter__(self) -> _LiveSpan:
        from opentelemetry.trace import use_span

        attributes = {"gangline.index": self._index} if self._index else {}
        ids = self._telemetry._ids
        assert ids is not None
        links: list[Link] = []
        if self._kind == "append":
            ids.force(self._index)
        elif self._index:
            links = [ids.link(self._index)]
        self._span: Span = self._telemetry._tracer.start_span(
            self._kind, context=_remote_context(self._traceparent), attributes=attributes | self._attributes, links=links
        )
        self._current = use_span(self._span, end_on_exit=True)
        self._current.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._current.__exit__(*exc)

    def at(self, index: int) -> None:
        """The work turned out to belong to log entry `index`."""
        ids = self._telemetry._ids
        assert ids is not None
        self._span.set_attribute("gangline.index", index)
        link = ids.link(index)
        self._span.add_link(link.context)

    def set(self, key: str, value: str | int | float) -> None:
        """Set an attribute."""
        self._span.set_attribute(key, value)

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"


class _Ids:
    """Span ids: random, but for the span that appends an entry, whose ids follow from the cluster and the index."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._forced = threading.local()

    def force(self, index: int) -> None:
        """The next span of this thread appends entry `index`."""
        self._forced.ids = self._of(index)

    def link(self, index: int) -> Link:
        """Return a link to the span that appended entry `index`, wherever that was."""
        from opentelemetry.trace import Link, SpanContext, TraceFlags

        trace_id, span_id = self._of(index)
        return Link(SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)))

    def generator(self) -> Any:
        """Return what the SDK asks for ids."""
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        forced = self._forced

        class Generator(RandomIdGenerator):
            """Gives the forced ids once: the SDK asks for the trace id and then for the span id."""

            def generate_trace_id(self) -> int:
                ids = getattr(forced, "ids", None)
                return ids[0] if ids else super().generate_trace_id()

            def generate_span_id(self) -> int:
                ids = getattr(forced, "ids", None)
                if not ids:
                    return super().generate_span_id()
                forced.ids = None
                return int(ids[1])

        return Generator()

    def _of(self, index: int) -> tuple[int, int]:
        digest = hashlib.blake2b(f"{self._namespace}/{index}".encode(), digest_size=24).digest()
        return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1


def _remote_context(traceparent: str) -> Any:
    """Return the context of a W3C traceparent header; an empty one, so that no span becomes a child by accident, when it is none."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context()) if traceparent else Context()


def _observe(read: Callable[[], Iterable[tuple[float, Labels]]]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    from opentelemetry.metrics import Observation

    return lambda _options: [Observation(value, dict(labels)) for value, labels in read()]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gangline")
    except PackageNotFoundError:
        return "unknown"


def _exporter_from_environment(warnings: list[str]) -> SpanExporter | None:
    if path := os.environ.get("GANGLINE_TRACE_FILE"):
        return _file_exporter(path)
    if not (endpoint := os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # type: ignore[import-not-found, unused-ignore]
            OTLPSpanExporter,
        )
    except ImportError:
        warnings.append(f"OTEL_EXPORTER_OTLP_ENDPOINT is {endpoint}, but the exporter is not installed: pip install 'gangline[otlp]'")
        return None
    exporter: SpanExporter = OTLPSpanExporter(timeout=5)
    return exporter


def _file_exporter(path: str) -> SpanExporter:
    """Return an exporter that appends one JSON object a span to the file; several processes may share it."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class FileExporter(SpanExporter):
        """Appends whole lines, so that lines of several processes do not mix."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            data = b"".join(json.dumps(_span_line(s)).encode() + b"\n" for s in spans)
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
            except OSError:
                return SpanExportResult.FAILURE
            try:
                return SpanExportResult.SUCCESS if os.write(fd, data) == len(data) else SpanExportResult.FAILURE
            except OSError:
                return SpanExportResult.FAILURE
            finally:
                os.close(fd)

    return FileExporter()


def _span_line(span: Any) -> dict[str, Any]:
    own = span.get_span_context()
    return {
        "name": span.name,
        "service": span.resource.attributes.get("service.name", ""),
        "trace_id": f"{own.trace_id:032x}",
        "span_id": f"{own.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
        "start_ns": span.start_time,
        "duration_ns": span.end_time - span.start_time,
        "attributes": dict(span.attributes or {}),
        "links": [{"trace_id": f"{li.context.trace_id:032x}", "span_id": f"{li.context.span_id:016x}"} for li in span.links],
        "error": span.status.description or "",
    }


# ---------------------------------------------------------------- log lines


def structured_logging(level: str = "info", stream: IO[str] | None = None, *, libraries: bool = False, **fields: Any) -> Log:
    """Return a logger of JSON lines on `stream` (stderr when None); `fields` stand in every line.

    With `libraries`, what other packages log from warnings up is written as such lines too (event `library`).
    """
    if level not in _LEVELS:
        raise ValueError(f"log level {level!r}; one of {', '.join(_LEVELS)}")
    log = Log(stream, _LEVELS[level], fields)
    if libraries:
        root = logging.getLogger()
        root.handlers[:] = [_LibraryHandler(log)]
        root.setLevel(logging.WARNING)
    return log


#: `json.dumps` would make one for each line
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Log:
    """Writes one line an event: `log.info("append", index=7, epoch=3, message="…")`. Never raises."""

    __slots__ = ("_fields", "_level", "_stream")

    def __init__(self, stream: IO[str] | None, level: int, fields: Mapping[str, Any]) -> None:
        self._stream = stream
        self._level = level
        self._fields = dict(fields)

    def bind(self, **fields: Any) -> Log:
        """Return a logger with these fields in every line besides its own."""
        return Log(self._stream, self._level, self._fields | fields)

    def debug(self, event: str, **fields: Any) -> None:
        """For whoever hunts a fault."""
        if self._level <= 10:
            self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Something of interest happened."""
        if self._level <= 20:
            self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something that a person should look at in the next days."""
        if self._level <= 30:
            self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Something that a person should look at now. An exception in `error` brings its traceback along."""
        cause = fields.get("error")
        if isinstance(cause, BaseException):
            fields["traceback"] = "".join(traceback.format_exception(cause))[-MAX_FIELD:]
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        line = log_line(level, event, {**self._fields, **fields} if self._fields else fields, time.time_ns())
        try:
            stream = self._stream or sys.stderr
            stream.write(line)
            stream.flush()
        except (OSError, ValueError):  # nobody reads, or the stream is closed: a log line is not worth a crash
            pass


def log_line(level: str, event: str, fields: Mapping[str, Any], at_ns: int) -> str:
    """Return one line of JSON, ASCII only: control, invisible and bidirectional characters come out as escapes."""
    moment = datetime.fromtimestamp(at_ns // 1_000_000 / 1000, UTC)
    out: dict[str, Any] = {"event": event, "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"), "level": level}
    for key in _FIXED_KEYS:
        if key in fields:
            out[key] = _plain(fields[key])
    for key, value in fields.items():
        if key not in out:
            out[key] = _plain(value)
    return _ENCODER.encode(out) + "\n"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, BaseException):
        value = f"{type(value).__name__}: {value}"
    if isinstance(value, bytes):
        value = value.hex()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    text = str(value)
    return text if len(text) <= MAX_FIELD else text[: MAX_FIELD - 1] + "…"


class _LibraryHandler(logging.Handler):
    """Turns records of the standard library's logging into our lines."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        write = self._log.error if record.levelno >= logging.ERROR else self._log.warning
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            message = str(record.msg)
        extra = {"error": record.exc_info[1]} if record.exc_info and record.exc_info[1] else {}
        write("library", logger=record.name, message=message, **extra)
