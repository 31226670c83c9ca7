"""Facts about GPU models: how much memory they have, and into what MIG can partition them.

Sources: NVIDIA MIG User Guide and `nvidia-smi mig -lgipp` of A100 and H100 for profile names, slices and placements, the same lay-out on all
boards of seven slices; NVIDIA/k8s-test-infra@3b2b865 (nvml-mock) for the memory of GB200, B200, H100 and A100-40 profiles;
NVIDIA/go-nvml@2f9e261 (pkg/nvml/mock/gpus) for H200 and B200. The memory of a profile is what the driver shows, a little under its name's GB.

A board of seven slices has 7 compute and 8 memory slices. An *instance* of a profile occupies the memory slices [start, start + size), and only
some starts are possible; instances may not overlap, and together they have at most 7 compute slices. So 3g fits at 0 and at 4 only, and
an eighth 1g fits nowhere although a memory slice is left.
"""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE_SLICES = 7
MEMORY_SLICES = 8


@dataclass(frozen=True)
class MigProfile:
    """One kind of instance. `size` counts memory slices, `most` the instances of it that one GPU can have."""

    name: str
    compute: int
    size: int
    memory_mib: int
    most: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class MigLayout:
    """The profiles of one model, smallest first."""

    name: str
    profiles: tuple[MigProfile, ...]

    def profile(self, name: str) -> MigProfile | None:
        """Return the profile with this name."""
        return _PROFILES[self.name].get(name)

    def __hash__(self) -> int:
        return hash(self.name)


#: what the profiles of all boards of seven slices have in common: compute slices, memory slices, suffix, instances at most, starts
_SEVEN = (
    (1, 1, "", 7, (0, 1, 2, 3, 4, 5, 6)),
    (1, 1, "+me", 1, (0, 1, 2, 3, 4, 5, 6)),
    (1, 2, "", 4, (0, 2, 4, 6)),
    (2, 2, "", 3, (0, 2, 4)),
    (3, 4, "", 2, (0, 4)),
    (4, 4, "", 1, (0,)),
    (7, 8, "", 1, (0,)),
)

#: by model: (GB in the name, MiB) of instances with 1, 2, 4 and 8 memory slices
_MEMORIES: dict[str, dict[int, tuple[int, int]]] = {
    "A100-40GB": {1: (5, 4_864), 2: (10, 9_856), 4: (20, 19_968), 8: (40, 40_192)},
    "A100": {1: (10, 9_728), 2: (20, 19_968), 4: (40, 40_192), 8: (80, 80_640)},
    "H100": {1: (10, 9_984), 2: (20, 20_096), 4: (40, 40_448), 8: (80, 81_152)},
    "H200": {1: (18, 18_432), 2: (35, 35_840), 4: (71, 72_704), 8: (141, 144_384)},
    "B200": {1: (23, 23_040), 2: (45, 46_080), 4: (90, 92_160), 8: (180, 184_320)},
    "GB200": {1: (23, 23_808), 2: (47, 47_616), 4: (93, 95_232), 8: (186, 190_464)},
}


def _layout(model: str) -> MigLayout:
    memories = _MEMORIES[model]
    return MigLayout(model, tuple(
        MigProfile(f"{compute}g.{memories[size][0]}gb{suffix}", compute, size, memories[size][1], most, starts)
        for compute, size, suffix, most, starts in _SEVEN
    ))  # fmt: skip


#: by the name that documents.Gpu.mig gives: that of the model
MIG_LAYOUTS: dict[str, MigLayout] = {model: _layout(model) for model in _MEMORIES}
_PROFILES = {name: {p.name: p for p in layout.profiles} for name, layout in MIG_LAYOUTS.items()}
#: names of all profiles, smallest first
MIG_PROFILES: tuple[str, ...] = tuple(
    dict.fromkeys(p.name for p in sorted((p for each in MIG_LAYOUTS.values() for p in each.profiles), key=lambda p: (p.memory_mib, p.compute)))
)

#: MiB of memory by model, as NVML reports it
MEMORY_MIB = {
    "GB200": 189_471, "B200": 183_359, "B300": 275_040, "GH200": 97_871, "H200": 143_771, "H100": 81_559, "H20": 97_871,
    "A100": 81_920, "A100-40GB": 40_960, "A40": 46_068, "A30": 24_576, "A10": 23_028, "L40S": 46_068, "L40": 46_068, "L4": 23_034,
    "V100": 32_768, "T4": 15_360, "RTX4090": 24_564,
}  # fmt: skip

#: other names of models, as people write them
ALIASES = {"A100-40": "A100-40GB", "A100-80": "A100", "A100-80GB": "A100", "GB200-NVL72": "GB200"}
