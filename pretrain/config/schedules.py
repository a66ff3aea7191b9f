"""Learning rate schedules, as pure functions of the recipe."""

from __future__ import annotations

import math

from pretrain.config.run import Segments


def learning_rate(segments: Segments, step: int) -> float:
    """Learning rate of update `step`, counted from 0.

    It rises linearly from the minimum at update 0 to the peak at update `warmup`. After that

        cosine: minimum + (peak - minimum) / 2 * (1 + cos(pi * (step - warmup) / period))
        linear: minimum + (peak - minimum) * max(0, steps - step) / (steps - warmup)
        constant: peak
        wsd: minimum + (peak - minimum) * f(1 - (steps - step) / cooldown_steps) from update
            steps - cooldown_steps on, where f(x) = 1 - sqrt(x), which ends lower than
            1 - x; peak before (Hägele et al. 2024, section 3)

    where `steps` is `training.steps` and period = steps - warmup, or of an overestimated-cosine
    floor(1.1 * steps), as in EIFY/fairseq, so that the published run ends at 84 % of the period.

    In a phase that has a schedule of its own, updates count from its first, and its length takes
    the place of `training.steps`. The other phases share the run's schedule; each may have another
    peak.
    """
    part = segments.at(step)
    config, steps, step = part.config, part.schedule_steps, step - part.schedule_start
    peak, minimum = config.optimizer.learning_rate, config.schedule.minimum_learning_rate
    warmup = config.schedule.warmup_steps
    if step < warmup:
        return minimum + (peak - minimum) * step / warmup
    if config.schedule.name == "constant":
        return peak
    if config.schedule.name == "linear":
        return minimum + (peak - minimum) * max(0, steps - step) / (steps - warmup)
    if config.schedule.name == "wsd":
        cooldown = config.schedule.cooldown_steps
        if step < steps - cooldown or not cooldown:
            return peak
        left = (steps - step) / cooldown
        return minimum + (peak - minimum) * (1.0 - math.sqrt(1.0 - left))
    overestimated = config.schedule.name == "overestimated-cosine"
    period = 11 * steps // 10 if overestimated else steps - warmup
    phase = (step - warmup) / period
    return minimum + 0.5 * (peak - minimum) * (1.0 + math.cos(math.pi * phase))
