"""Training speed beside the Hugging Face Trainer and a tight loop of plain torch, on one device.

    python -m tests.benchmarks.peers

Each contender has a process of its own, in turn, and trains as its users run it: on full rows of
random tokens, and on a task with inputs as long as CoLA's. Prints a table with date, device and
versions. `--size tiny --rows 2 --length 128 --steps 3` rehearses it on a CPU, without compilers.
"""

import argparse
import datetime
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from finetune import train
from finetune.batches import EncodedExamples, ShuffledBatches
from finetune.config import FinetuneConfig
from finetune.tasks import TASKS, Objective
from pretrain.config import load
from pretrain.engine.distributed import choose_device
from pretrain.engine.engine import start
from pretrain.loop.loop import run as run_loop
from pretrain.model import presets
from pretrain.model.classification import ClassificationConfig, ClassificationHead, Classifier
from pretrain.model.config import ModelConfig
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.tokens import FIRST_WORD_ID, IGNORED
from pretrain.plan import speed

ON_GPU = torch.cuda.is_available()
VOCABULARY, MASKED, EXAMPLES = 50304, 0.15, 8551
WARM_UP = 4
"""Updates before those that are measured: kernels are compiled in the first."""


class Shape(NamedTuple):
    """What is trained."""

    size: str
    length: int
    rows: int
    """Of a micro-batch."""
    steps: int
    """To measure."""

    @property
    def accumulation(self) -> int:
        return max(1, 64 // self.rows) if ON_GPU else 2

    def of(self, variant: str) -> ModelConfig:
        size = self.size.replace("base", "modern-base") if variant == "modern" else self.size
        overrides = {"max_positions": self.length, "embedding_size": 0}
        return presets.build(size, variant, VOCABULARY, overrides)

    def fields(self, variant: str) -> dict[str, Any]:
        """The sizes as transformers names them."""
        config = self.of(variant)
        return {
            "vocab_size": VOCABULARY,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "intermediate_size": config.intermediate_size,
        }


class Clock:
    """Measures updates: called at the end of each."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def __call__(self, *arguments: object) -> None:
        if ON_GPU:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def seconds(self) -> float:
        """Of an update: the median, as the first of a length takes longer."""
        return float(np.median(np.diff(self.ends[WARM_UP:])))


class TightLayer(nn.Module):
    """A layer of RoBERTa without what only some models need."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, self.heads = config.hidden_size, config.intermediate_size, config.num_heads
        self.qkv, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.expand, self.contract = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.norm, self.last_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        x = self.norm(x + F.dropout(self.output(mixed), 0.1))
        x = x + F.dropout(self.contract(F.gelu(self.expand(x))), 0.1)
        normed: Tensor = self.last_norm(x)
        return normed


class TightModel(nn.Module):
    """RoBERTa, and its loss at the masked places: no position bias, no mask, no documents."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(config.max_positions, hidden)
        self.layers = nn.Sequential(*(TightLayer(config) for _ in range(config.num_layers)))
        self.norm, self.last_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.dense, self.bias = nn.Linear(hidden, hidden), nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, ids: Tensor, places: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.tokens(ids) + self.positions.weight), 0.1)
        x = self.last_norm(F.gelu(self.dense(self.layers(x).flatten(0, 1)[places])))
        logits = F.linear(x, self.tokens.weight, self.bias)
        return F.cross_entropy(logits.float(), labels, reduction="sum")


def tight(shape: Shape) -> float:
    """As tight as torch allows: compiled whole, bf16, fp32 master weights, one fused AdamW."""
    device, clock = choose_device(), Clock()
    model = TightModel(shape.of("baseline")).to(device, torch.bfloat16 if ON_GPU else torch.float32)
    weights = list(model.parameters())
    masters = [weight.detach().float().clone().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    loss_of = torch.compile(model, fullgraph=True) if ON_GPU else model
    places = shape.rows * shape.length
    count = int(places * MASKED)
    ids = torch.randint(0, VOCABULARY, (shape.rows, shape.length), device=device)
    batch = ids, torch.randperm(places, device=device)[:count], ids.flatten()[:count]
    for _ in range(WARM_UP + shape.steps + 1):
        for _ in range(shape.accumulation):
            (loss_of(*batch) / (count * shape.accumulation)).backward()
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        clock()
    return clock.seconds()


def through_trainer(model: nn.Module, data: Any, rows: int, steps: int, **settings: Any) -> float:
    import transformers

    clock = Clock()
    callback = transformers.TrainerCallback()
    callback.on_step_end = lambda *arguments, **keywords: clock()  # type: ignore[method-assign]
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=rows,
        max_steps=WARM_UP + steps + 1,
        bf16=ON_GPU,
        optim="adamw_torch_fused",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=4 if ON_GPU else 0,
        **settings,
    )
    transformers.Trainer(model, arguments, padded, data, callbacks=[callback]).train()
    return clock.seconds()


def padded(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of rows, with a mask if one is padded."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], True, 1)
    labels = torch.tensor(np.array([row["labels"] for row in rows]))
    mask = ids != 1
    masked = {} if mask.all() else {"attention_mask": mask.long()}
    return {"input_ids": ids, "labels": labels, **masked}


def trainer(shape: Shape, variant: str) -> float:
    """RoBERTa ("baseline") or ModernBERT ("modern"), compiled, on rows without padding."""
    import transformers

    fields, length = shape.fields(variant), shape.length
    if variant == "modern":
        modern = {"max_position_embeddings": length, "sparse_prediction": True}
        config: Any = transformers.ModernBertConfig(**fields, **modern)
    else:
        fields |= {"max_position_embeddings": length + 2, "attention_probs_dropout_prob": 0.0}
        config = transformers.RobertaConfig(**fields)
    make: Callable[..., nn.Module] = transformers.AutoModelForMaskedLM.from_config
    ids = np.random.default_rng(0).integers(FIRST_WORD_ID, VOCABULARY, (64, shape.length))
    labels = np.where(np.random.default_rng(1).random(ids.shape) < MASKED, ids, IGNORED)
    return through_trainer(
        make(config, attn_implementation="sdpa"),
        [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)] * 16,
        shape.rows,
        shape.steps,
        gradient_accumulation_steps=shape.accumulation,
        torch_compile=ON_GPU,
    )


def ours(shape: Shape, words: Sequence[str]) -> float:
    """The recipe of these words, as `bench` measures it."""
    batch = {"micro_batch_size": shape.rows, "global_batch_size": shape.rows * shape.accumulation}
    settings = [f"batch.{name}={value}" for name, value in batch.items()]
    settings += [f"data.sequence_length={shape.length}", "phases=[]"]
    settings += [f"model.overrides.max_positions={shape.length}"]
    settings += [] if shape.size == "base" else [f"model.size={shape.size}"]
    settings += [] if ON_GPU else ["training.deepspeed=zero1_fp32"]
    config = load.load(words[0], [*words[1:], *settings])
    measured = speed.measure(config, seconds=0.3 * shape.steps)
    assert measured is not None  # on rank 0
    return measured.seconds


class RandomExamples(EncodedExamples):
    """Random ids, in number and lengths like CoLA's."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.lengths = np.clip(draw.gamma(5.0, 2.2, EXAMPLES).astype(int), 6, 47)
        limits = FIRST_WORD_ID, VOCABULARY - 1
        self.ids = [draw.integers(*limits, length, dtype=np.int32) for length in self.lengths]
        self.labels, self._segments = draw.integers(0, 2, EXAMPLES), 0


def our_finetuning(shape: Shape, batch: int) -> float:
    """Without the evaluations."""
    config, clock = FinetuneConfig(batch_size=batch), Clock()
    encoder = LanguageModel(shape.of("baseline")).encoder
    head = ClassificationHead(encoder.config.hidden_size, ClassificationConfig(2))
    examples = RandomExamples()
    batches = ShuffledBatches(examples.lengths, examples.collate, batch, 1, config.length_window)
    run_loop(
        train._engine(config, Classifier(encoder, head), start()),
        batches.micro_batches,
        Objective(TASKS["CoLA"]),
        learning_rate=lambda step: 1e-5,
        steps=range(WARM_UP + 10 * shape.steps + 1),
        observers=[clock],
    )
    return clock.seconds()


def trainer_finetuning(shape: Shape, batch: int) -> float:
    """As transformers' run_glue: not compiled, batches of all lengths."""
    import transformers

    examples, config = RandomExamples(), transformers.RobertaConfig(**shape.fields("baseline"))
    pairs = zip(examples.ids, examples.labels.tolist(), strict=True)
    data = [{"input_ids": ids.astype(np.int64), "labels": label} for ids, label in pairs]
    model = transformers.RobertaForSequenceClassification(config)
    return through_trainer(model, data, batch, 10 * shape.steps)


FAST = "pile-base-fast"
CONTENDERS: dict[str, tuple[Callable[[Shape], float], str]] = {
    "plain torch, tight": (tight, ""),
    "Trainer, RoBERTa": (partial(trainer, variant="baseline"), ""),
    "Trainer, ModernBERT": (partial(trainer, variant="modern"), ""),
    "zeroclap, baseline": (partial(ours, words=[FAST, "model.variant=baseline"]), "RoBERTa"),
    "zeroclap, zero-clap": (partial(ours, words=[FAST, "model.variant=zero-clap"]), "RoBERTa"),
    "zeroclap, modern-base": (partial(ours, words=["modern-base"]), "ModernBERT"),
    "Trainer, CoLA by 16": (partial(trainer_finetuning, batch=16), ""),
    "zeroclap, CoLA by 16": (partial(our_finetuning, batch=16), "CoLA by 16"),
    "Trainer, CoLA by 32": (partial(trainer_finetuning, batch=32), ""),
    "zeroclap, CoLA by 32": (partial(our_finetuning, batch=32), "CoLA by 32"),
}
"""Function of each, and what it is compared with of the Trainer's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="base", help="of all models")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=16, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=20, help="updates to measure")
    parser.add_argument("--only", default="", help="contenders with this in their name")
    options = parser.parse_args()
    shape = Shape(options.size, options.length, options.rows, options.steps)
    device = torch.cuda.get_device_name() if ON_GPU else "CPU"
    versions = [
        f"{name} {metadata.version(name)}" for name in ("torch", "deepspeed", "transformers")
    ]
    print(f"{datetime.date.today()}, {device}, {', '.join(versions)}; {shape.size}, an update of")
    print(
        f"{shape.accumulation} x {shape.rows} x {shape.length} tokens, or of a batch of examples\n"
    )
    print("| | ms an update | speed | times the Trainer's |\n|---|---|---|---|")
    found = dict[str, float]()
    for name, (function, other) in CONTENDERS.items():
        if options.only in name:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                seconds = found[name] = pool.submit(function, shape).result()
            tokens = shape.accumulation * shape.rows * shape.length / seconds
            rate = f"{1 / seconds:.1f} steps/s" if "CoLA" in name else f"{tokens:,.0f} tokens/s"
            peer = found.get(f"Trainer, {other}")
            ratio = f"{peer / seconds:.2f}" if peer else ""
            print(f"| {name} | {1e3 * seconds:.1f} | {rate} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
