"""The functions of ``torch.cuda`` that TE and training scripts use, for one GPU that runs all operations in order."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from typing_extensions import Self

from . import memory
from .device import replace
from .generators import DEFAULT
from .graph import Capture, CUDAGraph, refuse_in_capture

GPUS = {"hopper": (9, 0), "blackwell": (10, 0), "blackwell-rtx": (12, 0)}
"""The simulated GPUs and their compute capabilities. Only the simulation of Hopper was compared with a GPU."""

GPU = os.environ.get("TE_SIMULATOR_GPU", "hopper")
if GPU not in GPUS:
    raise ValueError(f"TE_SIMULATOR_GPU={GPU} is unknown. Set it to one of these GPUs: {', '.join(GPUS)}")

CAPABILITY = GPUS[GPU]

PROPERTIES = SimpleNamespace(
    name=f"simulated {GPU} GPU", major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132,
    total_memory=141 << 30, warp_size=32, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
)  # fmt: skip


def sm_arch() -> int:
    """Return the compute capability as one number, such as 90, for comparisons as in TE's C++."""
    return 10 * CAPABILITY[0] + CAPABILITY[1]


def any_fp8_layout() -> bool:
    """Return whether per-tensor FP8 products read operands in any layout, so that FP8 tensors need no transposes."""
    return 100 <= sm_arch() < 120 or sm_arch() >= 130


class Stream:
    """A stand-in for ``torch.cuda.Stream``. Operations of all streams run in the order of the program."""

    def __init__(self, device: Any = None, priority: int = 0, **other: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.priority = priority
        self.cuda_stream = id(self)
        self.stream_id = id(self)
        self.device_index = 0

    def wait_stream(self, stream: Stream) -> None:
        """Do nothing, because the work of the other stream is already done."""

    def wait_event(self, event: Event) -> None:
        """Do nothing, because the event has already happened."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return ``event``, or a new event, recorded at this point of the stream."""
        return event or Event()

    def query(self) -> bool:
        """Return True, because all work of the stream is done. In a capture, raise the GPU's error."""
        refuse_in_capture("Stream.query")
        return True

    def synchronize(self) -> None:
        """Do nothing outside of a capture. In a capture, raise the GPU's error."""
        refuse_in_capture("Stream.synchronize")

    def __enter__(self) -> Self:
        self._previous = _current.stream
        _current.stream = self
        return self

    def __exit__(self, *error: object) -> None:
        _current.stream = self._previous


class Event:
    """A stand-in for ``torch.cuda.Event``, which measures no time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        """Do nothing, because operations run in the order of the program."""

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing, because this event has already happened."""

    def query(self) -> bool:
        """Return True, because this event has already happened. In a capture, raise the GPU's error."""
        refuse_in_capture("Event.query")
        return True

    def synchronize(self) -> None:
        """Do nothing outside of a capture. In a capture, raise the GPU's error."""
        refuse_in_capture("Event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        """Raise NotImplementedError, because the simulator measures no time."""
        raise NotImplementedError("the simulator does not support Event.elapsed_time, because it measures no time")


class Library(ctypes.CDLL):
    """A stand-in for ``ctypes.CDLL``, with which programs find the simulated driver."""

    def __new__(cls, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        return Driver() if name == "libcuda.so.1" else super().__new__(cls)


class Driver:
    """A stand-in for ``libcuda.so.1``. Before importing torch, programs read the number of GPUs from this library."""

    def cuInit(self, flags: int) -> int:
        """Return 0, as after a successful start of the driver."""
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        """Write the number of GPUs, 1, to the pointer ``count``, and return 0."""
        count._obj.value = 1
        return 0


_current = SimpleNamespace(stream=Stream())
_DEFAULT_STREAM = _current.stream


def install() -> None:
    """Replace parts of torch and ``ctypes.CDLL``. Other functions of ``torch.cuda`` fail as without a GPU."""
    replace(torch.cuda, **_REPLACEMENTS)
    for module in (torch.cuda.graphs, torch.cuda.streams, torch.cuda.random, torch.cuda.memory):
        replace(module, **{name: _REPLACEMENTS[name] for name in vars(module).keys() & _REPLACEMENTS.keys()})
    replace(
        torch._C, _graph_pool_handle=memory.new_pool_id, _host_emptyCache=_ignore, _cuda_clearCublasWorkspaces=_ignore
    )
    replace(torch.version, cuda="13.0")
    replace(torch, compile=_compile)
    replace(ctypes, CDLL=Library)
    torch.set_num_threads(1)  # faster for small tensors, and the number of cores cannot change results
    replace(torch.autocast, __init__=_autocast(torch.autocast.__init__))


@contextlib.contextmanager
def _stream_context(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


@contextlib.contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _memory_reserved(device: Any = None) -> int:
    return sum(pool.reserved() for pool in memory.pools())


def _compile(model: Any = None, **options: Any) -> Any:
    """Return ``model`` unchanged, because a graph would not record compiled code.

    If ``model`` is None, return a decorator that returns its function unchanged.
    """
    return (lambda function: function) if model is None else model


def _autocast(function: Any) -> Any:
    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type == "cuda" and enabled:
            raise NotImplementedError("the simulator does not support torch.autocast('cuda')")
        function(self, device_type, dtype, enabled, cache_enabled)

    return init


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    DEFAULT.set_state(state)


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return DEFAULT.get_state()


_REPLACEMENTS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": _ignore,
    "_lazy_init": _ignore,
    "_lazy_call": lambda function, **kwargs: function(),
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _ignore,
    "device": _nothing,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_name": lambda device=None: PROPERTIES.name,
    "is_bf16_supported": lambda including_emulation=True: True,
    "get_arch_list": lambda: [f"sm_{sm_arch()}"],
    "synchronize": lambda device=None: refuse_in_capture("torch.cuda.synchronize"),
    "Stream": Stream,
    "Event": Event,
    "stream": _stream_context,
    "set_stream": lambda stream: setattr(_current, "stream", stream),
    "current_stream": lambda device=None: _current.stream,
    "default_stream": lambda device=None: _DEFAULT_STREAM,
    "CUDAGraph": CUDAGraph,
    "graph_pool_handle": memory.new_pool_id,
    "is_current_stream_capturing": lambda: Capture.current is not None,
    "default_generators": (DEFAULT,),
    "manual_seed": lambda seed: DEFAULT.manual_seed(seed),
    "manual_seed_all": lambda seed: DEFAULT.manual_seed(seed),
    "initial_seed": DEFAULT.initial_seed,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "get_rng_state_all": lambda: [_get_rng_state()],
    "set_rng_state_all": lambda states: _set_rng_state(states[0]),
    "empty_cache": _ignore,
    "ipc_collect": _ignore,
    "reset_peak_memory_stats": lambda device=None: memory.reset_peak(),
    "max_memory_allocated": lambda device=None: memory.peak(),
    "memory_allocated": lambda device=None: memory.allocated(),
    "memory_reserved": _memory_reserved,
    "max_memory_reserved": _memory_reserved,
    "nvtx": SimpleNamespace(range_push=_ignore, range_pop=_ignore, mark=_ignore, range=_nothing),
}
