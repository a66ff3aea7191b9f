"""A process that believes it has one CUDA device, on which nothing can run.

Import this before torch: the guard library of the environment variable GUARD (guard.cpp) must be
there when torch's own are loaded. `pretend` then replaces what torch asks a device, so that fake
tensors on "cuda" go through the model and Inductor. `tell` ends the process.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import traceback
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_LIBRARIES = Path(importlib.util.find_spec("torch").origin).parent / "lib"
for _library in (_LIBRARIES / "libc10.so", _LIBRARIES / "libtorch_cpu.so", os.environ["GUARD"]):
    ctypes.CDLL(str(_library), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402

KINDS = {
    "a100": {"major": 8, "minor": 0, "multi_processor_count": 108, "shared_kb": 163},
    "h100": {"major": 9, "minor": 0, "multi_processor_count": 132, "shared_kb": 227},
}
"""Properties in which GPUs differ; `shared_kb` is the shared memory that a block may have."""


class Stream:
    """A stream or an event: all that is asked of it has happened."""

    cuda_stream = stream_id = device_index = device_type = 0
    device = torch.device("cuda", 0)

    def __init__(self, *arguments: object, **keywords: object) -> None:
        pass

    def __getattr__(self, name: str):
        return lambda *arguments, **keywords: None

    def query(self) -> bool:
        return True


def pretend(kind: str) -> types.SimpleNamespace:
    """Make torch believe that there is one GPU of `kind`; returns its properties."""
    given = dict(KINDS[kind])
    shared = given.pop("shared_kb") * 1024
    properties = types.SimpleNamespace(
        **given,
        name=f"NVIDIA {kind.upper()}",
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + 1024,
        gcnArchName="",
    )
    _answer(
        torch.cuda,
        is_available=True,
        is_initialized=True,
        is_bf16_supported=True,
        is_current_stream_capturing=False,
        device_count=1,
        current_device=0,
        memory_allocated=0,
        max_memory_allocated=0,
        memory_reserved=0,
        max_memory_reserved=0,
        mem_get_info=(80 << 30, 80 << 30),
        memory_stats={},
        get_device_properties=properties,
        get_device_capability=(properties.major, properties.minor),
        get_device_name=properties.name,
        get_rng_state=torch.zeros(16, dtype=torch.uint8),
        set_rng_state=None,
        manual_seed=None,
        manual_seed_all=None,
        _lazy_init=None,
        set_device=None,
        synchronize=None,
        empty_cache=None,
        reset_peak_memory_stats=None,
        current_stream=Stream(),
        default_stream=Stream(),
        stream=contextlib.nullcontext(),
        _exchange_device=0,
        _maybe_exchange_device=0,
    )
    torch.cuda.Stream = torch.cuda.Event = Stream
    _answer(torch.cuda.random, get_rng_state=torch.zeros(16, dtype=torch.uint8), set_rng_state=None)
    _answer(torch.cuda.nvtx, range_push=None, range_pop=None)
    _answer(
        torch._C,
        _cuda_getCurrentRawStream=0,
        _cuda_getDevice=0,
        _cuda_setDevice=None,
        _cuda_exchangeDevice=0,
        _cuda_maybeExchangeDevice=0,
        _cuda_isCurrentStreamCapturing=False,
    )
    torch.version.cuda = "13.0"
    # The kernel of a GPU for a bias and for dropout; the choice itself is one of CUDA's.
    torch.nn.functional.scaled_dot_product_attention = _efficient_attention
    from torch._subclasses import fake_tensor

    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)
    fake_tensor.init_gpu_context = lambda *arguments: None
    # One copy, as of a real tensor.
    fake_tensor.FakeTensor.tolist = lambda self: [value.item() for value in self.cpu()]
    torch.Tensor.pin_memory = lambda self, *arguments, **keywords: self
    torch.nn.Module._apply = _apply
    return properties


def _answer(where: object, **answers: object) -> None:
    """Replace functions by ones that always return the same."""
    for name, value in answers.items():
        setattr(where, name, lambda *arguments, _value=value, **keywords: _value)


_attention = torch.nn.functional.scaled_dot_product_attention


def _efficient_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None
):
    if query.device.type == "cpu":
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    needs_gradient = any(tensor.requires_grad for tensor in (query, key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]


def _apply(module: torch.nn.Module, function, recurse: bool = True) -> torch.nn.Module:
    """Move or cast a module's tensors in place, which `Module._apply` does for no fake ones."""
    for child in module.children():
        child._apply(function)
    for tensors in (module._parameters, module._buffers):
        for tensor in filter(lambda t: t is not None, tensors.values()):
            with torch.no_grad():
                tensor.data = applied = function(tensor)
            if hasattr(applied, "fake_device"):
                tensor.fake_device = applied.fake_device
    return module


def tell(function: Callable[[Any], dict[str, object]], inputs: Iterable[Any]) -> None:
    """Print what a function finds of each input as a line of JSON; never returns."""
    code = 1
    try:
        for each in inputs:
            print(json.dumps(function(each)), flush=True)
        code = 0
    except Exception:  # noqa: BLE001 - told to who asked
        traceback.print_exc()
    os._exit(code)  # autograd's thread of the device cannot be joined
