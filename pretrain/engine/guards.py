"""Guards against loss spikes: what they leave out or clip of an update (`optimizer.guard`).

| guard | judges | and then |
|---|---|---|
| skip-step | loss and gradient norm of this step, by the last 128 | leaves the update out |
| zclip | gradient norm, by a running mean and variance | clips the whole gradient |
| adagc | gradient norm of each parameter, by its running mean | clips that parameter's gradient |

Each is a pure function from a state of plain numbers and the measurements of a step to the next
state and factors for the gradient; 0 leaves the update out. The numbers are those of the sources.
`Guard` applies them. The state is kept in the optimizer's first parameter group, so that it is
saved, loaded and resharded with the optimizer's own.

An update whose gradient is not finite never enters a state. ZeRO skips it before a guard sees it;
at stage 0, skip-step skips it, and the others let it pass.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.engine.by_parameter import Partitioned

State = Mapping[str, Any]
"""Plain numbers and lists of them; empty at the start."""
NONE = "none"
KEY = "guard"
"""Of the state in the optimizer's first parameter group."""

_WINDOW, _DEVIATIONS = 128, 6.0  # skip-step
_Z_THRESHOLD, _ZCLIP_ALPHA, _ZCLIP_WARMUP, _ZCLIP_EPSILON = 2.5, 0.97, 25, 1e-6
_RELATIVE, _ABSOLUTE, _ADAGC_BETA, _ADAGC_WARMUP = 1.05, 1.0, 0.98, 100


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


def adagc(
    steps: int, averages: Sequence[float], norm: float, norms: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Clip the gradient of each parameter to 1.05 times its running mean.

    Wang et al. 2025 (arXiv 2502.11034), algorithm 1: in the first 100 updates the whole gradient is
    clipped to a norm of 1, and the smallest norm of each parameter is kept; later the norms that
    were clipped enter a running mean with beta 0.98. A norm of 0 says nothing about the next
    one and is left out, or that parameter would never be trained.

    Args:
        steps: number of updates before this one.
        averages: for each parameter, what this function returned before; infinity at the start.
        norm: of the whole gradient.
        norms: of each parameter's gradient.

    Returns:
        The averages, and the factor of each parameter's gradient.
    """
    if steps < _ADAGC_WARMUP:
        factors = [_clip(norm, _ABSOLUTE)] * len(norms)
    else:
        factors = [_clip(n, _RELATIVE * a) for n, a in zip(norms, averages, strict=True)]
    after = list(averages)
    for number, (n, factor, average) in enumerate(zip(norms, factors, averages, strict=True)):
        if n > 0 and (steps < _ADAGC_WARMUP or math.isinf(average)):
            after[number] = min(average, factor * n)
        elif n > 0:
            after[number] = _ADAGC_BETA * average + (1 - _ADAGC_BETA) * factor * n
    return after, factors


def _clip(norm: float, limit: float) -> float:
    return limit / norm if norm > limit else 1.0


BY_WHOLE_NORM: Mapping[str, Callable[[State, float, float], tuple[State, float]]] = {
    "skip-step": skip_step,
    "zclip": zclip,
}
"""By the recipe's `optimizer.guard`."""
BY_PARAMETER = "adagc"


class Guard(Partitioned):
    """Stands between DeepSpeed and the optimizer that it wraps.

    DeepSpeed calls the optimizer once an update, or once for each part of the weights, with
    gradients that are reduced, unscaled and clipped. A guard then asks for the loss and the norm of
    the step. The engine answers with the reduction that it would have done after the update, so
    that no collective is added; adagc adds one for each call under ZeRO, for the sums of squares of
    parameters that lie on several ranks.

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

    @property
    def needs_pieces(self) -> bool:
        """Whether it needs `set_pieces` under ZeRO."""
        return self._name == BY_PARAMETER

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
        self._square_before = self._square_after = 0.0
        if self._group.get(KEY, {}).get("name", self._name) != self._name:
            del self._group[KEY]  # of another guard, from a checkpoint

    def end(self) -> float:
        """Finish an update.

        Returns:
            The norm of the gradient that the optimizer took, over its norm before the guard. 0: the
            update was left out. 1: nothing was changed, or DeepSpeed skipped the update.
        """
        before, after = self._square_before, self._square_after
        if before > 0 and math.isfinite(before):
            self._group[KEY]["steps"] += 1
            self._factor = math.sqrt(after / before)
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
        if self.needs_pieces:
            self._clip_parameters(tensors)
        elif 0.0 < self._factor < 1.0:
            torch._foreach_mul_([tensor.grad for tensor in tensors], self._factor)
        if self._factor > 0.0:
            self._update()

    def _judge(self) -> None:
        """Measure the step, and decide where the norm of the whole gradient is enough."""
        norm, loss = self._measure()
        self._norm, self._is_judged = math.inf if norm is None else norm, True
        if self.needs_pieces:
            return
        state, factor = BY_WHOLE_NORM[self._name](self._group.get(KEY, {}), self._norm, loss)
        self._group[KEY] = {**state, "name": self._name}
        if self._clipping and factor > 0:  # DeepSpeed has clipped the gradient already
            factor = min(1.0, factor * max(1.0, self._norm / self._clipping))
        self._factor = factor

    def _clip_parameters(self, tensors: Sequence[Tensor]) -> None:
        """Clip the gradients of some of the parameters, each by its own norm."""
        places = self._places()
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        numbers = [number for tensor in tensors for number in places[tensor]]
        gradients = self.parts(gradients, tensors)
        squares = self.square_sums(gradients)
        self._square_before += sum(squares)
        if not math.isfinite(self._square_before):
            return
        state = self._group.setdefault(
            KEY,
            {
                "name": self._name,
                "steps": 0,
                "averages": [math.inf] * sum(map(len, places.values())),
            },
        )
        averages = state["averages"]
        found, factors = adagc(
            state["steps"],
            [averages[number] for number in numbers],
            self._norm,
            [math.sqrt(square) for square in squares],
        )
        for number, average in zip(numbers, found, strict=True):
            averages[number] = average
        torch._foreach_mul_(gradients, factors)
        self._square_after += sum(
            square * factor**2 for square, factor in zip(squares, factors, strict=True)
        )

    def _places(self) -> dict[Tensor, range]:
        """For each tensor of the optimizer, the numbers of its parameters.

        They are counted in the order of the groups, whatever the stage and the number of ranks.
        """
        whole = (tensor for group in self._optimizer.param_groups for tensor in group["params"])
        lengths = {tensor: len(self.pieces(tensor)) for tensor in self._pieces or whole}
        ends = itertools.accumulate(lengths.values())
        pairs = zip(lengths.items(), ends, strict=True)
        return {tensor: range(end - length, end) for (tensor, length), end in pairs}
