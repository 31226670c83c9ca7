"""The GPUs of a node, as they are given to ranks; and simulated ones, which cost nothing and are the same to the scheduler."""

from __future__ import annotations

import re
import uuid
from typing import Literal

import msgspec

from gangline.core.model.documents import Gpu
from gangline.core.model.gpufacts import ALIASES, MEMORY_MIB, MIG_LAYOUTS

Kind = Literal["none", "simulated", "nvml"]

_NAMESPACE = uuid.UUID("6ba1f0f2-0c45-4d6c-9a86-2f9f2f8d5d11")
_SIMULATED = re.compile(r"^(?P<model>[a-z0-9][a-z0-9-]*?)x(?P<count>[0-9]{1,4})$")
_GPUS_MAX = 1024


class Inventory(msgspec.Struct, frozen=True):
    """The GPUs of this node, and when there are none, why."""

    gpus: tuple[Gpu, ...] = ()
    kind: Kind = "none"
    reason: str = ""


def kind_of(option: str) -> Kind:
    """Return the kind of GPUs of an option --gpus: auto, none, or sim:MODELxN[,MODELxN...]. Raises ValueError for anything else."""
    if option in ("none", "auto"):
        return "none" if option == "none" else "nvml"
    simulated(option, "")
    return "simulated"


def simulated(option: str, identity: str) -> Inventory:
    """Return the GPUs of an option like sim:h100x8, with uuids that stay the same for the same node identity.

    Four and more hang on two CPU sockets, half of them on each, as in most hosts; models that MIG can partition can be partitioned.
    """
    prefix, _, parts = option.partition(":")
    if prefix != "sim" or not parts:
        raise ValueError(f"--gpus {option!r}: use auto, none, or sim:MODELxN such as sim:h100x8")
    models = [model for part in parts.lower().split(",") for model in _models(option, part)]
    if len(models) > _GPUS_MAX:
        raise ValueError(f"--gpus {option!r}: at most {_GPUS_MAX} GPUs a node")
    gpus = tuple(
        Gpu(
            index=i, uuid=f"GPU-{uuid.uuid5(_NAMESPACE, f'{identity}/{i}')}", model=model, memory_mib=MEMORY_MIB[model],
            mig=model if model in MIG_LAYOUTS else "", links=(2 * i // len(models),) if len(models) >= 4 else (),
        )
        for i, model in enumerate(models)
    )
    return Inventory(gpus, "simulated")


def _models(option: str, part: str) -> list[str]:
    match = _SIMULATED.match(part)
    if match is None or not 0 < int(match["count"]) <= _GPUS_MAX:
        raise ValueError(f"--gpus {option!r}: {part!r} is not MODELxN such as h100x8")
    model = match["model"].upper()
    model = ALIASES.get(model, model)
    if model not in MEMORY_MIB:
        raise ValueError(f"--gpus {option!r}: unknown model {model!r}; known are {', '.join(sorted(MEMORY_MIB))}")
    return [model] * int(match["count"])
