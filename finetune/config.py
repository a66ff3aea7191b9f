"""The settings of a fine-tuning run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from data_prep.common.records import Int, decode
from pretrain.config.sections import BatchConfig
from pretrain.config.settings import apply_override, check

BEST_EPOCH_BY = ("benchmark", "published")


@dataclasses.dataclass(frozen=True)
class FinetuneConfig:
    """Settings of a run: those of a protocol, changed by key=value arguments."""

    epochs: Int = 10
    batch_size: Int = 16
    learning_rate: float = 1e-5
    warmup_fraction: float = 0.06
    """Share of the steps in which the learning rate rises to its peak; afterwards it falls to 0."""
    warmup_steps: Int = 0
    """Warm-up as a number of steps; 0: use `warmup_fraction`."""
    schedule_steps: Int = 0
    """Step at which the learning rate reaches 0; 0: at the end of the run."""
    weight_decay: float = 0.1
    gradient_clipping: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    dropout: float = 0.1
    """Dropout of the encoder, instead of that of pretraining."""
    attention_dropout: float = 0.1
    head_dropout: float = 0.0
    pooling: str = "first"
    """Input of the head: "first", the feature of `<s>`, or "mean", the mean over all tokens."""
    max_tokens: Int = 512
    """Longer inputs are left out of training and truncated in scoring; result.json counts them."""
    max_train_examples: Int = 0
    """Train on the first N examples only; 0: on all."""
    best_epoch_by: str = "published"
    """What chooses the best epoch, whose model is kept: "benchmark", GLUE's own score (the mean of
    `Task.official`), or "published", the study's (accuracy, for STS-B the loss)."""
    length_window: Int = 50
    """Number of batches within which examples are grouped by length; 1: no grouping."""
    start_from: str = ""
    """A task, such as MNLI: start from the model of its finished run in the same output folder;
    empty: from the model itself. It has no effect on that task, nor on random weights."""
    deepspeed: str = ""
    """A file of ds_configs/ without .json; empty: zero1_bf16 on a GPU, zero1_fp32 on a CPU."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: a value out of range.
        """
        for name in ("epochs", "batch_size", "learning_rate", "length_window"):
            check(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in ("warmup_fraction", "dropout", "attention_dropout", "head_dropout"):
            check(0 <= getattr(self, name) < 1, name, getattr(self, name), "in [0, 1)")
        for name in (
            "weight_decay",
            "gradient_clipping",
            "warmup_steps",
            "schedule_steps",
            "max_train_examples",
        ):
            check(getattr(self, name) >= 0, name, getattr(self, name), "0 or above")
        check(self.pooling in ("first", "mean"), "pooling", self.pooling, "one of first, mean")
        known = self.best_epoch_by in BEST_EPOCH_BY
        accepted = f"one of {', '.join(BEST_EPOCH_BY)}"
        check(known, "best_epoch_by", self.best_epoch_by, accepted)
        enough = self.max_tokens >= 6
        check(enough, "max_tokens", self.max_tokens, "at least 6: <s> a </s> </s> b </s>")

    def steps(self, examples: int) -> int:
        """Return the number of updates for a number of training examples."""
        return -(-self.epochs * examples // self.batch_size)

    def batch(self, world_size: int) -> BatchConfig:
        """Return the batch sizes of a run on this many ranks.

        Raises:
            ValueError: the batch does not divide over the ranks.
        """
        if self.batch_size % world_size:
            raise ValueError(
                f"batch_size {self.batch_size}: is not a multiple of --world-size {world_size}"
            )
        return BatchConfig(self.batch_size, self.batch_size // world_size)

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of update `step` of `steps`: linear warm-up and linear decay.

        Each update of the warm-up has the rate that fairseq gives to the next one; fairseq's first
        update has rate 0 and changes nothing.
        """
        end = self.schedule_steps or steps
        warmup = self.warmup_steps or round(self.warmup_fraction * end)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        return self.learning_rate * max(0, end - step) / max(1, end - warmup)


def override(config: FinetuneConfig, overrides: Sequence[str]) -> FinetuneConfig:
    """Return the config with `key=value` settings applied.

    Raises:
        ValueError: an unknown setting (the nearest is named), or a value of the wrong type.
    """
    values = dataclasses.asdict(config)
    for each in overrides:
        apply_override(values, each)
    return decode(FinetuneConfig, values)
