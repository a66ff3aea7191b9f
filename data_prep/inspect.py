"""The command `inspect`: describe a corpus in the terminal."""

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from data_prep.common import pictures
from data_prep.common.arguments import at_least
from data_prep.corpus import Corpus
from data_prep.manifest import ROLES, SPLITS, CorpusManifest, LengthHistogram, load_manifest
from data_prep.summary import table_of_kept, table_of_sizes, unknown_tokens
from data_prep.tokenizer import load

_BAR_WIDTH = 40
_SAMPLE_CHARACTERS = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("folder", type=Path, metavar="DIR")
    samples = "decoded documents of each split (default: %(default)s)"
    parser.add_argument("--samples", type=at_least(0), default=2, help=samples)
    plot = pictures.HELP.format("the lengths of documents")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=plot)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    folder: Path = options.folder
    pictures.check_file(options.plot)
    manifest = load_manifest(folder)
    for line in itertools.chain(
        _facts(folder, manifest),
        ["", *table_of_kept(manifest)],
        _rejects(manifest),
        unknown_tokens(folder, manifest),
        _histogram(manifest.length_histogram),
        _samples(folder, manifest, options.samples),
    ):
        print(line)
    if options.plot:
        plot_lengths(manifest, options.plot)


def _facts(folder: Path, manifest: CorpusManifest) -> Iterator[str]:
    """Yield what the corpus was made of and how, with the settings by their names."""
    yield str(folder)
    yield ""
    inputs = []
    for role, suffix in zip(ROLES, ("", " for training", " for validation"), strict=True):
        sizes = [file.size_bytes for file in manifest.inputs if file.role == role]
        if sizes:
            inputs.append(f"{len(sizes)}{suffix} ({sum(sizes) / 1e6:,.1f} MB)")
    perplexity = manifest.unigram_perplexity
    facts: dict[str, object] = {
        "inputs": ", ".join(inputs),
        "vocabulary": f"{manifest.vocab_size:,} ids ({manifest.tokenizer_digest[:12]}), stored as "
        f"{manifest.dtype}; encoded by {', '.join(manifest.encoders)}",
        **vars(manifest.settings),
        "filters": ", ".join(manifest.settings.filters),
        "cut documents": f"{manifest.cut:,}",
        "baseline": perplexity and f"unigram perplexity of the validation split {perplexity:,.1f}",
    }
    for name, fact in facts.items():
        if fact not in (None, ""):
            yield f"{name.replace('_', '-'):22}{fact}"
    yield from (f"{'damaged':22}{damage}" for damage in manifest.damages)


def _rejects(manifest: CorpusManifest) -> Iterator[str]:
    yield ""
    yield from table_of_sizes(manifest)
    for reason, rejects in manifest.by_frequency():
        subsets = ", ".join(f"{subset} {n:,}" for subset, n in sorted(rejects.by_subset.items()))
        yield f"rejected as {reason}: {rejects.count:,} ({subsets}); the first are"
        yield from (f"    {place}" for place in rejects.places)


def _histogram(histogram: LengthHistogram) -> Iterator[str]:
    yield ""
    yield (
        f"tokens per encoded document ({histogram.share_over_1024:.1%} over 1024, "
        f"{histogram.share_over_2048:.1%} over 2048)"
    )
    octaves: Counter[int] = Counter()
    for edge, count in zip(histogram.upper_edges, histogram.counts, strict=True):
        octaves[1 << (edge - 1).bit_length()] += count  # powers of two are bucket edges
    shortest = next(top for top, count in octaves.items() if count)
    for top, count in octaves.items():
        if top >= shortest:  # the last one has the longest
            bar = "#" * -(-count * _BAR_WIDTH // max(octaves.values()))
            yield f"{f'to {top:,}':>14} {bar:{_BAR_WIDTH}} {count:,}"


def _samples(folder: Path, manifest: CorpusManifest, samples: int) -> Iterator[str]:
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
            yield from ("", f"--- {split} document {index}, {subset}, {len(ids)} tokens", cut)


def plot_lengths(manifest: CorpusManifest, path: Path) -> None:
    """Draw how many documents have which length, and the longest one that was kept."""
    histogram, limit = manifest.length_histogram, manifest.settings.max_tokens
    edges = [1, *histogram.upper_edges]
    with pictures.picture(8, 4, path) as figure:
        axes = figure.subplots()
        widths = [right - left for left, right in itertools.pairwise(edges)]
        axes.bar(edges[:-1], histogram.counts, widths, align="edge", edgecolor="white")
        if limit is not None:
            axes.axvline(limit, color=pictures.RED, label=f"--max-tokens {limit}")
            axes.legend()
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("tokens, <s> and </s> included")
        axes.set_ylabel("documents")
        axes.set_title("Lengths of encoded documents")
