"""CPU tensors that report a GPU as their device, and functions of torch that accept ``device="cuda"``.

Every tensor of the process is a CPU tensor, but it reports the device ``cuda:0`` unless the program explicitly puts it
on the host (``device="cpu"``, ``.cpu()``, ``.to("cpu")``). Tensors on the host report the device ``cpu``. Only
tensors on the host may be read while a graph is captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from . import memory
from .graph import is_on_host, mark_on_host, refuse_in_capture

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")

_FACTORIES = (
    "arange", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace", "ones",
    "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
    "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
)  # fmt: skip
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_FROM_HOST = ("tensor", "new_tensor")
_READS = ("tolist", "numpy", "__array__")

_plain_device: Callable[[torch.Tensor], torch.device] = vars(torch._C.TensorBase)["device"].__get__


def install() -> None:
    """Replace the functions and attributes of torch that accept or report a device."""
    for name in _FACTORIES:
        replace(torch, **{name: _factory(getattr(torch, name))})
    for name in _METHODS:
        replace(torch.Tensor, **{name: _factory(getattr(torch.Tensor, name))})
    for name in _READS:
        replace(torch.Tensor, **{name: _host_read(name, getattr(torch.Tensor, name))})
    replace(torch, as_tensor=_as_tensor(torch.as_tensor))
    replace(
        torch.Tensor,
        _make_wrapper_subclass=staticmethod(_factory(torch.Tensor._make_wrapper_subclass)),
        device=property(_device),
        is_cuda=property(lambda self: _device(self).type == "cuda"),
        get_device=lambda self: 0 if _device(self).type == "cuda" else -1,
        data_ptr=_data_ptr(torch.Tensor.data_ptr),
        pin_memory=lambda self, device=None: self,
        record_stream=lambda self, stream: None,
        to=_to(torch.Tensor.to),
        cuda=lambda self, *args, **kwargs: self.to(CUDA),
        cpu=lambda self, *args, **kwargs: self.to(CPU),
    )
    replace(DeviceContext, __init__=_device_context(DeviceContext.__init__))


def replace(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _device(tensor: torch.Tensor) -> torch.device:
    real = _plain_device(tensor)
    return CUDA if real.type == "cpu" and not is_on_host(tensor) else real


def _asked(device: Any) -> torch.device | None:
    """Return the device that an argument requests, or None if the argument is None."""
    if device is None:
        return None
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _real(device: torch.device | None) -> torch.device | None:
    return CPU if device is not None and device.type == "cuda" else device


def _factory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of ``function`` that accepts CUDA devices, marks host tensors, and ignores ``pin_memory``."""

    @functools.wraps(function)
    def create(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        device = _asked(kwargs.get("device"))
        if device is None:
            return function(*args, **kwargs)
        kwargs["device"] = _real(device)
        if device.type == "cuda" and function.__name__ in _FROM_HOST:
            refuse_in_capture(f"torch.{function.__name__} copies values from the host")
        if device.type != "cpu":
            return function(*args, **kwargs)
        with _disable_current_modes():  # a graph does not record operations on host memory
            return mark_on_host(function(*args, **kwargs))

    return create


def _host_read(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_on_host(self):
            refuse_in_capture(f"Tensor.{name} needs values from the GPU")
        return function(self, *args, **kwargs)

    return read


def _data_ptr(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def data_ptr(self: torch.Tensor) -> int:
        address = function(self)
        if address:
            memory.address_taken(self)
        return address

    return data_ptr


def _as_tensor(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a ``torch.as_tensor`` that also accepts objects with a GPU address, such as TE's weak references."""
    plain = _factory(function)

    @functools.wraps(function)
    def as_tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        interface = None
        if not isinstance(data, torch.Tensor):
            with contextlib.suppress(Exception):  # torch treats any error as a missing attribute
                interface = data.__cuda_array_interface__
        return plain(data, *args, **kwargs) if interface is None else _from_interface(interface)

    return as_tensor


def _from_interface(interface: dict[str, Any]) -> torch.Tensor:
    if interface.get("strides") is not None:
        raise NotImplementedError("the simulator does not support __cuda_array_interface__ with strides")
    shape, address = tuple(interface["shape"]), interface["data"][0]
    dtype = _TYPES[interface["typestr"]]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    with _disable_current_modes():
        return memory.at_address(address, dtype, shape)


_TYPES = {
    "|b1": torch.bool, "|u1": torch.uint8, "|i1": torch.int8, "<i2": torch.int16, "<i4": torch.int32,
    "<i8": torch.int64, "<u2": torch.uint16, "<u4": torch.uint32, "<u8": torch.uint64, "<f2": torch.float16,
    "<f4": torch.float32, "<f8": torch.float64, "<c8": torch.complex64, "<c16": torch.complex128,
}  # fmt: skip


def _to(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def to(self: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], int):
            args = (_asked(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _asked(kwargs["device"])
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            device = args[0].device
        if device is not None and device.type == "meta":
            return function(self, "meta", dtype, copy=copy, memory_format=memory_format)
        moves = device is not None and device.type != _device(self).type
        if moves:
            refuse_in_capture(f"Tensor.to copies a tensor to {device}")
        to_host = moves and device is not None and device.type == "cpu"
        with _disable_current_modes() if to_host else contextlib.nullcontext():
            result = function(self, dtype=dtype or self.dtype, copy=copy or moves, memory_format=memory_format)
        return mark_on_host(result) if (device or _device(self)).type == "cpu" else result

    return to


def _device_context(function: Callable[..., None]) -> Callable[..., None]:
    """Return a wrapper of ``function``, the constructor of torch's `DeviceContext`, that accepts CUDA devices."""

    @functools.wraps(function)
    def init(self: Any, device: Any) -> None:
        function(self, _real(_asked(device)))

    return init
