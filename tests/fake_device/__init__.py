"""A fake accelerator: `load()` makes the device "fake", with `torch.fake` and all of `torch.accelerator`.

It is built by g++ for the PyTorch that is installed, once. What it has of CUDA is what goes wrong in programs that ran
on the CPU alone: an allocator with granules, segments and a limit; streams, with copies as late as allowed; backward on
a thread of its own; a generator of its own; poison in memory that nobody owns. Times say nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import torch

COMPILER = shutil.which("g++")
KIND = "cuda" if torch.cuda.is_available() else "fake"  # a machine with a GPU shows what holds on that
_HERE = Path(__file__).parent


def load() -> types.ModuleType:
    """Makes the device, once; for the rest of this process it is the one that `torch.accelerator` means."""
    torch.utils.rename_privateuse1_backend("fake")
    module = _module(ctypes.CDLL(str(_built())))
    torch._register_device_module("fake", module)
    # A process that ends right after a backward aborts, on any accelerator: its thread still lets go of objects.
    atexit.register(time.sleep, 0.1)
    torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=True, for_storage=True)
    module.default_generators = tuple(
        torch.ops.fake_device.default_generator(index) for index in range(module.device_count())
    )
    return module


@functools.cache
def switches() -> Any:
    """What tests set and look at."""
    if KIND == "fake":
        return torch.fake.switches
    from fake_device.cuda import Switches

    return Switches()


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """`model.to(KIND)`, with the parameters as they were, as on CUDA: by itself it makes new ones, and tied ones come
    apart."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(KIND)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _built() -> Path:
    sources = sorted([*_HERE.glob("*.h"), *_HERE.glob("*.cpp")])
    told = b"".join(source.read_bytes() for source in sources) + torch.__version__.encode()
    folder = Path(tempfile.gettempdir()) / f"remat-fake-device-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    library = folder / f"{hashlib.sha256(told).hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(library)
    return library


def _build(library: Path) -> None:
    installed = Path(torch.__file__).parent
    unfinished = library.with_suffix(".part")
    headers = [f"-I{installed / 'include'}", f"-I{installed / 'include/torch/csrc/api/include'}"]
    flags = [
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    libraries = [f"-L{installed / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = ["g++", *flags, *headers, str(_HERE / "device.cpp"), "-o", str(unfinished), *libraries]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise RuntimeError(f"g++ cannot build the fake device:\n{made.stderr}")
    unfinished.rename(library)


class _Switches:
    """What a test sets and looks at."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fake_highest.restype = library.fake_waits.restype = ctypes.c_int64

    def set_limit(self, size: int, index: int = 0) -> None:
        """Of bytes that the allocator may reserve."""
        self._library.fake_set_limit(index, ctypes.c_size_t(size))

    def set_late(self, late: bool) -> None:
        """Whether copies wait until somebody needs them, as they do at first; else they run when they are called."""
        self._library.fake_set_late(int(late))

    def highest(self, index: int = 0, *, begin_anew: bool = False) -> int:
        """The most bytes allocated since this was last told to begin anew, whoever resets the device's statistics."""
        return int(self._library.fake_highest(index, int(begin_anew)))

    def waits(self) -> int:
        """How often the host has waited for the device."""
        return int(self._library.fake_waits())

    def races(self) -> list[str]:
        """Uses of memory without an order between them, since this was last asked."""
        text, found = ctypes.create_string_buffer(200), []
        while self._library.fake_take_race(text, len(text)):
            found.append(text.value.decode())
        return found

    def pin(self, address: int, size: int) -> None:
        """As cudaHostRegister."""
        self._library.fake_pin(ctypes.c_void_p(address), ctypes.c_size_t(size))

    def unpin(self, address: int) -> bool:
        return bool(self._library.fake_unpin(ctypes.c_void_p(address)))


class _OnStream:
    """Inside, a stream is the current one."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = torch.accelerator.current_stream(self._stream.device)
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            torch.accelerator.set_stream(self._before)


class _OnDevice:
    """Inside, another device is the current one."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        self.prev_idx = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.idx)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self.prev_idx)


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


_OF_ONE_DEVICE = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"),
    *("reset_peak_memory_stats", "synchronize", "current_stream"),
)


def _module(library: ctypes.CDLL) -> types.ModuleType:
    """`torch.fake`, with what PyTorch and other libraries call in the modules of devices."""
    module, whole = types.ModuleType("torch.fake"), torch.accelerator
    for name in _OF_ONE_DEVICE:
        setattr(module, name, functools.partial(lambda call, device=None: call(_index(device)), getattr(whole, name)))
    module.mem_get_info = lambda device=None: whole.get_memory_info(_index(device))
    module.empty_cache, module.set_stream = whole.empty_cache, whole.set_stream
    module.current_device = whole.current_device_index
    module.set_device = lambda device: whole.set_device_index(_index(device))
    module.device_count = lambda: int(os.environ.get("FAKE_DEVICES", "1"))
    module.device, module.stream = _OnDevice, _OnStream
    # No classes, since `torch.Event.elapsed_time` takes no other one.
    module.Stream = lambda device=None, **others: torch.Stream(torch.device("fake", _index(device)), **others)
    module.Event = lambda enable_timing=False, **_: torch.Event("fake", enable_timing=enable_timing)
    module.get_rng_state = lambda device=None: module.default_generators[_index(device)].get_state()
    module.set_rng_state = lambda state, device=None: module.default_generators[_index(device)].set_state(state)
    module.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in module.default_generators]
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.get_device_name = lambda device=None: "fake accelerator"
    module.switches = _Switches(library)
    return module
