"""Learning rate of a step, as a pure function of the recipe. Imports no torch."""

from __future__ import annotations

import math

from pretrain.config.run import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of update `step`, counted from 0.

    Warm-up rises linearly from the minimum, which update 0 has, to the peak at update `warmup`.
    From there on

        cosine: minimum + (peak - minimum) / 2 * (1 + cos(pi * (step - warmup) / period))
        linear: minimum + (peak - minimum) * (steps - step) / (steps - warmup)

    with period = floor(overestimate * steps), counted from the end of the warm-up as in
    EIFY/fairseq, so that the published run ends at 84 % of the half period, above the minimum. No
    run reaches the end of the period, where this schedule begins again at the peak. The linear
    schedule stays at the minimum from update `steps` on.
    """
    peak, minimum = config.optimizer.learning_rate, config.schedule.minimum_learning_rate
    warmup, steps = config.schedule.warmup_steps, config.training.steps
    if step < warmup:
        return minimum + (peak - minimum) * step / warmup
    if config.schedule.name == "linear":
        return minimum + (peak - minimum) * max(0, steps - step) / (steps - warmup)
    # Rounded first: 1.1 * 100 is 110.00000000000001, and 1.1 * 10 must not lose its last step.
    period = math.floor(round(config.schedule.overestimate * steps, 6))
    phase = (step - warmup) % period / period
    return minimum + 0.5 * (peak - minimum) * (1.0 + math.cos(math.pi * phase))
