"""Length filters, and the counts of kept and rejected documents."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from data_prep.manifest import Count, Rejects, Settings

PLACES_KEPT = 5  # examples per reject reason


def judge(length: int, limits: Settings) -> str | None:
    """Return the reason why a document is rejected, or None.

    Args:
        length: Tokens of the document including `<s>` and `</s>`.
        limits: `min_tokens` and `max_tokens`, both inclusive.
    """
    if length > limits.max_tokens:
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
    room = limits.max_tokens - 2
    if len(ids) <= room or limits.long == "drop":
        return [ids]
    end = room if limits.long == "truncate" else len(ids)
    return [ids[start : start + room] for start in range(0, end, room)]


@dataclass
class Tally:
    """Counts of documents: kept by split and subset, rejected by reason and subset."""

    kept: dict[str, dict[str, Count]] = field(default_factory=dict)
    rejects: dict[str, Rejects] = field(default_factory=dict)
    cut: int = 0

    def keep(self, split: str, subset: str, count: Count) -> None:
        """Count documents written to a split."""
        self.kept.setdefault(split, {}).setdefault(subset, Count()).add(count)

    def reject(self, reason: str, subset: str, count: int, places: list[str]) -> None:
        """Count rejected documents, and remember the first places of each reason."""
        rejects = self.rejects.setdefault(reason, Rejects({}, []))
        rejects.by_subset[subset] = rejects.by_subset.get(subset, 0) + count
        rejects.places.extend(places[: PLACES_KEPT - len(rejects.places)])

    def add(self, other: "Tally") -> None:
        """Add the counts of a later shard."""
        for split, subsets in other.kept.items():
            for subset, count in subsets.items():
                self.keep(split, subset, count)
        for reason, rejects in other.rejects.items():
            places = rejects.places
            for subset, number in rejects.by_subset.items():
                self.reject(reason, subset, number, places)
                places = []
        self.cut += other.cut

    def rejects_summary(self) -> str:
        """Return the rejects as "3 too-long (first at a.jsonl:7), 1 not-json (first at ...)"."""
        parts = sorted(self.rejects.items(), key=lambda item: -item[1].count)
        return ", ".join(f"{r.count} {reason} (first at {r.places[0]})" for reason, r in parts)
