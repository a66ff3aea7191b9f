"""Loss spikes: when a run is suspected of one, and when it is confirmed. No torch.

A record (what a step measured) is judged by robust statistics of the records before it, on several
channels. A *suspicion* costs nothing: checkpoints from before it are kept. It *heals* when the loss
returns, or is confirmed as a *spike* when it does not:

| channel | suspected when | confirmed when |
|---|---|---|
| fast | 6 of the last 8 losses are outliers | no return within 50 records, or a gross rise |
| slow | the median of 64 losses is above its lowest of late | no return within 200, or as above |
| gradient-norm | 6 of the last 8 are outliers, in logarithms | never by itself |
| loss-scale | 6 of the last 8 updates overflowed | it goes on for 50 records; at the least scale |
| validation | the loss jumped since the last evaluation, or is not finite | so does the next one |
| non-finite | an update was skipped as not finite | 6 of the last 8 were, or over 25 of 256 |

An update that was made with a loss or a gradient that is not finite (ZeRO stage 0 skips none) has
spoiled the weights: a spike at once, on the channel non-finite. An update that was skipped has
changed nothing, so that a single one heals; what is counted over the last 256 records outlives the
suspicion. fp16 skips an update with a finite loss in order to lower its loss scale. Such updates
belong to the channel loss-scale, and are a spike at once where the scale cannot be lowered.

The numbers are SpikeConfig's defaults; they count records, so that a curve that was logged every
few steps is judged alike. Outliers never enter the statistics that judge. The onset is dated by
the change point of the last losses, not by the alarm.

The detector is a fold over its records: fed with those that survive after a restart, it is in the
state that it had.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Sequence

from pretrain.config.run import SpikeConfig
from pretrain.spikes.statistics import SLACK, Level, LowestLevel, Persistence, change_point

_SMALLEST_DEVIATION = 0.01
"""Nats. A loss that hardly moves would otherwise make an outlier of any noise."""
_SMALLEST_NORM_DEVIATION = 0.05
"""The same for the logarithm of the gradient norm."""
_RETURNED_DEVIATIONS = 3.0


@dataclasses.dataclass(frozen=True)
class Observation:
    """What a step measured."""

    step: int
    loss: float
    """Nats a target."""
    gradient_norm: float | None = None
    """Before clipping; None where it was not recorded, NaN where it was not finite."""
    loss_scale: float = 1.0
    """Of fp16; 1 in other precisions."""
    skipped: bool = False
    """Whether the update was left out because its gradient was not finite."""
    scale_exhausted: bool = False
    """Whether fp16 skipped it at its smallest loss scale: there is nothing left to lower."""
    validation_loss: float | None = None
    """Nats a target, where there was an evaluation since the step before."""

    @property
    def spoils(self) -> bool:
        """Whether an update was made with a loss or a gradient that is not finite."""
        if self.skipped:
            return False
        norm = self.gradient_norm
        return not (math.isfinite(self.loss) and (norm is None or math.isfinite(norm)))

    @property
    def overflows(self) -> bool:
        """Whether an update was skipped in order to lower the loss scale of fp16, or in vain."""
        if not self.skipped:
            return False
        return self.scale_exhausted or (math.isfinite(self.loss) and self.loss_scale > 1.0)

    @property
    def is_lost(self) -> bool:
        """Whether an update was skipped that loss scaling does not explain."""
        return self.skipped and not self.overflows


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that the detector has to say about a step."""

    kind: str
    """suspect, healed or spike"""
    channel: str
    """fast, slow, gradient-norm, loss-scale, validation or non-finite"""
    step: int
    """When it was said."""
    onset: int
    """First step of the rise."""
    loss: float
    """In nats: on the channels fast and slow the median since the onset, on validation the
    validation loss, on the others the loss of the step."""
    baseline: float
    """The level before, in nats; NaN where none is known yet."""


@dataclasses.dataclass
class _Suspicion:
    """A rise that has neither healed nor been confirmed yet."""

    channel: str
    onset: int
    first_record: int
    """Number of the onset's record."""
    deadline: int
    """Number of the record at which it is confirmed."""
    baseline: float
    fall: float
    """Nats that the baseline falls by while the number of records grows by a factor e."""
    deviation: float
    losses: list[float]
    """From the onset on."""
    trailing: int
    """How many of them were taken for sound before the suspicion."""

    def baseline_at(self, record: int) -> float:
        """Where the loss would be if it had gone on as before."""
        return self.baseline + self.fall * math.log(record / self.first_record)


class SpikeDetector:
    """The detector's state, and the fold's step: `update`."""

    def __init__(self, config: SpikeConfig, changes: Sequence[int] = ()) -> None:
        """An empty history.

        Args:
            config: thresholds.
            changes: steps from which on another level of the loss or of its scatter is to be
                expected (the batch grows, the learning rate jumps): what was learnt before them is
                forgotten, unless a suspicion is open, which is judged first. Until there is
                history again only gross rises over the old level are suspected.
        """
        self.config = config
        self._changes = sorted(changes)
        self._records = 0
        self._broken = False
        self._reset(last_step=-1)

    def _reset(self, last_step: int) -> None:
        """Back to an empty history; suspicions are dropped."""
        self._suspicion: _Suspicion | None = None
        self._norm_flags = Persistence(self.config.patience)
        self._norm_suspicion: tuple[int, int] | None = None
        self._skips = Persistence(self.config.patience)
        self._skip_suspicion: tuple[int, int] | None = None
        self._lost = Persistence(self.config.patience)
        most = max(self.config.window // 10, self.config.patience - 1)
        self._lost_of_window = Persistence(most + 1, self.config.window)
        self._lost_suspicion: int | None = None
        self._good_validation = (last_step, math.nan)
        self._validation_suspicion: int | None = None
        self._learn_anew(old_level=math.nan)

    def _learn_anew(self, old_level: float) -> None:
        """Forget where loss and gradient norm stood, but for one level to tell gross rises by."""
        config = self.config
        self._old_level = old_level
        self._level = Level(config.window, config.minimum_history, _SMALLEST_DEVIATION)
        self._outliers = Persistence(config.patience)
        self._lowest = LowestLevel(config.slow_window, config.window)
        self._trail: deque[tuple[int, float, float]] = deque(
            maxlen=max(2 * config.slow_window, config.patience + SLACK)
        )
        self._norms = self._unknown_norm()

    def _unknown_norm(self) -> Level:
        config = self.config
        return Level(config.window, config.minimum_history, _SMALLEST_NORM_DEVIATION)

    def update(self, observation: Observation) -> list[Event]:
        """Take in the next step's record; returns what there is to say, a spike last.

        After a spike all is forgotten: whoever goes on regardless has a new level.
        """
        self._records += 1
        self._apply_changes(observation.step)
        events = self._observe(observation)
        if events and events[-1].kind == "spike":
            self._reset(observation.step)
            self._broken = events[-1].channel == "non-finite" or observation.scale_exhausted
        return events

    def _apply_changes(self, step: int) -> None:
        if not self._changes or step < self._changes[0] or self._suspicion:
            return
        self._changes = [change for change in self._changes if change > step]
        self._learn_anew(self._level.median if self._level.known else self._old_level)

    def _observe(self, observation: Observation) -> list[Event]:
        events: list[Event] = []
        for judge in (
            self._judge_updates,
            self._judge_gradient_norm,
            self._judge_loss,
            self._judge_validation,
        ):
            events += judge(observation)
            if events and events[-1].kind == "spike":
                break
        return events

    def _baseline(self) -> float:
        if self._suspicion:
            return self._suspicion.baseline
        return self._level.median if self._level.known else self._old_level

    # The loss: fast and slow.

    def _judge_loss(self, observation: Observation) -> list[Event]:
        step, loss = observation.step, observation.loss
        if not math.isfinite(loss):
            return []
        if self._suspicion:
            self._suspicion.losses.append(loss)
            return self._judge_suspicion(self._suspicion, step)
        baseline, deviation = self._baseline(), self._deviation()
        distance = 0.0 if math.isnan(baseline) else (loss - baseline) / deviation
        outlier = distance > self.config.deviations
        self._trail.append((step, loss, distance))
        self._outliers.append(step, outlier)
        self._lowest.append(self._records, loss)
        if not outlier:
            self._level.learn(loss)
        if self._outliers.raised:
            return self._suspect("fast", step, baseline, deviation)
        if self._level.known and self._lowest.rise > self.config.slow_deviations * deviation:
            return self._suspect("slow", step, self._lowest.lowest[1], deviation)
        return []

    def _deviation(self) -> float:
        """Of a loss from the baseline; after a change such that only gross rises are outliers."""
        if self._level.known:
            return self._level.deviation
        return max(self.config.gross_nats, _SMALLEST_DEVIATION) / self.config.deviations

    def _suspect(self, channel: str, step: int, baseline: float, deviation: float) -> list[Event]:
        trail, config = list(self._trail), self.config
        if channel == "fast":
            distances = [distance for *_, distance in trail]
            place, wait = change_point(distances, config.deviations), config.confirm_steps
        else:
            # What came before the lowest level was higher for another reason.
            low = len(trail) - 1 - (self._records - self._lowest.lowest[0])
            trail = trail[max(0, low) :]
            distances = [(loss - baseline) / deviation for _, loss, _ in trail]
            place, wait = change_point(distances, config.slow_deviations), config.slow_confirm_steps
        losses = [loss for _, loss, _ in trail[place:]]
        first_record = self._records - len(losses) + 1
        self._suspicion = _Suspicion(
            channel=channel,
            onset=trail[place][0],
            first_record=first_record,
            deadline=first_record + wait,
            baseline=baseline,
            fall=self._lowest.fall(),
            deviation=deviation,
            losses=losses,
            trailing=len(losses),
        )
        return self._judge_suspicion(self._suspicion, step) or [self._said("suspect", step)]

    def _judge_suspicion(self, suspicion: _Suspicion, step: int) -> list[Event]:
        """Whether the open suspicion heals, is confirmed, or stays open."""
        level = statistics.median(suspicion.losses[-self.config.patience :])
        baseline = suspicion.baseline_at(self._records)
        rise = (level - baseline) / suspicion.deviation
        if suspicion.channel == "slow":
            recent = suspicion.losses[-self.config.slow_window // 2 :]
            returned = (
                statistics.median(recent) - baseline
                <= self.config.slow_deviations / 2 * suspicion.deviation
            )
            if rise > self.config.deviations:  # what began slowly has become fast
                soon = self._records + self.config.confirm_steps
                suspicion.deadline = min(suspicion.deadline, soon)
        else:
            returned = rise <= _RETURNED_DEVIATIONS
        if level > baseline + self.config.gross_nats:
            return [self._said("spike", step)]
        if returned and not self._norm_suspicion:
            return self._heal(suspicion, step)
        if returned:  # a raised gradient norm holds the suspicion open, and cannot confirm it
            soon = self._records + self.config.confirm_steps
            suspicion.deadline = max(suspicion.deadline, soon)
            return []
        return [self._said("spike", step)] if self._records >= suspicion.deadline else []

    def _heal(self, suspicion: _Suspicion, step: int) -> list[Event]:
        event = self._said("healed", step)
        self._suspicion = None
        self._outliers = Persistence(self.config.patience)
        self._trail.clear()
        self._lowest.forget(suspicion.trailing)
        return [event]

    def _said(self, kind: str, step: int) -> Event:
        suspicion = self._suspicion
        assert suspicion is not None
        loss = statistics.median(suspicion.losses)
        return Event(kind, suspicion.channel, step, suspicion.onset, loss, suspicion.baseline)

    # The other channels. Each keeps its own suspicion: (onset, number of the record).

    def _judge_gradient_norm(self, observation: Observation) -> list[Event]:
        norm, step = observation.gradient_norm, observation.step
        if norm is None or observation.skipped:
            return []
        value = math.log(norm) if norm > 0 and math.isfinite(norm) else math.inf
        known = self._norms.known
        outlier = known and not (
            value <= self._norms.median + self.config.deviations * self._norms.deviation
        )
        self._norm_flags.append(step, outlier)
        if not outlier and math.isfinite(value):
            self._norms.learn(value)
        if self._norm_suspicion is None:
            if not self._norm_flags.raised:
                return []
            self._norm_suspicion = (self._norm_flags.onset, self._records)
            return [self._told("suspect", "gradient-norm", observation, self._norm_suspicion[0])]
        onset, since = self._norm_suspicion
        expired = self._records - since >= self.config.slow_confirm_steps
        if not (expired or self._norm_flags.calm):
            return []
        if expired:  # it has a new level
            self._norms = self._unknown_norm()
        self._norm_flags, self._norm_suspicion = Persistence(self.config.patience), None
        return [self._told("healed", "gradient-norm", observation, onset)]

    def _judge_updates(self, observation: Observation) -> list[Event]:
        """The channels non-finite and loss-scale."""
        o = observation
        self._broken = self._broken and (o.spoils or o.is_lost or o.scale_exhausted)
        if self._broken:  # the spike that was said goes on
            return []
        if o.spoils:
            return [self._told("spike", "non-finite", o, self._since(o.step))]
        events = self._judge_lost(o)
        if events and events[-1].kind == "spike":
            return events
        return events + self._judge_skips(o)

    def _since(self, onset: int) -> int:
        """The onset, or where the loss began to rise, if it is under suspicion."""
        return min(onset, self._suspicion.onset) if self._suspicion else onset

    def _judge_lost(self, observation: Observation) -> list[Event]:
        step, lost = observation.step, observation.is_lost
        for flags in (self._lost, self._lost_of_window):
            flags.append(step, lost)
            if flags.raised:
                onset = self._since(flags.onset)
                return [self._told("spike", "non-finite", observation, onset)]
        if self._lost_suspicion is None:
            if not lost:
                return []
            self._lost_suspicion = step
            return [self._told("suspect", "non-finite", observation, step)]
        if not self._lost.none:
            return []
        onset, self._lost_suspicion = self._lost_suspicion, None
        return [self._told("healed", "non-finite", observation, onset)]

    def _judge_skips(self, observation: Observation) -> list[Event]:
        step = observation.step
        self._skips.append(step, observation.overflows)
        if observation.scale_exhausted:
            onsets = [flags.onset for flags in (self._skips, self._lost) if not flags.none]
            onsets += [self._skip_suspicion[0]] if self._skip_suspicion else []
            onset = self._since(min(onsets, default=step))
            return [self._told("spike", "loss-scale", observation, onset)]
        if self._skip_suspicion is None:
            if not self._skips.raised:
                return []
            self._skip_suspicion = (self._skips.onset, self._records)
            return [self._told("suspect", "loss-scale", observation, self._skip_suspicion[0])]
        onset, since = self._skip_suspicion
        if not observation.skipped and self._skips.calm:
            self._skip_suspicion = None
            return [self._told("healed", "loss-scale", observation, onset)]
        if self._records - since >= self.config.confirm_steps:
            return [self._told("spike", "loss-scale", observation, onset)]
        return []

    def _judge_validation(self, observation: Observation) -> list[Event]:
        value, step = observation.validation_loss, observation.step
        if value is None:
            return []
        # Not its best: a loss that creeps up is overfitting, which no rollback cures. Where none is
        # known yet, `before` is NaN, and every finite value is good.
        last_good, before = self._good_validation
        if not math.isfinite(value) or value > before + self.config.validation_nats:
            kind = "suspect" if self._validation_suspicion is None else "spike"
            onset = self._validation_suspicion = last_good + 1  # or later, up to this step
            return [Event(kind, "validation", step, onset, value, before)]
        self._good_validation = (step, value)
        suspected, self._validation_suspicion = self._validation_suspicion, None
        if suspected is None:
            return []
        return [Event("healed", "validation", step, suspected, value, before)]

    def _told(self, kind: str, channel: str, observation: Observation, onset: int) -> Event:
        return Event(kind, channel, observation.step, onset, observation.loss, self._baseline())
