"""Filters, and the counts of kept and rejected documents.

`FILTERS` judge a document by its text, before it is encoded; each is a function in a file of its
own, and a line in the table. `judge` judges it by its length in tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data_prep import contamination, duplicates, near_duplicates, own_filters
from data_prep.documents import Document, Records, Reject, Verdict
from data_prep.manifest import Count, Rejects, Settings
from data_prep.progress import Progress
from data_prep.task import ShardTask


class Filter(NamedTuple):
    """A filter of documents by their texts, and what it does before the first shard is made."""

    is_on: Callable[[Settings], bool]
    judge: Callable[[ShardTask], Verdict]
    """Returns the function that judges the documents of one input."""
    suffixes: tuple[str, ...] = ()
    """Of the files that it leaves in shards/ until the corpus is finished; that of `read` first."""
    read: Callable[[ShardTask, Progress], None] | None = None
    """Reads each input once, in a worker."""
    finish: Callable[[Sequence[ShardTask]], None] | None = None
    """Called when all inputs have been read."""


def other_subset(task: ShardTask) -> Verdict:
    """Return the filter of the documents of other subsets than the one that is wanted."""
    return lambda _, document: None if document.subset == task.settings.subset else "other-subset"


FILTERS = {
    "duplicates": Filter(
        lambda settings: settings.duplicates == "drop",
        duplicates.duplicates,
        (duplicates.HASHES_SUFFIX, duplicates.MARKS_SUFFIX),
        duplicates.hash_input,
        duplicates.mark_duplicates,
    ),
    "near-duplicates": Filter(
        lambda settings: settings.near_duplicates is not None,
        near_duplicates.near_duplicates,
        (near_duplicates.SIGNATURES_SUFFIX, near_duplicates.MARKS_SUFFIX),
        near_duplicates.sign_input,
        near_duplicates.mark_near_duplicates,
    ),
    "other subsets": Filter(lambda settings: settings.subset != "", other_subset),
    "contaminated": Filter(
        lambda settings: settings.decontaminate is not None,
        contamination.contaminated,
        (contamination.NGRAMS_SUFFIX,),
        finish=contamination.write_ngrams,
    ),
    "own": Filter(lambda settings: bool(settings.filters), own_filters.own),
}
"""By name; the first that rejects a document gives the reason."""


def filters_of(settings: Settings) -> dict[str, Filter]:
    """Return the filters that are on."""
    return {name: each for name, each in FILTERS.items() if each.is_on(settings)}


def filtered(records: Records, task: ShardTask) -> Records:
    """Yield the records of a task's input, with the documents that are rejected as rejects.

    Raises:
        ValueError: What a filter does before the first shard was not done, or for another state of
            the input.
    """
    judges = [each.judge(task) for each in filters_of(task.settings).values()]
    if not judges:
        yield from records
        return
    number = -1
    for record in records:
        if not isinstance(record, Document):
            yield record
            continue
        number += 1
        reasons = filter(None, (judge(number, record) for judge in judges))
        if reason := next(reasons, None):
            text_bytes = len(record.text.encode())
            yield Reject(reason, record.subset, record.source_file, record.line, text_bytes)
        else:
            yield record


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
    cut_tokens: int = 0

    def keep(self, split: str, subset: str, count: Count) -> None:
        """Count documents written to a split."""
        counts = self.kept.setdefault(split, {})
        counts[subset] = counts.get(subset, Count()) + count

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
        self.cut_tokens += other.cut_tokens

    def rejects_summary(self) -> str:
        """Return the rejects as "3 too-long (first at a.jsonl:7), 1 not-json (first at ...)"."""
        parts = sorted(self.rejects.items(), key=lambda item: -item[1].count)
        return ", ".join(f"{r.count} {reason} (first at {r.places[0]})" for reason, r in parts)
