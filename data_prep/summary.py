"""What a corpus keeps and rejects, in documents, tokens and bytes of text.

`prepare`, `inspect` and the figure show these rows.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from data_prep.filters import Tally
from data_prep.manifest import CorpusManifest, Count, Rejects
from data_prep.statistics import count_ids

ALLOWED_BROKEN = 0.1
"""Largest share of broken records, and of their bytes, without a warning."""
_ENCODED = {"too-long", "too-short"}
_NOT_BROKEN = {*_ENCODED, "contaminated", "duplicate", "empty", "near-duplicate", "other-subset"}
_WIDTHS = (("documents", 14), ("tokens", 18), ("MB of text", 14))
_NOT_RECORDED = (
    "tokens and bytes are left out: an earlier version made this corpus, or a part of it, and did "
    "not record those of rejected documents"
)


class Row(NamedTuple):
    """Documents that were kept, or rejected for one reason; None where a size is not known."""

    name: str
    documents: int
    tokens: int | None
    text_bytes: int | None


class Shares(NamedTuple):
    """Shares of a row's sizes in the sums of all rows; None where a size is not known."""

    documents: float
    tokens: float | None
    text_bytes: float | None


def by_frequency(rejects: Mapping[str, Rejects]) -> list[str]:
    """Return the reasons, most frequent first."""
    return sorted(rejects, key=lambda reason: (-rejects[reason].count, reason))


def has_sizes(manifest: CorpusManifest) -> bool:
    """Return whether the bytes of the rejected documents were recorded."""
    return all(rejects.text_bytes is not None for rejects in manifest.rejects.values())


def rows(manifest: CorpusManifest) -> list[Row]:
    """Return what was kept, then what was rejected, most frequent reason first.

    If documents were truncated, the last row has the tokens that were cut off.
    """
    kept = Count()
    for total in manifest.totals.values():
        kept.add(total)
    found = [Row("kept", kept.documents, kept.tokens, kept.text_bytes)]
    for reason in by_frequency(manifest.rejects):
        rejects = manifest.rejects[reason]
        found.append(Row(reason, rejects.count, _sum(rejects.tokens), _sum(rejects.text_bytes)))
    if manifest.cut_tokens:
        found.append(Row("cut off", 0, manifest.cut_tokens, None))
    return found


def shares(found: list[Row]) -> list[Shares]:
    """Return the shares of each of all rows."""
    documents, tokens, text_bytes = (
        max(sum(size or 0 for size in sizes), 1) for sizes in list(zip(*found, strict=True))[1:]
    )
    return [
        Shares(
            row.documents / documents,
            None if row.tokens is None else row.tokens / tokens,
            None if row.text_bytes is None else row.text_bytes / text_bytes,
        )
        for row in found
    ]


def table(manifest: CorpusManifest) -> Iterator[str]:
    """Yield lines with the sizes and shares of what was kept and rejected."""
    found = rows(manifest)
    if len(found) == 1:
        yield "rejected: nothing"
        return
    with_sizes = has_sizes(manifest)
    widths = _WIDTHS if with_sizes else _WIDTHS[:1]
    first = max(len(row.name) for row in found) + 2
    yield " " * first + "".join(f"{title:>{width}}{'share':>8}" for title, width in widths)
    for row, share in zip(found, shares(found), strict=True):
        tokens = "-" if row.tokens is None else f"{row.tokens:,}"
        megabytes = "-" if row.text_bytes is None else f"{row.text_bytes / 1e6:,.2f}"
        cells = zip(widths, (f"{row.documents:,}", tokens, megabytes), share, strict=False)
        line = "".join(
            f"{size:>{width}}{'' if part is None else f'{part:.1%}':>8}"
            for (_, width), size, part in cells
        )
        yield f"{row.name:{first}}{line}".rstrip()
    if not with_sizes:
        yield _NOT_RECORDED
    elif any(row.tokens is None for row in found):
        yield "(-: tokens of documents that were not encoded, which the shares leave out)"


def unknown_tokens(folder: Path, manifest: CorpusManifest) -> Iterator[str]:
    """Yield a line with the number of `<unk>` in a corpus, if there are any."""
    files = [folder / files.stem for shards in manifest.shards.values() for files in shards]
    counts = count_ids(files, manifest.vocab_size)
    if unknown := int(counts[manifest.special_ids["unk"]]):
        yield (
            f"{unknown:,} of {counts.sum():,} tokens ({unknown / counts.sum():.2%}) are <unk>: one "
            "or more characters that the vocabulary lacks, which are lost"
        )


def broken_warning(manifest: CorpusManifest) -> str | None:
    """Return a message if more than `ALLOWED_BROKEN` of the records or bytes are broken."""
    broken = {
        name: rejects
        for name, rejects in manifest.rejects.items()
        if name.partition(":")[0] not in _NOT_BROKEN
    }
    count = sum(rejects.count for rejects in broken.values())
    not_encoded = sum(r.count for name, r in manifest.rejects.items() if name not in _ENCODED)
    records = sum(manifest.length_histogram.counts) + not_encoded
    found = rows(manifest)
    share_of_bytes = sum(
        share.text_bytes or 0
        for row, share in zip(found, shares(found), strict=True)
        if row.name in broken
    )
    if max(count / max(records, 1), share_of_bytes) <= ALLOWED_BROKEN:
        return None
    size = f" and {share_of_bytes:.1%} of the bytes" if has_sizes(manifest) else ""
    return (
        f"{count:,} of {records:,} records ({count / records:.1%}){size} are broken: "
        f"{Tally(rejects=broken).rejects_summary()}. The corpus is complete without them; "
        "--allow-broken accepts that"
    )


def _sum(by_subset: Mapping[str, int] | None) -> int | None:
    return None if by_subset is None else sum(by_subset.values())
