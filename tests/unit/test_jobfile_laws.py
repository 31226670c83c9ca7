"""Laws of the job file: nothing but BadJob ever comes out of hostile input, and what is written out is read back."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.core.model.jobfile import parse_json_spec, parse_yaml, to_json
from gangline.core.model.problems import BadJob
from gangline.core.model.units import format_duration, format_size, parse_duration, parse_size

WORDS = st.sampled_from(
    ["command", "name", "queue", "gang", "ranks", "min_ranks", "resources", "gpus", "gpu_model", "cpus", "memory", "time_limit", "env",
     "workdir", "checkpoint", "path", "interval", "restart", "backoff", "initial", "signals", "fail", "preemption", "grace", "priority", "roles",
     "user", "image", "mounts", "source", "target", "shm_size"]
)  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["1h", "64GiB", "SIGTERM", "/a", "gang"])
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=5), max_leaves=20
)
FRAGMENTS = st.sampled_from(
    ["command", ": ", "[", "]", "{", "}", "\n", "  ", "- ", "&a ", "*a", "!!str ", "? ", "<<", "'", '"', "|", ">", "---\n", "...\n", "#", ",",
     "no", "0x1", "12:30:45", "gang", "ranks", "8", "%TAG ! x\n", "\t", "\u2028", "\x00", "\ufeff", "é", "null", "~", "%YAML 9.9\n"]
)  # fmt: skip


def only_bad_job(parse: Any, source: Any) -> None:
    with contextlib.suppress(BadJob):
        parse(source)


@given(JSON)
@settings(max_examples=300, deadline=None)
def test_objects(value: Any) -> None:
    only_bad_job(parse_json_spec, value)
    only_bad_job(parse_yaml, json.dumps(value))


@given(st.dictionaries(WORDS, JSON, max_size=6))
@settings(max_examples=300, deadline=None)
def test_mappings_of_known_words(value: dict[str, Any]) -> None:
    only_bad_job(parse_json_spec, {"command": ["a"], **value})
    only_bad_job(parse_json_spec, json.dumps(value).encode())


@given(st.binary(max_size=200) | st.text(max_size=100))
@settings(max_examples=300, deadline=None)
def test_bytes_and_texts(source: bytes | str) -> None:
    only_bad_job(parse_json_spec, source)
    only_bad_job(parse_yaml, source)


@given(st.lists(FRAGMENTS, max_size=25).map("".join))
@settings(max_examples=400, deadline=None)
def test_scraps_of_yaml(source: str) -> None:
    only_bad_job(parse_yaml, source)


DURATIONS = st.integers(1_000, 3_600_000).map(lambda ms: ms / 1000)
SPECS = st.fixed_dictionaries(
    {"command": st.lists(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1), min_size=1, max_size=4)},
    optional={
        "name": st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,10}[a-z0-9])?", fullmatch=True),
        "priority": st.integers(0, 1_000_000),
        "preemptible": st.booleans(),
        "gang": st.fixed_dictionaries(
            {"ranks": st.integers(1, 99).map(lambda n: n * 4)}, optional={"min_ranks": st.just(4), "ranks_per_node": st.just(2)}
        ),
        "resources": st.one_of(*(
            st.fixed_dictionaries(
                devices, optional={"cpus": st.integers(1, 9999).map(lambda n: n / 100), "memory": st.just("3TiB"), "gpu_model": st.just("a b")},
            )
            for devices in (
                {"gpus": st.integers(1, 64)}, {"gpu_share": st.integers(1, 99).map(lambda n: n / 100)}, {"gpu_memory": st.just("20GiB")},
                {"mig": st.sampled_from(["1g.5gb", "1g.10gb+me", "7g.186gb"]), "mig_count": st.integers(1, 7), "gpu_model_mix": st.booleans()},
            )
        )),
        "topology": st.fixed_dictionaries(
            {"required": st.sampled_from(["rack", "a.b/c"])}, optional={"preferred": st.just("nvlink"), "name": st.just("ib")}
        ),
        "time_limit": DURATIONS,
        "checkpoint": st.fixed_dictionaries({"path": st.just("/x"), "interval": DURATIONS}),
        "restart": st.fixed_dictionaries({}, optional={"hang_timeout": DURATIONS, "window": DURATIONS, "exit_codes": st.just({"fail": [3]})}),
        "preemption": st.fixed_dictionaries({"grace": DURATIONS, "signal": st.just("SIGUSR1")}),
        "user": st.sampled_from(["nobody", 1000]),
        "image": st.just("a/b:1"),
        "mounts": st.just([{"source": "data/x", "target": "/data", "read_only": True}, {"source": "/scratch"}]),
    },
)


@given(SPECS)
@settings(max_examples=200, deadline=None)
def test_what_is_written_out_is_read_back(value: dict[str, Any]) -> None:
    spec = parse_json_spec(value)
    assert parse_json_spec(json.dumps(to_json(spec)).encode()) == spec


@given(st.integers(0, 10**10))
def test_units_read_what_they_write(number: int) -> None:
    assert round((parse_duration(format_duration(number / 1000)) or 0) * 1000) == number
    assert parse_size(format_size(number)) == number
