"""A corpus in words, for the terminal."""

from collections.abc import Iterator
from pathlib import Path

from data_prep.manifest import ROLES, SPLITS, CorpusManifest, LengthHistogram, load_manifest
from data_prep.report import FILE_NAME as REPORT_FILE

_BAR_WIDTH = 40
_SAMPLE_CHARACTERS = 400
_ROLES_IN_WORDS = dict(zip(ROLES, ("", " for training", " for validation"), strict=True))


def describe(folder: Path, samples: int) -> Iterator[str]:
    """Lines on counts, subsets, rejects and lengths, and `samples` decoded documents of each split.

    Raises:
        ValueError: No finished corpus at `folder`.
    """
    manifest = load_manifest(folder)
    yield from _facts(folder, manifest)
    yield from _counts(manifest)
    yield from _rejects(manifest)
    yield from _histogram(manifest.length_histogram)
    if samples:
        yield from _samples(folder, manifest, samples)


def _facts(folder: Path, manifest: CorpusManifest) -> Iterator[str]:
    settings = manifest.settings
    by_role = {
        role: [file for file in manifest.inputs if file.role == role] for role in _ROLES_IN_WORDS
    }
    inputs = ", ".join(
        f"{len(files)}{_ROLES_IN_WORDS[role]} ({sum(f.size_bytes for f in files) / 1e6:,.1f} MB)"
        for role, files in by_role.items()
        if files
    )
    longer = {"drop": "dropped", "truncate": "truncated", "split": "split into windows"}
    lengths = f"{settings.min_tokens} to {settings.max_tokens} tokens, <s> and </s> included"
    splits = (
        f"{settings.valid_fraction:g} of the documents, by a hash of their text"
        if by_role["both"]
        else "inputs of its own"
    )
    yield f"{folder} ({REPORT_FILE} shows it)"
    yield ""
    facts = {
        "inputs": inputs,
        "vocabulary": f"{manifest.vocab_size:,} ids ({manifest.tokenizer_digest[:12]}), stored as "
        f"{manifest.dtype}; encoded by {', '.join(manifest.encoders)}",
        "kept": f"{lengths}; longer ones {longer[settings.long]} ({manifest.cut:,} cut)",
        "duplicates": {"keep": "kept", "drop": "all but the first of equal texts dropped"}[
            settings.duplicates
        ],
        "a sequence is": f"a {settings.unit}",
        "validation": splits,
    }
    if manifest.unigram_perplexity is not None:
        facts["baseline"] = (
            f"unigram perplexity of the validation split {manifest.unigram_perplexity:,.1f}"
        )
    yield from (f"{name:14}{fact}" for name, fact in facts.items())
    yield from (f"{'damaged':14}{damage}" for damage in manifest.damages)


def _counts(manifest: CorpusManifest) -> Iterator[str]:
    width = max(map(len, ("subset", *manifest.subsets))) + 2
    yield ""
    yield (
        f"{'split':8}{'subset':{width}}{'documents':>13}{'tokens':>17}{'share':>8}"
        f"{'MB of text':>13}{'tokens each':>13}"
    )
    for split in SPLITS:
        total = manifest.totals[split]
        rows = sorted(manifest.kept.get(split, {}).items(), key=lambda item: -item[1].tokens)
        for subset, count in [("all", total), *rows]:
            yield (
                f"{split:8}{subset:{width}}{count.documents:13,}{count.tokens:17,}"
                f"{count.tokens / max(total.tokens, 1):8.1%}{count.text_bytes / 1e6:13,.2f}"
                f"{count.tokens / max(count.documents, 1):13,.1f}"
            )
        sequences = sum(files.sequences for files in manifest.shards[split])
        if sequences != total.documents:
            yield f"{split:8}{sequences:,} sentences"


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
    used = [top for top, count in octaves.items() if count]
    most = max(octaves.values(), default=1)
    for top, count in octaves.items():
        if used and used[0] <= top <= used[-1]:
            bar = "#" * -(-count * _BAR_WIDTH // most)
            yield f"{f'to {top:,}':>14} {bar:{_BAR_WIDTH}} {count:,}"


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
