"""Export model folders as Hugging Face folders.

A baseline becomes a plain `RobertaForMaskedLM`, or with a classification head a
`RobertaForSequenceClassification`; an ALBERT an `AlbertForPreTraining`, without a pair head an
`AlbertForMaskedLM`, with a classification head an `AlbertForSequenceClassification`. These need no
custom code. Models that transformers does not have (ALiBi with offset, the CLAP head, the zero
mask, layers that share one part only, causal models) are exported with their code, which
transformers loads with `trust_remote_code=True`: one file, joined from pretrain/model/ and
modeling_zeroclap.py.

transformers itself is not needed here: the files are JSON and safetensors.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from data_prep.common.files import new_folder, write_json
from data_prep.tokenizer import Tokenizer
from pretrain.convert import huggingface_layout as layout
from pretrain.convert import huggingface_tokenizer
from pretrain.convert.model_card import model_card
from pretrain.convert.weights import separated
from pretrain.inference.model_folder import HEADS, ModelContents
from pretrain.model.classification import ClassificationConfig, check_pooling

_PACKAGE = Path(__file__).parent.parent
_ADAPTER = "modeling_zeroclap"
_SPECIAL_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}


def write_folder(
    folder: Path,
    contents: ModelContents,
    head: str | None = None,
    scores: str = "",
) -> list[str]:
    """Write a folder that transformers loads, complete or not at all.

    Args:
        folder: new or empty.
        contents: of a model folder.
        head: the classification head to export; None: export a language model.
        scores: of fine-tuning, in Markdown, for the model card.

    Returns:
        Sentences about the class, the line that loads it, and omitted parts.

    Raises:
        ValueError: the model has latents or an untied head, which exports do not hold; it has no
            such classification head or cannot have it (`check_pooling`); or the folder is not
            empty.
    """
    config = contents.config
    if config.latents or config.head == "untied":
        raise ValueError(
            f"{folder}: cannot be written for transformers: exports have neither latents (here "
            f"{config.latents}) nor an untied head (here {config.head!r})"
        )
    classifier = _classifier(contents, head)
    plain = layout.plain_type(config, classifier)
    library, form = {
        "roberta": ("Roberta", _roberta),
        "albert": ("Albert", _albert),
        None: ("Zeroclap", _own),
    }[plain]
    # Of the classification heads, the chosen one; beside it, a plain class has no other head.
    left_out = (HEADS, "head.", "pair_head.") if plain and head is not None else (HEADS,)
    weights = {
        name: weight
        for name, weight in contents.weights.items()
        if not name.startswith(left_out) or (head and name.startswith(f"{HEADS}{head}."))
    }
    own_settings, tensors = form(dataclasses.replace(contents, weights=weights), classifier)
    kind = f"{library}For{layout.task(config, classifier)}"
    settings = {"model_type": plain or "zeroclap", "architectures": [kind], **own_settings}
    if classifier is not None:
        labels = classifier.labels or layout.unnamed(classifier.classes)
        settings |= {
            "id2label": {str(index): label for index, label in enumerate(labels)},
            "label2id": {label: index for index, label in enumerate(labels)},
            "problem_type": layout.problem_types(classifier.classes)[0],
            "classifier_name": head,
        }
    settings |= {**_SPECIAL_IDS, "dtype": "float32", "provenance": dict(contents.provenance)}
    with new_folder(folder) as partial:
        # Not save_file, whose files only the owner can read.
        (partial / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
        write_json(partial / "config.json", settings)
        # Ids that `generate` must not choose, as no text has them.
        never = [Tokenizer.bos_id, Tokenizer.pad_id, Tokenizer.unk_id]
        generates = config.causal and head is None
        if (vocabulary := contents.vocabulary) is not None:
            never.append(vocabulary.mask_id)
            huggingface_tokenizer.write_vocabulary(partial, vocabulary, config, generates)
        if generates:
            generation = {**_SPECIAL_IDS, "suppress_tokens": never}
            write_json(partial / "generation_config.json", generation)
        if plain is None:
            (partial / f"{_ADAPTER}.py").write_text(_code(), encoding="utf-8")
        card = model_card(folder.resolve().name, contents, head, scores)
        (partial / "README.md").write_text(card, "utf-8")
    whose = "a class of transformers" if plain else "its code is in the folder; no other class fits"
    call = layout.loading_call(config, classifier, repr(str(folder)))
    return [f"{kind} ({whose}): {call}", *_left_out(contents, head, plain is not None)]


def _classifier(contents: ModelContents, name: str | None) -> ClassificationConfig | None:
    """Return the named classification head; raise ValueError if the model cannot have it."""
    if name is None:
        return None
    heads = contents.classification_heads
    if name not in heads:
        raise ValueError(
            f"classification head {name!r}: the model has no such head; it has "
            f"{', '.join(sorted(heads)) or 'none'}"
        )
    check_pooling(contents.config, heads[name].pooling)
    return heads[name]


def _left_out(contents: ModelContents, head: str | None, plain: bool) -> list[str]:
    notes = []
    if others := sorted(set(contents.classification_heads) - {head}):
        notes.append(f"classification heads were left out: {', '.join(others)}")
    if plain and head is not None:
        what = "head over the vocabulary was"
        if contents.config.pair_head:
            what = "heads over the vocabulary and of pairs were"
        notes.append(f"the {what} left out: a plain classifier has none")
    return notes


_Form = tuple[dict[str, Any], dict[str, Tensor]]
"""The settings of config.json, and the weights."""


def _roberta(contents: ModelContents, head: ClassificationConfig | None) -> _Form:
    config = contents.config
    settings = {
        **{theirs: getattr(config, ours) for ours, theirs in layout.ROBERTA_SETTINGS.items()},
        "max_position_embeddings": config.max_positions + layout.UNUSED_POSITIONS,
        "type_vocab_size": 1,
        "hidden_act": "gelu",
        "classifier_dropout": head and head.dropout,
        "tie_word_embeddings": True,
    }
    tensors = separated(contents.weights, layout.roberta_names(contents.weights))
    row = contents.weights[layout.POSITIONS].new_zeros(1, config.hidden_size)
    return settings, {**tensors, layout.TOKEN_TYPES: row}


def _albert(contents: ModelContents, head: ClassificationConfig | None) -> _Form:
    config = contents.config
    settings = {
        **{theirs: getattr(config, ours) for ours, theirs in layout.ALBERT_SETTINGS.items()},
        "embedding_size": config.token_size,
        "num_hidden_groups": layout.albert_groups(config),
        "inner_group_num": 1,
        "hidden_act": layout.ALBERT_ACTIVATIONS[config.activation],
        "classifier_dropout_prob": config.dropout if head is None else head.dropout,
        "tie_word_embeddings": True,
    }
    tensors = separated(contents.weights, layout.albert_names(contents.weights, config))
    if config.token_size == config.hidden_size:
        tensors |= layout.identity(config.hidden_size)
    return settings, tensors


def _own(contents: ModelContents, head: ClassificationConfig | None) -> _Form:
    config, vocabulary = contents.config, contents.vocabulary
    masks: list[int] = []
    if config.mask_embedding != "row":  # `<mask>` has no row, nor have tokens just before it
        last = config.vocab_size if vocabulary is None else vocabulary.mask_id
        masks += range(config.vocab_size, last + 1)
    tasks = ["CausalLM" if config.causal else "MaskedLM"]
    tasks += ["SequenceClassification", "TokenClassification", "QuestionAnswering"]
    classes = ["Config", "Model", *(f"ModelFor{task}" for task in tasks)]
    pooling = {}
    if head is not None:
        pooling = {"classifier_pooling": head.pooling, "classifier_dropout": head.dropout}
    settings = {
        "auto_map": {
            f"Auto{name}": f"{_ADAPTER}.Zeroclap{name.replace('ModelFor', 'For')}"
            for name in classes
        },
        **config.to_dict(),
        # transformers counts on a row for every id of the tokenizer.
        "vocab_size": config.vocab_size + len(masks),
        "mask_token_ids": masks,
        **pooling,
    }
    tensors = separated(contents.weights, layout.native_names(contents.weights))
    for by_token in layout.BY_TOKEN & tensors.keys():
        empty = tensors[by_token].new_zeros(len(masks), *tensors[by_token].shape[1:])
        tensors[by_token] = torch.cat([tensors[by_token], empty])
    return settings, tensors


@functools.cache
def _code() -> str:
    """Return one file of the model's source files, followed by the adapter, without their imports.

    The sources are unchanged: no two of them define the same name.
    """
    parts: dict[Path, str] = {}
    imports: set[str] = set()

    def add(path: Path) -> None:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.ImportFrom) and (node.level or "pretrain" in str(node.module)):
                used = _PACKAGE / "model" / f"{str(node.module).rpartition('.')[2]}.py"
                if used not in parts:
                    add(used)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imports.add(ast.unparse(node))
            else:
                continue
            last = node.end_lineno or node.lineno
            lines[node.lineno - 1 : last] = [""] * (last + 1 - node.lineno)
        parts[path] = f"# --- {path.name} ---\n\n" + "\n".join(lines).strip()

    add(_PACKAGE / "convert" / f"{_ADAPTER}.py")
    head = ["# Made by zeroclap. SPDX-License-Identifier: Apache-2.0", *sorted(imports)]
    return re.sub(r"\n{4,}", "\n\n\n", "\n\n\n".join(["\n".join(head), *parts.values()])) + "\n"
