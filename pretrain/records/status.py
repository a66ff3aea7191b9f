"""History and current state of a run: `zeroclap status RUN`."""

import dataclasses
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.common.wording import count, in_short
from pretrain.config.load import RUN_FILE, load
from pretrain.config.run import RunConfig, Segments
from pretrain.config.settings import override
from pretrain.records import ledger, metrics, pace, progress, versions, wording
from pretrain.records import segments as run_segments
from pretrain.records.folder import (
    SUPERVISED,
    SUPERVISOR_LOCK,
    check_ledger_is_there,
    holder,
    not_a_run,
)
from pretrain.records.history import sentences, suspicion
from pretrain.records.ledger import Record

FINISHED, TRAINING, STARTING = "finished", "training", "starting"
SPIKED, GIVEN_UP, STOPPED = "spiked", "given-up", "stopped"


@dataclasses.dataclass(frozen=True)
class CorpusUsage:
    """What a run has read of a corpus."""

    name: str
    blocks: int
    epochs: float
    """Skipped blocks count as read."""
    share: float
    """Share of a batch in the last finished step."""
    skipped: int
    """Blocks that rollbacks declared skipped, in all epochs."""
    share_of_tokens: float
    """Share of the corpus's tokens that its blocks hold."""

    def __str__(self) -> str:
        """A sentence."""
        skipped = f", {self.skipped:,} skipped" if self.skipped else ""
        return (
            f"{self.name}: {count(self.blocks, 'block')} drawn, "
            f"{in_short(self.epochs)} epochs{skipped}; its blocks hold "
            f"{self.share_of_tokens:.1%} of its tokens"
            + (f"; {self.share:.1%} of the last batch" if self.share < 1 else "")
        )


@dataclasses.dataclass(frozen=True)
class RunView:
    """A run's folder as it was read at one time."""

    folder: Path
    config: RunConfig
    records: Sequence[Record]
    """Of the ledger."""
    state: ledger.RunState
    segments: Segments
    all_lines: Sequence[metrics.Line]
    """Lines of metrics.jsonl, those of abandoned steps included."""
    lines: Sequence[metrics.Line]
    """Those of the surviving steps."""
    validation: Sequence[metrics.Line]
    """Lines of validation.jsonl that belong to the surviving steps."""
    activity: str
    """FINISHED, TRAINING, STARTING (a supervisor runs, but no attempt trains), SPIKED (not rolled
    back yet), GIVEN_UP or STOPPED."""
    notes: Sequence[str] = ()
    """Messages about files that could not be read."""
    slow_rank: pace.SlowRank | None = None
    """The rank for which the others wait now."""
    orphaned: bool = False
    """Whether the attempt that trains now has lost its supervisor."""

    @property
    def log(self) -> Path | None:
        """The newest attempt's log; without a supervisor there is none."""
        logs = (self.folder / "logs").glob("attempt-*.log")
        own = (path for path in logs if "-node-" not in path.name)
        return max(own, key=lambda path: (len(path.name), path.name), default=None)

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.lines[-1]["step"] + 1 if self.lines else 0

    @property
    def drawn(self) -> list[CorpusUsage]:
        """What the surviving steps drew from each corpus; [] before the run has begun."""
        corpora = run_segments.corpora_of(self.records)
        if not corpora:
            return []
        order, sizes = run_segments.order_of(self.records)
        place = sizes.first_block(self.step)
        rows = zip(
            (corpus["name"] or "corpus" for corpus in corpora),
            order.mixture.counts(place),
            order.epochs(place),
            order.mixture.shares(sizes.first_block(max(0, self.step - 1))),
            (lineage.skipped_count for lineage in order.lineages),
            (corpus["share_of_tokens"] for corpus in corpora),
            strict=True,
        )
        return [CorpusUsage(*row) for row in rows]

    @property
    def next_command(self) -> str:
        """The command to run next; "" while a run is being trained normally."""
        if self.activity in (TRAINING, STARTING) and not self.orphaned:
            return ""
        if self.activity == FINISHED:
            return f"zeroclap export {shlex.quote(str(self.folder))} --output MODEL"
        recipe = shlex.quote(str(_recipe_of(self.folder)))
        moved = self.folder.resolve() != Path(self.config.folder).resolve()
        folder = f" {shlex.quote(override('folder', str(self.folder)))}" if moved else ""
        # Where the user or Slurm starts an agent on each node, one node alone would go on without.
        machines = len({*_newest_attempt(self.records).get("hosts", ())})
        is_alone = machines < 2 or self.config.supervision.hostfile
        return f"zeroclap supervise {recipe}{folder}{'' if is_alone else f' --nodes {machines}'}"

    def pointers(self) -> list[str]:
        """Say where the log is, and what to do next."""
        log, command = self.log, self.next_command
        return [f"log: {log}"] * bool(log) + [f"next: {command}"] * bool(command)


def _recipe_of(run: Path) -> Path:
    """The recipe of a run; while a supervisor runs or no attempt has begun, the one it launches."""
    recipe, launched = run / RUN_FILE, run / SUPERVISED
    if launched.is_file() and (holder(run, SUPERVISOR_LOCK) or not recipe.is_file()):
        return launched
    return recipe


def view(run: Path) -> RunView:
    """Read a run's folder.

    Raises:
        ValueError: it is not a run's folder, or its ledger does not verify.
    """
    if not _recipe_of(run).is_file():
        raise not_a_run(run, f"{RUN_FILE} and no {SUPERVISED}")
    config = load(str(_recipe_of(run)))
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    check_ledger_is_there(run, records)
    state = ledger.run_state(records)
    segments = run_segments.segments_of(run, records, config)
    notes: list[str] = []
    all_lines = metrics.read_metrics(run / metrics.METRICS, notes.append)
    measured = metrics.read_metrics(run / metrics.VALIDATION, notes.append)
    kept = ledger.updates_kept(records)  # an attempt may have begun that has no line yet
    lines = metrics.surviving([x for x in all_lines if x["step"] < kept.get(x["attempt"], 0)])
    measured = [x for x in measured if x["step"] <= kept.get(x["attempt"], 0)]
    validation = metrics.surviving_validation(measured, lines)
    activity = _activity(run, records, state, config.training.steps)
    slow = _slow_rank(lines, records) if activity == TRAINING else None
    # Only a supervisor keeps a log of each attempt.
    is_supervised = (run / "logs" / f"attempt-{state.next_attempt - 1:03d}.log").exists()
    orphaned = activity == TRAINING and is_supervised and not holder(run, SUPERVISOR_LOCK)
    read = (all_lines, lines, validation)
    return RunView(run, config, records, state, segments, *read, activity, notes, slow, orphaned)


def _slow_rank(lines: Sequence[metrics.Line], records: Sequence[Record]) -> pace.SlowRank | None:
    """Return the slow rank of the newest attempt, if it has one."""
    if not (begun := _newest_attempt(records)):
        return None
    own = [line for line in lines[-pace.STEPS :] if line["attempt"] == begun["attempt"]]
    return pace.slow_rank(own, begun["hosts"], begun["kernels"][0])


def _newest_attempt(records: Sequence[Record]) -> Record:
    """Return the record of the newest attempt; {} if none has begun."""
    return next((record for record in reversed(records) if record["kind"] == "attempt"), {})


def _activity(run: Path, records: Sequence[Record], state: ledger.RunState, steps: int) -> str:
    if state.is_done(steps):
        return FINISHED
    if holder(run):
        return TRAINING
    if holder(run, SUPERVISOR_LOCK):
        return STARTING
    if records and records[-1]["kind"] == "gave-up":
        return GIVEN_UP
    return STOPPED if state.unanswered_spike is None else SPIKED


def describe_run(seen: RunView) -> str:
    """Describe a run on a page."""
    run, config, state = seen.folder, seen.config, seen.state
    checkpoints = ", ".join(
        f"{step:,}{' (tainted: after the onset)' if step in state.tainted else ''}"
        for step in state.checkpoints
    )
    end = wording.clock_time(progress.seconds_left(seen.lines, config.training.steps))
    parts = [
        f"{run}: {config.model.variant} {config.model.size}, {config.training.steps:,} steps, "
        f"recipe's seed {config.training.seed}",
        current_activity(seen),
        *([f"expected end: {end}"] if seen.activity == TRAINING else []),
        *([str(seen.slow_rank)] if seen.slow_rank else []),
        *([wording.validation_line(seen.validation)] if seen.validation else []),
        *versions.changes(seen.records),
        *run_segments.lines(seen.segments, state),
        *map(str, seen.drawn),
        *seen.notes,
        "",
        *(f"  {_clock(record['time'])}  {text}" for record, text in sentences(seen.records)),
        "",
        f"checkpoints: {checkpoints or 'none'}",
        *seen.pointers(),
    ]
    return "\n".join(parts) + "\n"


def facts(seen: RunView) -> dict[str, Any]:
    """Describe a run as a JSON object; its keys are in the help of `status`."""
    state, steps, last = seen.state, seen.config.training.steps, seen.lines[-1:]
    table, segment = run_segments.table(seen.segments, state), seen.segments.at(seen.step)
    return {
        "run": str(seen.folder),
        "state": seen.activity,
        "orphaned": seen.orphaned,
        "step": seen.step,
        "steps": steps,
        "loss": last[0]["loss"] if last else None,
        "tokens_per_second": last[0]["tokens"] / last[0]["seconds"] if last else None,
        "eta_seconds": progress.seconds_left(seen.lines, steps),
        "validation": _score(seen.validation[-1] if seen.validation else None),
        "best_validation": _score(metrics.best_validation(seen.validation)),
        "attempts": state.attempts,
        "spikes": len(state.spikes),
        "rollbacks": len(state.rollbacks),
        "checkpoints": list(state.checkpoints),
        "suspected_since": state.suspected_since,
        "code_changes": versions.changes(seen.records),
        "init_from": ledger.origin(seen.records),
        "segments": [dict(zip(run_segments.COLUMNS, row, strict=True)) for row in table],
        "segment": {n: getattr(segment, n) for n in ("name", "first_step", "end_step")},
        "corpora": [dataclasses.asdict(drawn) for drawn in seen.drawn],
        "slow_rank": dataclasses.asdict(seen.slow_rank) if seen.slow_rank else None,
        "reason": seen.records[-1].get("reason") if seen.records else None,
        "log": str(seen.log) if seen.log else None,
        "next": seen.next_command or None,
    }


def _score(line: metrics.Line | None) -> dict[str, object] | None:
    return {name: line[name] for name in ("step", "loss", "perplexity")} if line else None


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def current_activity(seen: RunView) -> str:
    """Describe the current state of a run in a sentence or two."""
    state, steps = seen.state, seen.config.training.steps
    if seen.activity == FINISHED:
        text = f"finished: {steps:,} of {steps:,} steps in {count(state.attempts, 'attempt')}"
        return text + suspicion(state.suspected_since)
    if seen.activity == STARTING:
        return f"starting: no attempt trains now; from step {state.resume_step():,} of {steps:,}"
    if seen.activity == TRAINING:
        newest = progress.progress_line(seen.lines, steps) if seen.lines else "no step yet"
        text = f"training now, attempt {state.next_attempt - 1}: {newest}"
        text += suspicion(state.suspected_since)
        adopt = f"\nno supervisor: run `{seen.next_command}` to adopt it"
        return text + adopt if seen.orphaned else text
    rest = f"it would continue from step {state.resume_step():,} of {steps:,}"
    if seen.activity == SPIKED:
        return f"stopped at a loss spike, not yet rolled back; {rest}"
    if seen.activity == GIVEN_UP:
        return f"given up: {seen.records[-1]['reason']}; {rest}"
    return f"not being trained; {rest}"
