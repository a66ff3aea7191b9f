"""Check a recipe before a run starts, and compare a resumed run with its past.

Imports no torch.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.corpus import Corpus
from data_prep.manifest import SPLITS, CorpusManifest, load_manifest
from pretrain.config.load import MAY_CHANGE, RUN_FILE, SCHEDULE, differences, load
from pretrain.config.phases import Stream
from pretrain.config.run import DataConfig, RunConfig
from pretrain.data.batches import (
    refuse_other_packing,
    refuse_without_targets,
    validation_key,
)
from pretrain.data.sources import SOURCES, Source
from pretrain.engine import settings as deepspeed_settings
from pretrain.engine.schedules import learning_rate
from pretrain.model import presets
from pretrain.model.config import AUTOMATIC, ModelConfig, check_backend, choose_backend
from pretrain.objectives.base import Vocabulary
from pretrain.objectives.registry import SETTINGS_BY_NAME
from pretrain.run import folder as run_folder
from pretrain.run import fork as forks
from pretrain.run import ledger
from pretrain.supervision import control

_MARKS = frozenset({run_folder.LOCK, run_folder.SUPERVISOR_LOCK, ledger.FILE_NAME, control.FOLDER})
"""First files of a run's folder; a folder without any of them is not a run's."""
_AMPERE, _HOPPER = 8.0, 9.0
"""Compute capabilities: the first GPUs with bf16, and those of FlexAttention's FLASH kernels."""


Manifests = Mapping[str, CorpusManifest]
"""Of a recipe's corpora, by name; the name of a single one is ""."""


def check(config: RunConfig, world_size: int) -> tuple[ModelConfig, Manifests]:
    """Check everything about a recipe that can be checked before a run starts.

    Args:
        config: the recipe.
        world_size: number of processes that share a batch.

    Returns:
        The model's architecture with the corpora's vocabulary, and the manifests of
        `config.streams`.

    Raises:
        ValueError: something is missing or does not fit; both values are named, and the phase.
    """
    found: list[tuple[ModelConfig, Manifests]] = []
    for phase in config.resolved_phases:
        try:
            found.append(_check_phase(phase.config, world_size))
        except ValueError as error:
            raise ValueError(f"{phase}: {error}" if config.phases else str(error)) from None
    manifests: dict[str, CorpusManifest] = {}
    for (_, of_phase), names in zip(found, config.stream_names, strict=True):
        manifests |= dict(zip(names, of_phase.values(), strict=True))
    _refuse_corpora_of_phases(config, manifests)
    return found[0][0], manifests


def _refuse_corpora_of_phases(config: RunConfig, manifests: Manifests) -> None:
    """Refuse other vocabularies in later phases, and a corpus under two paths."""
    first, streams = next(iter(manifests.values())), {s.name: s for s in config.streams}
    paths: dict[str, str] = {}
    for phase, names in zip(config.resolved_phases, config.stream_names, strict=True):
        for name in names if config.phases else ():
            stream, manifest = streams[name], manifests[name]
            if manifest.tokenizer_digest != first.tokenizer_digest:
                raise ValueError(
                    f"{phase}: {stream.path} was made with another vocabulary "
                    f"({manifest.tokenizer_digest[:12]}, {manifest.vocab_size} ids) than "
                    f"{config.streams[0].path} ({first.tokenizer_digest[:12]}, {first.vocab_size} "
                    "ids); accepted: corpora that were prepared with the same --tokenizer"
                )
            path = paths.setdefault(manifest.digest(), stream.key[0])
            if path != stream.key[0]:
                raise ValueError(
                    f"{phase}: {stream.path} is the same corpus as {path}; accepted: one path for "
                    "it, so that no phase reads again what another has read"
                )


def _check_phase(config: RunConfig, world_size: int) -> tuple[ModelConfig, Manifests]:
    """Check the settings of one phase; returns the architecture, and its corpora's manifests."""
    manifests = read_manifests(config.data)
    manifest = next(iter(manifests.values()))
    model = config.architecture(manifest.vocab_size)
    _refuse_other_objective(config, model)
    _refuse_one_segment(config, model)
    refuse_other_packing(SOURCES[config.data.packing], config.objective, model.latents)
    for source in (*open_sources(config.data, "train"), *open_sources(config.data, "valid")):
        _refuse_small_share(source, config, model)
    if model.longest_input and config.data.sequence_length > model.longest_input:
        raise ValueError(
            f"data.sequence_length {config.data.sequence_length} is above the model's "
            f"max_positions {model.max_positions}, the number of its learned positions"
        )
    if model.latents > config.data.sequence_length:
        raise ValueError(
            f"model.overrides.latents {model.latents}: accepted: at most data.sequence_length "
            f"{config.data.sequence_length}; latents beyond it would read nothing"
        )
    clipping = config.optimizer.gradient_clipping
    name = config.training.deepspeed
    settings = deepspeed_settings.read(name, config.batch, clipping, world_size)
    deepspeed_settings.refuse_optimizer(settings, config.optimizer.name)
    deepspeed_settings.refuse_guard(settings, config.optimizer.guard)
    check_backend(model, choose_backend(model, config.training.attention_backend, on_gpu=False))
    if config.training.compile:
        deepspeed_settings.refuse_compiling(settings)
    _refuse_profile(config, world_size)
    _refuse_missing_tracker(config)
    _refuse_bad_blocks(config, manifest.vocab_size, model)
    return model, manifests


def _refuse_missing_tracker(config: RunConfig) -> None:
    """Refuse a tracker whose package is not installed."""
    if config.tracker != "none" and importlib.util.find_spec(config.tracker) is None:
        raise ValueError(
            f"tracker {config.tracker}: its package is not installed; accepted: after "
            f'`pip install "zeroclap[{config.tracker}]"`, or tracker none'
        )


def _refuse_profile(config: RunConfig, world_size: int) -> None:
    """Refuse to trace steps or ranks that the run will not have."""
    steps, ranks = config.profile.steps, config.profile.ranks
    if steps and steps[0] >= config.training.steps:
        raise ValueError(
            f"profile.steps {steps}: accepted: from a step below training.steps "
            f"{config.training.steps} on"
        )
    if max(ranks, default=0) >= world_size:
        raise ValueError(
            f"profile.ranks {ranks}: accepted: ranks below {world_size}, the number of this launch"
        )


def _refuse_bad_blocks(config: RunConfig, vocab_size: int, model: ModelConfig) -> None:
    """Refuse blocks that the objective finds nothing in, or too few of them."""
    folder = Path(next(iter(config.data.named_corpora.values())).path)
    vocabulary = Vocabulary(vocab_size, model.vocab_size, folder)
    objective = config.objective.for_validation().build(vocabulary)
    for valid in open_sources(config.data, "valid"):
        refuse_without_targets(valid, objective, config.training.evaluation_blocks)
    for number, train in enumerate(open_sources(config.data, "train")):
        _refuse_few_blocks(train, number, config)
        # Raises where the objective takes text of other documents, and there are none.
        objective.collate([train.blank(0)], [validation_key(0)], train.sequence_length)


def open_sources(data: DataConfig, split: str) -> tuple[Source, ...]:
    """Return the blocks of one split of each of a recipe's corpora.

    Raises:
        ValueError: no document fits into a block, or the packing needs another kind of corpus.
    """
    folders = (Path(corpus.path) for corpus in data.named_corpora.values())
    cut = SOURCES[data.packing]
    return tuple(cut(Corpus(folder, split), data.sequence_length) for folder in folders)


def open_stream(stream: Stream, split: str) -> Source:
    """Return the blocks of one split of a corpus, cut in one way."""
    corpus = Corpus(Path(stream.path), split)
    return SOURCES[stream.packing](corpus, stream.sequence_length)


def read_manifests(data: DataConfig) -> Manifests:
    """Read the manifests of a recipe's corpora.

    Raises:
        ValueError: none is named or a folder is no corpus, a split has no documents, a corpus has
            another vocabulary than the recipe's or the first corpus, or is given twice.
    """
    if not data.named_corpora:
        raise ValueError("data.corpus: is not set; name a folder that `data_prep prepare` made")
    manifests: dict[str, CorpusManifest] = {}
    named: dict[str, str] = {}
    for name, corpus in data.named_corpora.items():
        path = corpus.path
        manifest = manifests[name] = load_manifest(Path(path))
        first = next(iter(manifests))
        for split in SPLITS:
            if not manifest.totals[split].documents:
                raise ValueError(f"{path}: its {split} split has no documents")
        if data.vocab_size not in (0, manifest.vocab_size):
            raise ValueError(
                f"data.vocab_size is {data.vocab_size}, but {path} was made with a vocabulary of "
                f"{manifest.vocab_size} ids"
            )
        if manifest.tokenizer_digest != manifests[first].tokenizer_digest:
            raise ValueError(
                f"data.corpora.{name}: {path} was made with another vocabulary "
                f"({manifest.tokenizer_digest[:12]}, {manifest.vocab_size} ids) than "
                f"data.corpora.{first} ({manifests[first].tokenizer_digest[:12]}, "
                f"{manifests[first].vocab_size} ids); accepted: corpora that were prepared with "
                "the same --tokenizer"
            )
        other = named.setdefault(manifest.digest(), name)
        if other != name:
            raise ValueError(
                f"data.corpora.{name}: {path} is the same corpus as data.corpora.{other}; "
                "accepted: each corpus once, with the sum of the weights"
            )
    return manifests


def data_summary(config: RunConfig) -> list[str]:
    """Say of each split how many of its tokens the run's blocks hold, in a sentence.

    Cuts the splits into blocks where that was not done before.
    """
    sentences = []
    for split, stream in itertools.product(SPLITS, config.streams):
        name = f"{stream.name}, " if stream.name else ""
        source = open_stream(stream, split)
        tokens, dropped = _tokens(source)
        sentences.append(
            f"{name}{source.corpus.split}: {len(source):,} blocks of {source.sequence_length} hold "
            f"{source.share_of_tokens:.1%} of {tokens:,} tokens ({stream.packing}, "
            f"{source.fill:.1%} full)"
            + (f"; {dropped:,} tokens of {source.dropped} are dropped" if dropped else "")
        )
    return sentences


def _tokens(source: Source) -> tuple[int, int]:
    """Return the tokens of a source's split, and how many of them its blocks do not hold."""
    tokens = int(source.corpus.lengths.sum())
    return tokens, tokens - round(source.share_of_tokens * tokens)


def _refuse_other_objective(config: RunConfig, model: ModelConfig) -> None:
    """Refuse to train a causal model to fill masks, or one that sees the next token to predict it.

    The first would be wasted, and the second has a loss of zero.
    """
    objective = config.objective
    if objective.causal == model.causal:
        return
    names = [n for n, settings in SETTINGS_BY_NAME.items() if settings.causal == model.causal]
    variants = [
        name
        for name, delta in presets.VARIANTS.items()
        if delta.get("causal", False) == objective.causal
    ]
    sees = "sees no later tokens" if model.causal else "sees the tokens that it would predict"
    raise ValueError(
        f"objective.name {objective.name} does not fit model.variant {config.model.variant}, which "
        f"{sees}; accepted: objective.name={names[0]}, or for model.variant one of "
        f"{', '.join(variants)}"
    )


def _refuse_one_segment(config: RunConfig, model: ModelConfig) -> None:
    """Refuse to train a model on pairs of segments that it cannot tell apart."""
    if config.objective.pairs and model.segments < 2:
        raise ValueError(
            f"objective.name {config.objective.name} reads pairs of segments, but a model of "
            f"model.variant {config.model.variant} has segments {model.segments}; accepted: "
            "model.variant=albert, or model.overrides.segments=2"
        )


def _refuse_small_share(source: Source, config: RunConfig, model: ModelConfig) -> None:
    """Refuse blocks that hold a smaller share of their split's tokens than the recipe asks for."""
    data = config.data
    if source.share_of_tokens >= data.minimum_share_of_tokens:
        return
    tokens, dropped = _tokens(source)
    whole = "contiguous" if config.objective.one_text or model.latents else "chunked"
    raise ValueError(
        f"data.packing {data.packing} would drop {dropped:,} of the {tokens:,} tokens of split "
        f"{source.corpus.split!r} of {source.corpus.folder}: {source.dropped}, with "
        f"data.sequence_length "
        f"{data.sequence_length}. That leaves {source.share_of_tokens:.1%}, below "
        f"data.minimum_share_of_tokens {data.minimum_share_of_tokens:g}; accepted: "
        + ("" if source.pairs else f"data.packing={whole} (drops nothing), ")
        + "longer blocks, or a lower share by name, such as data.minimum_share_of_tokens=0"
    )


def _refuse_few_blocks(train: Source, number: int, config: RunConfig) -> None:
    """Refuse the training split of corpus `number` if it has fewer blocks than an update reads."""
    data, size, mixture = config.data, config.batch.global_batch_size, config.mixture()
    share = max(mixture.shares(first)[number] for first, _ in mixture.stages)
    needed, blocks = math.ceil(share * size), len(train)
    if blocks < needed:
        part = "" if share == 1 else f"{needed:,} blocks of "
        raise ValueError(
            f"{train.corpus.folder}: its train split has {blocks:,} blocks of data.sequence_length "
            f"{data.sequence_length}, fewer than the {part}batch.global_batch_size {size:,} that "
            "each update reads; accepted: more text, shorter blocks, or a smaller batch"
            + ("" if share == 1 else ", or a smaller weight")
        )


def refuse_device(
    config: RunConfig, world_size: int, device: str, capability: float | None
) -> None:
    """Refuse an attention back end, a precision or comparisons that a device does not allow.

    Args:
        config: the recipe.
        world_size: number of ranks.
        device: "cpu" or "cuda".
        capability: compute capability of the GPU, such as 8.0; None where it is not known.

    Raises:
        ValueError: names the setting, the device, and what would work there.
    """
    backend = config.training.attention_backend
    if backend not in ("dense", AUTOMATIC) and device != "cuda":
        raise ValueError(
            f"training.attention_backend: {backend!r} needs a GPU; on {device} write dense"
        )
    training = config.training
    if device == "cuda" and training.comparison_interval and not training.deterministic:
        raise ValueError(
            f"training.comparison_interval {training.comparison_interval} on a GPU: its kernels "
            "may give other bits each time; accepted: 0, or training.deterministic=true"
        )
    if device != "cuda" or capability is None:
        return
    has = f"the GPU has compute capability {capability:.1f}"
    if backend == "flex-flash" and capability < _HOPPER:
        raise ValueError(
            f"training.attention_backend: 'flex-flash' needs compute capability {_HOPPER:.1f} "
            f"(Hopper) or later, and {has}; write flex"
        )
    name = config.training.deepspeed
    clipping = config.optimizer.gradient_clipping
    settings = deepspeed_settings.read(name, config.batch, clipping, world_size)
    if settings.get("bf16", {}).get("enabled", False) and capability < _AMPERE:
        half = name.replace("bf16", "fp16")
        known = (deepspeed_settings.DS_CONFIGS / f"{half}.json").is_file()
        raise ValueError(
            f"training.deepspeed: {name} computes in bf16, which needs compute capability "
            f"{_AMPERE:.1f} (A100) or later, and {has}; write "
            + (half if known and half != name else "a file with fp16, such as zero1_fp16")
        )


def refuse_other_recipe(config: RunConfig, manifests: Manifests) -> None:
    """Refuse to resume a run with another recipe or corpus than it began with.

    The number of steps and the schedule may change if the learning rate of every step done, as far
    as the newest checkpoint holds it, stays the same; so may the weights of corpora, if every step
    done or skipped reads the same.

    Raises:
        ValueError: lists each difference with both values; or the folder is not a run's.
    """
    run = Path(config.folder)
    _refuse_other_folder(run)
    fork = forks.find(config)
    records = fork.records if fork else ledger.read(run / ledger.FILE_NAME)
    old = fork.recipe if fork else None
    if not fork and (run / RUN_FILE).is_file():
        old = load(str(run / RUN_FILE))
    state = ledger.run_state(records, config.training.seed)
    done = state.resume_step()
    # What a rollback skipped is named by the steps that had read it.
    read = max([done, *(r["skip"][1] for r in state.rollbacks if r.get("skip"))])
    changed = _other_corpora(records, config, manifests, read)
    if old:
        changed += [*_other_recipe(old, config, done), *_other_weights(old, config, read)]
    known = (
        f"{run} is a run with another recipe; name a new folder, or resume it unchanged, with the "
        f"recipe {run / RUN_FILE}: "
    )
    if changed:
        raise ValueError(
            (
                f"fork_from: {fork.run} had another recipe up to step {fork.step}: "
                if fork
                else known
            )
            + "; ".join(changed)
        )


def _other_recipe(old: RunConfig, new: RunConfig, done: int) -> list[str]:
    """List how the recipe differs from the one that a run of `done` steps had so far."""
    changed = _differences(old, new, done, MAY_CHANGE)
    others = _differences(old, new, done, (*MAY_CHANGE, *SCHEDULE))
    if changed == others:
        return changed
    steps = new.training.steps
    if steps < done:
        return [*changed, f"training.steps {steps} is below the {done} steps that are done"]
    rates = ((step, learning_rate(old, step), learning_rate(new, step)) for step in range(done))
    differing = next((rate for rate in rates if rate[1] != rate[2]), None)
    if differing is None:
        if steps > done and learning_rate(new, steps - 1) == 0:
            others.append(
                f"training.steps {steps}: the learning rate of the last steps would be 0, the "
                "schedule's minimum; accepted: a new run"
            )
        return others
    reason = "step {}, which is done, had the learning rate {}, now {}".format(*differing)
    if steps != old.training.steps:
        decay_steps = old.schedule.decay_steps or old.training.steps
        reason += (
            f"; to change the number of steps, add schedule.decay_steps={decay_steps}, which keeps "
            "the schedule of the steps done"
        )
    return [*changed, reason]


def _differences(old: RunConfig, new: RunConfig, done: int, may_change: Sequence[str]) -> list[str]:
    """List how the settings of the steps done differ, and those of the first step."""
    found: dict[str, None] = {}
    for before, now in itertools.product(old.resolved_phases, new.resolved_phases):
        first, end = max(before.first_step, now.first_step), min(before.end_step, now.end_step)
        if first < min(end, max(done, 1)):
            where = f"from step {first} on, " if first else ""
            for text in differences(before.config, now.config, may_change):
                found[where + text] = None
    if not (old.phases or new.phases):
        return list(found)
    places = [[c.sizes.first_block(step) for step in range(done + 1)] for c in (old, new)]
    if not found and places[0] != places[1]:
        step = next(step for step in range(done + 1) if places[0][step] != places[1][step])
        found[f"batch: the sizes of the steps before {step}, which are done, were others"] = None
    return list(found)


def _other_weights(old: RunConfig, new: RunConfig, read: int) -> list[str]:
    """Say which of the steps that read or skipped blocks, those below `read`, has other weights."""
    place = new.sizes.first_block(read)
    if old.sizes.first_block(read) != place:
        return []  # another batch is named as such
    if old.mixture().until(place) == new.mixture().until(place):
        return []

    def weights(config: RunConfig) -> list[tuple[int, list[float]]]:
        return [(step, each) for step, each in config.weights() if step < read]

    return [
        f"data.corpora: the weights by step were {weights(old)}, now {weights(new)}, but the "
        f"steps before {read} are done; accepted: changes from step {read} on"
    ]


def _refuse_other_folder(run: Path) -> None:
    if run.exists() and not run.is_dir():
        raise ValueError(f"folder: {run} is a file; name a run's folder, or a new one")
    names = {path.name for path in run.iterdir()} if run.is_dir() else set()
    if names and not names & _MARKS:
        raise ValueError(
            f"folder: {run} holds {sorted(names)[0]} but no {ledger.FILE_NAME}, so it is not a "
            "run's folder; name a run's folder, an empty one, or a new one"
        )


def _other_corpora(
    records: Sequence[ledger.Record], config: RunConfig, manifests: Manifests, read: int
) -> list[str]:
    """List how the corpora differ from those in the ledger. Others may follow them.

    Those of phases that begin after step `read` are not compared.
    """
    began = next((record for record in records if record["kind"] == "created"), None)
    if began is None:
        return []
    manifest = next(iter(manifests.values()))
    if began["tokenizer"] != manifest.tokenizer_digest:
        return [
            f"data.corpus: made with a vocabulary of {began['vocab_size']} ids "
            f"({began['tokenizer'][:12]}), now with one of {manifest.vocab_size} "
            f"({manifest.tokenizer_digest[:12]})"
        ]
    then = ledger.corpora_digests(records)
    now = [(name, manifest.digest()) for name, manifest in manifests.items()]
    if config.phases or any("batches" in record for record in records):
        phases = zip(config.resolved_phases, config.stream_names, strict=True)
        begun = {n for phase, names in phases for n in names if phase.first_step < max(1, read)}
        now, then = now[: len(begun)], then[: len(begun)]
    if len(now) < len(then):
        missing = ", ".join(name for name, _ in then[len(now) :])
        return [f"data.corpora: {missing} is missing; accepted: with the weight 0"]
    return [
        f"data.corpora.{name} digest: {old[:12]}, now {new[:12]}"
        if name
        else f"data.corpus digest: {old[:12]}, now {new[:12]}"
        for (_, old), (name, new) in zip(then, now, strict=False)
        if old != new
    ]


def refuse_other_checkpoint(
    manifest: Mapping[str, Any],
    step: int,
    architecture: ModelConfig,
    lineage: Sequence[Sequence[object]],
) -> None:
    """Refuse a checkpoint of another model or another history than the run's.

    A field of the architecture that an earlier version did not write has its default.

    Args:
        manifest: the checkpoint's. Its recipe is compared elsewhere; but the architecture that a
            recipe's names stand for may have changed since.
        step: step of the checkpoint according to the ledger.
        architecture: the run's.
        lineage: the run's before that step, as `ledger.lineage_record` writes it.

    Raises:
        ValueError: lists each difference with both values; or the architecture has an unknown
            field.
    """
    source = f"the architecture in the checkpoint of step {step}"
    saved = ModelConfig.from_dict(manifest["architecture"], source).to_dict()
    now = {"step": step, "lineage": lineage, **architecture.to_dict()}
    then = {"step": manifest["step"], "lineage": manifest["lineage"], **saved}
    changed = [
        f"{name}: {then.get(name)!r}, now {now.get(name)!r}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    if changed:
        raise ValueError(
            f"the checkpoint of step {step} is of another model or run: " + "; ".join(changed)
        )
