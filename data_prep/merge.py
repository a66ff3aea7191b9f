"""The manifests of all shards -> the manifest of the corpus."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.filters import Tally
from data_prep.indexed import dtype_for
from data_prep.manifest import FORMAT_VERSION, SPLITS, CorpusManifest, Count, ShardManifest
from data_prep.shard import MAX_SUBSETS
from data_prep.statistics import count_ids, length_histogram, unigram_perplexity
from data_prep.tokenizer import Tokenizer


def merge(shards: Sequence[ShardManifest], tokenizer: Tokenizer, output: Path) -> CorpusManifest:
    """Add up the shards of a corpus.

    Args:
        shards: In the order of the inputs; at least one.
        tokenizer: What they were made with.
        output: The corpus folder, which holds their counts of ids.

    Raises:
        ValueError: No document was kept, or there are too many subsets to number.
    """
    tally = Tally()
    for shard in shards:
        tally.add(Tally(shard.kept, shard.rejects, shard.cut))
    if not tally.kept:
        reasons = tally.rejects_in_words() or "the inputs hold no line"
        raise ValueError(f"{output}: no document kept: {reasons}")
    totals = {split: Count() for split in SPLITS}
    for split, subsets in tally.kept.items():
        for count in subsets.values():
            totals[split].add(count)
    files = {split: [s.files[split] for s in shards if split in s.files] for split in SPLITS}
    counts = {
        split: count_ids([output / f.stem for f in files[split]], tokenizer.vocab_size)
        for split in SPLITS
    }
    return CorpusManifest(
        format_version=FORMAT_VERSION,
        tokenizer_digest=shards[0].tokenizer_digest,
        vocab_size=tokenizer.vocab_size,
        special_ids={
            name: getattr(tokenizer, f"{name}_id") for name in ("bos", "pad", "eos", "unk", "mask")
        },
        dtype=str(dtype_for(tokenizer.vocab_size)),
        encoders=sorted({shard.encoder for shard in shards}),
        settings=shards[0].settings,
        damages=[shard.damage for shard in shards if shard.damage],
        inputs=[shard.input for shard in shards],
        shards=files,
        subsets=_subset_table(tally),
        totals=totals,
        kept=tally.kept,
        cut=tally.cut,
        rejects=tally.rejects,
        length_histogram=length_histogram(np.sum([s.length_counts for s in shards], axis=0)),
        unigram_perplexity=unigram_perplexity(counts["train"], counts["valid"]),
    )


def _subset_table(tally: Tally) -> list[str]:
    names = sorted({subset for subsets in tally.kept.values() for subset in subsets})
    if len(names) > MAX_SUBSETS:
        raise ValueError(
            f"{len(names)} different values of meta.pile_set_name; accepted: {MAX_SUBSETS}"
        )
    return names
