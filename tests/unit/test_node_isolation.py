"""The decisions about isolation without a kernel: which control groups there are, the node's file, what storage a job wants."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.core.model.documents import DesiredRank
from gangline.core.model.problems import BadJob
from gangline.core.model.spec import Checkpoint, JobSpec, Mount, Resources
from gangline.nodeagent import cgroups, nodefile, storage
from gangline.nodeagent.cgroups import Layout, Limits
from gangline.nodeagent.isolation import limits_of
from gangline.nodeagent.nodefile import NodeRules, RankRules, Volume


def mount_line(kind: str, point: Path | str, options: str = "rw", root: str = "/") -> str:
    return f"30 20 0:30 {root} {point} rw,nosuid - {kind} {kind} {options}\n"


def test_v2(tmp_path: Path) -> None:
    own = tmp_path / "system.slice/gangline.service"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    layout = cgroups.detect(mount_line("cgroup2", tmp_path), "0::/system.slice/gangline.service\n")
    assert layout == Layout(str(own), ("memory", "pids", "cpu", "io"), devices=str(own))
    assert layout.words == "v2: memory, pids, cpu, io"
    groups = layout.of_rank("gangline-x", "j@1.0", Limits(memory_mib=64, pids=9, cpu_quota_milli=1500))
    assert [(g.base, g.base_writes, g.path) for g in groups] == [
        (f"{own}/gangline-x", (("cgroup.subtree_control", "+memory +pids +cpu", True),), f"{own}/gangline-x/j@1.0")
    ]
    assert groups[0].writes[:1] == (("memory.max", "67108864", True),)
    assert ("memory.oom.group", "1", False) in groups[0].writes
    assert ("pids.max", "9", True) in groups[0].writes
    assert ("cpu.max", "150000 100000", True) in groups[0].writes


def test_v2_moves_the_agent_aside_and_finds_its_group_again(tmp_path: Path) -> None:
    own = tmp_path / "svc"
    own.mkdir()
    (own / "cgroup.controllers").write_text("memory\n")
    (own / "cgroup.type").write_text("domain\n")
    (own / "cgroup.procs").write_text("123\n")
    (own / "cgroup.subtree_control").write_text("")
    (own / cgroups.AGENT_GROUP).mkdir()
    (own / cgroups.AGENT_GROUP / "cgroup.procs").write_text("")
    layout = cgroups.delegate(cgroups.detect(mount_line("cgroup2", tmp_path), "0::/svc\n"))
    assert layout.v2_controllers == ("memory",)
    assert (own / cgroups.AGENT_GROUP / "cgroup.procs").read_text() == "123"
    assert (own / "cgroup.subtree_control").read_text() == "+memory"
    assert cgroups.detect(mount_line("cgroup2", tmp_path), f"0::/svc/{cgroups.AGENT_GROUP}\n").v2 == str(own)


def test_v2_that_is_not_delegated(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    layout = cgroups.delegate(cgroups.detect(mount_line("cgroup2", tmp_path), "0::/\n"))
    assert layout.controllers == ()
    assert "Delegate=yes" in layout.words


def test_v1_and_hybrid(tmp_path: Path) -> None:
    for folder in ("memory/a", "cpu,cpuacct", "pids", "unified"):
        (tmp_path / folder).mkdir(parents=True)
    lines = mount_line("cgroup", tmp_path / "memory", "rw,memory") + mount_line("cgroup", tmp_path / "cpu,cpuacct", "rw,cpu,cpuacct")
    own = "4:memory:/a\n3:cpu,cpuacct:/\n2:pids:/\n1:name=systemd:/\n0::/\n"
    v1 = cgroups.detect(lines, own)
    assert v1 == Layout(v1={"memory": str(tmp_path / "memory/a"), "cpu": str(tmp_path / "cpu,cpuacct")})
    assert v1.words == "v1: memory, cpu"
    assert v1.missing(Limits(memory_mib=1, pids=1)) == ("pids",)
    hybrid = cgroups.detect(lines + mount_line("cgroup2", tmp_path / "unified"), own)
    assert hybrid.words == "hybrid: memory, cpu"
    groups = hybrid.of_rank("g", "r", Limits(memory_mib=1, cpu_share_milli=500))
    assert [g.path for g in groups] == [f"{tmp_path}/memory/a/g/r", f"{tmp_path}/cpu,cpuacct/g/r", f"{tmp_path}/unified/g/r"]
    assert groups[1].writes == (("cpu.shares", "512", True),)
    assert groups[2].writes == groups[2].base_writes == ()
    assert hybrid.of_rank("g", "r", Limits()) == ()


def test_no_control_groups() -> None:
    assert cgroups.detect("", "0::/\n").words == "none (they are not mounted)"
    assert cgroups.detect(mount_line("cgroup2", "/nowhere"), "0::/\n").words == "none (this agent may not make any)"


def test_limits_are_what_is_asked_for_and_enforced() -> None:
    spec, rank = JobSpec(command=("a",), resources=Resources(cpus_milli=2500, memory_mib=100)), DesiredRank(0, 0, (), 1)
    assert limits_of(spec, rank, NodeRules()) == Limits(memory_mib=100)
    assert not limits_of(JobSpec(command=("a",)), rank, NodeRules())
    rules = NodeRules(ranks=RankRules(memory=False, cpus="quota", pids=7))
    assert limits_of(spec, rank, rules) == Limits(pids=7, cpu_quota_milli=2500)


NODE = """
ranks: {cpus: share, pids: 4096, user: nobody, refuse_root: true, rlimits: {core: 0, nofile: 65536, memlock: unlimited}}
containers: {runtime: podman, flags: [--runtime, runc], run_flags: ["--ulimit", "nofile=1024:1024"], pull: false}
volumes:
  data: {path: /mnt/data/, read_only: true, nfs: "server:/export"}
mount_paths: [/home, /scratch]
checkpoint_free: 10GiB
"""


def test_node_file() -> None:
    rules = nodefile.parse(NODE)
    assert (rules.ranks.cpus, rules.ranks.pids, rules.ranks.user, rules.ranks.refuse_root) == ("share", 4096, "nobody", True)
    assert len(rules.ranks.rlimits) == 3
    assert rules.containers.flags == ("--runtime", "runc")
    assert rules.volumes == {"data": Volume("/mnt/data", read_only=True, nfs="server:/export")}
    assert (rules.mount_paths, rules.checkpoint_free_mib) == (("/home", "/scratch"), 10_240)
    assert nodefile.parse("") == nodefile.load(None) == NodeRules()


def test_b67_node_file_problems_are_all_told() -> None:
    text = "rank: {}\nranks: {pids: -1, cpus: all, rlimits: {files: 1}}\nvolumes: {A: {path: /a}, b: {}, c: {path: x}}\n"
    with pytest.raises(BadJob) as caught:
        nodefile.parse(text, "node.yaml")
    found = {(p.pointer, p.code) for p in caught.value.problems}
    assert found == {
        ("/rank", "GL-1101"), ("/ranks/pids", "GL-1104"), ("/ranks/cpus", "GL-1106"), ("/ranks/rlimits/files", "GL-1101"),
        ("/volumes/A", "GL-1105"), ("/volumes/b", "GL-1103"), ("/volumes/c/path", "GL-1105"),
    }  # fmt: skip
    assert str(caught.value).startswith("node.yaml:1:1: ")


def test_mounts_are_resolved_outer_ones_first() -> None:
    rules = NodeRules(volumes={"data": Volume("/mnt/data", nfs="s:/e")})
    mounts = (Mount("data/a", "/x/y/z", read_only=True), Mount("/home/u", "/x"))
    found = storage.resolve(mounts, rules, {"/mnt/data": "s:/e"})
    assert found == (("/home/u", "/x", False), ("/mnt/data/a", "/x/y/z", True))
    assert storage.on_node("/x/y/z/f", found) == "/mnt/data/a/f"
    assert storage.on_node("/x/f", found) == "/home/u/f"
    assert storage.on_node("/xy", found) == "/xy"
    spec = JobSpec(command=("a",), mounts=mounts, checkpoint=Checkpoint(path="/x/ckpt"), workdir="/x/y/z")
    wants = storage.wants_of("j", 2, spec, found, rules)
    assert (wants.checkpoint, wants.workdir, wants.targets) == ("/home/u/ckpt", "/mnt/data/a", ("/x", "/x/y/z"))
    assert not storage.wants_of("j", 2, JobSpec(command=("a",), checkpoint=Checkpoint(path="s3://b/c")), (), rules)


def test_mount_points() -> None:
    text = "1 0 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / /mnt/my\\040data rw shared:1 - nfs4 server:/a\\040b rw\n"
    assert storage.mount_points(text) == {"/": "/dev/vda", "/mnt/my data": "server:/a b"}
