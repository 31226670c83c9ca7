"""The `resources` of a job file: what one rank asks for. docs/jobfile.md.

GPUs are asked for in one of four ways that exclude each other: `gpus` whole ones, `gpu_share` of one, `gpu_memory` of one, or `mig` instances.
"""

from __future__ import annotations

from typing import Any, Final

from gangline.core.model.fields import MODEL, Fields, Reading, boolean, hundredths, read_mapping, size, thousandths_word, whole
from gangline.core.model.gpufacts import MIG_LAYOUTS, MIG_PROFILES
from gangline.core.model.nearest import nearest
from gangline.core.model.problems import show
from gangline.core.model.spec import Resources
from gangline.core.model.units import format_size

MAX_GPUS: Final = 64
MAX_MODELS: Final = 16
#: seven on each GPU of a node of sixteen
MAX_INSTANCES: Final = 112

#: the ways to ask for GPUs
KINDS: Final = ("gpus", "gpu_share", "gpu_memory", "mig")


def _models(reading: Reading, at: str, value: Any) -> tuple[str, ...] | None:
    rule = f'a text as "H100" or a list of up to {MAX_MODELS}'
    items = value if type(value) is list else [value]
    if len(items) > MAX_MODELS:
        reading.refuse(at, "GL-1110", f"{len(items):,} models are more than the limit of {MAX_MODELS}.")
        return None
    models: list[str] = []
    for i, item in enumerate(items):
        where = at if items is not value else f"{at}/{i}"
        if type(item) is not str:
            reading.wrong(where, item, rule)
        elif not MODEL.fullmatch(item):
            reading.refuse(where, "GL-1105", f"{show(item)} is not a GPU model: letters, digits, spaces, dots and hyphens, up to 64.")
        elif item.upper() in models:
            reading.refuse(where, "GL-1108", f"{show(item)} is given twice.")
        else:
            models.append(item.upper())
    return tuple(models) if len(models) == len(items) else None


def _share(reading: Reading, at: str, value: Any) -> int | None:
    if type(value) in (int, float) and value >= 1:
        message = f"{show(value)} is not a part of one GPU: needed is a number from 0.01 to 0.99. Whole ones are asked for by `gpus`."
        reading.refuse(at, "GL-1104", message)
        return None
    milli: int | None = _PART(reading, at, value)
    return milli


_PART = hundredths(0.01, 0.99)


def _profile(reading: Reading, at: str, value: Any) -> str | None:
    rule = 'a text, a MIG profile as "1g.10gb"'
    if type(value) is not str:
        reading.wrong(at, value, rule)
        return None
    if not value:
        return None
    name = value.strip().lower()
    if name in MIG_PROFILES:
        return name
    reading.refuse(at, "GL-1106", f"{show(value)} is not a MIG profile; known are {', '.join(MIG_PROFILES)}.", nearest(name, MIG_PROFILES))
    return None


RESOURCES: Fields = {
    "gpus": ("gpus", whole(1, MAX_GPUS, "Leave the field out for a job without GPUs.")),
    "gpu_share": ("gpu_share_milli", _share),
    "gpu_memory": ("gpu_memory_mib", size(1, 4 * 1024 * 1024)),
    "mig": ("mig", _profile),
    "mig_count": ("mig_count", whole(1, MAX_INSTANCES)),
    "gpu_model": ("gpu_models", _models),
    "gpu_model_mix": ("gpu_model_mix", boolean),
    "cpus": ("cpus_milli", hundredths(0.01, 4096)),
    "memory": ("memory_mib", size(1, 64 * 1024 * 1024)),
}


def read_resources(reading: Reading, at: str, value: Any) -> Resources | None:
    """Read what a rank asks for."""
    found = read_mapping(reading, at, value, RESOURCES)
    if found is None:
        return None
    given = [word for word in KINDS if value.get(word) not in (None, "")]
    for word in given[1:]:
        reading.refuse(f"{at}/{word}", "GL-1108", f"{word} is given beside {given[0]}; a rank asks for GPUs in one way: {', '.join(KINDS)}.")
    for word in ("gpu_model", "gpu_model_mix"):
        if found.get(RESOURCES[word][0]) and not given:
            reading.refuse(f"{at}/{word}", "GL-1108", f"{word} is given, but no GPUs: say how many a rank needs by one of {', '.join(KINDS)}.")
    if "mig_count" in found and "mig" not in given:
        reading.refuse(f"{at}/mig_count", "GL-1108", "mig_count is given, but no mig: say of which profile.")
    if found.get("mig"):
        found.setdefault("mig_count", 1)
        _check_profile(reading, at, found["mig"], found.get("gpu_models", ()))
    return Resources(**found)


def _check_profile(reading: Reading, at: str, profile: str, models: tuple[str, ...]) -> None:
    """A model that is known and lacks the profile could never be taken."""
    for model in models:
        layout = MIG_LAYOUTS.get(model)
        if layout is not None and layout.profile(profile) is None:
            names = [p.name for p in layout.profiles]
            near = nearest(profile, names)
            reading.refuse(f"{at}/mig", "GL-1108", f"{model} has no MIG profile {profile}; it has {', '.join(names)}.", near)


def resource_words(res: Resources) -> dict[str, Any]:
    """Return the resources in the job file's words; what is not given is empty."""
    return {
        "gpus": res.gpus or "",
        "gpu_share": thousandths_word(res.gpu_share_milli) if res.gpu_share_milli else "",
        "gpu_memory": format_size(res.gpu_memory_mib) if res.gpu_memory_mib else "",
        "mig": res.mig,
        "mig_count": res.mig_count if res.mig else "",
        "gpu_model": list(res.gpu_models),
        "gpu_model_mix": res.gpu_model_mix or "",
        "cpus": thousandths_word(res.cpus_milli),
        "memory": format_size(res.memory_mib) if res.memory_mib else "",
    }
