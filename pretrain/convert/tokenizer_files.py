"""Write and read the vocabularies of model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_prep import tokenizer as tokenizers
from data_prep.common.files import read_json, write_json
from data_prep.tokenizer import Tokenizer
from pretrain.model.config import ModelConfig

_SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}


def write_vocabulary(
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
    write_json(folder / tokenizers.FILE_NAME, content)
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


def read_vocabulary(
    folder: Path, kind: str, config: ModelConfig, notes: list[str]
) -> tuple[Tokenizer | None, list[int]]:
    """Read the vocabulary of a folder.

    Args:
        folder: of a model.
        kind: its model_type.
        config: of the model.
        notes: receives a sentence if the vocabulary cannot be used.

    Returns:
        The vocabulary; and where its special ids were changed, the folder's row for each row of
        ours, else an empty list.

    Raises:
        ValueError: tokenizer.json is not valid JSON.
    """
    file = folder / tokenizers.FILE_NAME
    pair = [folder / name for name in ("vocab.json", "merges.txt")]
    if file.is_file():
        read_json(file)  # a damaged one is refused, one with other special ids is left out
    elif not all(path.is_file() for path in pair):
        return None, []
    try:
        vocabulary, order = tokenizers.load_with_order(folder)
        if kind == "roberta" and order and order[Tokenizer.pad_id] != Tokenizer.pad_id:
            # Its pad_token_id, from which positions are counted, is another token's.
            raise ValueError(f"special ids: <pad> has {order[1]}, the model's pad_token_id is 1")
    except ValueError as error:
        notes.append(f"the vocabulary was left out: {error}")
        return None, []
    ids, rows = vocabulary.vocab_size, config.vocab_size
    if ids > rows if config.mask_embedding == "row" else vocabulary.mask_id < rows:
        notes.append(f"the vocabulary was left out: it has {ids} ids, the model {rows} rows")
        return None, []
    if order and kind != "albert":
        notes.append(
            f"the ids were put in this project's order, in which <mask> has the last, {ids - 1} "
            f"(here {order[-1]}), and <s> has 0 (here {order[0]}); the rows of the tokens follow"
        )
    return vocabulary, order and [*order, *range(ids, rows)]
