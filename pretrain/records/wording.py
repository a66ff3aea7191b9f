"""Format the numbers and measurements of a run as text."""

import datetime
import math
from collections.abc import Sequence

from pretrain.records.metrics import Line, best_validation, finite_or_nan


def validation_line(validation: Sequence[Line]) -> str:
    """Describe the newest validation and the best one.

    Of several terms it gives the loss of each, because their sum has no perplexity. The first
    validation on other blocks than the one before says so, as the two do not compare.

    Args:
        validation: lines of validation.jsonl on the surviving lineage, at least one.
    """
    newest, best = validation[-1], best_validation(validation)
    terms = newest.get("terms", {})
    key, digits = ("loss", ".4f") if terms else ("perplexity", ".2f")
    shown = {name: term[key] for name, term in terms.items()} or {key: newest[key]}
    loss = format_number(newest["loss"], ".4f")
    parts = [f"{name} {format_number(value, digits)}" for name, value in shown.items()]
    text = f"validation after {newest['step']:,} steps: loss {loss}, {', '.join(parts)}"
    if len({line.get("validation_id") for line in validation[-2:]}) > 1:
        text += " on the next phase's blocks"
    if best is None or best is newest:
        return text
    return f"{text} (best {best[key]:{digits}} after {best['step']:,})"


def format_number(value: float | None, form: str) -> str:
    """Format a number from a run's files, where null stands for one that was not finite."""
    return format(value, form) if math.isfinite(finite_or_nan(value)) else "not finite"


def clock_time(seconds: float | None) -> str:
    """The local time so many seconds from now with its zone, and its day unless that is today."""
    if seconds is None:
        return "not known yet"
    now = datetime.datetime.now().astimezone()
    try:
        end = (now + datetime.timedelta(seconds=seconds)).astimezone()
    except OverflowError:
        return "the end of time"
    return end.strftime("%H:%M %Z" if end.date() == now.date() else "%Y-%m-%d %H:%M %Z")
