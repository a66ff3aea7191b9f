"""Fake tensors with values: every operation on them is repeated on tensors of the CPU.

`Shadow` follows what is not compiled. Of what is, `follow_compiled` runs the generated program a
second time on the values, and Triton's interpreter runs its kernels (TRITON_INTERPRET=1).
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map
from triton.runtime import interpreter

_EXECUTE = CachingAutotuner.run
"""Before `kernels.compile_for` replaces it."""
_VALUES: dict[int, torch.UntypedStorage] = {}
"""By the storage of a fake tensor."""
_ALIVE: list[object] = []
"""Storages whose addresses are keys."""
_CPU = torch.device("cpu")


@contextlib.contextmanager
def _on_values() -> Iterator[None]:
    """Neither modes nor an enclosing vmap apply."""
    with _disable_current_modes(), torch._C._DisableFuncTorch():
        yield


def value(leaf: object) -> object:
    """The values of a fake tensor; any other object as it is, but for a device."""
    if isinstance(leaf, torch.device):
        return _CPU
    if not isinstance(leaf, FakeTensor):
        return leaf
    storage = _VALUES[leaf.untyped_storage()._cdata]
    empty = torch.empty(0, dtype=leaf.dtype)
    return empty.set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())


def _is_known(leaf: object) -> bool:
    return not isinstance(leaf, FakeTensor) or leaf.untyped_storage()._cdata in _VALUES


def _remember(fakes: object, values: object) -> None:
    for fake, real in zip(tree_iter(fakes), tree_iter(values), strict=True):
        if isinstance(fake, FakeTensor):
            _VALUES[fake.untyped_storage()._cdata] = real.untyped_storage()
            _ALIVE.append(fake.untyped_storage())


class Shadow(TorchDispatchMode):
    """Repeats on values what is done to fake tensors that have some."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile works below it."""
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if all(map(_is_known, tree_iter((args, kwargs)))) and not isinstance(
            function, torch._ops.HigherOrderOperator
        ):
            with _on_values():
                _remember(result, function(*tree_map(value, args), **tree_map(value, kwargs)))
        return result


def follow_compiled() -> None:
    """Run what Inductor generates twice: on fake tensors, without kernels, and on values."""

    def launch(tuner, *arguments, **keywords):
        if not any(isinstance(argument, FakeTensor) for argument in arguments):
            _EXECUTE(tuner, *arguments, **keywords)

    CachingAutotuner.run = launch
    CachingAutotuner.precompile = lambda *arguments, **keywords: None
    compile_to_module = GraphLowering.compile_to_module

    def followed(graph):
        module = compile_to_module(graph)
        with open(module.__file__) as file, _on_values():
            on_values = PyCodeCache.load(_on_cpu(file.read()))
        on_fakes = module.call

        def call(arguments):
            with _on_values():
                values = [value(argument) for argument in arguments]
            results = on_fakes(arguments)
            with _on_values():
                _remember(results, on_values.call(values))
            return results

        module.call = call
        return module

    GraphLowering.compile_to_module = followed
    _mend_interpreter()


def _on_cpu(program: str) -> str:
    """The program that Inductor generates, allocating on the CPU; its kernels stay the GPU's."""
    for old, new in {
        "guards._empty_strided_cuda": "guards._empty_strided_cpu",
        "torch.cuda._DeviceGuard(0)": "__import__('contextlib').nullcontext()",
        "torch.cuda.set_device(0)": "None",
        "get_raw_stream(0)": "0",
        "device='cuda:0'": "device='cpu'",
        "device=device(type='cuda', index=0)": "device=device(type='cpu')",
        "libdevice.exp(": "tl.exp(",  # the interpreter has none
    }.items():
        program = program.replace(old, new)
    return program


def _mend_interpreter() -> None:
    """Triton 3.7's interpreter multiplies the bits of bf16 matrices, which it keeps as uint16."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(matrix):
        if matrix.dtype.scalar != interpreter.tl.bfloat16:
            return matrix
        bits = matrix.data.view(np.uint16).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    interpreter.InterpreterBuilder.create_dot = lambda builder, a, b, *rest: multiply(
        builder, widened(a), widened(b), *rest
    )
