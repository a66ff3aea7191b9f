"""Training speed of RoBERTa on a CPU beside that of transformers, as ratios.

    python -m tests.benchmarks.speed --json speed.json

Two models of the same shape are trained by turns, one update each, on the same micro-batches of
random tokens, so that what else the machine does slows both alike. Each size and layout runs in a
process of its own. For a GPU see `peers`.
"""

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data_prep.common.files import write_json
from pretrain.config.sections import OptimizerConfig
from pretrain.engine import optimizers
from pretrain.engine.distributed import Process
from pretrain.loop.protocols import MicroBatch
from pretrain.model import presets
from pretrain.model.config import ModelConfig
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.base import Block, PretrainingObjective, Vocabulary
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.tokens import FIRST_WORD_ID, IGNORED

Update = Callable[[MicroBatch], object]
CPU = torch.device("cpu")
LAYOUTS = ("full", "padded")
"""Full rows, which have no mask; padded: rows of one document of random length."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the shape of its micro-batches; an update reads one micro-batch."""

    size: str
    layout: str
    length: int
    rows: int
    vocab_size: int

    def architecture(self) -> ModelConfig:
        # Token vectors of the hidden size, as the others have them.
        sizes = {"max_positions": self.length, "embedding_size": 0}
        overrides = {**sizes, "attention_dropout": 0.0}
        return presets.build(self.size, "baseline", self.vocab_size, overrides)

    def objective(self) -> PretrainingObjective:
        vocabulary = Vocabulary(self.vocab_size, self.vocab_size - 1, Path())
        return MaskedLMConfig().build(vocabulary)

    def batch(self, step: int) -> MicroBatch:
        """The micro-batch of a step, made of random ids."""
        draw = np.random.default_rng([step, self.length])
        lengths = [self.length] * self.rows
        if self.layout == "padded":
            lengths = draw.integers(self.length // 2, self.length + 1, self.rows).tolist()
        rows = [draw.integers(FIRST_WORD_ID, self.vocab_size - 1, length) for length in lengths]
        objective = self.objective()
        keys = [(0, step, row) for row in range(self.rows)]
        arrays = objective.collate([Block(ids) for ids in rows], keys, self.length)
        return MicroBatch(0, arrays, sum(lengths), objective.targets(arrays))


def ours(case: Case) -> Update:
    model, objective = LanguageModel(case.architecture(), 128), case.objective()

    def loss_of(batch: MicroBatch) -> Tensor:
        return objective.loss(model, batch.to(CPU)).sum() / sum(batch.targets)

    return train(optimizers.build(model, OptimizerConfig()), loss_of)


def theirs(case: Case) -> Update:
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
    model = make(config, attn_implementation="sdpa").train()

    def loss_of(batch: MicroBatch) -> Tensor:
        tensors = batch.to(CPU)
        labels, mask = torch.full_like(tensors["input_ids"], IGNORED), tensors.get("document_ids")
        used = tensors["labels"] != IGNORED
        labels.view(-1)[tensors["target_positions"][used]] = tensors["labels"][used]
        loss: Tensor = model(
            input_ids=tensors["input_ids"], attention_mask=mask, labels=labels
        ).loss
        return loss

    return train(torch.optim.AdamW(model.parameters(), fused=True), loss_of)


def train(optimizer: torch.optim.Optimizer, loss_of: Callable[[MicroBatch], Tensor]) -> Update:
    """Train with plain PyTorch: fp32, fused AdamW."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-4

    def update(batch: MicroBatch) -> None:
        loss_of(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def compare(case: Case, seconds: float) -> dict[str, Any]:
    """Train both models by turns for about `seconds`, at least three updates each."""
    Process.from_environment({}).prepare_cpu()
    batches = [case.batch(step) for step in range(2)]
    updates = []
    for make in (ours, theirs):
        torch.manual_seed(0)
        updates.append(make(case))
    times: list[list[float]] = []
    last = time.perf_counter()
    for step, batch in enumerate(itertools.cycle(batches)):
        if step == len(batches):  # these warmed up
            times.clear()
            last = time.perf_counter() + seconds
        if len(times) >= 3 and time.perf_counter() >= last:
            break
        ends = [time.perf_counter()]
        for update in updates:
            update(batch)
            ends.append(time.perf_counter())
        times.append([end - begin for begin, end in itertools.pairwise(ends)])
    ratios = [other / own for own, other in times]
    tokens = statistics.fmean(batch.tokens for batch in batches)
    return {
        **dataclasses.asdict(case),
        "tokens_per_second": tokens / statistics.median(own for own, _ in times),
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4, method="inclusive"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="small", help="such as small,base")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rows", type=int, help="of a micro-batch")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a size and layout")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = options.rows or max(1, 1024 // options.length)
    print(f"{rows} x {options.length} tokens; tokens/s, and over transformers' (quartiles)")
    found = []
    for size, layout in itertools.product(options.sizes.split(","), LAYOUTS):
        case = Case(size, layout, options.length, rows, vocab_size=2000)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            measured = pool.submit(compare, case, options.seconds).result()
        low, middle, high = measured["quartiles"]
        speed = f"{measured['tokens_per_second']:,.0f} tokens/s"
        print(f"{size}, {layout}: {speed}, {middle:.2f} ({low:.2f}, {high:.2f})", flush=True)
        found.append(measured)
        if options.json:
            write_json(options.json, found)


if __name__ == "__main__":
    main()
