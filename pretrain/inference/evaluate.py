"""Validation of a model folder, at the training length and beyond it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from data_prep.corpus import Corpus
from data_prep.tokenizer import Tokenizer
from pretrain.data.batches import (
    refuse_without_targets,
    spread,
    validation_batches,
    validation_note,
)
from pretrain.data.sources import Source
from pretrain.data.windows import number_of_windows, window_batches
from pretrain.loop import MicroBatch
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.base import (
    DocumentObjective,
    ObjectiveSettings,
    PretrainingObjective,
    Vocabulary,
)


@dataclasses.dataclass(frozen=True)
class Score:
    """Loss over some targets."""

    loss: float
    """Nats per target; of several terms, their weighted sum."""
    perplexity: float
    """exp(loss)."""
    targets: int
    accuracy: float
    """Share of the targets that the model finds most likely."""

    @classmethod
    def of(cls, sums: npt.NDArray[np.float64], weights: Sequence[float]) -> Score:
        """The score of summed losses.

        Args:
            sums: [terms, 3]: nats, correct predictions, targets; at least one target.
            weights: of the terms.
        """
        loss = sum(
            weight * nats / targets
            for weight, (nats, _, targets) in zip(weights, sums.tolist(), strict=True)
            if targets
        )
        _, correct, targets = sums.sum(axis=0).tolist()
        # exp of more is infinite.
        return cls(loss, math.exp(min(loss, 700.0)), int(targets), correct / targets)


@dataclasses.dataclass(frozen=True)
class Scores:
    """One pass over the validation split."""

    total: Score
    subsets: dict[str, Score]
    """By Pile subset, those with targets alone."""
    terms: dict[str, Score]
    """By term of the objective, where it has several, those with targets alone."""

    @classmethod
    def of(cls, sums: npt.ArrayLike, terms: Mapping[str, float], names: Sequence[str]) -> Scores:
        """The scores of `PretrainingObjective.evaluate`'s sums over all batches.

        Args:
            sums: [subsets, terms, 3], or flat.
            terms: of the objective.
            names: of the subsets.
        """
        parts = np.asarray(sums, dtype=np.float64).reshape(len(names), len(terms), 3)
        weights, whole = list(terms.values()), parts.sum(axis=0)
        subsets = zip(names, parts, strict=True)
        by_term = zip(terms, whole, strict=True) if len(terms) > 1 else ()
        return cls(
            Score.of(whole, weights),
            {name: Score.of(part, weights) for name, part in subsets if part[:, 2].any()},
            {name: Score.of(part[None], [1.0]) for name, part in by_term if part[2]},
        )


@dataclasses.dataclass(frozen=True)
class Evaluation(Scores):
    """Scores on blocks, or on windows of documents, of one length."""

    length: int
    """Most tokens of a block or window, with special tokens."""
    blocks: int
    """Number of blocks; of `evaluate_lengths`: of windows."""
    coverage: float
    """Share of the split's tokens that the model read."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A length that could not be measured."""

    length: int
    refused: str
    """Why."""


def validation_objective(
    model: LanguageModel, tokenizer_digest: str, corpus: Corpus, settings: ObjectiveSettings
) -> PretrainingObjective:
    """What a model is measured by on a corpus: the objective's validation form.

    Args:
        model: the model.
        tokenizer_digest: of the model's vocabulary.
        corpus: the validation split.
        settings: of the objective.

    Raises:
        ValueError: the corpus has another vocabulary than the model.
    """
    manifest = corpus.manifest
    if manifest.tokenizer_digest != tokenizer_digest:
        raise ValueError(
            f"{corpus.folder}: was made with another vocabulary "
            f"({manifest.tokenizer_digest[:12]}, {manifest.vocab_size} ids) than the model's "
            f"({tokenizer_digest[:12]})"
        )
    vocabulary = Vocabulary(manifest.vocab_size, model.config.vocab_size, corpus.folder)
    return settings.for_validation().build(vocabulary)


def evaluate_blocks(
    model: LanguageModel,
    objective: PretrainingObjective,
    source: Source,
    limit: int = 0,
    micro_batch_size: int = 8,
) -> Evaluation:
    """Scores as a run measures them: on the same blocks, with the same targets.

    They equal those that a run of one rank logged bit by bit, if the packing, the length, the
    number of blocks, the micro-batch size, the precision and the machine are the same.

    Args:
        model: any device, evaluation mode.
        objective: for validation.
        source: blocks of the validation split.
        limit: most blocks; 0: all.
        micro_batch_size: blocks per forward pass.

    Raises:
        ValueError: nothing to predict, or a length that the model cannot read.
    """
    refuse_without_targets(source, objective, limit)
    chosen, corpus = spread(len(source), limit), source.corpus
    batches = validation_batches(source, objective, limit, micro_batch_size, 0, 1)
    ids = sum(source.size(index) for index in chosen)
    scores = _scores(model, objective, batches, corpus, ids, source.sequence_length)
    # Text never encodes to <s>.
    tokens = sum(int((source[index].ids != Tokenizer.bos_id).sum()) for index in chosen)
    coverage = tokens / int(corpus.lengths.sum())
    return Evaluation(
        **vars(scores), length=source.sequence_length, blocks=len(chosen), coverage=coverage
    )


def evaluate_lengths(
    model: LanguageModel,
    objective: PretrainingObjective,
    corpus: Corpus,
    lengths: Iterable[int],
    limit: int = 0,
    tokens: int = 8192,
) -> Iterator[Evaluation | Refusal]:
    """Scores of the same targets at every length, each as soon as it is measured.

    Documents are cut into windows (`pretrain.data.windows`).

    Args:
        model: any device, evaluation mode.
        objective: for validation.
        corpus: the validation split.
        lengths: most tokens of a window, `<s>` included; each at least 2.
        limit: most documents; 0: all.
        tokens: most tokens per forward pass; a pass has at least one window.

    Raises:
        ValueError: the objective cannot draw the targets of a document, or there is nothing to
            predict.
    """
    if not isinstance(objective, DocumentObjective):
        raise ValueError(
            f"objective {objective.settings.name!r} cannot draw targets for whole documents, so "
            "every length would measure others; accepted: to evaluate without --lengths"
        )
    documents = spread(len(corpus), limit)
    read = int(corpus.lengths[documents].sum())
    longest, longest_input = int(corpus.lengths[documents].max()) + 1, model.config.longest_input
    for length in lengths:
        if longest_input and length > longest_input:
            yield Refusal(length, f"the model's learned positions end at {longest_input}")
            continue
        blocks = number_of_windows(corpus, documents, length)
        row = min(length, longest)
        batches = window_batches(corpus, objective, documents, row, max(1, tokens // row))
        try:
            scores = _scores(model, objective, batches, corpus, read + blocks, length)
        except torch.OutOfMemoryError as error:
            yield Refusal(length, str(error).partition("\n")[0])
            continue
        coverage = read / int(corpus.lengths.sum())
        yield Evaluation(**vars(scores), length=length, blocks=blocks, coverage=coverage)


def _scores(
    model: LanguageModel,
    objective: PretrainingObjective,
    batches: Iterable[MicroBatch],
    corpus: Corpus,
    tokens: int,
    length: int,
) -> Scores:
    """The scores over batches of `tokens` tokens in all, with a progress bar on a terminal."""
    names = corpus.manifest.subsets
    with tqdm(
        desc=f"length {length}",
        total=tokens,
        unit=" tokens",
        unit_scale=True,
        leave=False,
        disable=None,  # where stderr is no terminal
    ) as bar:

        def shown() -> Iterator[MicroBatch]:
            for batch in batches:
                yield batch
                bar.update(batch.tokens)

        sums = summed(model, objective, shown(), len(names))
    if not sums[..., 2].any():
        raise ValueError(
            f"{corpus.folder}: split {corpus.split!r} has nothing to predict: none of the {tokens} "
            f"tokens read is a target ({validation_note(objective.settings)}); accepted: more "
            "validation documents"
        )
    return Scores.of(sums.tolist(), objective.terms, names)


def summed(
    model: LanguageModel,
    objective: PretrainingObjective,
    batches: Iterable[MicroBatch],
    subsets: int,
) -> torch.Tensor:
    """The objective's sums over at least one batch: [subsets, terms, 3] in fp64."""
    device = next(model.parameters()).device
    nothing = torch.zeros((subsets, len(objective.terms), 3), dtype=torch.float64, device=device)
    with torch.no_grad():
        parts = [
            objective.evaluate(model, batch.to(device), subsets) if any(batch.targets) else nothing
            for batch in batches
        ]
    # As in Engine.evaluate, so that the sum has the same bits.
    return torch.stack(parts).sum(dim=0)
