"""MIG instances by NVML: made at the place that the scheduler has decided, unmade, and looked at. Used by `gpuprocess.py` only.

A *GPU instance* is what is placed; programs run in a *compute instance*, of which each of ours has one that takes the whole of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from gangline.nodeagent.gpudata import Instance, Partition
from gangline.nodeagent.nvml import quietly_imported

nvml = quietly_imported()


class Impossible(Exception):
    """NVML does not do what is asked for; the message says what, for people."""


def partition(handle: Any, ask: Partition) -> tuple[Instance, ...]:
    """Do what is asked for, verify it, and return the instances that are there then. Raises Impossible and pynvml.NVMLError."""
    if ask.mig:
        _set_mode(handle, True)
    elif not _is_on(handle):
        return ()
    for start in ask.unmake:
        _unmake(handle, start)
    for profile, start in ask.make:
        _make(handle, profile, start)
    if ask.mig is False:
        _set_mode(handle, False)
        return ()
    there = instances(handle)
    missing = [f"{profile} at {start}" for profile, start in ask.make if not any((i.profile, i.start) == (profile, start) for i in there)]
    if missing:
        raise Impossible(f"NVML has made MIG instances that are not there: {', '.join(missing)}")
    return there


def instances(handle: Any) -> tuple[Instance, ...]:
    """Return the instances of a GPU, by start; one that programs cannot run in has no UUID."""
    uuids = dict(_mig_uuids(handle))
    found = [
        Instance(name, info.placement.start, info.placement.size, uuids.get(info.id, ""), info.id) for name, _, info in _gpu_instances(handle)
    ]
    return tuple(sorted(found, key=lambda i: i.start))


def _is_on(handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError as e:
        if e.value == nvml.NVML_ERROR_NOT_SUPPORTED:
            return False
        raise


def _set_mode(handle: Any, on: bool) -> None:
    if _is_on(handle) == on:
        return
    word = "on" if on else "off"
    try:
        status = nvml.nvmlDeviceSetMigMode(handle, nvml.NVML_DEVICE_MIG_ENABLE if on else nvml.NVML_DEVICE_MIG_DISABLE)
    except nvml.NVMLError as e:
        raise Impossible(f"MIG mode cannot be switched {word}: {e}") from None
    if status != nvml.NVML_SUCCESS or _is_on(handle) != on:
        why = f"{nvml.NVMLError(status)}" if status != nvml.NVML_SUCCESS else "it is pending"
        raise Impossible(f"MIG mode cannot be switched {word} at once ({why}): reset the GPU, or boot the node")


def _profiles(handle: Any) -> Iterator[tuple[str, Any]]:
    """Yield the profiles of a GPU with their names, "1g.10gb"."""
    for number in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number, version=2)
        except nvml.NVMLError as e:
            if e.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                raise
            continue
        name = info.name.decode() if isinstance(info.name, bytes) else info.name
        yield name.removeprefix("MIG "), info


def _gpu_instances(handle: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (profile, handle of the GPU instance, its info)."""
    for name, profile in _profiles(handle):
        count = ctypes.c_uint(max(1, profile.instanceCount))
        some = (nvml.c_nvmlGpuInstance_t * count.value)()
        nvml.nvmlDeviceGetGpuInstances(handle, profile.id, some, ctypes.byref(count))
        for at in range(count.value):
            yield name, some[at], nvml.nvmlGpuInstanceGetInfo(some[at])


def _mig_uuids(handle: Any) -> Iterator[tuple[int, str]]:
    """Yield (id of the GPU instance, UUID) of what programs see as devices."""
    for at in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, at)
        except nvml.NVMLError as e:
            if e.value != nvml.NVML_ERROR_NOT_FOUND:
                raise
            continue
        uuid = nvml.nvmlDeviceGetUUID(device)
        yield nvml.nvmlDeviceGetGpuInstanceId(device), uuid.decode() if isinstance(uuid, bytes) else uuid


def _make(handle: Any, profile: str, start: int) -> None:
    info = next((i for name, i in _profiles(handle) if name == profile), None)
    if info is None:
        raise Impossible(f"the GPU has no MIG profile {profile}; it has {', '.join(name for name, _ in _profiles(handle)) or 'none'}")
    place = _placement(handle, info, profile, start)
    try:
        made = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, info.id, ctypes.byref(place))
    except nvml.NVMLError as e:
        raise Impossible(f"MIG instance {profile} at {start} cannot be made: {e}") from None
    try:
        nvml.nvmlGpuInstanceCreateComputeInstance(made, _whole_compute(made, info.sliceCount))
    except nvml.NVMLError as e:
        nvml.nvmlGpuInstanceDestroy(made)
        raise Impossible(f"MIG instance {profile} at {start} cannot be computed in: {e}") from None


def _placement(handle: Any, info: Any, profile: str, start: int) -> Any:
    """Return the placement that NVML has for this start: its size is the driver's to say."""
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, info.id, None, ctypes.byref(count))
    some = (nvml.c_nvmlGpuInstancePlacement_t * max(1, count.value))()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, info.id, some, ctypes.byref(count))
    starts = {some[at].start: some[at] for at in range(count.value)}
    if start not in starts:
        raise Impossible(f"the GPU has no place for {profile} at {start}, only at {', '.join(map(str, sorted(starts))) or 'none'}")
    return starts[start]


def _compute_profiles(one: Any) -> Iterator[Any]:
    """Yield what the driver says of each compute instance profile that the GPU instance has."""
    for number in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(one, number, nvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, version=2)
        except nvml.NVMLError as e:
            if e.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                raise
            continue
        yield info


def _whole_compute(made: Any, slices: int) -> int:
    """Return the id of the compute instance profile that takes all compute slices of a GPU instance."""
    for info in _compute_profiles(made):
        if info.sliceCount == slices:
            return int(info.id)
    raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)


def _unmake(handle: Any, start: int) -> None:
    """Destroy the GPU instance at a start, with its compute instances. One that is not there is as good as unmade."""
    for name, one, info in list(_gpu_instances(handle)):
        if info.placement.start != start:
            continue
        try:
            for compute in list(_compute_instances(one)):
                nvml.nvmlComputeInstanceDestroy(compute)
            nvml.nvmlGpuInstanceDestroy(one)
        except nvml.NVMLError as e:
            raise Impossible(f"MIG instance {name} at {start} cannot be unmade: {e}; look for a process that uses it") from None


def _compute_instances(one: Any) -> Iterator[Any]:
    for info in _compute_profiles(one):
        count = ctypes.c_uint(max(1, info.instanceCount))
        some = (nvml.c_nvmlComputeInstance_t * count.value)()
        nvml.nvmlGpuInstanceGetComputeInstances(one, info.id, some, ctypes.byref(count))
        yield from some[: count.value]
