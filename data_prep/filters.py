"""Length filters, and the counts of kept and rejected documents."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from data_prep.manifest import Count, Rejects, Settings


def judge(length: int, limits: Settings) -> str | None:
    """Return the reason why a document is rejected, or None.

    Args:
        length: Tokens of the document including `<s>` and `</s>`.
        limits: `min_tokens` and `max_tokens`, both inclusive.
    """
    if limits.max_tokens is not None and length > limits.max_tokens:
        return "too-long"
    if length < limits.min_tokens:
        return "too-short"
    return None


def windows(ids: npt.NDArray[np.int32], limits: Settings) -> list[npt.NDArray[np.int32]]:
    """Return the ids to write for a document: all, their beginning, or consecutive windows.

    Args:
        ids: Without `<s>` and `</s>`.
        limits: `long` applies to documents over `max_tokens`; "drop" returns them unchanged, so
            that `judge` rejects them.
    """
    if limits.long == "drop" or limits.max_tokens is None:
        return [ids]
    room = limits.max_tokens - 2
    if len(ids) <= room:
        return [ids]
    end = room if limits.long == "truncate" else len(ids)
    return [ids[start : start + room] for start in range(0, end, room)]


@dataclass
class Tally:
    """Counts of documents: kept by split and subset, rejected by reason and subset."""

    kept: dict[str, dict[str, Count]] = field(default_factory=dict)
    rejects: dict[str, Rejects] = field(default_factory=dict)
    cut: int = 0
    cut_tokens: int | None = 0

    def keep(self, split: str, subset: str, count: Count) -> None:
        """Count documents written to a split."""
        self.kept.setdefault(split, {}).setdefault(subset, Count()).add(count)

    def reject(self, reason: str, rejects: Rejects) -> None:
        """Count rejected documents."""
        self.rejects.setdefault(reason, Rejects({}, [], {}, {})).add(rejects)

    def add(self, other: "Tally") -> None:
        """Add the counts of a later shard."""
        for split, subsets in other.kept.items():
            for subset, count in subsets.items():
                self.keep(split, subset, count)
        for reason, rejects in other.rejects.items():
            self.reject(reason, rejects)
        self.cut += other.cut
        if self.cut_tokens is not None and other.cut_tokens is not None:
            self.cut_tokens += other.cut_tokens
        else:
            self.cut_tokens = None

    def rejects_summary(self) -> str:
        """Return the rejects as "3 too-long (first at a.jsonl:7), 1 not-json (first at ...)"."""
        parts = sorted(self.rejects.items(), key=lambda item: -item[1].count)
        return ", ".join(f"{r.count} {reason} (first at {r.places[0]})" for reason, r in parts)
