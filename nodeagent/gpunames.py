"""The short names of GPU models, by which jobs ask for them. Pure."""

from __future__ import annotations

import re

from gangline.core.model.gpufacts import MEMORY_MIB


def model_name(nvml_name: str) -> str:
    """Return the short name of a model: "NVIDIA H100 80GB HBM3" is "H100". Unknown ones keep their name, in capitals without NVIDIA."""
    words = re.split(r"[\s-]+", nvml_name.upper())
    for word in words:
        if word in MEMORY_MIB:
            return f"{word}-40GB" if word == "A100" and "40GB" in words else word
    return " ".join(w for w in words if w != "NVIDIA")
