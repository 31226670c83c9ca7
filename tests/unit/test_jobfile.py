"""The job file: what is accepted, and every bad input of RELIABILITY section 4.2 that concerns specs, by its number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gangline.core.model import jobfile
from gangline.core.model.jobfile import MAX_BYTES, parse_json_spec, parse_yaml, to_json
from gangline.core.model.jobresources import RESOURCES
from gangline.core.model.problems import BadJob, Problem
from gangline.core.model.spec import (
    ArraySpec,
    Checkpoint,
    Dependency,
    Elastic,
    Gang,
    JobSpec,
    Mount,
    Preemption,
    Resources,
    Restart,
    TopologyRequest,
)

DESIGN_EXAMPLE = """
name: llama-pretrain
queue: research/nlp
priority: 50                     # preemptible below 100 unless said otherwise
preemptible: true
gang: {ranks: 64, min_ranks: 48, ranks_per_node: 8}
resources: {gpus: 1, gpu_model: [H100, H200], cpus: 8, memory: 64GiB}
time_limit: 24h
command: [python, train.py]
image: null
workdir: /data/run
checkpoint: {path: /ckpt/llama, interval: 10m}
restart: {on_rank_failure: gang, on_node_failure: reschedule, max_restarts: 10, window: 24h, backoff: {initial: 1s, max: 5m}, hang_timeout: 15m, exit_codes: {fail: [2]}}
preemption: {signal: SIGTERM, grace: 60s}
on_disconnect: stop              # or keep
depends_on: []
"""  # noqa: E501


def refused(**fields: Any) -> list[Problem]:
    """Return the problems of a job that is good but for these fields."""
    with pytest.raises(BadJob) as caught:
        parse_json_spec({"command": ["true"], **fields})
    return caught.value.problems


def job(**fields: Any) -> JobSpec:
    return parse_json_spec({"command": ["true"], **fields})


def only(problems: list[Problem], pointer: str, code: str) -> Problem:
    assert [(p.pointer, p.code) for p in problems] == [(pointer, code)]
    return problems[0]


def refused_text(text: bytes | str) -> list[Problem]:
    with pytest.raises(BadJob) as caught:
        parse_json_spec(text)
    return caught.value.problems


def refused_yaml(text: bytes | str) -> list[Problem]:
    with pytest.raises(BadJob) as caught:
        parse_yaml(text, "job.yaml")
    return caught.value.problems


def test_design_example_is_read_whole() -> None:
    assert parse_yaml(DESIGN_EXAMPLE) == [
        JobSpec(
            name="llama-pretrain",
            queue="research/nlp",
            gang=Gang(64, 48, 8),
            resources=Resources(1, ("H100", "H200"), 8000, 65536),
            time_limit_s=86400.0,
            command=("python", "train.py"),
            workdir="/data/run",
            checkpoint=Checkpoint("/ckpt/llama", 600.0),
            restart=Restart(hang_timeout_s=900.0, fail_exit_codes=(2,)),
            preemption=Preemption("SIGTERM", 60.0),
        )
    ]


def test_smallest_job_has_the_defaults_of_the_spec() -> None:
    assert parse_json_spec(b'{"command": ["true"]}') == JobSpec(command=("true",))


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"priority": 100}, JobSpec(("true",), priority=100, preemptible=False)),
        ({"priority": 100, "preemptible": True}, JobSpec(("true",), priority=100)),
        ({"gang": {"ranks": 3}}, JobSpec(("true",), gang=Gang(3, 3))),
        ({"resources": {"gpus": 2, "gpu_model": "h100"}}, JobSpec(("true",), resources=Resources(2, ("H100",)))),
        ({"resources": {"cpus": 0.1, "memory": "1.5GiB"}}, JobSpec(("true",), resources=Resources(0, (), 100, 1536))),
        ({"time_limit": 90}, JobSpec(("true",), time_limit_s=90.0)),
        ({"time_limit": "1h30m"}, JobSpec(("true",), time_limit_s=5400.0)),
        ({"time_limit": "1d500ms"}, JobSpec(("true",), time_limit_s=86400.5)),
        ({"restart": {"signals": {"fail": ["SIGABRT", "SIGABRT"]}}}, JobSpec(("true",), restart=Restart(fail_signals=("SIGABRT",)))),
        ({"restart": {"hang_timeout": 0}}, JobSpec(("true",))),
        ({"workdir": "/data//run/./a/"}, JobSpec(("true",), workdir="/data/run/a")),
        ({"workdir": "/"}, JobSpec(("true",), workdir="/")),
        ({"checkpoint": {"path": "s3://bucket/run"}}, JobSpec(("true",), checkpoint=Checkpoint("s3://bucket/run"))),
        ({"env": {"LD_LIBRARY_PATH": "/cuda", "A": ""}}, JobSpec(("true",), env={"LD_LIBRARY_PATH": "/cuda", "A": ""})),
        ({"topology": {"required": "rack"}}, JobSpec(("true",), topology=TopologyRequest("rack"))),
        (
            {"topology": {"required": "example.org/Row-1", "preferred": "nvlink", "name": "ib"}},
            JobSpec(("true",), topology=TopologyRequest("example.org/Row-1", "nvlink", "ib")),
        ),
        ({"topology": {"required": "", "preferred": None}}, JobSpec(("true",))),
        ({"name": None, "env": None, "image": None, "mounts": [], "topology": {}, "user": ""}, JobSpec(("true",))),
    ],
)
def test_good_fields(fields: dict[str, Any], spec: JobSpec) -> None:
    read = parse_json_spec({"command": ["true"], **fields})
    assert read == spec
    assert parse_json_spec(to_json(read)) == read


def test_all_problems_at_once_each_with_its_place() -> None:
    text = "name: Llama\ngang:\n  ranks: 64\n  min_rank: 4\ncommand: [python, 8]\nenv: {RANK: '1'}\n"
    with pytest.raises(BadJob) as caught:
        parse_yaml(text, "job.yaml")
    assert [(p.line, p.column, p.pointer, p.code, p.nearest) for p in caught.value.problems] == [
        (1, 7, "/name", "GL-1105", "llama"),
        (4, 3, "/gang/min_rank", "GL-1101", "min_ranks"),
        (5, 19, "/command/1", "GL-1102", '"8"'),
        (6, 7, "/env/RANK", "GL-1107", ""),
    ]
    assert (
        str(caught.value)
        .splitlines()[1]
        .startswith('job.yaml:4:3: /gang/min_rank: "min_rank" is not a field of `gang`. Did you mean min_ranks?')
    )


def test_several_documents_are_several_jobs_and_report_together() -> None:
    assert len(parse_yaml("---\ncommand: [a]\n---\n# nothing\n---\ncommand: [b]\n")) == 2
    assert [(p.line, p.pointer) for p in refused_yaml("command: a\n---\ncommand: [b]\nnaem: x\n")] == [(1, "/command"), (4, "/naem")]


# ---------------------------------------------------------------- the rows of RELIABILITY 4.2


@pytest.mark.parametrize("text", [b"", b"   ", "", b"null", b"[]", b'"x"', b"1", b"\xff", b"{", b"{} {}"])
def test_b1_b2_not_a_job(text: bytes) -> None:
    assert refused_text(text)
    assert refused_yaml(text)


def test_b3_larger_than_256_kib() -> None:
    text = b'{"command": ["' + b"a" * MAX_BYTES + b'"]}'
    only(refused_text(text), "", "GL-1002")
    only(refused_yaml(text), "", "GL-1002")


def test_b7_duplicate_keys() -> None:
    only(refused_text(b'{"command": ["a"], "resources": {"gpus": 1, "gpus": 8}}'), "", "GL-1005")
    problem = only(refused_yaml("command: [a]\nresources: {gpus: 1, gpus: 8}"), "/resources/gpus", "GL-1005")
    assert (problem.line, problem.column) == (2, 22)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 10_000, "9" * 19, "1" + "0" * 5_000 + ".5"])
def test_b8_b9_numbers_beyond_json(number: str) -> None:
    assert refused_text(f'{{"command": ["a"], "time_limit": {number}}}')
    assert refused_yaml(f"command: [a]\ntime_limit: {number}")


def test_b9_huge_number_in_a_decoded_object() -> None:
    assert "about" in only(refused(priority=10**10_000), "/priority", "GL-1104").message


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 50_000, b'{"command": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"])
def test_b10_nesting(text: bytes) -> None:
    assert refused_text(text)
    assert refused_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "command: [a]\nenv: &e {A: b}",
        "command: &c [a]\nenv: *c",
        "command: [a]\nenv: {A: *x}",
        "a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\ncommand: [a]",
    ],
)
def test_b11_aliases_and_anchors(text: str) -> None:
    assert "GL-1003" in {p.code for p in refused_yaml(text)}


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!str", "!x", "!!binary"])
def test_b12_tags(tag: str) -> None:
    assert "GL-1003" in {p.code for p in refused_yaml(f"command: [a]\nname: {tag} 'x'")}


@pytest.mark.parametrize("value", ["0x10", "1_000", "no", "12:30:45", "2026-12-01", "010", "0b11", ".inf", ".nan", "1e3", "+1", "'8'", "on"])
def test_b13_values_that_yaml_readers_disagree_on(value: str) -> None:
    problem = only(refused_yaml(f"command: [a]\nresources: {{gpus: {value}}}"), "/resources/gpus", "GL-1102")
    assert problem.line == 2
    if value not in ("1e3", "'8'"):
        for field in ("name", "queue"):
            only(refused_yaml(f"command: [a]\n{field}: {value}"), f"/{field}", "GL-1102")


def test_b13_boolean_words() -> None:
    only(refused_yaml("command: [a]\npreemptible: no"), "/preemptible", "GL-1102")
    assert parse_yaml("command: [a]\npreemptible: false")[0].preemptible is False


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "a" * 65, "a" * 65_536, "a\0b", "a\n", "a\u202eb", "a\u200bb", "<img onerror>", "A", "-a", "a-", ".", " a", "é"],
)
def test_b14_to_b17_names(name: str) -> None:
    problem = only(refused(name=name), "/name", "GL-1105")
    assert problem.message.isprintable()
    assert len(problem.message) < 250


@pytest.mark.parametrize("gpus", [0, -1, 1.5, 1.0, "8", True, [], {}, 10**9])
def test_b19_b20_gpus(gpus: Any) -> None:
    assert only(refused(resources={"gpus": gpus}), "/resources/gpus", "GL-1104" if type(gpus) is int else "GL-1102").message


def test_b21_b22_gang() -> None:
    only(refused(gang={"ranks": 10**6}), "/gang/ranks", "GL-1104")
    only(refused(gang={"ranks": 4, "min_ranks": 5}), "/gang/min_ranks", "GL-1108")
    assert only(refused(gang={"ranks": 12, "ranks_per_node": 8}), "/gang/ranks", "GL-1108").nearest == "8"
    elastic = {"ranks": 16, "min_ranks": 8, "ranks_per_node": 2}
    assert parse_json_spec({"command": ["x"], "gang": elastic, "elastic": {"grow_after": "90s", "step": 4}}).elastic == Elastic(90.0, 4)
    only(refused(gang=elastic, elastic={"step": 3}), "/elastic/step", "GL-1108")
    only(refused(gang={"ranks": 16, "min_ranks": 8}, elastic={"step": 3}), "/elastic/step", "GL-1108")
    only(refused(gang={"ranks": 16}, elastic={"grow_after": "1m"}), "/elastic", "GL-1108")
    only(refused(elastic={"grow_after": "1m"}), "/elastic", "GL-1108")
    role = {"name": "server", "replicas": 4, "min_replicas": 2}
    only(refused(roles=[role], elastic={"step": 2}), "/elastic/step", "GL-1108")
    serving = parse_json_spec({"command": ["x"], "roles": [role], "elastic": {"grow_after": "9s"}})
    assert parse_json_spec(to_json(serving)).elastic == Elastic(9.0)
    only(refused(gang={"ranks": 0}), "/gang/ranks", "GL-1104")


def test_b23_priority() -> None:
    for priority in (2**63, -1, 1_000_001):
        only(refused(priority=priority), "/priority", "GL-1104")
    only(refused(priority=True), "/priority", "GL-1102")


def test_b24_unknown_field() -> None:
    problem = only(refused(comand=["a"]), "/comand", "GL-1101")
    assert "comand" in problem.message
    assert problem.nearest == "command"
    only(refused(**{"a/b~c": 1}), "/a~1b~0c", "GL-1101")


@pytest.mark.parametrize("user", ["root", 0, "0", "000", -1, 2**32 - 1, "a b", "-x", "Ümlaut", "x" * 33])
def test_b32_users_that_are_refused(user: object) -> None:
    only(refused(user=user), "/user", "GL-1105")


def test_b32_users() -> None:
    assert job(user=1000).user == "1000"
    assert job(user="ml-train_1").user == "ml-train_1"
    only(refused(user=True), "/user", "GL-1102")


@pytest.mark.parametrize("image", ["a b", "-rm", "x;rm", "$(x)", "a\nb", "x" * 600])
def test_b41_images_that_are_refused(image: str) -> None:
    only(refused(image=image), "/image", "GL-1105")


def test_what_is_said_of_containers_needs_an_image() -> None:
    assert job(image="registry.example:5000/a/b@sha256:0123", shm_size="8GiB").shm_mib == 8192
    only(refused(shm_size="8GiB"), "/shm_size", "GL-1108")


def test_mounts() -> None:
    found = job(mounts=[{"source": "data/sub", "target": "/data//x/", "read_only": True}, {"source": "/scratch"}]).mounts
    assert found == (Mount("data/sub", "/data/x", read_only=True), Mount("/scratch", "/scratch"))


@pytest.mark.parametrize(
    ("mount", "place", "code"),
    [
        ({"source": "data/../x", "target": "/d"}, "/source", "GL-1105"),
        ({"source": "../x", "target": "/d"}, "/source", "GL-1105"),
        ({"source": "/a/../b"}, "/source", "GL-1105"),
        ({"source": "/a:b"}, "/source", "GL-1105"),
        ({"source": "/a,readonly"}, "/source", "GL-1105"),
        ({"source": "data"}, "", "GL-1103"),
        ({"target": "/d"}, "", "GL-1103"),
        ({"source": "data", "target": "/"}, "/target", "GL-1105"),
        ({"source": "data", "target": "/proc/self"}, "/target", "GL-1105"),
        ({"source": "data", "target": "/dev"}, "/target", "GL-1105"),
        ({"source": "data", "target": "d"}, "/target", "GL-1105"),
        ({"source": "data", "target": "/d", "ro": True}, "/ro", "GL-1101"),
    ],
)
def test_mounts_that_are_refused(mount: dict[str, object], place: str, code: str) -> None:
    only(refused(mounts=[mount]), f"/mounts/0{place}", code)


def test_mounts_that_contradict() -> None:
    only(refused(mounts=[{"source": "a", "target": "/d"}, {"source": "b", "target": "/d"}]), "/mounts/1/target", "GL-1108")
    only(refused(mounts=[{"source": "a", "target": "/d", "read_only": True}], checkpoint={"path": "/d/run"}), "/checkpoint/path", "GL-1108")
    inner = {"source": "b", "target": "/d/run"}
    assert job(mounts=[{"source": "a", "target": "/d", "read_only": True}, inner], checkpoint={"path": "/d/run"}).checkpoint.path == "/d/run"


@pytest.mark.parametrize(
    ("asked", "resources"),
    [
        ({"gpu_share": 0.5}, Resources(gpu_share_milli=500)),
        ({"gpu_share": 0.01, "gpu_model": "T4"}, Resources(gpu_share_milli=10, gpu_models=("T4",))),
        ({"gpu_memory": "20GiB"}, Resources(gpu_memory_mib=20_480)),
        ({"mig": "1G.10GB"}, Resources(mig="1g.10gb", mig_count=1)),
        ({"mig": "3g.40gb", "mig_count": 2, "gpu_model": ["H100", "A100"]}, Resources(mig="3g.40gb", mig_count=2, gpu_models=("H100", "A100"))),
        ({"gpus": 1, "gpu_model_mix": True}, Resources(gpus=1, gpu_model_mix=True)),
        ({"gpus": 1, "gpu_share": None, "mig": ""}, Resources(gpus=1)),
    ],
)
def test_parts_of_gpus(asked: dict[str, Any], resources: Resources) -> None:
    spec = parse_json_spec({"command": ["true"], "resources": asked})
    assert spec.resources == resources
    assert parse_json_spec(to_json(spec)) == spec


@pytest.mark.parametrize(
    ("asked", "field", "code", "said", "nearest"),
    [
        ({"gpu_share": 1}, "gpu_share", "GL-1104", "Whole ones are asked for by `gpus`", ""),
        ({"gpu_share": 0}, "gpu_share", "GL-1104", "from 0.01 to 0.99", ""),
        ({"gpu_share": 0.333}, "gpu_share", "GL-1104", "too fine", "0.33"),
        ({"gpu_share": "half"}, "gpu_share", "GL-1102", "a number", ""),
        ({"gpu_memory": 20}, "gpu_memory", "GL-1105", "has no unit", "20GiB"),
        ({"mig": "1g.11gb"}, "mig", "GL-1106", "known are 1g.5gb", "1g.10gb"),
        ({"mig": "1g.5gb", "gpu_model": "H100"}, "mig", "GL-1108", "H100 has no MIG profile 1g.5gb; it has 1g.10gb", ""),
        ({"mig": "1g.10gb", "mig_count": 0}, "mig_count", "GL-1104", "from 1 to 112", ""),
        ({"mig_count": 2}, "mig_count", "GL-1108", "but no mig", ""),
        ({"gpu_model_mix": True}, "gpu_model_mix", "GL-1108", "but no GPUs", ""),
    ],
)
def test_parts_of_gpus_that_make_no_sense(asked: dict[str, Any], field: str, code: str, said: str, nearest: str) -> None:
    problem = only(refused(resources=asked), f"/resources/{field}", code)
    assert said in problem.message
    assert problem.nearest in (nearest, "1g.10gb")


def test_gpus_are_asked_for_in_one_way_and_all_others_are_named() -> None:
    problems = refused(resources={"gpus": 1, "gpu_share": 0.5, "gpu_memory": "1GiB", "mig": "1g.10gb"})
    assert [p.pointer for p in problems] == ["/resources/gpu_share", "/resources/gpu_memory", "/resources/mig"]
    assert {p.code for p in problems} == {"GL-1108"}


def test_topologies_that_say_nothing() -> None:
    only(refused(topology={"name": "ib"}), "/topology", "GL-1108")
    only(refused(topology={"required": "a b"}), "/topology/required", "GL-1105")
    only(refused(topology={"preferred": 3}), "/topology/preferred", "GL-1102")
    only(refused(topology={"level": "rack"}), "/topology/level", "GL-1101")
    only(refused(topology="rack"), "/topology", "GL-1102")


def test_b27_size_of_env() -> None:
    only(refused(env={f"V{i}": "x" for i in range(10_000)}), "/env", "GL-1110")
    only(refused(env={"A": "x" * 1_000_000}), "/env/A", "GL-1110")
    only(refused(env={f"V{i}": "x" * 30_000 for i in range(10)}), "/env", "GL-1110")


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "LD_AUDIT", "PATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
     "NVIDIA_VISIBLE_DEVICES", "GANGLINE_JOB", "TORCHELASTIC_RUN_ID"],
)  # fmt: skip
def test_b28_reserved_variables(name: str) -> None:
    only(refused(env={name: "x"}), f"/env/{name}", "GL-1107")


@pytest.mark.parametrize("name", ["", "A=B", "1A", "A B", "Ä", "A\0", "A" * 129])
def test_b28_names_of_variables(name: str) -> None:
    assert [p.code for p in refused(env={name: "x"})] == ["GL-1105"]


def test_b29_env_values() -> None:
    only(refused(env={"A": "x\0y"}), "/env/A", "GL-1111")
    only(refused(env={"A": "\ud800"}), "/env/A", "GL-1111")
    for value in (8, True, None, [], 1.5):
        only(refused(env={"A": value}), "/env/A", "GL-1102")


@pytest.mark.parametrize(
    ("command", "pointer", "code"),
    [
        ([], "/command", "GL-1103"),
        (None, "", "GL-1103"),
        ("python train.py", "/command", "GL-1102"),
        (["a\0"], "/command/0", "GL-1111"),
        ([""], "/command/0", "GL-1103"),
        (["a"] * 200_000, "/command", "GL-1110"),
        (["a", "x" * 131_072], "/command/1", "GL-1110"),
        (["a", 8], "/command/1", "GL-1102"),
        (["a", None], "/command/1", "GL-1102"),
        ({"a": 1}, "/command", "GL-1102"),
    ],
)
def test_b30_command(command: Any, pointer: str, code: str) -> None:
    only(refused(command=command), pointer, code)


@pytest.mark.parametrize("workdir", ["data", "../data", "/data/../etc", "/..", "/a\nb", "/a\u202eb", "~/x", 5])
def test_b31_workdir(workdir: Any) -> None:
    assert refused(workdir=workdir)[0].pointer == "/workdir"
    assert refused(checkpoint={"path": workdir})[0].pointer == "/checkpoint/path"


@pytest.mark.parametrize("limit", [0, -5, 1e12, 10**30, "0s", "-5s", "12:30:45", "5 minutes", "1m1h", "1m1m", "24H", True, [], float("inf")])
def test_b33_time_limit(limit: Any) -> None:
    assert [p.pointer for p in refused(time_limit=limit)] == ["/time_limit"]


def test_b41_arguments_stay_arguments() -> None:
    assert parse_json_spec({"command": ["echo", ";rm -rf /"]}).command == ("echo", ";rm -rf /")


@pytest.mark.parametrize("queue", ["", "/", "a/", "/a", "a//b", "a/../b", "A", "a/b/c/d/e/f/g/h/i", 7, "a" * 300])
def test_queues(queue: Any) -> None:
    assert refused(queue=queue)[0].pointer == "/queue"


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"resources": {"memory": "64G"}}, "/resources/memory"),
        ({"resources": {"memory": 64}}, "/resources/memory"),
        ({"resources": {"memory": "0GiB"}}, "/resources/memory"),
        ({"resources": {"memory": "65TiB"}}, "/resources/memory"),
        ({"resources": {"cpus": 0}}, "/resources/cpus"),
        ({"resources": {"cpus": 0.001}}, "/resources/cpus"),
        ({"resources": {"cpus": 0.125}}, "/resources/cpus"),
        ({"resources": {"cpus": float("nan")}}, "/resources/cpus"),
        ({"resources": {"gpu_model": "H100"}}, "/resources/gpu_model"),
        ({"resources": {"gpus": 1, "gpu_model": ["H100", "h100"]}}, "/resources/gpu_model/1"),
        ({"resources": {"gpus": 1, "gpu_model": ""}}, "/resources/gpu_model"),
        ({"resources": []}, "/resources"),
        ({"restart": {"backoff": {"initial": "10m", "max": "5m"}}}, "/restart/backoff"),
        ({"restart": {"exit_codes": {"fail": [0]}}}, "/restart/exit_codes/fail/0"),
        ({"restart": {"exit_codes": {"fail": [None]}}}, "/restart/exit_codes/fail/0"),
        ({"restart": {"exit_codes": {"fail": 2}}}, "/restart/exit_codes/fail"),
        ({"restart": {"signals": {"fail": ["ABRT"]}}}, "/restart/signals/fail/0"),
        ({"preemption": {"signal": "SIGKILL"}}, "/preemption/signal"),
        ({"preemption": {"grace": "2h"}}, "/preemption/grace"),
        ({"on_disconnect": "stpo"}, "/on_disconnect"),
        ({"preemptible": "true"}, "/preemptible"),
    ],
)
def test_other_bad_fields(fields: dict[str, Any], pointer: str) -> None:
    assert [p.pointer for p in refused(**fields)] == [pointer]


def test_sizes_without_their_unit_say_what_was_meant() -> None:
    for written in ("64G", "64gb", "64Gi", "64gib", 64):
        assert refused(resources={"memory": written})[0].nearest == "64GiB"


def test_number_of_problems_is_bounded() -> None:
    assert len(refused(env={f"GANGLINE_{i}": "x" for i in range(500)})) == 100
    assert len(refused_yaml("command: [a]\nenv:\n" + "  A: x\n" * 500)) == 100


def test_manual_has_every_field_and_its_examples_are_jobs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "jobfile.md").read_text()
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        assert parse_yaml(block)
    listed = set(re.findall(r"^\| `([a-z_.]+)` \|", text, re.MULTILINE))
    sections = ("gang", "elastic", "resources", "topology", "checkpoint", "restart", "preemption", "health")
    fields = {name for name in jobfile._JOB if name not in sections}
    fields |= {f"roles.{name}" for name in (*jobfile._ROLE, "roles")}
    nested = {
        "gang": jobfile._GANG, "resources": RESOURCES, "topology": jobfile._TOPOLOGY, "checkpoint": jobfile._CHECKPOINT,
        "preemption": jobfile._PREEMPTION, "elastic": jobfile._ELASTIC, "health": jobfile._HEALTH,
    }  # fmt: skip
    fields |= {f"{section}.{name}" for section, names in nested.items() for name in names}
    fields |= {f"restart.{name}" for name in jobfile._RESTART if name not in ("backoff", "exit_codes", "signals")}
    assert listed == fields | {"restart.backoff.initial", "restart.backoff.max", "restart.exit_codes.fail", "restart.signals.fail"}


# ---------------------------------------------------------------- when a job takes part


def test_when_a_job_takes_part() -> None:
    spec = parse_json_spec({
        "command": ["x"], "array": "0-9%2", "depends_on": ["prep", "after_any:sweep.3"], "hold": True, "begin": "90m",
        "deadline": "2030-06-01T12:00:00.250+02:00",
    })  # fmt: skip
    assert spec.array == ArraySpec(((0, 9, 1),), 2)
    assert spec.depends_on == (Dependency("prep"), Dependency("sweep.3", "after_any"))
    assert (spec.hold, spec.begin_at_ms, spec.begin_after_s) == (True, 0, 5400.0)
    assert (spec.deadline_ms, spec.deadline_after_s) == (1_906_538_400_250, 0.0)
    words = to_json(spec)
    assert words["deadline"] == "2030-06-01T10:00:00.250Z"
    assert parse_json_spec(words) == spec


def test_arrays_that_are_none() -> None:
    assert only(refused(array=10), "/array", "GL-1102").nearest == '"0-9"'
    only(refused(array=[1]), "/array", "GL-1102")
    only(refused(array="9-1"), "/array", "GL-1105")
    assert parse_json_spec({"command": ["x"], "array": ""}).array is None


def test_dependencies_that_are_none() -> None:
    assert only(refused(depends_on=["afterok:prep"]), "/depends_on/0", "GL-1106").nearest == "after_ok:prep"
    assert only(refused(depends_on=["after_okay:prep"]), "/depends_on/0", "GL-1106").nearest == "after_ok:prep"
    only(refused(depends_on=["prep", "after_any:prep"]), "/depends_on/1", "GL-1108")
    only(refused(depends_on=["Not A Job"]), "/depends_on/0", "GL-1105")
    only(refused(depends_on=[3]), "/depends_on/0", "GL-1102")
    only(refused(depends_on=[f"j{i}" for i in range(101)]), "/depends_on", "GL-1110")
    assert parse_json_spec({"command": ["x"], "depends_on": "prep"}).depends_on == (Dependency("prep"),)


def test_times_that_are_none() -> None:
    assert only(refused(begin="2030-06-01T12:00:00"), "/begin", "GL-1105").nearest == "2030-06-01T12:00:00Z"
    only(refused(begin="2030-06-01"), "/begin", "GL-1105")
    only(refused(begin="2030-13-01T12:00:00Z"), "/begin", "GL-1105")
    only(refused(begin="9999-12-31T23:59:59-23:59"), "/begin", "GL-1104")
    only(refused(begin="tomorrow"), "/begin", "GL-1105")
    only(refused(begin="400d"), "/begin", "GL-1104")
    only(refused(begin=True), "/begin", "GL-1102")
    assert "RFC 3339" in only(refused_yaml("command: [x]\nbegin: 2030-06-01T12:00:00Z"), "/begin", "GL-1102").message
    only(refused(begin="2h", deadline="1h"), "/deadline", "GL-1108")
    only(refused(begin="1h", deadline="2h", time_limit="90m"), "/deadline", "GL-1108")
    only(refused(begin="2030-06-01T12:00:00Z", deadline="2030-06-01T12:00:00Z"), "/deadline", "GL-1108")
