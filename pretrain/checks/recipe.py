"""Check a recipe before a run starts."""

import importlib.util
import itertools
import math
import os
import shutil
import sysconfig
from pathlib import Path

from data_prep.common.files import named_errors
from data_prep.common.wording import count
from data_prep.manifest import SPLITS, CorpusManifest, load_manifest
from pretrain.config import deepspeed as deepspeed_settings
from pretrain.config.run import RunConfig
from pretrain.config.sections import DataConfig
from pretrain.data.batches import check_packing, check_targets, validation_key
from pretrain.data.blocks import Blocks
from pretrain.data.mixture import Mixture
from pretrain.data.sources import SOURCES, open_source
from pretrain.model.backends import AUTOMATIC, check_backend, choose_backend
from pretrain.model.config import ModelConfig
from pretrain.model.presets import VARIANTS
from pretrain.objectives.base import Vocabulary
from pretrain.objectives.registry import SETTINGS_BY_NAME
from pretrain.processes import gpus

_COMPILERS = {"cpu": ("CXX", "g++"), "cuda": ("CC", "gcc", "clang")}
"""What torch and Triton compile kernels with: a variable that names it, or programs."""
_AMPERE = 8.0
"""Compute capability of the first GPUs with bf16."""
_FEWEST_TARGETS = 32
"""Expected in an update. Of fewer, in many steps, there may be none, and training would end."""
_USUAL_SHARE = 0.9
"""Share of a split's tokens below which its blocks are warned of."""


USUAL_VOCABULARY = 50_265
"""RoBERTa's, which is assumed where none is known."""


def check(config: RunConfig, world_size: int) -> ModelConfig:
    """Check everything about a recipe that can be checked before a run starts here.

    `check_recipe`, and what the launch and the installed packages decide; arguments, results and
    errors are the same.
    """
    package = importlib.util.find_spec(config.tracker)
    if package is None or package.origin is None:  # without an origin: a mere folder of that name
        raise ValueError(
            f"tracker {config.tracker}: its package is not installed; run `pip install "
            f'"zeroclap[{config.tracker}]"`, or use tracker tensorboard'
        )
    return check_recipe(config, world_size)


def check_settings(config: RunConfig, world_size: int = 1) -> None:
    """Check what can be checked of a recipe without its corpora.

    Raises:
        ValueError: something does not fit; both values are named, and the phase.
    """
    for part in config.segments.parts:
        with named_errors(part.name):
            _check_settings(part.config, part.config.architecture(USUAL_VOCABULARY), world_size)


def check_recipe(config: RunConfig, world_size: int) -> ModelConfig:
    """Check a recipe and its corpora.

    Args:
        config: the recipe.
        world_size: number of processes that share a batch.

    Returns:
        The model's architecture with the corpora's vocabulary.

    Raises:
        ValueError: something is missing or does not fit; both values are named, and the phase.
    """
    known: dict[str, tuple[str, CorpusManifest]] = {}
    for part in config.segments.parts:
        with named_errors(part.name):
            model = _check_phase(part.config, world_size, known)
    return model


def _check_phase(
    config: RunConfig, world_size: int, known: dict[str, tuple[str, CorpusManifest]]
) -> ModelConfig:
    """Check one phase; returns the architecture."""
    manifest = _check_corpora(config.data, known)
    model = config.architecture(manifest.vocab_size)
    _check_settings(config, model, world_size)
    sources = config.segments.sources
    vocabulary = Vocabulary(manifest.vocab_size, model.vocab_size, Path(sources[0].path))
    objective = config.objective.for_validation().build(vocabulary)
    for number, source in enumerate(sources):
        # The small one first: it may be empty, and opening one cuts it into blocks.
        valid, train = (open_source(source, split) for split in reversed(SPLITS))
        check_targets(valid, objective, config.training.evaluation_blocks)
        _check_enough_blocks(train, number, config)
        # Raises where the objective takes text of other documents, and there are none.
        objective.collate([train[0]], [validation_key(0)], train.sequence_length)
    return model


def _check_settings(config: RunConfig, model: ModelConfig, world_size: int) -> None:
    """Check the settings of one phase against each other, the model and the number of ranks."""
    data, objective, training = config.data, config.objective, config.training
    if data.named_corpora:
        Mixture.of_run(config.segments)  # refuses weights that no order could follow
    check_packing(SOURCES[data.packing], objective, model.latents)
    settings = deepspeed_settings.read_settings(*config.deepspeed_arguments(world_size))
    backend = training.attention_backend
    with named_errors("training", "."):
        check_backend(model, choose_backend(model, backend, on_gpu=False))
    deepspeed_settings.compiles(training.compile, settings, on_gpu=False)
    # A causal model that fills masks is wasted; one that sees the next token has a loss of zero.
    sees = "sees no later tokens" if model.causal else "sees the tokens that it would predict"
    names = [n for n, settings in SETTINGS_BY_NAME.items() if settings.causal == model.causal]
    variants = [n for n, v in VARIANTS.items() if v.get("causal", False) == objective.causal]
    which, others = f"model.variant {config.model.variant}", ", ".join(variants)
    others = f"for model.variant one of {others}"
    if "causal" in config.model.overrides:
        which, others = f"model.overrides.causal {model.causal}", f"{objective.causal} there"
    chosen = objective.target_share * data.sequence_length  # of a full block
    rules = (
        (
            objective.causal != model.causal,
            f"objective.name {objective.name} does not fit {which}, which {sees}; accepted: "
            f"objective.name={names[0]}, or {others}",
        ),
        (
            objective.pairs and model.segments < 2,
            f"objective.name {objective.name} reads pairs of segments, but a model of "
            f"model.variant {config.model.variant} has segments {model.segments}; accepted: "
            "model.variant=albert, or model.overrides.segments=2",
        ),
        (
            model.longest_input and data.sequence_length > model.longest_input,
            f"data.sequence_length {data.sequence_length} is above the model's "
            f"max_positions {model.max_positions}, the number of its learned positions",
        ),
        (
            # A full block has a target where it is to have one or more; the order of a pair is one.
            getattr(objective, "pair_task", "none") == "none"
            and chosen < 1
            and chosen * config.batch.global_batch_size < _FEWEST_TARGETS,
            f"objective.probability {objective.target_share} of data.sequence_length "
            f"{data.sequence_length} leaves updates of batch.global_batch_size "
            f"{config.batch.global_batch_size} blocks without anything to predict; accepted: "
            f"{math.ceil(1e6 / data.sequence_length) / 1e6:g} or more",
        ),
        (
            model.latents > data.sequence_length,
            f"model.overrides.latents {model.latents}: accepted: at most data.sequence_length "
            f"{data.sequence_length}; latents beyond it would read nothing",
        ),
        (
            training.deterministic and backend == "flex" and model.has_trained_bias,
            "training.attention_backend: flex adds up the gradient of a trained position bias in "
            "an order that differs from run to run; with training.deterministic use auto or dense",
        ),
    )
    for is_wrong, message in rules:
        if is_wrong:
            raise ValueError(message)


def _check_corpora(
    data: DataConfig, known: dict[str, tuple[str, CorpusManifest]]
) -> CorpusManifest:
    """Check the manifests of a phase's corpora; returns the last: all have one vocabulary.

    Args:
        data: of the phase.
        known: path and manifest of each corpus of the phases before, by digest; this phase's are
            added.

    Raises:
        ValueError: none is named or a folder is no corpus, a corpus has another vocabulary than the
            run's first one, is given twice, or by another path than before, so that a phase would
            read again what another has read.
    """
    if not data.named_corpora:
        raise ValueError("data.corpus: is not set; name a folder that `zeroclap prepare` made")
    digests: set[str] = set()
    for name, corpus in data.named_corpora.items():
        path = str(Path(corpus.path))
        setting = f"data.corpora.{name}" if name else "data.corpus"
        where = f"{setting}: {path}"
        with named_errors(setting):
            manifest = load_manifest(Path(path))
        digest = manifest.digest()
        other, _ = known.setdefault(digest, (path, manifest))
        first_path, first = next(iter(known.values()))
        if manifest.tokenizer_digest != first.tokenizer_digest:
            raise ValueError(
                f"{where} was made with another vocabulary "
                f"({manifest.tokenizer_digest[:12]}, {manifest.vocab_size} ids) than {first_path} "
                f"({first.tokenizer_digest[:12]}, {first.vocab_size} ids); prepare all corpora "
                "with the same --tokenizer"
            )
        if other != path or digest in digests:
            raise ValueError(
                f"{where} is the same corpus as {other}; name it once, with the sum of the "
                "weights, and in all phases by one path"
            )
        digests.add(digest)
    return manifest


def data_summary(config: RunConfig, world_size: int) -> list[str]:
    """Say of each split how many of its tokens the run's blocks hold, in a sentence, and warn.

    Cuts the splits into blocks where that was not done before. Says as well how many micro-batches
    are empty, where the ranks do not divide a batch.
    """
    sentences = [f"WARNING: {config.short_reach}"] if config.short_reach else []
    for batch in dict.fromkeys(part.config.batch for part in config.segments.parts):
        places = world_size * batch.accumulation_steps(world_size)
        if empty := places - batch.micro_batches:
            sentences.append(
                f"{count(world_size, 'rank')} compute {places:,} micro-batches of "
                f"{batch.micro_batch_size} for an update of {batch.global_batch_size:,} blocks, "
                f"{empty:,} of them empty"
            )
    for split, source in itertools.product(SPLITS, config.segments.sources):
        name = f"{source.name}, " if source.name else ""
        blocks = open_source(source, split)
        tokens = blocks.corpus.tokens
        dropped = tokens - round(blocks.share_of_tokens * tokens)
        is_small = blocks.share_of_tokens < _USUAL_SHARE
        sentences.append(
            f"{'WARNING: ' if is_small else ''}{name}{split}: {len(blocks):,} blocks of "
            f"{blocks.sequence_length} hold {blocks.share_of_tokens:.1%} of {tokens:,} tokens "
            f"({source.packing}, {blocks.fill:.1%} full)"
            + (f"; {dropped:,} tokens of {blocks.dropped} are dropped" if dropped else "")
            + ("; another data.packing or longer blocks keep more" if is_small else "")
        )
    return sentences


def _check_enough_blocks(train: Blocks, number: int, config: RunConfig) -> None:
    """Refuse the training split of corpus `number` if it has fewer blocks than an update reads."""
    size, mixture = config.batch.global_batch_size, Mixture.of_run(config.segments)
    share = max(mixture.shares(first)[number] for first, _ in mixture.stages)
    needed, blocks = math.ceil(share * size), len(train)
    if blocks < needed:
        raise ValueError(
            f"{train.corpus.folder}: its train split has {blocks:,} blocks of data.sequence_length "
            f"{train.sequence_length}, fewer than the {needed:,} of batch.global_batch_size "
            f"{size:,} that each update reads; use more text, shorter blocks, or a smaller batch "
            "or weight"
        )


def check_device(config: RunConfig, world_size: int, device: str) -> None:
    """Refuse attention back ends, precisions and compiled layers that this machine does not allow.

    Args:
        config: the recipe.
        world_size: number of ranks.
        device: "cpu" or "cuda"; empty: not known, which allows all.

    Raises:
        ValueError: names the setting, the device, and what would work there.
    """
    backend = config.training.attention_backend
    if backend not in ("dense", AUTOMATIC) and device == "cpu":
        raise ValueError(
            f"training.attention_backend: {backend!r} needs a GPU; on {device} write dense"
        )
    settings = deepspeed_settings.read_settings(*config.deepspeed_arguments(world_size))
    half = deepspeed_settings.half_precisions(settings)
    check_precision(f"training.deepspeed: {config.training.deepspeed}", half, device)
    on_gpu = device == "cuda"
    compiled = deepspeed_settings.compiles(config.training.compile, settings, on_gpu)
    if device and (compiled or (on_gpu and backend != "dense")):
        variable, *programs = _COMPILERS[device]
        header, lacks = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h"), ""
        if not (os.environ.get(variable) or any(map(shutil.which, programs))):
            lacks = f"PATH has no {' or '.join(programs)}; install one, name one in {variable}"
        elif not header.is_file():
            lacks = f"there is no {header}; install it (python3-dev)"
        if lacks:
            raise ValueError(
                f"training.compile: needs a compiler and Python's headers, and {lacks}, or write "
                "training.compile=false and training.attention_backend=dense"
            )


def check_precision(named: str, half: list[str], device: str) -> None:
    """Refuse precisions of a setting, as `check_device` does; errors name the setting."""
    computes = f"{named} computes in"
    capability = gpus.least_capability() if device == "cuda" else None
    if "bf16" in half and capability is not None and capability < _AMPERE:
        raise ValueError(
            f"{computes} bf16, which needs compute capability {_AMPERE:.1f} (A100) or later, and "
            f"the GPU has {capability:.1f}; write a file with fp16, such as zero1_fp16"
        )
    if device == "cpu" and "fp16" in half and not cpu_has_fp16():
        raise ValueError(
            f"{computes} fp16, which torch does not do on this CPU; write a file with bf16 or "
            "fp32, such as zero1_fp32"
        )


def cpu_has_fp16() -> bool:
    """Whether DeepSpeed computes in fp16 on this CPU: it asks torch, as is done here."""
    import torch

    # Missing where torch was built without mkldnn.
    return bool(getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", bool)())
