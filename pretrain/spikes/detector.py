"""Loss spike detector: suspects a spike, and confirms it or lets it heal.

Each record (the measurements of one step) is judged by robust statistics of the records before it,
on several channels. A *suspicion* costs nothing; checkpoints from before it are kept. It *heals*
when the loss returns, and is confirmed as a *spike* when the loss does not return.

| channel | suspected when | confirmed when |
|---|---|---|
| fast | 6 of the last 8 losses are outliers | no return within 50 records, or a gross rise |
| slow | the median of 64 losses is above its recent minimum | no return within 200, or as above |
| gradient-norm | 6 of the last 8 log norms are outliers | never by itself |
| loss-scale | 6 of the last 8 updates overflowed | it lasts for 50 records; at the smallest scale |
| drift | the loss rose by over 0.2 nats in all within 8,192 records | never by itself |
| validation | the loss jumped since the last evaluation, or is not finite | so does the next one |
| non-finite | an update was skipped as not finite | 6 of the last 8 were, or over 25 of 256 |

An update that was applied with a non-finite loss or gradient (ZeRO stage 0 skips none) has
corrupted the weights. It is a spike at once, on the channel non-finite. A skipped update has
changed nothing, so a single one heals; the count over the last 256 records outlives the suspicion.
fp16 skips an update with a finite loss in order to lower its loss scale. Such updates belong to the
channel loss-scale, and are a spike at once where the scale cannot be lowered.

A rise on the channels fast and slow that would be confirmed is a *new level* where it is small and
no longer rises (`_judge_lasting_rise`): the data have changed for good, and the loss falls again
from there. The detector adopts this level. While a small rise still rises, it stays suspected.
Rises add up, and a spike begins where the first of them began (`DriftChannel`).

The numbers are those of the default SpikeConfig. They count records, so curves logged every few
steps are judged alike. Outliers never enter the statistics. The change point of the last losses
dates the onset, not the alarm.

An evaluation is judged when it is measured, so that the last one of a run counts, too.

The detector is a fold over its records: after a restart it is fed the surviving records and is in
the same state as before.
"""

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Sequence

from pretrain.config.sections import SpikeConfig
from pretrain.spikes.channels import SMALL_NATS, DriftChannel, ValidationChannel
from pretrain.spikes.observations import Event, Observation, Seen
from pretrain.spikes.statistics import TOLERANCE, FlagWindow, Level, LowestLevel, change_point

_SMALLEST_DEVIATION = 0.01
"""Nats. Without it, any noise on a nearly constant loss would be an outlier."""
_SMALLEST_NORM_DEVIATION = 0.05
"""The same for the natural logarithm of the gradient norm."""
_FEWEST_AFTER_A_CHANGE = 16
"""Losses after a declared change by which the next one is judged, in place of a quarter window. At
the start of a run, where a loss may rise during the warm-up, so few would be too few."""
_RETURNED_DEVIATIONS = 3.0
"""Largest rise of the last losses' median at which a fast suspicion heals."""
_STILL_RISING = 1 / 8
"""Share of a rise that its later half may add where it no longer rises. A rise that doubles within
as many records as are compared adds 0.29."""


@dataclasses.dataclass
class Suspicion:
    """A rise of the loss that has neither healed nor been confirmed yet."""

    channel: str
    onset: int
    first_record: int
    """Number of the record of the onset."""
    deadline: int
    """Number of the record at which the rise is confirmed."""
    baseline: float
    fall: float
    """Change of the baseline, in nats, while the number of records grows by a factor e."""
    deviation: float
    losses: list[float]
    """Losses from the onset on."""

    last_extrapolated: int
    """Number of the last record to which the baseline is extrapolated: the first deadline. Much
    further, a loss falls less than its slope predicts, and a rise would seem to grow."""

    def baseline_at(self, record: int) -> float:
        """The baseline, extrapolated to a record."""
        record = min(record, self.last_extrapolated)
        return self.baseline + self.fall * math.log(record / self.first_record)


@dataclasses.dataclass
class Channel:
    """A channel whose records are flagged, and its suspicion."""

    name: str
    flags: FlagWindow
    suspected: bool = False
    onset: int = 0
    since: int = 0
    """Number of the record at which the channel was suspected."""


class SpikeDetector:
    """Finds loss spikes in a sequence of records, given one by one to `update`."""

    def __init__(self, config: SpikeConfig, changes: Sequence[int] = ()) -> None:
        """Start with an empty history.

        Args:
            config: thresholds.
            changes: steps at which the level of the loss is expected to rise (other data, another
                schedule). The statistics of earlier records are forgotten there, unless a suspicion
                is open, which is judged first. Until there are some new ones, only gross rises
                above the old level are suspected.
        """
        self.config = config
        self._changes = sorted(changes)
        self._records = 0
        self._spike_continues = False
        self._reset(last_step=-1)

    def _reset(self, last_step: int) -> None:
        """Forget the history and drop every suspicion."""
        patience = self.config.patience
        self._suspicion: Suspicion | None = None
        self._raised_norms = Channel("gradient-norm", FlagWindow(patience))
        self._overflows = Channel("loss-scale", FlagWindow(patience))
        self._skips = Channel("non-finite", FlagWindow(patience))
        most = max(self.config.window // 10, patience - 1)
        self._window_skips = FlagWindow(most + 1, self.config.window)
        self._validation = ValidationChannel(self.config.validation_nats, last_step)
        self._drift = DriftChannel()
        self._restart_levels(old_level=math.nan)

    def _restart_levels(self, old_level: float) -> None:
        """Forget the levels of loss and gradient norm; gross rises are judged by the old level."""
        config = self.config
        self._old_level = old_level
        first = config.slow_window if math.isnan(old_level) else _FEWEST_AFTER_A_CHANGE
        self._level = Level(config.window, min(first, config.slow_window), _SMALLEST_DEVIATION)
        self._norms = self._new_norms()
        self._outliers = FlagWindow(config.patience)
        self._lowest = LowestLevel(config.slow_window, config.window)
        self._trail: deque[tuple[int, float, float]] = deque(  # step, loss, distance
            maxlen=max(2 * config.slow_window, config.patience + TOLERANCE)
        )

    def _new_norms(self) -> Level:
        return Level(self.config.window, self.config.slow_window, _SMALLEST_NORM_DEVIATION)

    def update(self, seen: Seen) -> list[Event]:
        """Judge the next record.

        After a spike the history is forgotten, so that the rest of a curve has a new level.

        Returns:
            The events; a spike comes last.
        """
        if isinstance(seen, Observation):
            events = self._observed(seen)
        else:
            events = self._validation.judge(seen)
        if events and events[-1].kind == "spike":
            events[-1] = self._from_first_rise(events[-1])
            self._reset(events[-1].step)
        return events

    def _observed(self, observation: Observation) -> list[Event]:
        self._records += 1
        self._apply_changes(observation.step)
        events: list[Event] = []
        for judge in (self._judge_update, self._judge_gradient_norm, self._judge_loss):
            events += judge(observation)
            if events and events[-1].kind == "spike":
                non_finite = events[-1].channel == "non-finite"
                self._spike_continues = non_finite or observation.scale_exhausted
                break
        return events

    def _from_first_rise(self, spike: Event) -> Event:
        """Return the spike, dated to the first rise of the loss with which it may have begun."""
        if self._suspicion:
            spike = dataclasses.replace(spike, onset=min(spike.onset, self._suspicion.onset))
            self._drift.date(spike.onset, self._suspicion.deviation)
        first, level = self._drift.onset, self._drift.level
        if first is None or first >= spike.onset:
            return spike
        return dataclasses.replace(spike, onset=first, baseline=level)

    def deviations(self, observation: Observation) -> dict[str, float]:
        """Return the distance of the next record from its level, before `update` judges it.

        Returns:
            `loss_deviations`, and `gradient_norm_deviations` of the norm's logarithm, in robust
            standard deviations; NaN where the level is not known, or the value is not finite.
        """
        norm, loss, found = observation.gradient_norm, math.nan, math.nan
        if self._suspicion:
            baseline = self._suspicion.baseline_at(self._records + 1)
            loss = (observation.loss - baseline) / self._suspicion.deviation
        elif self._level.is_known:
            loss = (observation.loss - self._level.median) / self._level.deviation
        if norm and norm > 0 and math.isfinite(norm) and self._norms.is_known:
            found = (math.log(norm) - self._norms.median) / self._norms.deviation
        loss = loss if math.isfinite(loss) else math.nan
        return {"loss_deviations": loss, "gradient_norm_deviations": found}

    def _apply_changes(self, step: int) -> None:
        if not self._changes or step < self._changes[0] or self._suspicion:
            return
        self._changes = [change for change in self._changes if change > step]
        self._drift = DriftChannel()
        self._restart_levels(self._level.median if self._level.is_known else self._old_level)

    def _baseline(self) -> float:
        if self._suspicion:
            return self._suspicion.baseline
        known = self._level.is_known or math.isnan(self._old_level)
        return self._level.median if known else self._old_level

    # The loss: the channels fast and slow.

    def _judge_loss(self, observation: Observation) -> list[Event]:
        step, loss = observation.step, observation.loss
        if not math.isfinite(loss):
            return []
        block_ends = self._drift.append(step, loss)
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
            self._level.append(loss)
        if self._outliers.is_raised:
            return self._suspect_loss("fast", step, baseline, deviation)
        if self._level.is_known and self._lowest.rise > self.config.slow_deviations * deviation:
            return self._suspect_loss("slow", step, self._lowest.lowest[1], deviation)
        return self._drift.judge(step, deviation) if block_ends else []

    def _deviation(self) -> float:
        """Return the deviation of a loss; without a history only gross rises are outliers."""
        if self._level.is_known:
            return self._level.deviation
        return max(self.config.gross_nats, _SMALLEST_DEVIATION) / self.config.deviations

    def _suspect_loss(
        self, channel: str, step: int, baseline: float, deviation: float
    ) -> list[Event]:
        trail, config = list(self._trail), self.config
        if channel == "fast":
            distances = [distance for *_, distance in trail]
            place, wait = change_point(distances, config.deviations), config.confirm_steps
        else:
            # Losses before the lowest level may be higher without belonging to this rise.
            low = len(trail) - 1 - (self._records - self._lowest.lowest[0])
            trail = trail[max(0, low) :]
            distances = [(loss - baseline) / deviation for _, loss, _ in trail]
            place, wait = change_point(distances, config.slow_deviations), config.slow_confirm_steps
        losses = [loss for _, loss, _ in trail[place:]]
        first_record = self._records - len(losses) + 1
        self._suspicion = Suspicion(
            channel=channel,
            onset=trail[place][0],
            first_record=first_record,
            deadline=first_record + wait,
            last_extrapolated=first_record + wait,
            baseline=baseline,
            fall=self._lowest.fall(),
            deviation=deviation,
            losses=losses,
        )
        # If the rise heals, the records around it are judged without it.
        self._outliers = FlagWindow(config.patience)
        self._trail.clear()
        self._lowest.forget(len(losses))
        event = self._loss_event("suspect", self._suspicion, step)
        return self._judge_suspicion(self._suspicion, step) or [event]

    def _judge_suspicion(self, suspicion: Suspicion, step: int) -> list[Event]:
        """Heal the open suspicion, confirm it, or leave it open."""
        config = self.config
        level = statistics.median(suspicion.losses[-config.patience :])
        baseline = suspicion.baseline_at(self._records)
        rise = (level - baseline) / suspicion.deviation
        soon = self._records + config.confirm_steps
        if suspicion.channel == "slow":
            recent = statistics.median(suspicion.losses[-config.slow_window // 2 :])
            returned = recent - baseline <= config.slow_deviations / 2 * suspicion.deviation
            if rise > config.deviations:  # the slow rise has become a fast one
                suspicion.deadline = min(suspicion.deadline, soon)
        else:
            returned = rise <= _RETURNED_DEVIATIONS
        if level > baseline + config.gross_nats:
            return [self._loss_event("spike", suspicion, step)]
        if returned and not self._raised_norms.suspected:
            self._suspicion = None
            return [self._loss_event("healed", suspicion, step)]
        if returned:  # a raised gradient norm keeps the suspicion open but cannot confirm it
            suspicion.deadline = max(suspicion.deadline, soon)
        elif self._records >= suspicion.deadline:
            return self._judge_lasting_rise(suspicion, step, baseline)
        return []

    def _judge_lasting_rise(self, suspicion: Suspicion, step: int, baseline: float) -> list[Event]:
        """Decide between a spike and a new level, or wait until this is known.

        A rise is small up to `SMALL_NATS`, counted from the level before the first rise that the
        run has not returned from: small steps do not add up unnoticed. It no longer rises
        where the later half of its last records is hardly above the earlier one. A small rise that
        goes on rising is a spike as soon as it is not small.
        """
        config, losses = self.config, suspicion.losses
        start = min(baseline, self._drift.level)  # if this is NaN, `baseline`
        half = max(config.slow_window, config.slow_confirm_steps)
        rise = statistics.median(losses[-half // 2 :]) - start  # long enough to ignore a blip
        if rise > SMALL_NATS:
            return [self._loss_event("spike", suspicion, step)]
        earlier, later = losses[-2 * half : -half], losses[-half:]
        settled = len(earlier) == half and (
            statistics.median(later) - statistics.median(earlier) <= _STILL_RISING * rise
        )
        if not settled or self._raised_norms.suspected:
            suspicion.deadline = self._records + max(1, config.confirm_steps)
            return []
        return [self._learn_level(suspicion, step, later)]

    def _learn_level(self, suspicion: Suspicion, step: int, losses: Sequence[float]) -> Event:
        """Go on from a new level, that of the last losses."""
        self._suspicion = None
        self._drift.begin(suspicion.baseline, suspicion.onset)
        self._restart_levels(self._old_level)
        for record, loss in enumerate(losses, start=self._records - len(losses) + 1):
            self._level.append(loss)
            self._lowest.append(record, loss)
        event = self._loss_event("new-level", suspicion, step)
        return dataclasses.replace(event, loss=statistics.median(losses))

    def _loss_event(self, kind: str, suspicion: Suspicion, step: int) -> Event:
        loss = statistics.median(suspicion.losses)
        return Event(kind, suspicion.channel, step, suspicion.onset, loss, suspicion.baseline)

    # The other channels.

    def _event(self, kind: str, channel: str, observation: Observation, onset: int) -> Event:
        return Event(kind, channel, observation.step, onset, observation.loss, self._baseline())

    def _follow(
        self, channel: Channel, observation: Observation, begins: bool, ends: bool
    ) -> list[Event]:
        """Suspect a channel that is not suspected if `begins`, or heal one that is if `ends`."""
        if not (ends if channel.suspected else begins):
            return []
        channel.suspected = not channel.suspected
        if channel.suspected:
            channel.onset, channel.since = channel.flags.onset, self._records
        kind = "suspect" if channel.suspected else "healed"
        return [self._event(kind, channel.name, observation, channel.onset)]

    def _judge_gradient_norm(self, observation: Observation) -> list[Event]:
        norm, channel = observation.gradient_norm, self._raised_norms
        if norm is None or observation.skipped:
            return []
        value = math.log(norm) if norm > 0 and math.isfinite(norm) else math.inf
        norms = self._norms
        outlier = norms.is_known and value > norms.median + self.config.deviations * norms.deviation
        channel.flags.append(observation.step, outlier)
        if not outlier and math.isfinite(value):
            norms.append(value)
        flags, since = channel.flags, self._records - channel.since
        expired = channel.suspected and since >= self.config.slow_confirm_steps
        events = self._follow(channel, observation, flags.is_raised, flags.is_calm or expired)
        if expired:  # the raised norm is the new level
            self._norms = self._new_norms()
        if events and not channel.suspected:
            channel.flags = FlagWindow(self.config.patience)
        return events

    def _judge_update(self, observation: Observation) -> list[Event]:
        """Judge whether the update was applied: the channels non-finite and loss-scale."""
        o = observation
        self._spike_continues = self._spike_continues and (
            o.corrupts_weights or o.is_non_finite_skip or o.scale_exhausted
        )
        if self._spike_continues:  # it was reported before
            return []
        if o.corrupts_weights:
            return [self._event("spike", "non-finite", o, o.step)]
        events = self._judge_skip(o)
        if events and events[-1].kind == "spike":
            return events
        return events + self._judge_overflow(o)

    def _judge_skip(self, observation: Observation) -> list[Event]:
        skipped, channel = observation.is_non_finite_skip, self._skips
        for flags in (channel.flags, self._window_skips):
            flags.append(observation.step, skipped)
            if flags.is_raised:
                return [self._event("spike", channel.name, observation, flags.onset)]
        return self._follow(channel, observation, skipped, channel.flags.is_clear)

    def _judge_overflow(self, observation: Observation) -> list[Event]:
        channel = self._overflows
        channel.flags.append(observation.step, observation.is_overflow)
        if observation.scale_exhausted:
            onsets = [channel.onset] if channel.suspected else []
            onsets += [c.flags.onset for c in (channel, self._skips) if not c.flags.is_clear]
            onset = min(onsets, default=observation.step)
            return [self._event("spike", channel.name, observation, onset)]
        settled = channel.flags.is_calm and not observation.skipped
        events = self._follow(channel, observation, channel.flags.is_raised, settled)
        lasts = channel.suspected and self._records - channel.since >= self.config.confirm_steps
        if lasts and not events:
            return [self._event("spike", channel.name, observation, channel.onset)]
        return events
