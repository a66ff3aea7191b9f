"""What may change within a run, and what may not.

`FREE` may differ at each start. `BY_STEP` may differ from a step on: in a phase of the recipe, or
in a recipe that follows (`supervise --from`). `FIXED` is the same from the first step to the last.
The most specific name that a setting is within decides.
"""

from collections.abc import Mapping

from pretrain.config.settings import is_within

_INTERVALS = (
    "training.evaluation_interval",
    "training.evaluation_blocks",
    "training.checkpoint_interval",
    "training.checkpoints_kept",
)
FREE = (
    "folder",
    "tracker",
    "batch.micro_batch_size",
    "training.data_workers",
    "training.activation_checkpointing",
    "training.attention_backend",
    "training.compile",
    *_INTERVALS,
    "spike",
    "supervision",
    "notify",
    "profile",
)
"""Nothing of this changes a batch, what is hidden in it, or the gradient but for rounding. Another
micro-batch size draws other dropout masks, as compiled layers do."""
BY_STEP = ("data", "objective", "batch", "optimizer.learning_rate", "schedule")
_LENGTH = ("training.steps", "phases")
FIXED: Mapping[str, str] = {
    "model": "the weights have its shapes",
    "objective.name": "the model's head is for it",
    "optimizer": "its state goes on from checkpoint to checkpoint",
    "training.seed": "the first weights, the order of blocks and all draws come from it",
    "training.deepspeed": "it decides the precision, and how checkpoints divide the state",
    "training.deterministic": "other kernels compute other bits",
    "fault": "a rehearsed fault belongs to the whole run",
}
"""Each with the reason."""
PHASES_MAY_CHANGE = (*BY_STEP, *_INTERVALS)
"""All of it but `objective.name`."""


def rule(key: str) -> str:
    """The name in FREE, BY_STEP or FIXED that decides whether a setting may change."""
    return max((n for n in (*FREE, *BY_STEP, *_LENGTH, *FIXED) if is_within(key, n)), key=len)
