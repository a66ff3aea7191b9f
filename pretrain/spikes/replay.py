"""`replay`: run the spike detector over recorded curves, and show the planned rollbacks.

The detector is the one that runs live. A curve is a run's folder or another program's log, also
compressed (.gz, .zst): a CSV (one run of W&B, TensorBoard), JSON Lines, trainer_state.json of
transformers, or the JSON log of fairseq, whose losses have base 2. A step number that does not
increase marks a restart from a checkpoint; later records replace earlier ones. Steps may be
missing: many logs keep one in five.
"""

import csv
import dataclasses
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.common import pictures, records
from data_prep.common.files import named_errors, parse_json, write_json
from data_prep.common.markup import text_table
from data_prep.compressed import open_stream
from pretrain.config.load import RUN_FILE, load
from pretrain.config.run import RunConfig
from pretrain.config.sections import SpikeConfig
from pretrain.config.settings import apply_override
from pretrain.records import history, ledger, metrics
from pretrain.records.segments import segments_of
from pretrain.spikes import policy
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.live import declared_changes, history_before
from pretrain.spikes.observations import Observation, Seen

_STEP = (
    *("step", "iteration", "iter", "global_step", "train_global_step", "trainer_global_step"),
    *("_step", "num_updates", "update"),  # fairseq's `update` counts epochs
)
_LOSS = ("loss", "train_loss", "training_loss", "lm_loss", "train_lm_loss", "value")
_NORM = ("gradient_norm", "grad_norm", "gnorm", "train_grad_norm", "optimizer_gradient_norm")
_SEPARATORS = str.maketrans(" -/.", "____")
_COLORS = {"healed": pictures.ORANGE, "new-level": pictures.GREEN, "spike": pictures.RED}


def replay(words: Sequence[str], json_file: Path | None, picture: Path | None) -> None:
    """Print the detector's events on curves.

    Args:
        words: paths of curves, and thresholds as `spike.key=value`.
        json_file: also gets the findings.
        picture: also gets the curves, drawn.

    Raises:
        ValueError: a word is neither a curve nor a threshold, or as `read_curve`.
    """
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    _settings(None, overrides)  # refused before anything is read
    paths = [Path(word) for word in words if word not in overrides]
    if not paths:
        raise ValueError("no curve is named; give a run's folder, a CSV, JSON Lines or JSON log")
    found = [detect(str(p), read_curve(p), *_settings(p, overrides)) for p in paths]
    sys.stdout.write(table(found))
    if json_file:
        write_json(json_file, {each.name: each.events for each in found})
    if picture:
        _plot(found, picture)


def read_curve(path: Path) -> list[Seen]:
    """Return the detector's input from a run's folder or a log, in order.

    Raises:
        ValueError: there is nothing to read, a line is malformed, or none has a step and a loss.
    """
    lines = path / metrics.METRICS
    if lines.is_file():
        validation = metrics.read_metrics(path / metrics.VALIDATION)
        seen = history_before(sys.maxsize, metrics.read_metrics(lines), validation)
    elif path.is_file():
        rows = [row for number, record in _records(path) if (row := _row(record, path, number))]
        seen = [Observation(**row) for row in metrics.surviving(rows)]
        if len(seen) < len(rows):
            left = f"{path}: {len(seen):,} of {len(rows):,} records are used; where a step does not"
            print(f"note: {left} increase, later ones replace earlier ones", file=sys.stderr)
    else:
        raise ValueError(f"{path}: no such file or run's folder")
    if not seen:
        raise ValueError(f"{path}: has no record with a step and a loss")
    return seen


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the columns of each line, without a truncated last line."""
    csv.field_size_limit(2**31 - 1)  # a damaged line may be one field
    with open_stream(path) as stream:
        data = stream.read()
    with named_errors(f"{path}: is not UTF-8 text"):
        text = data.decode("utf-8-sig")
    if '"log_history"' in text:
        yield from enumerate(_trainer_history(text, path))
        return
    lines, names = re.split("\r\n?|\n", text), []
    if '"num_updates"' in text:  # fairseq: a time may stand before, and other lines are messages
        lines = [x[x.find("{") :] if '"num_updates"' in x else "" for x in lines]
    elif {".jsonl", ".json"}.isdisjoint(path.suffixes):
        names = _columns(next(csv.reader(lines[:1]), []), path)
    for number, line in enumerate(lines[1:] if names else lines, start=2 if names else 1):
        if not line.strip():
            continue
        try:
            cells = next(csv.reader([line])) if names else []
            yield number, dict(zip(names, cells, strict=True)) if names else parse_json(line)
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}: line {number} is malformed") from None


def _trainer_history(text: str, path: Path) -> list[dict[str, Any]]:
    """The records with a training loss of transformers' trainer_state.json."""
    try:  # the last one has the mean of all losses, as train_loss
        return [dict(each) for each in parse_json(text)["log_history"] if "loss" in each]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path}: is not a trainer_state.json of transformers") from None


def _columns(header: list[str], path: Path) -> list[str]:
    """The names of a CSV's columns, without W&B's "RUN - ".

    Raises:
        ValueError: there are losses of several runs.
    """
    names = [name.rpartition(" - ")[2] for name in header]
    doubled = {name for name in names if names.count(name) > 1}
    if doubled and names != header:
        runs = ", ".join(old for old, name in zip(header, names, strict=True) if name in doubled)
        raise ValueError(f"{path}: has columns of several runs ({runs}); export one run")
    return names


def _row(record: dict[str, Any], path: Path, number: int) -> dict[str, Any] | None:
    """Return the fields of an Observation; None where the step or the loss is missing."""
    plain = {key.strip().lower().translate(_SEPARATORS): record[key] for key in reversed(record)}
    step, loss, norm = (
        next((plain[name] for name in names if plain.get(name) not in (None, "")), None)
        for names in (_STEP, _LOSS, _NORM)
    )
    if step is None or loss is None:
        return None
    try:
        if not float(step).is_integer():
            raise ValueError(f"step {step!r} is not a whole number")
        norm = None if norm is None else float(norm)
        # In fp16 an update whose norm is not finite may have been skipped.
        known = norm if norm is None or math.isfinite(norm) else None
        nats = float(loss) * (math.log(2) if "num_updates" in plain else 1.0)
        return {"step": int(float(step)), "loss": nats, "gradient_norm": known}
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: line {number}: {error}") from None


def _settings(
    path: Path | None, overrides: Sequence[str]
) -> tuple[SpikeConfig, int, Sequence[int]]:
    """The thresholds for a curve, the steps between its checkpoints, and its declared changes.

    Args:
        path: of the curve.
        overrides: `spike.key=value`, each in place of the recipe's or the default value.

    Raises:
        ValueError: the run's recipe is not valid, a key does not exist, or a value is not accepted.
    """
    config = RunConfig()
    changes: list[int] = []
    if path and (path / RUN_FILE).is_file():
        config, told = load(str(path / RUN_FILE)), ledger.read_ledger(path / ledger.FILE_NAME)
        changes = declared_changes(segments_of(path, told, config))
    values: dict[str, Any] = {"spike": dataclasses.asdict(config.spike)}
    for override in overrides:
        apply_override(values, override)
    if other := sorted(set(values) - {"spike"}):
        raise ValueError(records.unknown_key(other[0], ["spike"]))
    decoded = records.decode(SpikeConfig, values["spike"], "spike.")
    return decoded, config.training.checkpoint_interval, changes


@dataclasses.dataclass(frozen=True)
class Found:
    """The detector's events on a curve."""

    name: str
    steps: list[Observation]
    events: list[dict[str, Any]]
    """As a ledger would hold them: each event, and after a spike the answer of the policy."""


def detect(
    name: str,
    seen: Sequence[Seen],
    config: SpikeConfig,
    checkpoint_interval: int,
    changes: Sequence[int] = (),
) -> Found:
    """Run the detector over a curve, and plan the answer to each spike.

    The curve continues as it was recorded, whatever the policy plans: after a spike the detector
    learns the level anew.
    """
    detector, events = SpikeDetector(config, changes), []
    for event in (event for each in seen for event in detector.update(each)):
        events.append(dataclasses.asdict(event))
        if event.kind != "spike":
            continue
        # A curve may count tokens as steps: far fewer are looked at than it would have.
        first = max(1, event.onset // checkpoint_interval - 1000) * checkpoint_interval
        checkpoints = range(first, event.step + 1, checkpoint_interval)
        rollbacks = ledger.segments(events)
        seeds = range(1, len(rollbacks) + 2)
        plan = policy.plan(events[-1], rollbacks, checkpoints, seeds, config)
        events.append({"kind": "gave-up", **dataclasses.asdict(plan)})
        if isinstance(plan, policy.Rollback):
            events[-1] |= {"kind": "segment", "why": ledger.SPIKE, "onset": event.onset}
    return Found(name, [each for each in seen if isinstance(each, Observation)], events)


def table(found: Sequence[Found]) -> str:
    """Format the findings on several curves as text."""
    rows = []
    for each in found:
        kinds = Counter(event["kind"] for event in each.events)
        numbers = (kinds[kind] for kind in ("suspect", "healed", "new-level", "spike"))
        rows.append((each.name, f"{len(each.steps):,}", *map(str, numbers)))
    lines = text_table(("curve", "records", "suspicions", "healed", "new levels", "spikes"), rows)
    begins = {"spike": "", "segment": "would be ", "gave-up": "would be "}  # planned, not done
    for each in found:
        answered = [event for event in each.events if event["kind"] in begins]
        lines += [f"{each.name}: {begins[e['kind']]}{history.describe(e)}" for e in answered]
    return "\n".join(lines) + "\n"


def _plot(found: Sequence[Found], path: Path) -> None:
    """Draw every curve with its suspicions and spikes."""
    with pictures.picture(10, 0.6 + 2.4 * len(found), path) as figure:
        grid = figure.subplots(len(found), squeeze=False)[:, 0]
        for axes, each in zip(grid, found, strict=True):
            axes.plot([o.step for o in each.steps], [o.loss for o in each.steps], lw=0.6)
            for event in each.events:
                if color := _COLORS.get(event["kind"]):
                    place, label = (event["onset"], event["step"]), event["kind"]
                    axes.axvspan(*place, color=color, alpha=0.4, lw=1, label=label)
            axes.set(title=each.name, ylabel="nats", yscale="log")
            pictures.plain_numbers(axes.yaxis)
        grid[-1].set_xlabel("step")
        pictures.legend_below(figure, columns=4)
