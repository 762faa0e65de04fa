"""Devices to plan for: their memory, peak arithmetic rate, bandwidth, and the fraction of these that operators reach.

Peak rates are the dense rates in the manufacturers' data sheets. The fractions are assumptions, until
`remat calibrate` measures them on the target machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

from remat import files
from remat.errors import InvalidFile, RematError

GIB = 2**30
VERSION = 1

# Kinds of operators. The efficiency of a compute-bound kind is a fraction of the peak rate for the operator's dtype;
# the efficiency of a memory-bound kind is a fraction of the bandwidth.
BY_ARITHMETIC = ("product", "convolution", "attention")
BY_MEMORY = ("copy", "pointwise", "transcendental", "normalisation", "softmax", "reduction", "indexing", "random")

_ON_GPUS = MappingProxyType(
    {
        **{"product": 0.7, "convolution": 0.5, "attention": 0.45},
        **{"copy": 0.85, "pointwise": 0.85, "transcendental": 0.8, "normalisation": 0.6, "softmax": 0.7},
        **{"reduction": 0.7, "indexing": 0.35, "random": 0.6},
    }
)
_ON_CPUS = MappingProxyType(
    {
        **{"product": 0.8, "convolution": 0.5, "attention": 0.4},
        **{"copy": 0.9, "pointwise": 0.8, "transcendental": 0.12, "normalisation": 0.4, "softmax": 0.2},
        **{"reduction": 0.5, "indexing": 0.3, "random": 0.06},
    }
)


@dataclass(frozen=True)
class Device:
    """A device that plans are made for.

    Attributes:
        kind: "cpu", or PyTorch's name of an accelerator ("cuda", "xpu", ...): selects the rounding of the allocator and
            the kernels, which are taken to be CUDA's on all accelerators.
        memory_bytes: size of its memory.
        flops_per_second: the peak rate by dtype: "bfloat16", "float16", "tf32", "float32", "float64".
        bytes_per_second: bandwidth of its memory.
        launch_seconds: the minimum time of any operator.
        host_bytes_per_second: bandwidth of the link to the host's memory.
        efficiency: the fraction of the peak that each kind of operator reaches (`BY_ARITHMETIC`, `BY_MEMORY`).
    """

    name: str
    kind: str
    memory_bytes: int
    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    launch_seconds: float
    host_bytes_per_second: float
    efficiency: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = {*BY_ARITHMETIC, *BY_MEMORY} - self.efficiency.keys()
        if missing or "float32" not in self.flops_per_second:
            lacking = f" ({', '.join(sorted(missing))} missing)" if missing else ""
            raise RematError(
                f"device {self.name!r} is not complete: it needs a rate for float32, and an "
                f"efficiency for each kind of operator{lacking}"
            )

    @property
    def granule(self) -> int:
        """The bytes to whose multiples its allocator rounds sizes."""
        return 1 if self.kind == "cpu" else 512

    def save(self, path: str | Path) -> None:
        """Writes it as JSON, for `load` and `--device`."""
        content = asdict(self) | {
            "flops_per_second": dict(self.flops_per_second),
            "efficiency": dict(self.efficiency),
        }
        files.write(path, "device", VERSION, content)

    @classmethod
    def load(cls, path: str | Path) -> Device:
        """Reads what `save` wrote.

        Raises:
            InvalidFile: it is no such file.
        """
        content = files.read(path, "device", VERSION)
        try:
            return cls(**content)
        except (TypeError, RematError) as error:
            raise InvalidFile(f"{path}: not a device file: {error}") from error


def _gpu(name: str, memory: int, rates: tuple[float, float, float, float], bandwidth: float, link: float) -> Device:
    """`rates`: TFLOP/s for 16 bits, tf32, float32 and float64; bandwidth in GB/s, of the memory and of the link."""
    half, tf32, single, double = (rate * 1e12 for rate in rates)
    flops = {"bfloat16": half, "float16": half, "tf32": tf32, "float32": single, "float64": double}
    return Device(name, "cuda", memory * GIB, flops, bandwidth * 1e9, 5e-6, link * 1e9, _ON_GPUS)


DEVICES = {
    device.name: device
    for device in (
        _gpu("a100", 80, (312, 156, 19.5, 19.5), 2039, 25),
        _gpu("h100", 80, (989, 494, 67, 67), 3350, 50),
        _gpu("h200", 141, (989, 494, 67, 67), 4800, 50),
        _gpu("l4", 24, (121, 60, 30, 0.5), 300, 25),
        _gpu("rtx4090", 24, (165, 83, 83, 1.3), 1008, 25),
        _gpu("mi300x", 192, (1307, 654, 163, 163), 5300, 50),
        Device(
            "cpu",
            "cpu",
            16 * GIB,
            {"bfloat16": 2.5e10, "float16": 2.5e10, "float32": 5e10, "float64": 2.5e10},
            1e10,
            2e-6,
            1e10,
            _ON_CPUS,
        ),
    )
}


def device_called(name: str) -> Device | None:
    """The device for a driver's device name ("NVIDIA H100 80GB HBM3"); None if it is not in `DEVICES`."""
    words = name.lower().replace("-", " ").split()
    found = {*words, *map("".join, itertools.pairwise(words))}  # "RTX 4090" is one name
    return next((device for device in DEVICES.values() if device.kind != "cpu" and device.name in found), None)


def device_named(name: str) -> Device:
    """The device of that name ("h100", "cuda:h100", "cpu"), or of that file, which `remat calibrate` wrote.

    Raises:
        RematError: there is none.
    """
    known = DEVICES.get(name.removeprefix("cuda:").lower())
    if known is not None:
        return known
    if name.endswith(".json"):
        return Device.load(name)
    raise RematError(
        f"unknown device {name!r}; estimate for one of {', '.join(DEVICES)}, or for that of a file written by "
        "`remat calibrate`"
    )
