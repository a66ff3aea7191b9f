"""Spike rules of other projects, for comparison.

Each function takes the losses of a run and returns the indices at which the rule raises an alarm.
The projects' own code does more around these rules; none of them rolls a run back. Rules on the
gradient norm alone (ZClip, AdaGC) clip and raise no alarm.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence


def megatron(losses: Sequence[float]) -> list[int]:
    """A loss that is at least 10 times the largest of the first 100.

    Megatron-LM, `RerunStateMachine.is_unexpectedly_large` (--check-for-spiky-loss).
    """
    limit = 10.0 * max(map(abs, losses[:100]), default=0.0)
    return [i for i, loss in enumerate(losses) if i >= 100 and not abs(loss) < limit]


def llm_foundry(losses: Sequence[float]) -> list[int]:
    """The fifth loss in a row of at least twice the mean of the window before.

    llm-foundry, `KillLossSpike`, with its defaults: a window of 100 losses or 5 % of the run,
    whichever is larger.
    """
    window: deque[float] = deque(maxlen=max(100, len(losses) // 20))
    alarms, outliers = [], 0
    for index, loss in enumerate(losses):
        if len(window) == window.maxlen:
            outliers = outliers + 1 if not loss < 2.0 * statistics.fmean(window) else 0
            if outliers == 5:
                alarms.append(index)
                outliers = 0
        window.append(loss)
    return alarms


def lightning(losses: Sequence[float]) -> list[int]:
    """A loss above the mean of the last 10 by more than twice that mean.

    Lightning, `SpikeDetection`, with its defaults (window 10, relative tolerance 2).
    """
    window: deque[float] = deque(maxlen=10)
    alarms = []
    for index, loss in enumerate(losses):
        if len(window) == 10 and not loss <= 3.0 * statistics.fmean(window):
            alarms.append(index)
        window.append(loss)
    return alarms


def olmo(losses: Sequence[float]) -> list[int]:
    """A loss more than 6 standard deviations above the mean of the last 128.

    OLMo-core, `StabilityMonitorCallback` and `SkipStepOptimizer`; active after 64 losses.
    """
    window: deque[float] = deque(maxlen=128)
    alarms = []
    # Sums of differences from the first loss lose fewer digits than sums of the losses.
    first = losses[0] if losses else 0.0
    total = squares = 0.0
    for index, loss in enumerate(losses):
        value = loss - first
        count = len(window)
        if count >= 64:
            mean = total / count
            variance = max(0.0, (squares - count * mean * mean) / (count - 1))
            if not value <= mean + 6.0 * variance**0.5:
                alarms.append(index)
        if count == window.maxlen:
            total, squares = total - window[0], squares - window[0] ** 2
        window.append(value)
        total, squares = total + value, squares + value * value
    return alarms


def flagscale(losses: Sequence[float]) -> list[int]:
    """A loss that is at least 0.2 times above the last one that was not.

    FlagScale, `SpikyLossDetector` (auto_skip_spiky_loss, 2025), with the default of its class; it
    skips the samples. A NaN is no alarm there.
    """
    alarms, last = [], math.nan
    for index, loss in enumerate(losses):
        if loss - last >= 0.2 * last > 0:
            alarms.append(index)
        else:
            last = loss
    return alarms


RULES: dict[str, Callable[[Sequence[float]], list[int]]] = {
    "Megatron": megatron,
    "llm-foundry": llm_foundry,
    "Lightning": lightning,
    "OLMo": olmo,
    "FlagScale": flagscale,
}


def incidents(alarms: Sequence[int], apart: int = 50) -> list[int]:
    """First alarm of each group; alarms in a group are less than `apart` records apart."""
    return [
        alarm
        for number, alarm in enumerate(alarms)
        if number == 0 or alarm - alarms[number - 1] >= apart
    ]
