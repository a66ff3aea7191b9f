"""Measurement of benchmark cases; each contender runs in its own process."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pretrain.bench.contenders import CONTENDERS, Case, Update, autocast, collate, model_of
from pretrain.config.run import OptimizerConfig
from pretrain.data.prefetch import follow_parent
from pretrain.engine import optimizers
from pretrain.engine.distributed import Process, choose_device
from pretrain.loop import MicroBatch
from pretrain.model import attention
from pretrain.model.layers import EncoderLayer

T = TypeVar("T")

_WARM_UP = 2
_LEAST_UPDATES = 3


@dataclasses.dataclass(frozen=True)
class Measured:
    """Figures of one case."""

    seconds: float
    """Median time of an update."""
    tokens: int
    """Tokens per update, without padding."""
    peak_bytes: int
    """Peak memory: of the GPU, or of the process on a CPU."""
    start_seconds: float
    """Time to build and compile the model."""
    parts: dict[str, float]
    """Seconds by part of an update; each is measured alone, forward and backward."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """Figures of one case beside a baseline."""

    tokens_per_second: float
    """At the median time of an update."""
    peak_bytes: int
    """Peak memory: of the GPU, or of the process on a CPU."""
    ratios: list[float]
    """Speed over the baseline's, of each pair of updates."""


def log(text: str) -> None:
    """Write a progress line to stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def prepare_process() -> None:
    """Set this process up as the engine does, so that every contender has the same settings."""
    follow_parent()
    Process.from_environment({}).prepare_cpu()


def matmul_peak(name: str | None = None) -> float:
    """Return the FLOP/s of a large matrix product, in bf16 on a GPU and fp32 on a CPU.

    Args:
        name: of the device, see `choose_device`.
    """
    device = choose_device(name)
    on_gpu = device.type == "cuda"
    side, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    return 2 * side**3 / min(_seconds(lambda: a @ b, device) for _ in range(20))


def measure(case: Case, seconds: float) -> Measured | str:
    """Train for about `seconds` after a warm-up.

    Returns:
        The figures, or the reason why there are none, such as "out of memory".
    """
    return _guarded(functools.partial(_measure, case, seconds))


def compare(case: Case, baseline: Case, seconds: float) -> Compared | str:
    """Train two models by turns for about `seconds`, one update each, on the same batches.

    What else the machine does slows both alike.

    Returns:
        The figures of `case` beside `baseline`, or the reason why there are none.
    """
    return _guarded(functools.partial(_compare, case, baseline, seconds))


def _guarded(measuring: Callable[[torch.device], T]) -> T | str:
    device = choose_device()
    torch.compiler.reset()
    _free_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    try:
        return measuring(device)
    except torch.OutOfMemoryError:
        return "out of memory"
    except (RuntimeError, ValueError, ImportError) as error:
        return f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    finally:
        _free_memory(device)  # the next case may run in another process


def _warmed_up(case: Case, device: torch.device) -> tuple[Update, list[MicroBatch]]:
    log("    building the model")
    torch.manual_seed(0)
    update = CONTENDERS[case.contender](case, device)
    batches = [collate(case, step) for step in range(_WARM_UP)]
    log(f"    warming up{' and compiling' if device.type == 'cuda' else ''}")
    for batch in batches:
        update(batch)
    _wait(device)
    return update, batches


def _compare(case: Case, baseline: Case, seconds: float, device: torch.device) -> Compared:
    update, batches = _warmed_up(case, device)
    peak_bytes = _peak_bytes(device)  # with one model only
    baseline_update, _ = _warmed_up(baseline, device)
    log("    measuring both by turns")
    times: list[float] = []
    ratios: list[float] = []
    end = time.perf_counter() + seconds
    for batch in itertools.cycle(batches):
        if len(times) >= _LEAST_UPDATES and time.perf_counter() >= end:
            break
        times.append(_seconds(functools.partial(update, batch), device))
        ratios.append(_seconds(functools.partial(baseline_update, batch), device) / times[-1])
    tokens = sum(batch.tokens for batch in batches) // len(batches)
    return Compared(tokens / statistics.median(times), peak_bytes, ratios)


def _measure(case: Case, seconds: float, device: torch.device) -> Measured:
    started = time.perf_counter()
    update, batches = _warmed_up(case, device)
    ready = time.perf_counter()
    log("    measuring")
    # On a CPU the first seconds of a process are slower than the rest.
    first_counted = ready + (seconds if device.type == "cpu" else 0)
    times: list[float] = []
    for batch in itertools.cycle(batches):
        began = time.perf_counter()
        if len(times) >= _LEAST_UPDATES and began >= first_counted + seconds:
            break
        duration = _seconds(functools.partial(update, batch), device)
        if began >= first_counted:
            times.append(duration)
    return Measured(
        seconds=statistics.median(times),
        tokens=sum(batch.tokens for batch in batches) // len(batches),
        peak_bytes=_peak_bytes(device),
        start_seconds=ready - started,
        parts=_parts(case, batches[0], device) if case.parts else {},
    )


def _parts(case: Case, batch: MicroBatch, device: torch.device) -> dict[str, float]:
    """Return the seconds of each part of a plain-loop update, measured alone and not compiled."""
    log("    measuring the parts of an update")
    model = model_of(case, device)
    tensors = batch.to(device)
    config, layer = model.config, model.encoder.layers[0]
    assert isinstance(layer, EncoderLayer)
    with torch.no_grad():
        _, context = model.encoder.embed(tensors["input_ids"], tensors.get("document_ids"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, hidden = config.num_heads, config.hidden_size
    shape = (case.rows, case.length)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype, requires_grad=True)

    x, qkv = random(*shape, hidden), random(*shape, 3, heads, hidden // heads)
    inner = random(*shape, config.intermediate_size)
    features = random(len(tensors["target_positions"]), hidden)
    table = model.encoder.embeddings.tokens.weight

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

    def forward_and_backward(part: Callable[[], Tensor]) -> float:
        def once() -> None:
            with autocast(device):
                result = part()
            result.backward(torch.ones_like(result))  # type: ignore[no-untyped-call]

        once()
        return median_seconds(once)

    def median_seconds(action: Callable[[], object]) -> float:
        return statistics.median(_seconds(action, device) for _ in range(3))

    optimizer = optimizers.build(model, OptimizerConfig())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    layers = config.num_layers
    return {
        "attention": layers * forward_and_backward(lambda: attention.attend(qkv, context, 0.0)),
        "matrices": layers * forward_and_backward(matrices),
        "head": forward_and_backward(head),
        "optimizer": median_seconds(optimizer.step),
        "data": median_seconds(lambda: collate(case, 0)),
    }


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    action()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # Not getrusage: its peak starts at the memory of the parent process.
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
