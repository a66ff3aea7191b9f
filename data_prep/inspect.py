"""A corpus in words, for the terminal."""

from collections.abc import Iterator
from pathlib import Path

from data_prep.manifest import SPLITS, CorpusManifest, LengthHistogram, load_manifest

_BAR_WIDTH = 40
_SAMPLE_CHARACTERS = 400


def describe(folder: Path, samples: int) -> Iterator[str]:
    """Lines on counts, subsets, rejects and lengths, and `samples` decoded documents of each split.

    Raises:
        ValueError: No finished corpus at `folder`.
    """
    manifest = load_manifest(folder)
    yield from _counts(folder, manifest)
    yield from _rejects(manifest)
    yield from _histogram(manifest.length_histogram)
    if samples:
        yield from _samples(folder, manifest, samples)


def _counts(folder: Path, manifest: CorpusManifest) -> Iterator[str]:
    settings = manifest.settings
    yield (
        f"{folder}: {len(manifest.inputs)} inputs, vocabulary of {manifest.vocab_size} "
        f"({manifest.tokenizer_digest[:12]}), ids as {manifest.dtype}"
    )
    yield (
        f"kept: {settings.min_tokens} to {settings.max_tokens} tokens (longer: {settings.long}, "
        f"{manifest.cut} cut or split), validation share {settings.valid_fraction}"
    )
    if manifest.unigram_perplexity is not None:
        yield f"unigram perplexity of the validation split: {manifest.unigram_perplexity:.1f}"
    yield ""
    yield f"{'split':8}{'subset':24}{'documents':>12}{'tokens':>14}{'MB of text':>12}"
    for split in SPLITS:
        rows = sorted(manifest.kept.get(split, {}).items(), key=lambda item: -item[1].tokens)
        for subset, count in [("all", manifest.totals[split]), *rows]:
            yield (
                f"{split:8}{subset:24}{count.documents:12,}{count.tokens:14,}"
                f"{count.text_bytes / 1e6:12.2f}"
            )


def _rejects(manifest: CorpusManifest) -> Iterator[str]:
    yield ""
    if not manifest.rejects:
        yield "rejected: nothing"
    for reason, rejects in sorted(manifest.rejects.items(), key=lambda item: -item[1].count):
        subsets = ", ".join(f"{subset} {n:,}" for subset, n in sorted(rejects.by_subset.items()))
        yield f"rejected: {reason} {rejects.count:,} ({subsets})"
        yield from (f"    {place}" for place in rejects.places)


def _histogram(histogram: LengthHistogram) -> Iterator[str]:
    yield ""
    yield (
        f"tokens a document before filtering ({histogram.share_over_1024:.1%} over 1024, "
        f"{histogram.share_over_2048:.1%} over 2048)"
    )
    octaves: dict[int, int] = {}
    for edge, count in zip(histogram.upper_edges, histogram.counts, strict=True):
        top = 1 << (edge - 1).bit_length()  # an edge itself: an octave is whole buckets
        octaves[top] = octaves.get(top, 0) + count
    most = max(octaves.values(), default=1)
    for top, count in octaves.items():
        if count:
            bar = "#" * -(-count * _BAR_WIDTH // most)
            yield f"{f'to {top}':>12} {bar:{_BAR_WIDTH}} {count:,}"


def _samples(folder: Path, manifest: CorpusManifest, samples: int) -> Iterator[str]:
    from data_prep.corpus import Corpus
    from data_prep.tokenizer import load

    tokenizer = load(folder)
    for split in SPLITS:
        if not manifest.shards[split]:
            continue
        corpus = Corpus(folder, split)
        count = min(samples, len(corpus))
        for index in (number * len(corpus) // count for number in range(count)):
            ids = corpus.document(index)
            subset = manifest.subsets[int(corpus.subsets[index])]
            text = tokenizer.decode(ids.tolist())
            cut = f"{text[:_SAMPLE_CHARACTERS]} [...]" if len(text) > _SAMPLE_CHARACTERS else text
            yield ""
            yield f"--- {split} document {index}, {subset}, {len(ids)} tokens"
            yield cut
