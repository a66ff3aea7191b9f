"""Model folders to Hugging Face folders.

A baseline becomes a plain `RobertaForMaskedLM`, or with a classification head a
`RobertaForSequenceClassification`, a causal model with learned positions an `OPTForCausalLM`; these
need no code of ours. What transformers does not have (ALiBi with offset, the CLAP head, the zero
mask, other causal models) is exported with its code: the unchanged files of pretrain/model/, and
modeling_zeroclap.py, which transformers loads with `trust_remote_code=True`.

transformers itself is not needed here: the files are JSON and safetensors.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from data_prep import tokenizer as tokenizers
from data_prep.files import new_folder, strict_json
from data_prep.tokenizer import Tokenizer
from pretrain.convert import huggingface_layout as layout
from pretrain.convert.weights import separated
from pretrain.inference.model_folder import HEADS, ModelContents
from pretrain.model.config import ClassificationConfig, ModelConfig, check_pooling
from pretrain.run.checkpoints import write_json

_PACKAGE = Path(__file__).parent.parent
_ADAPTER = "modeling_zeroclap"
_AUTO_MAP = {
    "AutoConfig": f"{_ADAPTER}.ZeroclapConfig",
    "AutoModel": f"{_ADAPTER}.ZeroclapModel",
    "AutoModelForMaskedLM": f"{_ADAPTER}.ZeroclapForMaskedLM",
    "AutoModelForCausalLM": f"{_ADAPTER}.ZeroclapForCausalLM",
    "AutoModelForSequenceClassification": f"{_ADAPTER}.ZeroclapForSequenceClassification",
    "AutoModelForTokenClassification": f"{_ADAPTER}.ZeroclapForTokenClassification",
    "AutoModelForQuestionAnswering": f"{_ADAPTER}.ZeroclapForQuestionAnswering",
}
_SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
_SPECIAL_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}


def write(folder: Path, contents: ModelContents, head: str | None = None) -> list[str]:
    """Write a folder that transformers loads, whole or not at all.

    Args:
        folder: new or empty.
        contents: of a model folder.
        head: the classification head to export; None: export a language model.

    Returns:
        What was left out, one sentence each.

    Raises:
        ValueError: the model has no such head or cannot have it (`check_pooling`), or the folder
            is not empty.
    """
    heads = contents.classification_heads
    if head is not None and head not in heads:
        raise ValueError(
            f"classification head {head!r}: the model has no such head; it has "
            f"{', '.join(sorted(heads)) or 'none'}"
        )
    classifier = None if head is None else heads[head]
    if classifier is not None:
        check_pooling(contents.config, classifier.pooling)
    plain = layout.plain_type(contents.config, classifier)
    form = {"roberta": _roberta, "opt": _opt, None: _own}[plain]
    settings, tensors = form(contents, head, classifier)
    if classifier is not None:
        settings |= _label_settings(classifier) | {"classifier_name": head}
    settings |= {**_SPECIAL_IDS, "dtype": "float32", "provenance": dict(contents.provenance)}
    with new_folder(folder) as partial:
        # Not save_file, which lets nobody but the owner read what it writes.
        (partial / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
        write_json(partial / "config.json", settings)
        generates = contents.config.causal and head is None
        if generates:
            write_json(partial / "generation_config.json", _generation_settings(contents))
        if contents.vocabulary is not None:
            _write_tokenizer(partial, contents.vocabulary, contents.config, generates)
        if plain is None:
            _write_code(partial)
        (partial / "README.md").write_text(
            _model_card(folder.resolve().name, contents, head), "utf-8"
        )
    return _left_out(contents, head, plain is not None)


def _exported(weights: Iterable[str], head: str | None, plain: bool) -> list[str]:
    """Return the names of the weights to export: of the model, and of one classification head."""
    left_out = (HEADS, "head.") if plain and head is not None else (HEADS,)
    return [
        name
        for name in weights
        if not name.startswith(left_out) or (head and name.startswith(f"{HEADS}{head}."))
    ]


def _left_out(contents: ModelContents, head: str | None, plain: bool) -> list[str]:
    notes = []
    if others := sorted(set(contents.classification_heads) - {head}):
        notes.append(f"classification heads were left out: {', '.join(others)}")
    if plain and head is not None:
        notes.append(
            "the head over the vocabulary was left out: RobertaForSequenceClassification has none"
        )
    return notes


_Form = tuple[dict[str, Any], dict[str, Tensor]]
"""What a form of export writes: the settings of config.json, and the weights."""


def _roberta(contents: ModelContents, name: str | None, head: ClassificationConfig | None) -> _Form:
    config = contents.config
    kind = "RobertaForMaskedLM" if head is None else "RobertaForSequenceClassification"
    settings = {
        "model_type": "roberta",
        "architectures": [kind],
        **{theirs: getattr(config, ours) for ours, theirs in layout.ROBERTA_SETTINGS.items()},
        "max_position_embeddings": config.max_positions + layout.UNUSED_POSITIONS,
        "type_vocab_size": 1,
        "hidden_act": "gelu",
        "classifier_dropout": None if head is None else head.dropout,
        "tie_word_embeddings": True,
    }
    names = layout.roberta_names(_exported(contents.weights, name, plain=True))
    tensors = separated(contents.weights, names)
    row = contents.weights[layout.POSITIONS].new_zeros(1, config.hidden_size)
    return settings, {**tensors, layout.TOKEN_TYPES: row}


def _opt(contents: ModelContents, name: str | None, head: ClassificationConfig | None) -> _Form:
    config = contents.config
    settings = {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        **{theirs: getattr(config, ours) for ours, theirs in layout.OPT_SETTINGS.items()},
        "word_embed_proj_dim": config.hidden_size,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": True,
        "tie_word_embeddings": config.scale == 1.0,
    }
    names = layout.opt_names(_exported(contents.weights, name, plain=True))
    tensors = separated(contents.weights, names)
    if config.scale != 1.0:
        table = tensors[layout.OPT_TOKENS]
        tensors |= {layout.OPT_TOKENS: table * config.scale, layout.OPT_OUTPUT: table}
    return settings, tensors


def _generation_settings(contents: ModelContents) -> dict[str, Any]:
    """Return what transformers' `generate` never chooses: the same as ours."""
    never = [Tokenizer.bos_id, Tokenizer.pad_id, Tokenizer.unk_id]
    if contents.vocabulary is not None:
        never.append(contents.vocabulary.mask_id)
    return {**_SPECIAL_IDS, "suppress_tokens": never}


def _mask_ids(contents: ModelContents) -> list[int]:
    """Return the ids that mean the mask and have no row: `<mask>`, and tokens without a row."""
    config, vocabulary = contents.config, contents.vocabulary
    if config.mask_embedding == "row":
        return []
    last = config.vocab_size if vocabulary is None else vocabulary.mask_id
    return list(range(config.vocab_size, last + 1))


def _own(contents: ModelContents, name: str | None, head: ClassificationConfig | None) -> _Form:
    config, masks = contents.config, _mask_ids(contents)
    objectives = ["AutoModelForMaskedLM", "AutoModelForCausalLM"]
    task = objectives.pop(config.causal)
    auto_map = {key: value for key, value in _AUTO_MAP.items() if key not in objectives}
    pooling = {}
    if head is not None:
        task = "AutoModelForSequenceClassification"
        pooling = {"classifier_pooling": head.pooling, "classifier_dropout": head.dropout}
    settings = {
        "model_type": "zeroclap",
        "architectures": [_AUTO_MAP[task].removeprefix(f"{_ADAPTER}.")],
        "auto_map": auto_map,
        **config.to_dict(),
        # transformers counts on a row for every id of the tokenizer.
        "vocab_size": config.vocab_size + len(masks),
        "mask_token_ids": masks,
        "architecture_fields": sorted(config.to_dict()),
        **pooling,
    }
    names = layout.own_names(_exported(contents.weights, name, plain=False))
    tensors = separated(contents.weights, names)
    for by_token in layout.BY_TOKEN & tensors.keys():
        empty = tensors[by_token].new_zeros(len(masks), *tensors[by_token].shape[1:])
        tensors[by_token] = torch.cat([tensors[by_token], empty])
    return settings, tensors


def _label_settings(head: ClassificationConfig) -> dict[str, Any]:
    labels = head.labels or layout.unnamed(head.classes)
    return {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        "problem_type": layout.problem_types(head.classes)[0],
    }


def _write_tokenizer(
    folder: Path, vocabulary: Tokenizer, config: ModelConfig, generates: bool
) -> None:
    path = folder / tokenizers.FILE_NAME
    vocabulary.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["post_processor"] = {
        "type": "RobertaProcessing",
        "sep": ["</s>", vocabulary.eos_id],
        "cls": ["<s>", vocabulary.bos_id],
        "trim_offsets": True,
        "add_prefix_space": False,
    }
    if generates:
        content["post_processor"] = _prompt_template(vocabulary)
    for token in content["added_tokens"]:
        # The space before a mask belongs to the predicted token, as in fill_mask.
        token["lstrip"] = token["id"] == vocabulary.mask_id
    write_json(path, content)
    settings: dict[str, Any] = {
        # The class that takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        # decode() must return texts unchanged.
        "clean_up_tokenization_spaces": False,
        **_SPECIAL_TOKENS,
    }
    if generates:
        settings["padding_side"] = "left"
    if config.longest_input:
        settings["model_max_length"] = config.longest_input
    write_json(folder / "tokenizer_config.json", settings)


def _prompt_template(vocabulary: Tokenizer) -> dict[str, Any]:
    """Return the post-processor of causal models: `<s>` and the text, which may go on."""
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    ids = {"id": "<s>", "ids": [vocabulary.bos_id], "tokens": ["<s>"]}
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, second],
        "special_tokens": {"<s>": ids},
    }


def _write_code(folder: Path) -> None:
    for path in sorted((_PACKAGE / "model").glob("*.py")):
        shutil.copyfile(path, folder / path.name)
    adapter = f"{_ADAPTER}.py"
    code = (_PACKAGE / "convert" / adapter).read_text(encoding="utf-8")
    flat = re.sub(r"^from pretrain\.model\.", "from .", code, flags=re.MULTILINE)
    (folder / adapter).write_text(flat, encoding="utf-8")


def _model_card(name: str, contents: ModelContents, head: str | None) -> str:
    classifier = None if head is None else contents.classification_heads[head]
    plain = layout.plain_type(contents.config, classifier)
    task, kind, what = "fill-mask", "MaskedLM", "A masked language model"
    if contents.config.causal:
        task, kind, what = "text-generation", "CausalLM", "A causal language model"
    if classifier is not None:
        task, kind, what = "text-classification", "SequenceClassification", "A text classifier"
    trust = "" if plain else ", trust_remote_code=True"
    code = "not in transformers; the Python files beside this one are its code."
    if plain is not None:
        name_there = {"roberta": "RoBERTa", "opt": "OPT"}[plain]
        code = f"transformers' own {name_there}; no other code is needed."
    fields = contents.config.to_dict() | ({} if classifier is None else classifier.to_dict())
    rows = "\n".join(f"| {field} | {strict_json(value)} |" for field, value in fields.items())
    provenance = strict_json(dict(contents.provenance), indent=1)
    return f"""---
library_name: transformers
pipeline_tag: {task}
---

# {name}

{what}, exported by zeroclap. Its architecture is {code}

```python
from transformers import AutoModelFor{kind}, AutoTokenizer

folder = "."  # where this file is, or its name on the hub
tokenizer = AutoTokenizer.from_pretrained(folder{trust})
model = AutoModelFor{kind}.from_pretrained(folder{trust})
```

| architecture | |
|---|---|
{rows}

Provenance:

```json
{provenance}
```
"""
