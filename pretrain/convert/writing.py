"""Write model folders, which transformers loads.

A baseline is a plain RoBERTa, an ALBERT whose layers share everything or nothing a plain ALBERT.
Models that transformers does not have (ALiBi with offset, the CLAP head, the zero mask, causal
models, layers that share one part only) carry their code, which transformers loads with
`trust_remote_code=True`: one file, joined from pretrain/model/ and modeling_zeroclap.py. Models
with latents or an untied head have no code for transformers.

transformers itself is not needed here: the files are JSON and safetensors.
"""

import ast
import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from data_prep.common.files import new_folder, write_json
from data_prep.tokenizer import FILE_NAME, Tokenizer
from pretrain.convert import names as layout
from pretrain.convert.contents import ModelContents
from pretrain.convert.model_card import model_card
from pretrain.convert.weights import separated
from pretrain.model.config import ModelConfig

_PACKAGE = Path(__file__).parent.parent
_ADAPTER = "modeling_zeroclap"
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


def save_model(folder: Path, contents: ModelContents) -> str:
    """Write a model folder, complete or not at all.

    Args:
        folder: new or empty.
        contents: with a classification head it has no head over the vocabulary, and none of pairs.

    Returns:
        How to load it in Python.

    Raises:
        ValueError: the folder is not empty, or the model is causal and its classification head
            reads the first token.
    """
    config, classifier = contents.config, contents.classifier
    if classifier is not None:
        config.check_pooling(classifier.pooling)
    plain = layout.plain_type(config, classifier)
    own_settings, tensors = _plain(contents, plain) if plain else _own(contents)
    kind = f"{(plain or 'zeroclap').title()}For{layout.task(config, classifier)}"
    settings = {"model_type": plain or "zeroclap", "architectures": [kind], **own_settings}
    if classifier is not None:
        labels = classifier.labels or layout.unnamed(classifier.classes)
        settings |= {
            "id2label": {str(index): label for index, label in enumerate(labels)},
            "label2id": {label: index for index, label in enumerate(labels)},
            "problem_type": layout.problem_types(classifier.classes)[0],
        }
    settings |= {**_SPECIAL_IDS, "dtype": "float32", "provenance": dict(contents.provenance)}
    with new_folder(folder) as partial:
        # Not save_file, whose files only the owner can read.
        (partial / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
        write_json(partial / "config.json", settings)
        # Ids that `generate` must not choose, as no text has them.
        never = [Tokenizer.bos_id, Tokenizer.pad_id, Tokenizer.unk_id]
        generates = config.causal and classifier is None
        if (vocabulary := contents.vocabulary) is not None:
            never.append(vocabulary.mask_id)
            _write_vocabulary(partial, vocabulary, config, generates)
        if generates:
            generation = {**_SPECIAL_IDS, "suppress_tokens": never}
            write_json(partial / "generation_config.json", generation)
        if "auto_map" in settings:
            (partial / f"{_ADAPTER}.py").write_text(_code(), encoding="utf-8")
        card = model_card(folder.resolve().name, contents)
        (partial / "README.md").write_text(card, "utf-8")
    if not layout.in_transformers(config):
        return "transformers cannot load it: it has latents, or an untied head"
    return f"{kind} in Python: {layout.loading_call(config, classifier, repr(str(folder)))}"


_Form = tuple[dict[str, Any], dict[str, Tensor]]
"""The settings of config.json, and the weights."""


def _plain(contents: ModelContents, kind: str) -> _Form:
    config, head = contents.config, contents.classifier
    tensors = separated(contents.weights, layout.their_names(kind, contents.weights, config))
    own: dict[str, Any]
    if kind == "roberta":
        own = {
            "max_position_embeddings": config.max_positions + layout.UNUSED_POSITIONS,
            "type_vocab_size": 1,
            "hidden_act": "gelu",
            "classifier_dropout": head and head.dropout,
        }
        tensors[layout.TOKEN_TYPES] = torch.zeros(1, config.hidden_size)
    else:
        own = {
            "embedding_size": config.token_size,
            "num_hidden_groups": layout.albert_groups(config),
            "inner_group_num": 1,
            "hidden_act": layout.ALBERT_ACTIVATIONS[config.activation],
            "classifier_dropout_prob": config.dropout if head is None else head.dropout,
        }
        if config.token_size == config.hidden_size:
            tensors |= layout.identity(config.hidden_size)
    names = layout.SETTINGS[kind]
    settings = {theirs: getattr(config, ours) for ours, theirs in names.items()}
    return {**settings, **own, "tie_word_embeddings": True}, tensors


def _own(contents: ModelContents) -> _Form:
    config, vocabulary = contents.config, contents.vocabulary
    masks: list[int] = []
    if config.mask_embedding != "row":  # `<mask>` has no row, nor have tokens just before it
        last = config.vocab_size if vocabulary is None else vocabulary.mask_id
        masks += range(config.vocab_size, last + 1)
    settings = {
        **dataclasses.asdict(config),
        # transformers counts on a row for every id of the tokenizer.
        "vocab_size": config.vocab_size + len(masks),
        "mask_token_ids": masks,
    }
    if layout.in_transformers(config):
        tasks = ["CausalLM" if config.causal else "MaskedLM"]
        tasks += ["SequenceClassification", "TokenClassification", "QuestionAnswering"]
        settings["auto_map"] = {
            f"Auto{name}": f"{_ADAPTER}.Zeroclap{name.replace('ModelFor', 'For')}"
            for name in ("Config", "Model", *(f"ModelFor{task}" for task in tasks))
        }
    if (head := contents.classifier) is not None:
        settings["classifier_pooling"] = head.pooling
        settings["classifier_dropout"] = head.dropout
    tensors = {name: weight.contiguous() for name, weight in contents.weights.items()}
    for by_token in layout.BY_TOKEN & tensors.keys():
        empty = tensors[by_token].new_zeros(len(masks), *tensors[by_token].shape[1:])
        tensors[by_token] = torch.cat([tensors[by_token], empty])
    return settings, tensors


def _write_vocabulary(
    folder: Path, vocabulary: Tokenizer, config: ModelConfig, generates: bool
) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        folder: where to write.
        vocabulary: with our ids, which do not change.
        config: of the model; with segments, pairs of texts are laid out in these.
        generates: whether the model continues texts, so that these have no `</s>`.
    """
    from tokenizers import processors

    content = vocabulary.content()
    segments = config.segments > 0
    start, end = ("<s>", vocabulary.bos_id), ("</s>", vocabulary.eos_id)
    processor: processors.PostProcessor
    if generates:  # the text may go on
        processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [start, end])
    elif segments:
        last = min(1, config.segments - 1)
        pair = f"<s> $A </s> $B:{last} </s>:{last}"
        processor = processors.TemplateProcessing("<s> $A </s>", pair, [start, end])
    else:
        processor = processors.RobertaProcessing(end, start, add_prefix_space=False)
    content["post_processor"] = json.loads(processor.__getstate__())
    for token in content["added_tokens"]:
        # The space before a mask belongs to the predicted token, as in fill_mask.
        token["lstrip"] |= token["id"] == vocabulary.mask_id
    write_json(folder / FILE_NAME, content)
    settings: dict[str, Any] = {
        # The class that takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *["token_type_ids"] * segments, "attention_mask"],
        # decode() must return texts unchanged.
        "clean_up_tokenization_spaces": False,
        **_SPECIAL_TOKENS,
        **({"padding_side": "left"} if generates else {}),
        # Without it, a pipeline truncates nothing. A model that reads longer texts does so on
        # request.
        "model_max_length": config.max_positions,
    }
    write_json(folder / "tokenizer_config.json", settings)


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
