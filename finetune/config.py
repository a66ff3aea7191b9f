"""The settings of a fine-tuning run."""

import dataclasses
from typing import Annotated, Literal

from annotated_types import Ge

from data_prep.common.records import (
    Fraction,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from pretrain.config.sections import BatchConfig


@dataclasses.dataclass(frozen=True)
class FinetuneConfig:
    """Settings of a run: those of a protocol, changed by key=value arguments."""

    epochs: PositiveInt = 10
    batch_size: PositiveInt = 16
    learning_rate: PositiveFloat = 1e-5
    warmup_fraction: Fraction = 0.06
    """Share of the schedule's steps in which the learning rate rises; afterwards it falls to 0."""
    schedule_steps: NonNegativeInt = 0
    """Step at which the learning rate reaches 0; 0: at the end of the run."""
    weight_decay: NonNegativeFloat = 0.1
    gradient_clipping: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0: no clipping."""
    dropout: Fraction = 0.1
    """Dropout of the encoder, instead of that of pretraining."""
    attention_dropout: Fraction = 0.1
    head_dropout: Fraction = 0.0
    pooling: Literal["first", "mean"] = "first"
    """Input of the head: "first", the feature of `<s>`, or "mean", the mean over all tokens."""
    max_tokens: Annotated[Int, Ge(6)] = 512
    """Longer inputs are left out of training and cut in scoring; the report counts both. At least
    those of `<s> a </s> </s> b </s>`."""
    max_train_examples: NonNegativeInt = 0
    """Train on the first N examples only; 0: on all."""
    best_epoch_by: Literal["benchmark", "published"] = "published"
    """What chooses the best epoch, whose model is kept: "benchmark", GLUE's own score (the mean of
    `Task.official`), or "published", as EIFY/fairseq did (accuracy, for STS-B the loss)."""
    length_window: PositiveInt = 50
    """Number of batches within which examples are grouped by length; 1: no grouping."""
    start_from: str = ""
    """A task, such as MNLI: start from the model of its finished run in the same output folder;
    empty: from the model itself. It has no effect on that task, nor on random weights."""
    deepspeed: str = ""
    """A file of ds_configs/ without .json; empty: zero1_bf16 on a GPU, zero1_fp32 on a CPU."""

    def steps(self, examples: int) -> int:
        """Return the number of updates for a number of training examples."""
        return -(-self.epochs * examples // self.batch_size)

    def engine(self, world_size: int, on_gpu: bool) -> tuple[str, BatchConfig, float, int]:
        """Return what `read_settings` of DeepSpeed takes; some ranks may read fewer examples."""
        most = -(-self.batch_size // world_size)
        name = self.deepspeed or ("zero1_bf16" if on_gpu else "zero1_fp32")
        return name, BatchConfig(most * world_size, most), self.gradient_clipping, world_size

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of update `step` of `steps`: linear warm-up and linear decay.

        Each update of the warm-up has the rate that fairseq gives to the next one; fairseq's first
        update has rate 0 and changes nothing.
        """
        end = self.schedule_steps or steps
        warmup = round(self.warmup_fraction * end)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        return self.learning_rate * max(0, end - step) / max(1, end - warmup)
