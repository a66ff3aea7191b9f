"""A plan as text: what `python -m pretrain plan` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pretrain.checks.devices import DEVICES, HEADROOM
from pretrain.plan.plan import Fit, PhaseCost, Plan, Reading

MOST_EPOCHS = 40
"""More are warned of. Repeated text is worth almost nothing beyond about 40 epochs (Muennighoff et
al. 2023, figure 1, for causal language models); BERT was trained for 40 (Devlin et al. 2019, A.2).
"""


def table(planned: Plan, *, details: bool = False) -> str:
    """Format a plan as text: about ten lines, and with `details` what they come from."""
    each, most = planned.checkpoint, planned.checkpoints_most
    (fit,) = (fit for fit in planned.fits if fit.backend == planned.backend)
    rows = [
        ("parameters", f"{planned.parameters:,}"),
        *_vocabulary(planned),
        ("tokens", f"{planned.tokens:,} (padding included)"),
        *_epochs(planned.reading),
        *_speed(planned),
        ("memory", f"ZeRO {planned.stage}, {_fit(fit, planned)}"),
        (
            "checkpoints",
            f"{_size(each)} each; {planned.checkpoints_usual} kept "
            f"({_size(each * planned.checkpoints_usual)}), at most {most} after loss spikes "
            f"({_size(each * most)})",
        ),
        ("exported", _size(planned.exported)),
    ]
    lines = [f"{name:12} {text}" for name, text in rows]
    return "\n".join([*lines, *(_details(planned) if details else [])]) + "\n"


def _details(planned: Plan) -> Iterator[str]:
    """Lines about single phases, ZeRO stages, attention back ends and checkpoints."""
    parts = sorted(planned.parts.items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {part / planned.seconds:.0%}" for name, part in parts if part)
    rows = [
        ("as trained", f"{planned.trained_parameters:,} parameters"),
        ("FLOPs", f"{planned.flops:.3g} ({planned.flops_per_token / 1e6:,.0f} M per token)"),
        ("spent on", shares),
        *(
            ("phases" if number == 0 else "", _cost(cost))
            for number, cost in enumerate(planned.phases)
        ),
        (
            "checkpoints",
            f"the newest {planned.checkpoints_newest}, and those that a rollback may go back to; "
            "most after rollbacks, while another",
        ),
        ("", "is saved; up to two more after stops between them"),
    ]
    yield ""
    yield from (f"{name:12} {text}" for name, text in rows)
    heads = ("weights", "gradients", "optimizer", "bucket", "activations", "total")
    yield from ("", "per rank".ljust(12) + "".join(f"{head:>12}" for head in heads))
    for stage, memory in planned.memory.items():
        mark = " <- the recipe's" if stage == planned.stage else ""
        if not memory.fits(planned.device_memory):
            mark += f" (too much for the {_size(planned.device_memory)} of {planned.kind})"
        figures = "".join(f"{_size(getattr(memory, head)):>12}" for head in heads)
        yield f"ZeRO {stage}".ljust(12) + figures + mark
    yield ""
    yield f"attention    {planned.backend} on a GPU; at ZeRO {planned.stage}, on one GPU:"
    yield from (f"{'':12} {_fit(fit, planned)}" for fit in planned.fits)


def _speed(planned: Plan) -> list[tuple[str, str]]:
    """Rows about the time: how long, how fast, and what would help."""
    seconds, each = planned.seconds, planned.tokens / planned.seconds / planned.world_size
    shortest, longest = (_time(seconds / (1 + sign * planned.uncertainty)) for sign in (1, -1))
    utilization = planned.flops_per_token * each / DEVICES[planned.kind].flops
    rows = [
        (
            "time",
            f"{_time(seconds)} ({shortest} to {longest}) on {planned.world_size} {planned.kind}: "
            f"{planned.source}; without validation and checkpoints",
        ),
        (
            "speed",
            f"{planned.world_size * each:,.0f} tokens/s, {each:,.0f} of each GPU, "
            f"{utilization:.0%} of its bf16 peak",
        ),
    ]
    if planned.change:
        text = f"{planned.change.setting} would help most: {_time(planned.change.seconds)}"
        rows.append(("faster", text))
    return rows


def _vocabulary(planned: Plan) -> list[tuple[str, str]]:
    if not planned.vocab_size_is_assumed:
        return []
    reason = "no corpus is on this machine"
    return [("vocabulary", f"{planned.vocab_size:,} ids, assumed: {reason}")]


def _fit(fit: Fit, planned: Plan) -> str:
    """Say which micro-batches fit with an attention back end."""
    if fit.problem:
        return f"{fit.backend}: cannot compute this model ({fit.problem})"
    has = f"{planned.kind}, {_size(planned.device_memory)}"
    text = f"{fit.backend}: micro-batches of {fit.micro_batch_size} need {_size(fit.bytes)}"
    is_small = fit.bytes <= HEADROOM * planned.device_memory
    text += f", which {'fits' if is_small else 'does not fit'} ({has})"
    if not fit.largest:
        return f"{text}; none fits"
    if fit.largest == fit.micro_batch_size:
        return f"{text}; no larger ones fit and divide the batch"
    return f"{text}; the largest that fit are of {fit.largest} ({_size(fit.largest_bytes)})"


def _epochs(reading: Mapping[str, Reading] | None) -> list[tuple[str, str]]:
    """Rows about what is read of each corpus."""
    if reading is None:
        return [("epochs", "unknown: data.corpus is not a folder on this machine")]
    texts = [f"{name}: {_read(r)}" if name else _read(r) for name, r in reading.items()]
    return list(zip(["epochs", *[""] * len(texts)], texts, strict=False))


def _cost(cost: PhaseCost) -> str:
    return (
        f"{cost.name}: {cost.steps:,} steps, {cost.tokens:,} tokens, {cost.flops:.3g} FLOPs, "
        f"{_time(cost.seconds)}"
    )


def _read(reading: Reading) -> str:
    text = (
        f"{reading.epochs:,.2f} of {reading.blocks:,} blocks, {reading.fill:.1%} full, with "
        f"{reading.share_of_tokens:.1%} of the train split's {reading.tokens:,} tokens"
    )
    if reading.epochs > MOST_EPOCHS:
        text += (
            f"\n{'':12} WARNING: beyond {MOST_EPOCHS} epochs repeated text teaches almost nothing; "
            "take a larger corpus or fewer training.steps"
        )
    return text


def _time(seconds: float) -> str:
    """A duration in the largest unit of which it has at least two."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.3g} seconds"


def _size(count: float) -> str:
    """A number of bytes, in GB from 1 GB on, in MB below."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
