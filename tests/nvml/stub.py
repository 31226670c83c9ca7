"""The state of the stand-in for NVML (nvml_stub.c), mapped so that a test changes it while other processes use it."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from ctypes import c_char, c_uint32, c_uint64
from pathlib import Path

from gangline.core.model.gpufacts import MEMORY_MIB, MIG_LAYOUTS

XID, DOUBLE_BIT_ECC = 8, 2
LOST, NOT_SUPPORTED, UNKNOWN = 15, 3, 999

#: profile → (number, id) as NVML has them: NVML_GPU_INSTANCE_PROFILE_*, and ids as `nvidia-smi mig -lgip` prints them for A100 and H100
_PROFILES = ((0, 19), (7, 20), (9, 15), (1, 14), (2, 9), (3, 5), (4, 0))


def _structure(name: str, /, **fields: object) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


def _words(names: str) -> dict[str, object]:
    return dict.fromkeys(names.split(), c_uint32)


def _longs(names: str) -> dict[str, object]:
    return dict.fromkeys(names.split(), c_uint64)


Instance = _structure("Instance", **_words("what used id profile start size compute gpu"), uuid=c_char * 96)
Profile = _structure("Profile", **_words("used number id slices size most memory_mib starts"), name=c_char * 96)
Gpu = _structure(
    "Gpu", **_words("what present lost minor numa topology"), uuid=c_char * 96, name=c_char * 96, bus=c_char * 32,
    **_longs("memory_total memory_used energy_mj reasons ecc_corrected ecc_uncorrected nvlink_errors"),
    **_words("busy memory_busy power_mw power_limit_mw celsius memory_celsius sm_mhz memory_mhz has_ecc pcie_replays needs compute_mode"),
    remapped=c_uint32 * 4, **_words("links links_up links_counted_each bridged_to mig_capable mig_on mig_needs_reset processes"),
    pids=c_uint32 * 8, bytes=c_uint64 * 8, profiles=Profile * 8, instances=Instance * 8,
)  # fmt: skip
Event = _structure("Event", **_words("gpu gone gi ci"), **_longs("type data"))
State = _structure(
    "State", **_words("count no_driver events calls"), hang=c_char * 64, crash=c_char * 64, fail=c_char * 64, **_words("fail_with spare"),
    ring=Event * 64, gpus=Gpu * 16,
)  # fmt: skip


class Stub:
    """The library, built in `folder`, and its state."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.library = folder / "libnvidia-ml.so.1"
        source = Path(__file__).with_name("nvml_stub.c")
        subprocess.run(["gcc", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-o", self.library, source], check=True, timeout=60)
        self.path = folder / "state"
        self.path.write_bytes(bytes(ctypes.sizeof(State)))
        with self.path.open("r+b") as f:
            self._map = mmap.mmap(f.fileno(), 0)
        self.state = State.from_buffer(self._map)

    @property
    def environment(self) -> dict[str, str]:
        """With this the dynamic loader finds the stand-in, and the stand-in its state."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "NVML_STUB_STATE": str(self.path)}

    @property
    def gpus(self) -> ctypes.Array[ctypes.Structure]:
        return self.state.gpus

    def add(self, model: str = "H100", name: str = "", *, numa: int = 0, switch: int | None = None, mig: bool = True) -> int:
        """Put one more GPU in, and return its number here."""
        at = self.state.count
        gpu = self.gpus[at]
        gpu.what, gpu.present, gpu.minor, gpu.numa, gpu.topology = 0x47, 1, at, numa, at + 100 if switch is None else switch
        gpu.uuid = f"GPU-{at:08x}-1111-2222-3333-{at:012x}".encode()
        gpu.name = (name or f"NVIDIA {model} 80GB HBM3").encode()
        gpu.bus = f"00000000:{0x10 + at:02X}:00.0".encode()
        gpu.memory_total, gpu.memory_used = MEMORY_MIB[model] << 20, 1 << 30
        gpu.power_mw, gpu.power_limit_mw, gpu.celsius, gpu.memory_celsius, gpu.sm_mhz, gpu.memory_mhz = 350_000, 700_000, 55, 61, 1980, 2619
        gpu.has_ecc, gpu.links, gpu.links_up = 1, 18, (1 << 18) - 1
        if mig and model in MIG_LAYOUTS:
            gpu.mig_capable = 1
            for slot, p, (number, id_) in zip(gpu.profiles, MIG_LAYOUTS[model].profiles, _PROFILES, strict=False):
                slot.used, slot.number, slot.id, slot.slices, slot.size, slot.most = 1, number, id_, p.compute, p.size, p.most
                slot.memory_mib, slot.starts, slot.name = p.memory_mib, sum(1 << s for s in p.starts), f"MIG {p.name}".encode()
        self.state.count = at + 1
        return at

    def event(self, gpu: int, type_: int = XID, data: int = 0, *, gone: bool = False) -> None:
        """Have the event sets tell of something."""
        slot = self.state.ring[self.state.events % 64]
        slot.gpu, slot.gone, slot.gi, slot.ci, slot.type, slot.data = gpu, gone, 0xFFFFFFFF, 0xFFFFFFFF, type_, data
        self.state.events += 1

    def uuid(self, gpu: int) -> str:
        return bytes(self.gpus[gpu].uuid).decode()

    def swap(self, a: int, b: int) -> None:
        """Exchange two GPUs, as another order of enumeration does."""
        size = ctypes.sizeof(Gpu)
        one, other = ctypes.string_at(ctypes.addressof(self.gpus[a]), size), ctypes.string_at(ctypes.addressof(self.gpus[b]), size)
        ctypes.memmove(ctypes.addressof(self.gpus[a]), other, size)
        ctypes.memmove(ctypes.addressof(self.gpus[b]), one, size)
