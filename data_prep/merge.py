"""Merge the manifests of all shards into the manifest of the corpus."""

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
    """Return the manifest of a corpus.

    Args:
        shards: At least one, in the order of the inputs.
        tokenizer: The vocabulary of the corpus.
        output: The corpus folder with the `.counts` files of the shards.

    Raises:
        ValueError: No document was kept, or there are more subsets than a uint8 can number.
    """
    tally = Tally()
    for shard in shards:
        tally.add(Tally(shard.kept, shard.rejects, shard.cut, shard.cut_tokens))
    if not tally.kept:
        reasons = tally.rejects_summary() or "the inputs have no lines"
        raise ValueError(f"{output}: no document kept: {reasons}")
    subsets = sorted({subset for counts in tally.kept.values() for subset in counts})
    if len(subsets) > MAX_SUBSETS:
        raise ValueError(
            f"{len(subsets)} different values of {shards[0].settings.subset_key}; accepted: "
            f"{MAX_SUBSETS}"
        )
    totals = {split: sum(tally.kept.get(split, {}).values(), Count()) for split in SPLITS}
    files = {split: [s.files[split] for s in shards if split in s.files] for split in SPLITS}
    ids = [count_ids([output / f.stem for f in files[s]], tokenizer.vocab_size) for s in SPLITS]
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
        subsets=subsets,
        totals=totals,
        **vars(tally),
        length_histogram=length_histogram(np.sum([s.length_counts for s in shards], axis=0)),
        unigram_perplexity=unigram_perplexity(*ids),
    )
