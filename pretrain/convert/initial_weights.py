"""The model of a run, with its initial weights: drawn from its seed, or those of another model.

A run with `model.init_from` copies that model into its own folder before its first attempt
(convert/init_from.py). Attempts that begin at step 0, also after a rollback, read only the copy:
the model itself may be gone by then.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from data_prep.common.files import sha256_of
from pretrain.config.run import RunConfig
from pretrain.convert.names import TOKENS
from pretrain.model.config import VOCABULARY_MULTIPLE, ModelConfig
from pretrain.model.language_model import LanguageModel
from pretrain.model.layers import checkpoint_activations, compile_layers
from pretrain.records import folder, ledger


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
