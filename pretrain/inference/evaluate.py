"""Validation of a model, at the training length and at other lengths."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from data_prep.common.records import check_value
from data_prep.corpus import Corpus
from pretrain.data.batches import check_targets, evenly_spaced, validation_batches, validation_note
from pretrain.data.blocks import Blocks
from pretrain.data.windows import Windows
from pretrain.loop.protocols import MicroBatch
from pretrain.model.config import ModelConfig
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.base import (
    PAIR_SPECIAL_TOKENS,
    ObjectiveSettings,
    PretrainingObjective,
    Vocabulary,
)
from pretrain.objectives.sentence_pairs import SentencePairsLM
from pretrain.objectives.tokens import DocumentObjective


@dataclasses.dataclass(frozen=True)
class Score:
    """Loss over some targets."""

    loss: float
    """Nats per target; of several terms, their weighted sum."""
    perplexity: float
    """exp(loss); of several terms, that of the first one, which is of tokens. NaN without any."""
    targets: int
    accuracy: float
    """Share of the targets that the model ranks first."""

    @classmethod
    def of(cls, sums: npt.NDArray[np.float64], weights: Sequence[float]) -> "Score":
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
        (nats, _, tokens), *_ = sums.tolist()
        _, correct, targets = sums.sum(axis=0).tolist()
        # exp of more is infinite.
        perplexity = math.exp(min(nats / tokens, 700.0)) if tokens else math.nan
        return cls(loss, perplexity, int(targets), correct / targets)


@dataclasses.dataclass(frozen=True)
class Scores:
    """One pass over the validation split."""

    total: Score
    subsets: dict[str, Score]
    """By Pile subset, for subsets with targets."""
    terms: dict[str, Score]
    """By term of an objective with several, for terms with targets."""

    @classmethod
    def of(cls, sums: npt.ArrayLike, terms: Mapping[str, float], names: Sequence[str]) -> "Scores":
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
class LengthScores(Scores):
    """Scores on blocks, or on windows of texts, of one length."""

    length: int
    """Most tokens of a block or window, with special tokens."""
    blocks: int
    """Number of blocks; of `evaluate_lengths`: of windows."""
    coverage: float
    """Share of the split's tokens that the blocks or windows hold. Span corruption reads less."""
    stride: int | None = None
    """Stride of overlapping windows; None: they do not overlap."""
    pairs: dict[str, Score] = dataclasses.field(default_factory=dict)
    """Of `evaluate_blocks`, for a model with a pair head: of "masked", "nsp" and "sop"."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A length that could not be measured."""

    length: int
    refused: str
    """Why."""


def validation_objective(
    model: LanguageModel, tokenizer_digest: str, corpus: Corpus, settings: ObjectiveSettings
) -> PretrainingObjective:
    """Return the objective that measures a model on a corpus: its validation form.

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
    source: Blocks,
    limit: int = 0,
    micro_batch_size: int = 8,
) -> LengthScores:
    """Measure scores as a run does, and those of a pair head on both tasks.

    Blocks and targets are those of a run. The scores are bitwise equal to those that a run of one
    rank logged, if the packing, the length, the number of blocks, the micro-batch size, the
    precision and the machine are the same.

    Both tasks of pairs (Lan et al. 2020, table 5) read one pair of each block. The score of the
    masked tokens is that of pairs in their order, so that models of different tasks predict the
    same tokens of the same text.

    Args:
        model: any device, evaluation mode.
        objective: for validation.
        source: blocks of the validation split, which `check_blocks` accepts.
        limit: most blocks; 0: all.
        micro_batch_size: blocks per forward pass.

    Raises:
        ValueError: a length that the model cannot read.
    """

    def measure(each: PretrainingObjective) -> Scores:
        batches = validation_batches(source, each, limit, micro_batch_size, 0, 1)
        shown = _with_bar(batches, source.sequence_length, sum(map(source.size, chosen)))
        return Scores.of(summed(model, each, shown, len(names)).tolist(), each.terms, names)

    chosen, corpus = evenly_spaced(len(source), limit), source.corpus
    names = corpus.manifest.subsets
    scores, pairs = measure(objective), {}
    for name, each in pair_objectives(objective).items():
        found = scores if each.settings == objective.settings else measure(each)
        pairs[name] = found.terms.get(name, found.total)
    # The objective truncates longer pairs.
    most = source.sequence_length - PAIR_SPECIAL_TOKENS if source.pairs else source.sequence_length
    tokens = sum(min(source.tokens(index), most) for index in chosen)
    return LengthScores(
        **vars(scores),
        length=source.sequence_length,
        blocks=len(chosen),
        coverage=tokens / corpus.tokens,
        pairs=pairs,
    )


def pair_objectives(objective: PretrainingObjective) -> dict[str, SentencePairsLM]:
    """Return the objective of each pair score by the score's name; empty without pairs."""
    if not isinstance(objective, SentencePairsLM):
        return {}
    tasks: dict[str, Literal["none", "nsp", "sop"]]
    tasks = {"masked": "none", "nsp": "nsp", "sop": "sop"}
    return {
        name: dataclasses.replace(
            objective, settings=dataclasses.replace(objective.settings, pair_task=task)
        )
        for name, task in tasks.items()
    }


def check_blocks(objective: PretrainingObjective, source: Blocks, limit: int) -> None:
    """Refuse blocks that `evaluate_blocks`, with the same arguments, could not measure.

    Raises:
        ValueError: they have no targets, or none of one of the scores of pairs.
    """
    for each in [objective, *pair_objectives(objective).values()]:
        check_targets(source, each, limit)


def check_lengths(
    objective: PretrainingObjective,
    model: ModelConfig,
    corpus: Corpus,
    documents: Sequence[int],
    lengths: Sequence[int],
    one_text: bool,
) -> None:
    """Refuse lengths that `evaluate_lengths`, with the same arguments, could not measure.

    Raises:
        ValueError: the objective cannot draw the targets of a document, a model with latents would
            read several documents in a row, or a window is longer than the documents together.
    """
    if not isinstance(objective, DocumentObjective):
        raise ValueError(
            f"objective {objective.settings.name!r} cannot draw targets for whole documents, so "
            "each length would score different ones; evaluate without --lengths"
        )
    if model.latents and not one_text:
        raise ValueError(
            "--lengths puts several documents into a row, which the model's latents read as one; "
            "use --packing contiguous, or leave out --lengths"
        )
    read = int(corpus.lengths[documents].sum())
    if max(lengths) > read + 1:
        raise ValueError(
            f"--lengths {max(lengths)}: the text to read has {read} tokens (documents: "
            f"{len(documents)}), fewer than one window; accepted: up to {read + 1}"
        )


def evaluate_lengths(
    model: LanguageModel,
    objective: PretrainingObjective,
    corpus: Corpus,
    lengths: Sequence[int],
    limit: int = 0,
    tokens: int = 8192,
    *,
    stride: int | None = None,
    one_text: bool = False,
) -> Iterator[LengthScores | Refusal]:
    """Yield scores of the same targets at every length.

    Errors are raised at once, before anything is measured. Documents, or the split as one text, are
    cut into windows (`pretrain.data.windows`).

    Args:
        model: any device, evaluation mode.
        objective: for validation.
        corpus: the validation split.
        lengths: most tokens of a window, `<s>` included; each at least 2.
        limit: most documents; 0: all.
        tokens: most tokens per forward pass; a pass has at least one window.
        stride: of the windows; None: they do not overlap.
        one_text: read the documents as one text, so that windows cross their boundaries.

    Raises:
        ValueError: as `check_lengths`, or the stride is below 1 or above a window; while it
            measures: there is nothing to predict.
    """
    documents = evenly_spaced(len(corpus), limit)
    check_lengths(objective, model.config, corpus, documents, lengths, one_text)
    assert isinstance(objective, DocumentObjective)
    accepted = f"1 to {min(lengths)}, the shortest window of --lengths"
    check_value("--stride", stride, stride is None or 1 <= stride <= min(lengths), accepted)
    measured = (Windows(corpus, documents, size, stride or size, one_text) for size in lengths)
    return (_window_scores(model, objective, windows, tokens, stride) for windows in measured)


def _window_scores(
    model: LanguageModel,
    objective: DocumentObjective,
    windows: Windows,
    tokens: int,
    stride: int | None,
) -> LengthScores | Refusal:
    corpus, length, longest = windows.corpus, windows.length, model.config.longest_input
    if longest and length > longest:
        return Refusal(length, f"the model's learned positions end at {longest}")
    names, rows = corpus.manifest.subsets, max(1, tokens // windows.row)
    batches = _with_bar(windows.batches(objective, rows), length, windows.ids)
    # Added one by one: there may be as many passes as tokens.
    parts = (summed(model, objective, [each], len(names)) for each in batches)
    try:
        sums = functools.reduce(torch.add, parts).cpu().numpy()
    except torch.OutOfMemoryError as error:
        return Refusal(length, str(error).partition("\n")[0])
    if not sums[..., 2].any():
        raise ValueError(
            f"{corpus.folder}: split {corpus.split!r} has nothing to predict: none of the "
            f"{windows.ids} tokens read is a target ({validation_note(objective.settings)}); "
            "prepare more validation documents"
        )
    return LengthScores(
        **vars(Scores.of(sums, objective.terms, names)),
        length=length,
        blocks=len(windows),
        coverage=int(corpus.lengths[windows.documents].sum()) / corpus.tokens,
        stride=stride,
    )


def _with_bar(batches: Iterable[MicroBatch], length: int, tokens: int) -> Iterator[MicroBatch]:
    """Batches of `tokens` tokens in all, with a progress bar where stderr is a terminal."""
    shown: dict[str, Any] = {"unit": " tokens", "unit_scale": True, "leave": False, "disable": None}
    with tqdm(desc=f"length {length}", total=tokens, **shown) as bar:
        for batch in batches:
            yield batch
            bar.update(batch.tokens)


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
