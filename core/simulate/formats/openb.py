"""openb: the node and pod lists of Alibaba's GPU cluster trace of 2023 (cluster-trace-gpu-v2023).

Nodes: `sn` name, `cpu_milli`, `memory_mib`, `gpu` number of GPUs, `model` of them.
Tasks: `name`, `cpu_milli`, `memory_mib`, `num_gpu` GPUs, `gpu_milli` thousandths of each (under 1000 only of a single GPU), and, where the list
has the column, `gpu_spec`: the models that will do, joined by `|`, none for any. Further columns are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gangline.core.simulate.reading import Table

#: of a whole GPU
GPU = 1000
#: more GPUs than one node has
_MOST_GPUS = 1024


@dataclass(frozen=True, slots=True)
class OpenbNode:
    """One node: CPU in milli-cores, memory in MiB."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


@dataclass(frozen=True, slots=True)
class OpenbTask:
    """One task: `gpus` GPUs, `gpu_milli` thousandths of each; `models` are those that will do, sorted, none for any."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    gpu_milli: int
    models: tuple[str, ...] = ()

    @property
    def total_milli(self) -> int:
        """Thousandths of a GPU in all."""
        return self.gpus * self.gpu_milli


def read_nodes(path: Path) -> list[OpenbNode]:
    """Return the nodes of a list, in its order. Raises BadTrace."""
    table = Table(path, ("sn", "cpu_milli", "memory_mib", "gpu", "model"))
    out, names = [], set()
    for row in table:
        name, gpus = row.string("sn"), row.integer("gpu", 0, _MOST_GPUS)
        if name in names:
            row.bad("sn", "is there twice")
        names.add(name)
        out.append(OpenbNode(name, row.integer("cpu_milli"), row.integer("memory_mib"), gpus, row.string("model", "")))
    table.finish()
    return out


def read_tasks(path: Path) -> list[OpenbTask]:
    """Return the tasks of a list, in its order. Raises BadTrace."""
    table = Table(path, ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"), ("gpu_spec",))
    out, names = [], set()
    for row in table:
        name, gpus = row.string("name"), row.integer("num_gpu", 0, _MOST_GPUS)
        if name in names:
            row.bad("name", "is there twice")
        names.add(name)
        milli = row.integer("gpu_milli", 1 if gpus else 0, GPU, default=GPU if gpus else 0)
        if gpus > 1 and 1 < milli < GPU:
            row.bad("gpu_milli", f"must be {GPU} for {gpus} GPUs: only a single GPU is shared")
        models = tuple(sorted({part for each in row.string("gpu_spec", "").split("|") if (part := each.strip())}))
        cpu, memory = row.integer("cpu_milli"), row.integer("memory_mib")
        out.append(OpenbTask(name, cpu, memory, gpus, milli if gpus else 0, models))
    table.finish()
    return out
