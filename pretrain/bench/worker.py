"""What one contender's process does in `pretrain bench`: one case after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.bench.contenders import (
    CONTENDERS,
    Case,
    Update,
    autocast,
    collate,
    model_of,
)
from pretrain.config.run import OptimizerConfig
from pretrain.data.prefetch import follow_parent

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.loop import MicroBatch

_WARM_UP = 2
_LEAST_UPDATES = 3


@dataclasses.dataclass(frozen=True)
class Measured:
    """How a case went."""

    seconds: float
    """Of the median update."""
    tokens: int
    """Real ones of an update."""
    peak_bytes: int
    """Most memory: of the GPU, or of the process on a CPU."""
    start_seconds: float
    """Building the model, and compiling it."""
    parts: dict[str, float]
    """Seconds of each part of an update, each measured by itself, forwards and backwards."""


def say(text: str) -> None:
    """Tell the user what is going on: a line on stderr, at once."""
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()


def begin() -> None:
    """Prepare this process, as the engine does: no contender is favoured by it."""
    from pretrain.engine.distributed import Process

    follow_parent()
    Process.from_environment({}).prepare_cpu()


_one: tuple[Case, Update]
"""What this process works on between calls of `timed_update`."""


def begin_one(case: Case) -> None:
    """Prepare this process for updates of one case alone."""
    global _one
    import torch

    begin()
    say(f"{case.name()}: building the model")
    torch.manual_seed(0)
    _one = case, CONTENDERS[case.contender](case, _device())


def timed_update(step: int) -> float:
    """Seconds of one update of `begin_one`'s case."""
    case, update = _one
    batch = collate(case, step)
    return _seconds(lambda: update(batch), _device())


def matmul_peak() -> float:
    """Multiplications and additions a second of a large matrix product: bf16 on a GPU, or fp32."""
    import torch

    device = _device()
    on_gpu = device.type == "cuda"
    side = 8192 if on_gpu else 1024
    a, b = (
        torch.randn(side, side, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
        for _ in range(2)
    )
    return 2 * side**3 / min(_seconds(lambda: a @ b, device) for _ in range(20))


def measure(case: Case, seconds: float) -> Measured | str:
    """Train for about so many seconds, after a warm-up.

    Returns:
        Figures, or why there are none: memory that does not suffice is a result, too.
    """
    import torch

    device = _device()
    try:
        with _clean(device):
            return _measure(case, seconds, device)
    except torch.OutOfMemoryError:
        return "out of memory"
    except (RuntimeError, ValueError, ImportError) as error:
        return f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def _measure(case: Case, seconds: float, device: torch.device) -> Measured:
    import torch

    started = time.perf_counter()
    say("    building the model")
    torch.manual_seed(0)
    update = CONTENDERS[case.contender](case, device)
    batches = [collate(case, step) for step in range(_WARM_UP)]
    say(f"    warming up{' and compiling' if device.type == 'cuda' else ''}")
    for batch in batches:
        update(batch)
    _wait(device)
    ready = time.perf_counter()
    say("    measuring")
    # On a CPU the first seconds of a process are slower than the rest.
    counted = ready + (seconds if device.type == "cpu" else 0)
    times: list[float] = []
    turn = itertools.cycle(batches)
    while len(times) < _LEAST_UPDATES or time.perf_counter() < counted + seconds:
        began, batch = time.perf_counter(), next(turn)
        taken = _seconds(lambda batch=batch: update(batch), device)  # type: ignore[misc]
        if began >= counted:
            times.append(taken)
    return Measured(
        seconds=statistics.median(times),
        tokens=sum(batch.tokens for batch in batches) // len(batches),
        peak_bytes=peak_bytes(),
        start_seconds=ready - started,
        parts=_parts(case, batches[0], device) if case.parts else {},
    )


def _parts(case: Case, batch: MicroBatch, device: torch.device) -> dict[str, float]:
    """Seconds of the parts of an update of the plain loop, each by itself, compiled by nobody."""
    import torch

    from pretrain.engine import optimizers
    from pretrain.model import attention
    from pretrain.model.layers import EncoderLayer

    say("    measuring the parts of an update")
    model = model_of(case, device)
    tensors = batch.to(device)
    config, layer = model.config, model.encoder.layers[0]
    assert isinstance(layer, EncoderLayer)
    with torch.no_grad():
        _, context = model.encoder.embed(tensors["input_ids"], tensors.get("document_ids"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, hidden = config.num_heads, config.hidden_size
    shape = (case.rows, case.length)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype, requires_grad=True)

    x, qkv = drawn(*shape, hidden), drawn(*shape, 3, heads, hidden // heads)
    inner, places = drawn(*shape, config.intermediate_size), tensors["target_positions"]
    features, table = drawn(len(places), hidden), model.encoder.embeddings.tokens.weight

    def head() -> Tensor:
        return case.objective().loss(lambda *_: model.head(features, table), tensors)

    def matrices() -> Tensor:
        outputs = (
            layer.attention.query_key_value(x),
            layer.attention.output(x),
            layer.expand(x),
            layer.contract(inner),
        )
        return torch.cat([output.flatten() for output in outputs])

    def backwards(part: Callable[[], Tensor]) -> float:
        def once() -> None:
            with autocast(device):
                result = part()
            result.backward(torch.ones_like(result))  # type: ignore[no-untyped-call]

        once()
        return statistics.median(_seconds(once, device) for _ in range(3))

    numbers = OptimizerConfig()
    optimizer = optimizers.build(model, numbers)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    layers = config.num_layers
    return {
        "attention": layers * backwards(lambda: attention.attend(qkv, context, 0.0)),
        "matrices": layers * backwards(matrices),
        "head": backwards(head),
        "optimizer": statistics.median(_seconds(optimizer.step, device) for _ in range(3)),
        "data": statistics.median(_seconds(lambda: collate(case, 0), device) for _ in range(3)),
    }


def _device() -> torch.device:
    from pretrain.engine.distributed import choose_device

    return choose_device()


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    action()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def _clean(device: torch.device) -> Iterator[None]:
    """Nothing of the case before: no compiled code, no peak; and no memory left to the next one."""
    import torch

    torch.compiler.reset()
    _release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    try:
        yield
    finally:
        _release(device)  # the next case may be another process's


def _release(device: torch.device) -> None:
    import gc

    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_bytes() -> int:
    """Most memory so far: of the GPU, or of this process on a CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # Not getrusage: it begins with the memory of the process that started this one.
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
