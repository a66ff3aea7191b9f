"""What the command `evaluate` measures and writes, for each model that it names."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import os
import sys
from collections.abc import Iterator

import torch

from data_prep.common import pictures
from data_prep.common.files import AtomicFile
from data_prep.corpus import Corpus
from pretrain.data.batches import (
    refuse_other_packing,
    refuse_without_targets,
    spread,
    validation_note,
)
from pretrain.data.sources import SOURCES, Source
from pretrain.engine.distributed import choose_device
from pretrain.models import evaluation_report as report
from pretrain.models import model_folder
from pretrain.models.evaluate import (
    evaluate_blocks,
    evaluate_lengths,
    pair_objectives,
    validation_objective,
)
from pretrain.models.layers import LayerChanges, layer_changes
from pretrain.models.model_folder import LoadedModel
from pretrain.models.scores import Evaluation, Measured, Refusal
from pretrain.objectives.base import PretrainingObjective

_LAYER_BLOCKS = 32
"""Blocks that --layers reads where nothing else is asked for."""


@dataclasses.dataclass(frozen=True)
class _Reading:
    """One of the models, and what it is measured on."""

    name: str
    loaded: LoadedModel
    objective: PretrainingObjective
    corpus: Corpus
    options: argparse.Namespace

    @property
    def packing(self) -> str:
        """How documents fill the blocks, or with --lengths the windows."""
        return str(self.options.packing or self.loaded.packing)

    def source(self) -> Source:
        """The blocks to read.

        Raises:
            ValueError: the objective cannot read such blocks, or the corpus has none.
        """
        packing = SOURCES[self.packing]
        refuse_other_packing(packing, self.objective.settings, self.loaded.model.config.latents)
        return packing(self.corpus, self.loaded.sequence_length)

    def results(self) -> Iterator[Evaluation | Refusal]:
        """Scores by length, or of the blocks; what is refused is refused at once."""
        if self.options.lengths:
            return self._of_windows()
        source, loaded = self.source(), self.loaded
        blocks = self.options.blocks
        limit = loaded.evaluation_blocks if blocks is None else blocks
        for each in [self.objective, *pair_objectives(self.objective).values()]:
            refuse_without_targets(source, each, limit)

        def measure() -> Iterator[Evaluation]:
            size = loaded.micro_batch_size
            yield evaluate_blocks(loaded.model, self.objective, source, limit, size)

        return measure()

    def _of_windows(self) -> Iterator[Evaluation | Refusal]:
        loaded, options = self.loaded, self.options
        return evaluate_lengths(
            loaded.model,
            self.objective,
            self.corpus,
            options.lengths,
            options.blocks or 0,
            loaded.micro_batch_size * loaded.sequence_length,
            stride=options.stride,
            one_text=self.packing == "contiguous",
            interpolate_from=loaded.sequence_length if options.interpolate else None,
        )

    def note(self) -> str:
        """Say what is predicted, and with --lengths in which text."""
        note = f"{validation_note(self.loaded.objective)}\n"
        if not self.options.lengths:
            return note
        lengths = self.corpus.lengths[spread(len(self.corpus), self.options.blocks or 0)]
        longest = int(lengths.max()) + 1
        kind = f"the longest of {longest:,} tokens with <s>"
        if self.packing == "contiguous":
            kind = f"read as one text of {int(lengths.sum()):,} tokens"
        elif max(self.options.lengths) > longest:
            kind += ", so longer windows change nothing"
        documents = f"{len(lengths):,} of {len(self.corpus):,} documents"
        return f"{note}the same targets at every length, of {documents}, {kind}\n"


def run(options: argparse.Namespace) -> None:
    """Measure models as the options of `evaluate` say.

    Raises:
        ValueError: the options mean nothing, a model cannot be measured on the corpus, or some
            lengths could not be measured.
    """
    _check_options(options)
    device = choose_device(options.device)
    corpus = Corpus(options.data, "valid")
    names = [folder.resolve().name for folder in options.model]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in options.model]
    readings = []
    for name, folder in zip(names, options.model, strict=True):
        loaded = model_folder.load_model(folder)
        digest, settings = loaded.tokenizer.digest(), loaded.objective
        objective = validation_objective(loaded.model, digest, corpus, settings)
        readings.append(_Reading(name, loaded, objective, corpus, options))
    measure = _measure_layers if options.layers else _measure_scores
    measure(options, readings, device)


def _measure_scores(
    options: argparse.Namespace, readings: list[_Reading], device: torch.device
) -> None:
    all_results = [reading.results() for reading in readings]
    _refuse_unwritable(options)
    measured: list[Measured] = []
    for reading, results in zip(readings, all_results, strict=True):
        loaded = reading.loaded
        recorded = loaded.recipe_section("objective").get("pair_task", "-")
        task = recorded if loaded.model.config.pair_head else None
        found = Measured(reading.name, loaded.sequence_length, pair_task=task)
        measured.append(found)
        if len(readings) > 1:
            title = f"{reading.name}, trained on blocks of {found.trained_length:,} tokens"
            sys.stdout.write(f"\n{title}\n")
        sys.stdout.write(reading.note())
        loaded.model.to(device)
        counted = "windows" if options.lengths else "blocks"
        sys.stdout.write(report.heading(counted, options.interpolate))
        for result in results:
            found.results.append(result)
            sys.stdout.write(report.table_rows(result, options.interpolate))
            sys.stdout.flush()
            report.write_scores(measured, options.json, options.csv)
        report.write_scores(measured, plot=options.plot)
        sys.stdout.write(report.position_table(found.evaluations))
        loaded.model.to("cpu")
    if table := report.pair_table(measured):
        sys.stdout.write(f"\n{table}")
    if refused := report.refusals(measured):
        total = sum(len(each.results) for each in measured)
        number = f"{len(refused)} of {total} lengths were not measured"
        raise ValueError(f"{number}: {'; '.join(refused)}")


def _measure_layers(
    options: argparse.Namespace, readings: list[_Reading], device: torch.device
) -> None:
    for reading in readings:
        if reading.loaded.model.config.latents:
            raise ValueError(
                f"--layers: {reading.name} has latents, and its layers work on different vectors; "
                "leave it out"
            )
    sources = [reading.source() for reading in readings]
    _refuse_unwritable(options)
    limit = _LAYER_BLOCKS if options.blocks is None else options.blocks
    found: dict[str, LayerChanges] = {}
    for reading, source in zip(readings, sources, strict=True):
        model, size = reading.loaded.model.to(device), reading.loaded.micro_batch_size
        found[reading.name] = layer_changes(model, reading.objective, source, limit, size)
        model.to("cpu")
    sys.stdout.write(report.layer_table(found))
    report.write_layers(found, options.json, options.csv, options.plot)


def _refuse_unwritable(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written, while that costs no measurement."""
    for path in filter(None, (options.json, options.csv, options.plot)):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        AtomicFile(path).discard()


def _check_options(options: argparse.Namespace) -> None:
    if (options.blocks or 0) < 0:
        raise ValueError(f"--blocks {options.blocks}: accepted: 0 (all) or more")
    if options.layers and options.lengths:
        raise ValueError("--layers and --lengths cannot be combined")
    for name, given in (
        ("stride", options.stride is not None),
        ("interpolate", options.interpolate),
    ):
        if given and not options.lengths:
            raise ValueError(f"--{name} needs --lengths")
    if options.plot and not (options.lengths or options.layers):
        raise ValueError("--plot needs --lengths or --layers")
    if options.plot:
        pictures.check_name("--plot", options.plot)
