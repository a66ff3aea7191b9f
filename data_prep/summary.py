"""What a corpus keeps and rejects, in documents, tokens and bytes of text.

`prepare` and `inspect` show these rows.
"""

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from data_prep.common.markup import text_table
from data_prep.common.wording import few
from data_prep.filters import FILTERED, OTHER_SUBSET
from data_prep.manifest import SPLITS, CorpusManifest, Count, Tally, add_counts
from data_prep.statistics import count_ids

ALLOWED_BROKEN = 0.1
"""Largest share of broken records, and of their bytes, without a warning."""
LEAST_VALID_TOKENS = 50_000
"""With fewer, the standard error of a validation loss is above about 0.035 nats."""
_NATS_PER_TARGET = 3.0  # standard deviation of the loss of a token
_MASKED = 0.15
_MARGIN = 1.25
_MOST_VALID = 0.5
"""Share of a corpus for validation above which more text is advised."""
LEAST_BYTES_PER_TOKEN = 2.0
"""In GPT-2's vocabulary, texts in Latin letters and code have 2.0 to 4.3 bytes per token, Russian,
Arabic, Hindi and Chinese 1.5 to 1.8, and Korean 1.2."""
_ENCODED = {"too-long", "too-short"}
_NOT_BROKEN = {*_ENCODED, "empty", OTHER_SUBSET, FILTERED}
_COLUMNS = ("", "documents", "share", "tokens", "share", "bytes of text", "share")
_KEPT = (
    *("split", "subset", "documents", "tokens", "bytes of text"),
    *("share of tokens", "tokens each", "bytes a token"),
)


def rows(manifest: CorpusManifest) -> dict[str, Count]:
    """Return what was kept, then what was rejected, most frequent reason first.

    If documents were truncated, the last row has what was cut off.
    """
    found = {"kept": sum(manifest.totals.values(), Count())}
    found |= {reason: rejects.total for reason, rejects in manifest.by_frequency()}
    if manifest.cut_tokens:
        found["cut off"] = Count(0, manifest.cut_tokens, manifest.cut_bytes)
    return found


def table_of_kept(manifest: CorpusManifest) -> list[str]:
    """Return lines with the sizes of each split and its subsets, largest first."""
    cells = []
    for split in SPLITS:
        total = manifest.totals[split]
        rows = sorted(manifest.kept.get(split, {}).items(), key=lambda item: -item[1].tokens)
        for subset, count in [("all", total), *rows]:
            sizes = (f"{size:,}" for size in vars(count).values())
            share = f"{count.tokens / max(total.tokens, 1):.1%}"
            tokens = f"{count.tokens / max(count.documents, 1):,.1f}"
            text_bytes = f"{count.text_bytes / max(count.tokens, 1):.2f}"
            cells.append((split, subset, *sizes, share, tokens, text_bytes))
        sequences = sum(files.sequences for files in manifest.shards[split])
        if sequences != total.documents:
            cells.append((split, f"{sequences:,} sentences", *[""] * 6))
    return text_table(_KEPT, cells)


def table_of_sizes(manifest: CorpusManifest) -> Iterator[str]:
    """Yield lines with the sizes and shares of what was kept and rejected."""
    found = rows(manifest)
    if len(found) == 1:
        yield "rejected: nothing"
        return
    sums = vars(sum(found.values(), Count())).values()
    cells = [
        [name, *chain(*map(_with_share, vars(row).values(), sums))] for name, row in found.items()
    ]
    yield from text_table(_COLUMNS, cells)
    if not all(row.tokens for row in found.values()):
        yield "(-: not encoded, so the number of tokens is unknown; shares leave it out)"


def _with_share(size: int, total: int) -> tuple[str, str]:
    return (f"{size:,}", f"{size / total:.1%}") if size else ("-", "")


def bytes_per_token(manifest: CorpusManifest) -> dict[str, float]:
    """Return the bytes of text per token of each subset, lowest first."""
    sizes: dict[str, Count] = {}
    for subsets in manifest.kept.values():
        add_counts(sizes, subsets)
    found = {name: size.text_bytes / size.tokens for name, size in sizes.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def warnings(manifest: CorpusManifest) -> Iterator[str]:
    """Yield what makes a corpus less useful than its author may expect, and what to do."""
    tokens = manifest.totals["valid"].tokens
    if 0 < tokens < LEAST_VALID_TOKENS:
        all_tokens = tokens + manifest.totals["train"].tokens
        chosen = manifest.settings.valid_fraction
        # A share of the documents may have a smaller share of the tokens, as the one chosen has.
        needed = _MARGIN * max(LEAST_VALID_TOKENS / all_tokens, chosen)
        share = math.ceil(100 * needed) / 100
        use = f"--valid-fraction {share:g}" if chosen and share <= _MOST_VALID else "more text"
        error = _NATS_PER_TARGET / math.sqrt(_MASKED * tokens)
        yield (
            f"the validation split has {tokens:,} tokens: with {_MASKED:.0%} of them masked, the "
            f"standard error of its loss is about {error:.2f} nats. Use at least "
            f"{LEAST_VALID_TOKENS:,} tokens, for example with {use}"
        )
    sizes = bytes_per_token(manifest).items()
    if low := [f"{name} {each:.2f}" for name, each in sizes if each < LEAST_BYTES_PER_TOKEN]:
        yield (
            f"under {LEAST_BYTES_PER_TOKEN:g} bytes of text per token ({few(low)}): the "
            "vocabulary has few words of this text and encodes the rest in small pieces. Train one "
            "on such text with train-tokenizer to need fewer tokens"
        )


def unknown_tokens(folder: Path, manifest: CorpusManifest) -> Iterator[str]:
    """Yield a line with the number of `<unk>` in a corpus, if there are any."""
    files = [folder / files.stem for shards in manifest.shards.values() for files in shards]
    counts = count_ids(files, manifest.vocab_size)
    if unknown := int(counts[manifest.special_ids["unk"]]):
        yield (
            f"{unknown:,} of {counts.sum():,} tokens ({unknown / counts.sum():.2%}) are <unk>: "
            "their characters are not in the vocabulary and are lost"
        )


def broken_warning(manifest: CorpusManifest) -> str | None:
    """Return a message if more than `ALLOWED_BROKEN` of the records or bytes are broken."""
    broken = {
        name: rejects
        for name, rejects in manifest.rejects.items()
        if name.partition(":")[0] not in _NOT_BROKEN
    }
    total = sum((rejects.total for rejects in broken.values()), Count())
    not_encoded = sum(r.count for name, r in manifest.rejects.items() if name not in _ENCODED)
    records = sum(manifest.length_histogram.counts) + not_encoded
    text_bytes = sum(rows(manifest).values(), Count()).text_bytes
    share_of_bytes = total.text_bytes / max(text_bytes, 1)
    if max(total.documents / records, share_of_bytes) <= ALLOWED_BROKEN:
        return None
    return (
        f"{total.documents:,} of {records:,} records ({total.documents / records:.1%}) and "
        f"{share_of_bytes:.1%} of the bytes are broken: "
        f"{Tally({}, broken, 0, 0).rejects_summary()}. The corpus is complete without them; "
        "--allow-broken accepts that"
    )
