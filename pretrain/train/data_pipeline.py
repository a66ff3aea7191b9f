"""What one segment of a run reads: its objective, and batches for training and validation."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.config.run import Segment
from pretrain.data.batches import PretrainingBatches, validation_batches
from pretrain.data.sources import open_source
from pretrain.loop.protocols import MicroBatch, Model
from pretrain.objectives.base import Vocabulary
from pretrain.train.setup import Setup

if TYPE_CHECKING:
    from torch import Tensor


class DataPipeline:
    """The objective and the batches of one segment, on one rank."""

    def __init__(self, setup: Setup, segment: Segment) -> None:
        """Build objective and batches."""
        self.setup, self.segment = setup, segment
        architecture, blocks, segments = setup.architecture, setup.blocks, setup.segments
        config = segment.config
        data, training = config.data, config.training
        manifests = setup.course.manifests
        self._corpora = {n: manifests[str(Path(c.path))] for n, c in data.named_corpora.items()}
        (manifest, *_), corpus = self._corpora.values(), blocks.sources[0].corpus.folder
        vocabulary = Vocabulary(manifest.vocab_size, architecture.vocab_size, corpus)
        self.objective = config.objective.build(vocabulary)
        validated = config.objective.for_validation()
        self._validated = validated.build(vocabulary)
        digests = [manifest.digest() for manifest in self._corpora.values()]
        sized = (data.sequence_length, data.packing, training.evaluation_blocks)
        self.validation_id = hashlib.blake2b(
            repr((digests, sized, validated)).encode()
        ).hexdigest()[:12]
        """Names what validation measures: losses with an equal id can be compared."""
        self.batches = PretrainingBatches(
            dataclasses.replace(blocks, sequence_length=data.sequence_length),
            self.objective,
            setup.start.order,
            config.batch,
            config.fault,
            training.seed,
            segments.sizes,
        )

    @functools.cached_property
    def validation(self) -> list[MicroBatch]:
        """This rank's batches of all validation splits, which the first evaluation opens."""
        config, group = self.segment.config, self.setup.group
        subsets = [len(manifest.subsets) for manifest in self._corpora.values()]
        firsts = itertools.accumulate(subsets[:-1], initial=0)
        sources = [open_source(each, "valid") for each in config.segments.sources]
        return [
            batch
            for source, first in zip(sources, firsts, strict=True)
            for batch in validation_batches(
                source,
                self._validated,
                config.training.evaluation_blocks,
                config.batch.micro_batch_size,
                group.rank,
                group.world_size,
                first,
            )
        ]

    @property
    def _names(self) -> list[str]:
        """Of all subsets of the validation splits."""
        return [
            f"{corpus}/{subset}" if corpus else subset
            for corpus, manifest in self._corpora.items()
            for subset in manifest.subsets
        ]

    def sums(self, model: Model, batch: dict[str, "Tensor"]) -> "Tensor":
        """Sums over a batch of `validation`; those of all batches give `scores`."""
        return self._validated.evaluate(model, batch, len(self._names))

    def scores(self, sums: Sequence[float]) -> dict[str, Any]:
        """The scores of the validation splits as a record; of several corpora, of each as well."""
        from pretrain.inference.evaluate import Scores

        terms = self._validated.terms
        record = dataclasses.asdict(Scores.of(sums, terms, self._names))
        if self.segment.config.data.corpora:  # several
            of_subsets = iter(np.reshape(sums, (len(self._names), -1)))
            sizes = (len(manifest.subsets) for manifest in self._corpora.values())
            wholes = [sum(itertools.islice(of_subsets, size)) for size in sizes]
            by_corpus = Scores.of(wholes, terms, [*self._corpora])
            record["corpora"] = dataclasses.asdict(by_corpus)["subsets"]
        return record
