"""Inductor for a GPU that is not there: its Triton kernels are compiled, looked at, and not run.

`compile_for` makes torch.compile believe in the device of `device.pretend`. Triton's own ptxas
makes the machine code. Launching them does nothing.
"""

import re
import subprocess
import tempfile
import types
from collections import Counter
from pathlib import Path

import torch
import triton
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

KERNELS: dict[str, dict[str, int]] = {}
"""What those that were compiled need, by name."""
LAUNCHES: Counter[str] = Counter()


def _needs(compiled: "triton.compiler.CompiledKernel") -> dict[str, int]:
    """What a compiled kernel takes of the GPU: bytes a thread, bytes a block; atomic additions."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [tool, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (spills,) = re.findall(r"STACK:(\d+)", text)
    return {
        "spills": int(spills),
        "shared": compiled.metadata.shared,
        "shared_limit": torch.cuda.get_device_properties().shared_memory_per_block_optin,
        "atomics": len(re.findall(r"^\s*(?:@!?%p\d+ )?(?:atom|red)\.", compiled.asm["ptx"], re.M)),
    }


def compile_for(properties: types.SimpleNamespace) -> None:
    """Make Inductor compile for the device that `device.pretend` returned."""
    inductor.compile_threads = 1
    # Triton's own cache stays, which `force_disable_caches` would empty: most of the time is its.
    inductor.fx_graph_cache = inductor.autotune_local_cache = False
    functorch.enable_autograd_cache = False
    inductor.use_static_triton_launcher = False
    capability = properties.major * 10 + properties.minor
    target = triton.backends.compiler.GPUTarget("cuda", capability, properties.warp_size)
    triton.runtime.driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_device_interface=lambda: torch.cuda,
            get_active_torch_device=lambda: torch.device("cuda", 0),
        )
    )
    triton_helpers.set_driver_to_gpu = lambda: None
    CachingAutotuner.precompile = _precompile
    CachingAutotuner.run = _launch
    # Generated programs call these past Python's dispatcher, and so past fake tensors.
    guards = torch._C._dynamo.guards
    reinterpret = guards._reinterpret_tensor

    def view(tensor, size, stride, offset=0):
        if not isinstance(tensor, torch._subclasses.FakeTensor):
            return reinterpret(tensor, size, stride, offset)
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)

    guards._reinterpret_tensor = view
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda"
    )
    # Inductor finds the value of a constant by making one element of it, here on the CPU.
    deduce = UniformValueConstantFolder._deduce_value

    def deduce_on_cpu(folder, node):
        given = node.kwargs
        node.kwargs = given | ({"device": torch.device("cpu")} if "device" in given else {})
        try:
            return deduce(folder, node)
        finally:
            node.kwargs = given

    UniformValueConstantFolder._deduce_value = deduce_on_cpu


def _precompile(tuner: CachingAutotuner, *arguments: object, **keywords: object) -> None:
    if tuner.launchers:
        return
    chosen = tuner.configs[0]
    tuner._precompile_worker()
    KERNELS[tuner.fn.__name__] = _needs(tuner.compile_results[0].kernel)
    tuner.launchers = [types.SimpleNamespace(config=chosen)]


def _launch(tuner: CachingAutotuner, *arguments: object, **keywords: object) -> None:
    LAUNCHES[tuner.fn.__name__] += 1
