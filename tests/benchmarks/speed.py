"""Training speed beside a plain loop and transformers, as ratios.

    python -m tests.benchmarks.speed --json speed.json

Two models of the same shape are trained by turns, one update each, on the same micro-batches of
random tokens, so that what else the machine does slows both alike. Each pair runs in a process of
its own. On a CPU the models are small.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from data_prep.common.files import write_json
from pretrain.config.sections import BatchConfig, OptimizerConfig
from pretrain.engine import engine, optimizers
from pretrain.engine.distributed import Process, choose_device
from pretrain.loop.protocols import MicroBatch
from pretrain.model import presets
from pretrain.model.config import ModelConfig
from pretrain.model.language_model import LanguageModel
from pretrain.model.layers import compile_layers
from pretrain.objectives.base import Block, PretrainingObjective, Vocabulary
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.tokens import FIRST_WORD_ID, IGNORED

Update = Callable[[MicroBatch], object]
DEEPSPEED, PLAIN, TRANSFORMERS = "DeepSpeed", "plain loop", "transformers"


class Side(NamedTuple):
    """What is measured: a key of CONTENDERS, a model and a layout of rows."""

    contender: str
    variant: str
    layout: str = "full"
    """full rows, which have no mask; padded: rows of one document of random length."""


BASELINE, ZERO_CLAP = (Side(PLAIN, variant) for variant in ("baseline", "zero-clap"))
PAIRS = (
    (Side(DEEPSPEED, "baseline"), BASELINE),
    (Side(DEEPSPEED, "zero-clap"), ZERO_CLAP),
    (BASELINE, Side(TRANSFORMERS, "baseline")),
    (Side(PLAIN, "baseline", "padded"), Side(TRANSFORMERS, "baseline", "padded")),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model and the shape of its micro-batches; an update reads one micro-batch."""

    side: Side
    size: str
    length: int
    rows: int
    vocab_size: int

    def architecture(self) -> ModelConfig:
        # Token vectors of the hidden size, as the others have them; FlexAttention has no dropout.
        sizes = {"max_positions": self.length, "embedding_size": 0}
        overrides = {**sizes, "attention_dropout": 0.0}
        return presets.build(self.size, self.side.variant, self.vocab_size, overrides)

    def objective(self) -> PretrainingObjective:
        vocabulary = Vocabulary(self.vocab_size, self.vocab_size - 1, Path())
        return MaskedLMConfig().build(vocabulary)

    def model(self, device: torch.device) -> LanguageModel:
        backend = "flex" if device.type == "cuda" else "dense"
        return LanguageModel(self.architecture(), 128, backend).to(device)

    def batch(self, step: int) -> MicroBatch:
        """The micro-batch of a step, made of random ids."""
        draw = np.random.default_rng([step, self.length])
        lengths = [self.length] * self.rows
        if self.side.layout == "padded":
            lengths = draw.integers(self.length // 2, self.length + 1, self.rows).tolist()
        rows = [draw.integers(FIRST_WORD_ID, self.vocab_size - 1, length) for length in lengths]
        objective = self.objective()
        keys = [(0, step, row) for row in range(self.rows)]
        arrays = objective.collate([Block(ids) for ids in rows], keys, self.length)
        return MicroBatch(0, arrays, sum(lengths), objective.targets(arrays))


def through_deepspeed(case: Case, device: torch.device) -> Update:
    on_gpu = device.type == "cuda"
    process = engine.start()
    batch = BatchConfig(global_batch_size=case.rows, micro_batch_size=case.rows)
    settings = engine.deepspeed_json("zero1_bf16" if on_gpu else "zero1_fp32", batch, 0.0, 1)
    model = case.model(device)
    built = engine.Engine(model, OptimizerConfig(), settings, process, compiled=on_gpu)
    objective = case.objective()

    def update(batch: MicroBatch) -> object:
        counts = batch.tokens, *batch.targets  # as in the loop, which knows them beforehand
        losses = built.backward([batch], objective, counts, 0, 0)
        return built.update(losses, objective, counts, 1e-4, 0)

    return update


def plain_loop(case: Case, device: torch.device) -> Update:
    model, objective = case.model(device), case.objective()
    if device.type == "cuda":
        compile_layers(model)

    def loss_of(batch: MicroBatch) -> Tensor:
        return objective.loss(model, batch.to(device)).sum() / sum(batch.targets)

    return train(optimizers.build(model, OptimizerConfig()), loss_of, device)


def train(
    optimizer: torch.optim.Optimizer, loss_of: Callable[[MicroBatch], Tensor], device: torch.device
) -> Update:
    """Train with plain PyTorch: fp32 weights, autocast to bf16 on a GPU, fused AdamW."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-4

    def update(batch: MicroBatch) -> None:
        with autocast(device):
            loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def transformers(case: Case, device: torch.device) -> Update:
    from transformers import AutoModelForMaskedLM, RobertaConfig

    architecture = case.architecture()
    config = RobertaConfig(
        vocab_size=case.vocab_size,
        hidden_size=architecture.hidden_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        intermediate_size=architecture.intermediate_size,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=case.length + 2,
        type_vocab_size=1,
    )
    make: Callable[..., nn.Module] = AutoModelForMaskedLM.from_config
    model = make(config, attn_implementation="sdpa").to(device).train()

    def loss_of(batch: MicroBatch) -> Tensor:
        tensors = batch.to(device)
        labels, mask = _labels_by_position(tensors), tensors.get("document_ids")
        loss: Tensor = model(
            input_ids=tensors["input_ids"], attention_mask=mask, labels=labels
        ).loss
        return loss

    return train(torch.optim.AdamW(model.parameters(), fused=True), loss_of, device)


def _labels_by_position(batch: Mapping[str, Tensor]) -> Tensor:
    """The labels of a batch as transformers takes them: [B, T], IGNORED where there is none."""
    labels = torch.full_like(batch["input_ids"], IGNORED)
    used = batch["labels"] != IGNORED
    labels.view(-1)[batch["target_positions"][used]] = batch["labels"][used]
    return labels


CONTENDERS: dict[str, Callable[[Case, torch.device], Update]] = {
    DEEPSPEED: through_deepspeed,
    PLAIN: plain_loop,
    TRANSFORMERS: transformers,
}


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    on_gpu = device.type == "cuda"
    return torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext()


def compare(case: Case, other: Case, seconds: float) -> dict[str, Any]:
    """Train two models by turns for about `seconds`, at least three updates each."""
    Process.from_environment({}).prepare_cpu()
    device = choose_device()
    batches = [(case.batch(step), other.batch(step)) for step in range(2)]
    updates = []
    for each in (case, other):
        torch.manual_seed(0)
        updates.append(CONTENDERS[each.side.contender](each, device))
    times: list[list[float]] = []
    end = time.perf_counter()
    for step, pair in enumerate(itertools.cycle(batches)):
        if step == len(batches):  # these warmed up
            times.clear()
            end = time.perf_counter() + seconds
        if len(times) >= 3 and time.perf_counter() >= end:
            break
        times.append([timed(u, batch, device) for u, batch in zip(updates, pair, strict=True)])
    ratios = [theirs / ours for ours, theirs in times]
    tokens = statistics.fmean(batch.tokens for batch, _ in batches)
    return {
        "tokens_per_second": tokens / statistics.median(ours for ours, _ in times),
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4, method="inclusive"),
    }


def timed(update: Update, batch: MicroBatch, device: torch.device) -> float:
    """Seconds of an update."""
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    started = time.perf_counter()
    update(batch)
    wait()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", help="such as base,large")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rows", type=int, help="of a micro-batch")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a pair")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    sizes = options.sizes or ("base" if on_gpu else "small")
    rows = options.rows or max(1, (32768 if on_gpu else 1024) // options.length)
    shape = functools.partial(
        Case, length=options.length, rows=rows, vocab_size=50265 if on_gpu else 2000
    )
    print(f"{rows} x {options.length} tokens; tokens/s, and over the other's (quartiles)")
    found = []
    for size, (side, other) in itertools.product(sizes.split(","), PAIRS):
        cases = shape(side, size), shape(other, size)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            measured = pool.submit(compare, *cases, options.seconds).result()
        low, middle, high = measured["quartiles"]
        print(
            f"{size} {', '.join(side)} / {', '.join(other)}: {measured['tokens_per_second']:,.0f} "
            f"tokens/s, {middle:.2f} ({low:.2f}, {high:.2f})",
            flush=True,
        )
        found.append({"size": size, "side": side, "other": other, **measured})
        if options.json:
            write_json(options.json, found)


if __name__ == "__main__":
    main()
