"""The model of a run, with its initial weights: drawn from its seed, or those of another model.

A run with `model.init_from` copies that model into its own folder before its first attempt.
Attempts that begin at step 0, also after a rollback, read only the copy: the model itself may be
gone by then.

Order: `initial_model`; `check_initial_model` (before a launch), `copy_initial_model` (before the
first attempt); both of these end in `read_initial_model`.
"""

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from data_prep.common.files import named_errors, sha256_of, write_atomically
from data_prep.manifest import CorpusManifest, load_manifest
from pretrain.config.run import RunConfig
from pretrain.convert import reading
from pretrain.convert.contents import CLASSIFIER, ModelContents
from pretrain.convert.names import BY_TOKEN, TOKENS
from pretrain.model.config import VOCABULARY_MULTIPLE, ModelConfig
from pretrain.model.language_model import LanguageModel
from pretrain.model.layers import checkpoint_activations, compile_layers
from pretrain.records import folder, ledger

_FREE = ("dropout", "attention_dropout", "initial_weights", "initial_beta")
"""Fields that may differ: they do not change the outputs of trained weights."""


def initial_model(
    config: RunConfig,
    architecture: ModelConfig,
    backend: str = "dense",
    compiled: bool = False,
    read: bool = True,
) -> LanguageModel:
    """Return the model of a run before its first update, on the CPU.

    Args:
        config: the recipe.
        architecture: what it describes, with the corpus's vocabulary.
        backend: of attention.
        compiled: compile each layer with torch.compile. Dropout masks then differ from those of
            an uncompiled model, and are as reproducible. Not at ZeRO stage 3.
        read: False: draw the weights even with `model.init_from`; a checkpoint overwrites them.

    Raises:
        ValueError: the run's copy of another model is missing, or is not what was recorded.
    """
    torch.manual_seed(config.training.seed)
    model = LanguageModel(architecture, VOCABULARY_MULTIPLE, backend)
    if read and config.model.init_from:
        weights = load_file(str(_verified(Path(config.folder))))
        table = model.encoder.embeddings.tokens.weight
        rows = table.new_zeros(len(table) - len(weights[TOKENS]), table.shape[1])
        weights[TOKENS] = torch.cat([weights[TOKENS], rows])
        model.load_state_dict(weights)
    if compiled:
        compile_layers(model)
    if config.training.activation_checkpointing:
        checkpoint_activations(model)
    return model


def _verified(run: Path) -> Path:
    """Return the file of a run's copied weights, whose hash is the recorded one."""
    path = run / folder.INITIAL_WEIGHTS
    recorded = ledger.origin(ledger.read_ledger(run / ledger.FILE_NAME))
    if recorded is None or not path.is_file() or sha256_of(path) != recorded["sha256"]:
        raise ValueError(
            f"{path}: is missing or is not what was recorded in {ledger.FILE_NAME}; restore it "
            "from a backup of this folder"
        )
    return path


def described(config: RunConfig, architecture: ModelConfig) -> str:
    """Describe the model that the run continues; check it if it and the corpus are available.

    Raises:
        ValueError: as `read_initial_model`.
    """
    source = Path(config.model.init_from)
    corpora = [Path(source.path) for source in config.segments.sources]
    if corpora and corpora[0].exists() and source.exists():
        return check_initial_model(config, architecture, load_manifest(corpora[0]))
    return f"initial weights: {source} (not checked: it or the corpus is not on this machine)"


def check_initial_model(
    config: RunConfig, architecture: ModelConfig, manifest: CorpusManifest
) -> str:
    """Check the model that a run starts from, and describe it in a sentence.

    A run that has begun has its own copy; then the model is not read.

    Raises:
        ValueError: as `read_initial_model`.
    """
    if found := ledger.origin(ledger.read_ledger(Path(config.folder) / ledger.FILE_NAME)):
        return f"initial weights: {ledger.describe_origin(found)}"
    contents = read_initial_model(config, architecture, manifest)
    text = f"initial weights: those of {config.model.init_from}"
    return "; ".join([text, *contents.notes])


def copy_initial_model(
    config: RunConfig, architecture: ModelConfig, manifest: CorpusManifest
) -> dict[str, object]:
    """Copy the model that a run starts from into the run's folder.

    Returns:
        The record of it for the ledger (`ledger.origin`).

    Raises:
        ValueError: as `read_initial_model`.
    """
    contents = read_initial_model(config, architecture, manifest)
    path = reading.located(Path(config.model.init_from)).resolve()
    files = {file.name: sha256_of(file) for file in reading.weight_files(path)}
    weights = {name: weight.contiguous() for name, weight in contents.weights.items()}
    copied = write_atomically(Path(config.folder) / folder.INITIAL_WEIGHTS, save(weights))
    return {"path": str(path), "files": files, "sha256": copied.sha256}


def read_initial_model(
    config: RunConfig, architecture: ModelConfig, manifest: CorpusManifest
) -> ModelContents:
    """Read the model that a run starts from; an ALBERT's pooler alone is left out.

    Args:
        config: the recipe.
        architecture: the run's.
        manifest: of the run's corpus, or of one of several, which have the same vocabulary.

    Returns:
        Its contents, with the run's architecture, whose dropout may differ.

    Raises:
        ValueError: there is no model; its vocabulary is not the corpus's; its architecture is not
            the recipe's; or it has no head over the vocabulary. Both sides are named.
    """
    name = f"model.init_from {config.model.init_from}"
    with named_errors("model.init_from"):
        contents = reading.read_folder(Path(config.model.init_from))
    _check_vocabulary(name, contents, config.segments.sources[0].path, manifest)
    contents = _without_padding(name, contents)
    _check_architecture(name, contents.config, architecture)
    if not contents.has_head:
        raise ValueError(
            f"{name}: has no head over the vocabulary; use a language model, such as "
            "RobertaForMaskedLM"
        )
    weights = {key: w for key, w in contents.weights.items() if not key.startswith(CLASSIFIER)}
    left_out = ("its pooler was left out",) if len(weights) < len(contents.weights) else ()
    notes = (*contents.notes, *left_out)
    return dataclasses.replace(contents, config=architecture, weights=weights, notes=notes)


def _check_vocabulary(
    name: str, contents: ModelContents, corpus: str, manifest: CorpusManifest
) -> None:
    vocabulary = contents.vocabulary
    if vocabulary is None:
        notes = "; ".join(contents.notes)
        raise ValueError(
            f"{name}: has no vocabulary to compare with that of the corpus "
            f"{corpus}{notes and f' ({notes})'}; put its tokenizer.json into the folder"
        )
    if (digest := vocabulary.digest()) != manifest.tokenizer_digest:
        raise ValueError(
            f"{name}: has a vocabulary of {vocabulary.vocab_size} ids ({digest[:12]}), but the "
            f"corpus {corpus} was made with one of {manifest.vocab_size} ids "
            f"({manifest.tokenizer_digest[:12]}); give the model's vocabulary to "
            "`zeroclap prepare --tokenizer`"
        )


def _without_padding(name: str, contents: ModelContents) -> ModelContents:
    """Remove the rows beyond the vocabulary: training pads the table itself."""
    assert contents.vocabulary is not None
    rows = contents.config.vocab_size
    needed = contents.vocabulary.vocab_size - (contents.config.mask_embedding == "zero")
    if rows == needed:
        return contents
    if rows < needed:  # the zero mask stands for others, too
        raise ValueError(f"{name}: has {rows} rows of tokens, but its vocabulary needs {needed}")
    by_token = {*BY_TOKEN, "head.weight"}  # of a head with a matrix of its own
    weights = {
        key: weight[:needed] if key in by_token else weight
        for key, weight in contents.weights.items()
    }
    note = f"its last {rows - needed} rows of tokens, which have no id, were left out"
    config = dataclasses.replace(contents.config, vocab_size=needed)
    notes = (*contents.notes, note)
    return dataclasses.replace(contents, config=config, weights=weights, notes=notes)


def _check_architecture(name: str, theirs: ModelConfig, ours: ModelConfig) -> None:
    """Raise ValueError, naming the settings to change, if the architectures differ."""
    # max_positions limits nothing where positions are computed.
    free = (*_FREE, "vocab_size", *(() if theirs.longest_input else ("max_positions",)))
    fields = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in free]
    differing = {n: v for n in fields if (v := getattr(theirs, n)) != getattr(ours, n)}
    if not differing:
        return
    found = [f"{each} {value!r}, here {getattr(ours, each)!r}" for each, value in differing.items()]
    words = []
    if differing.pop("pair_head", None) is not None:
        words = [f"objective.name={'sentence-pairs' if theirs.pair_head else 'masked-lm'}"]
    words += [f"model.overrides.{each}={value}" for each, value in differing.items()]
    raise ValueError(
        f"{name}: is not the model that the recipe describes: {', '.join(found)}; set "
        f"{' '.join(words)}"
    )
