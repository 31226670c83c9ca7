"""The GPUs of a node: real ones as NVML names them, or simulated ones that cost nothing and behave the same to the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import uuid
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from gangline.core.model.documents import Gpu
from gangline.core.model.gpufacts import ALIASES, MEMORY_MIB, MIG_LAYOUTS

#: a driver that does not answer for so long is taken for broken
NVML_TIMEOUT_S = 10.0

_NAMESPACE = uuid.UUID("6ba1f0f2-0c45-4d6c-9a86-2f9f2f8d5d11")
_SIMULATED = re.compile(r"^(?P<model>[a-z0-9][a-z0-9-]*?)x(?P<count>[0-9]{1,4})$")
_GPUS_MAX = 1024


class Inventory(msgspec.Struct, frozen=True):
    """The GPUs of this node, and when there are none, why."""

    gpus: tuple[Gpu, ...] = ()
    kind: Literal["none", "simulated", "nvml"] = "none"
    reason: str = ""


async def discover(option: str, identity: str) -> Inventory:
    """Return the inventory for the option --gpus: auto, none, or sim:MODELxN[,MODELxN...]. Raises ValueError for anything else."""
    if option == "none":
        return Inventory(reason="switched off with --gpus none")
    if option == "auto":
        return await nvml_inventory()
    return simulated(option, identity)


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


def model_name(nvml_name: str) -> str:
    """Return the short name of a model: "NVIDIA H100 80GB HBM3" is "H100". Unknown ones keep their name, in capitals without NVIDIA."""
    words = re.split(r"[\s-]+", nvml_name.upper())
    for word in words:
        if word in MEMORY_MIB:
            return f"{word}-40GB" if word == "A100" and "40GB" in words else word
    return " ".join(w for w in words if w != "NVIDIA")


async def nvml_inventory(read: Callable[[], tuple[Gpu, ...]] | None = None, timeout_s: float = NVML_TIMEOUT_S) -> Inventory:
    """Ask NVML. No library, no driver, no GPU and a driver that hangs all give an empty inventory with the reason."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[Gpu, ...]] = loop.create_future()

    def settle(set_: Callable[[Any], None], value: Any) -> None:
        if not answer.done():
            set_(value)

    def ask() -> None:
        result: tuple[Callable[[Any], None], Any]
        try:
            result = answer.set_result, (read or _read_nvml)()
        except Exception as e:  # noqa: BLE001 - pynvml raises classes that it makes at run time; whatever it is, it is the reason
            result = answer.set_exception, OSError(f"{type(e).__name__}: {e}")
        with contextlib.suppress(RuntimeError):  # so late that the loop is closed
            loop.call_soon_threadsafe(settle, *result)

    # A daemon: a driver that hangs in the kernel must not keep the agent from ending.
    threading.Thread(target=ask, name="nvml", daemon=True).start()
    try:
        gpus = await asyncio.wait_for(answer, timeout_s)
    except TimeoutError:
        return Inventory(reason=f"NVML did not answer within {timeout_s:g} s: look at the driver, for example with nvidia-smi")
    except OSError as e:
        return Inventory(reason=f"NVML: {e}")
    return Inventory(gpus, "nvml") if gpus else Inventory(reason="NVML reports no GPU")


def _read_nvml() -> tuple[Gpu, ...]:
    import pynvml

    pynvml.nvmlInit()
    try:
        return tuple(_read_gpu(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        model=model_name(_text(nvml.nvmlDeviceGetName(handle))),
        memory_mib=int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
