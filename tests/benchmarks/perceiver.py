"""Step times of models with latents over the length of the input and the number of latents.

    python -m tests.benchmarks.perceiver [--lengths 128,256,512,1024] [--latents 32,64,128]
        [--rows 8] [--repeats 5] [--device cuda] [--plot perceiver.png]

Times forward and backward passes of the size `char`, without dropout, in fp32 on a CPU and in bf16
on CUDA, and puts beside them what the formulas of pretrain/model/perceiver.py say, as shares of the
model without latents at the same length: attention scores alone, N T^2 to 2 T L + (N - 2) L^2; and
all matrix products (`pretrain plan`'s count). Every model runs in turn, `--repeats` times over, and
medians are compared. Prints a table, and draws both into a picture.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from pretrain.bench.needs import flops_per_token
from pretrain.model import presets
from pretrain.model.config import ModelConfig
from pretrain.model.language_model import LanguageModel

VOCABULARY = 256
Seconds = dict[tuple[int, int], float]
"""By length and number of latents; 0 latents for the model without."""


def architecture(length: int, latents: int) -> ModelConfig:
    """The model of size char; its queries are the last tokens."""
    variant = "char-perceiver-ar" if latents else "char-vanilla"
    fields = {"latents": latents, "max_positions": length, "dropout": 0.0, "attention_dropout": 0.0}
    return presets.build("char", variant, VOCABULARY, fields)


def step_of(config: ModelConfig, rows: int, device: torch.device) -> Callable[[], float]:
    """A function that does one forward and backward pass and returns its seconds."""
    length = config.max_positions
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = LanguageModel(config).to(device, kind).train()
    ids = torch.randint(VOCABULARY, (rows, length), device=device)
    places = torch.arange(rows * length, device=device)

    def step() -> float:
        began = time.perf_counter()
        logits = model(ids, None, places)
        assert isinstance(logits, torch.Tensor)
        cross_entropy(logits.float(), ids.flatten()).backward()
        model.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return step


def measure(cases: list[tuple[int, int]], rows: int, repeats: int, device: torch.device) -> Seconds:
    """Median seconds of each case; every case runs in turn, after two steps to warm up."""
    steps = {case: step_of(architecture(*case), rows, device) for case in cases}
    for step in steps.values():
        step()
        step()
    found: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(repeats):
        for case, step in steps.items():
            found[case].append(step())
    return {case: statistics.median(seconds) for case, seconds in found.items()}


def scores(length: int, latents: int) -> float:
    """Attention scores of a row, per head."""
    layers = architecture(length, latents).num_layers
    if not latents:
        return layers * length**2
    return 2 * length * latents + (layers - 2) * latents**2


def products(length: int, latents: int) -> float:
    """FLOPs of a row's matrix products, forward and backward."""
    return length * flops_per_token(architecture(length, latents), length, 1.0)


def shares(seconds: Seconds, length: int, latents: int) -> tuple[float, float, float]:
    """Time, matrix products and scores as shares of those without latents at the same length."""
    case, whole = (length, latents), (length, 0)
    return (
        seconds[case] / seconds[whole],
        products(*case) / products(*whole),
        scores(*case) / scores(*whole),
    )


def table(seconds: Seconds) -> str:
    """Milliseconds of a step, and shares of the model without latents, in Markdown."""
    lines = ["| tokens | latents | ms a step | measured | products | scores |", "|---" * 6 + "|"]
    for (length, latents), found in seconds.items():
        cells = " | ".join(f"{share:.2f}" for share in shares(seconds, length, latents))
        lines.append(f"| {length:,} | {latents or 'none'} | {1000 * found:,.1f} | {cells} |")
    return "\n".join(lines)


def draw(seconds: Seconds, path: Path, title: str) -> None:
    """Step times by length, and shares of the model without latents beside the formulas."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, ScalarFormatter

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, parts = figure.subplots(1, 2)
    lengths = sorted({length for length, _ in seconds})
    for number, latents in enumerate(sorted({latents for _, latents in seconds})):
        here = [length for length in lengths if (length, latents) in seconds]
        color, name = f"C{number}", f"{latents} latents" if latents else "without latents"
        times.plot(here, [1000 * seconds[n, latents] for n in here], "o-", color=color, label=name)
        if latents:
            found = zip(*(shares(seconds, length, latents) for length in here), strict=True)
            for values, style in zip(found, ("o-", "--", ":"), strict=True):
                label = name if style == "o-" else None
                parts.plot(here, values, style, color=color, label=label)
    for style, label in (("--", "all matrix products"), (":", "attention scores alone")):
        parts.plot([], [], style, color="black", label=label)
    times.set(title="A step", ylabel="milliseconds", yscale="log")
    parts.set(title="Share of the model without latents", ylim=(0, 1.3))
    for axes in (times, parts):
        axes.set(xlabel="tokens", xscale="log")
        axes.set_xticks(lengths)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    times.yaxis.set_major_formatter(ScalarFormatter())
    times.legend()
    parts.legend(ncols=2, loc="upper right")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def numbers(text: str) -> list[int]:
    """Whole numbers, as in 128,256."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    """Measure, print the table, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=numbers, default=[128, 256, 512, 1024])
    parser.add_argument("--latents", type=numbers, default=[32, 64, 128])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--plot", type=Path, default=Path("perceiver.png"))
    options = parser.parse_args()
    cases = [
        (length, latents)
        for length in options.lengths
        for latents in (0, *options.latents)
        if latents < length
    ]
    seconds = measure(cases, options.rows, options.repeats, options.device)
    print(table(seconds))
    where = torch.cuda.get_device_name() if options.device.type == "cuda" else "CPU"
    draw(seconds, options.plot, f"Size char, {options.rows} rows, {where}")


if __name__ == "__main__":
    main()
