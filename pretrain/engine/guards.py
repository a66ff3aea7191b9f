"""Guards against loss spikes: what they leave out or clip of an update (`optimizer.guard`).

| guard | judges | and then |
|---|---|---|
| skip-step | loss and gradient norm of this step, by the last 128 | leaves the update out |
| zclip | gradient norm, by a running mean and variance | clips the whole gradient |

Each is a pure function from a state of plain numbers and the measurements of a step to the next
state and a factor for the gradient; 0 leaves the update out. The numbers are those of the sources.
`Guard` applies them. The state is kept in the optimizer's first parameter group, so that it is
saved, loaded and resharded with the optimizer's own.

An update whose gradient is not finite never enters a state. ZeRO skips it before a guard sees it;
at stage 0, skip-step skips it, and zclip lets it pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

State = Mapping[str, Any]
"""Plain numbers and lists of them; empty at the start."""
NONE = "none"
KEY = "guard"
"""Of the state in the optimizer's first parameter group."""

_WINDOW, _DEVIATIONS = 128, 6.0  # skip-step
_Z_THRESHOLD, _ZCLIP_ALPHA, _ZCLIP_WARMUP, _ZCLIP_EPSILON = 2.5, 0.97, 25, 1e-6


def skip_step(state: State, norm: float, loss: float) -> tuple[State, float]:
    """Leave out an update whose loss or gradient norm is far above the last ones.

    Far is 6 standard deviations above the mean of the last 128 steps, once there are 63, as in
    OLMo-core's `SkipStepOptimizer`. There, steps that are left out enter these statistics, and
    raise the threshold so much that the fourth of a row of bad batches passed here. Here they stay
    out. After 128 in a row the level is taken for a new one, and the statistics begin anew.
    """
    if not (math.isfinite(norm) and math.isfinite(loss)):
        return state, 0.0
    measured = {"losses": loss, "norms": norm}
    before = {name: state.get(name, []) for name in measured}
    usual = len(before["losses"]) + 1 < _WINDOW // 2 or all(
        value <= statistics.fmean(last) + _DEVIATIONS * statistics.stdev(last)
        for value, last in zip(measured.values(), before.values(), strict=True)
    )
    if usual:
        after = {name: [*before[name], value][-_WINDOW:] for name, value in measured.items()}
        return after, 1.0
    in_a_row = state.get("in_a_row", 0) + 1
    return ({**state, "in_a_row": in_a_row} if in_a_row < _WINDOW else {}), 0.0


def zclip(state: State, norm: float, loss: float) -> tuple[State, float]:
    """Clip a gradient whose norm is over 2.5 standard deviations above its running mean.

    Kumar et al. 2025 (arXiv 2504.02507), section 3, reciprocal clipping, as the authors' code has
    it: a norm with z-score z is clipped to mean + 2.5^2 / z deviations. Mean and variance begin as
    those of the first 25 norms, which are not clipped, and follow the clipped norms with alpha
    0.97. The loss is not looked at.
    """
    if not math.isfinite(norm):
        return state, 1.0
    if "mean" not in state:
        norms = [*state.get("norms", []), norm]
        if len(norms) < _ZCLIP_WARMUP:
            return {"norms": norms}, 1.0
        return {"mean": statistics.fmean(norms), "variance": statistics.pvariance(norms)}, 1.0
    mean, variance = state["mean"], state["variance"]
    deviation = math.sqrt(variance)
    z = (norm - mean) / (deviation + _ZCLIP_EPSILON)
    clipped = mean + _Z_THRESHOLD**2 / z * deviation if z > _Z_THRESHOLD else norm
    mean = _ZCLIP_ALPHA * mean + (1 - _ZCLIP_ALPHA) * clipped
    variance = _ZCLIP_ALPHA * variance + (1 - _ZCLIP_ALPHA) * (clipped - mean) ** 2
    return {"mean": mean, "variance": variance}, clipped / norm if clipped < norm else 1.0


RULES: Mapping[str, Callable[[State, float, float], tuple[State, float]]] = {
    "skip-step": skip_step,
    "zclip": zclip,
}
"""By the recipe's `optimizer.guard`."""


class Guard:
    """Stands between DeepSpeed and the optimizer that it wraps.

    DeepSpeed calls the optimizer once an update, or once for each part of the weights, with
    gradients that are reduced, unscaled and clipped. A guard then asks for the loss and the norm of
    the step. The engine answers with the reduction that it would have done after the update, so
    that no collective is added.

    All ranks decide from the same numbers, and so alike.
    """

    def __init__(self, name: str, clipping: float, optimizer: torch.optim.Optimizer) -> None:
        """Guard an optimizer, before DeepSpeed gets it.

        Args:
            name: the recipe's `optimizer.guard`; "none" changes nothing.
            clipping: largest norm that DeepSpeed leaves the gradient; 0 for any.
            optimizer: whose `step` is replaced.
        """
        self._name, self._clipping, self._optimizer = name, clipping, optimizer
        self._update = optimizer.step
        if name != NONE:
            optimizer.step = self._guarded_step  # type: ignore[assignment, method-assign]

    def begin(
        self, groups: Sequence[dict[str, Any]], measure: Callable[[], tuple[float | None, float]]
    ) -> None:
        """Prepare for an update.

        Args:
            groups: the optimizer's parameter groups; the first one holds the state.
            measure: returns the norm of the gradient before clipping, None if it is not finite, and
                the loss. Called on all ranks or on none.
        """
        self._group, self._measure = groups[0], measure
        self._is_judged, self._factor = False, 1.0
        if self._group.get(KEY, {}).get("name", self._name) != self._name:
            del self._group[KEY]  # of another guard, from a checkpoint

    def end(self) -> float:
        """Finish an update.

        Returns:
            The norm of the gradient that the optimizer took, over its norm before the guard. 0: the
            update was left out. 1: nothing was changed, or DeepSpeed skipped the update.
        """
        return self._factor

    def _guarded_step(self, closure: Callable[[], float] | None = None) -> None:
        """Take the place of the optimizer's `step`."""
        if not self._is_judged:
            self._judge()
        tensors = [
            tensor
            for group in self._optimizer.param_groups
            for tensor in group["params"]
            if tensor.grad is not None
        ]
        if 0.0 < self._factor < 1.0:
            torch._foreach_mul_([tensor.grad for tensor in tensors], self._factor)
        if self._factor > 0.0:
            self._update()

    def _judge(self) -> None:
        """Measure the step, and decide."""
        norm, loss = self._measure()
        norm, self._is_judged = math.inf if norm is None else norm, True
        state, factor = RULES[self._name](self._group.get(KEY, {}), norm, loss)
        self._group[KEY] = {**state, "name": self._name}
        if self._clipping and factor > 0:  # DeepSpeed has clipped the gradient already
            factor = min(1.0, factor * max(1.0, norm / self._clipping))
        self._factor = factor
