"""Tiny models in folders, ours and transformers', and the comparison of what both compute."""

import copy
import functools
import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from pretrain.convert.model_folder import build
from pretrain.convert.writing import save_model
from pretrain.model import presets
from pretrain.model.classification import ClassificationConfig, Classifier
from tests.pretrain.convert.contents import random_contents

SMALL = {"pair_head": True, "embedding_size": 16}
MODELS = {
    **{name: (name, {}) for name in presets.VARIANTS if not name.startswith("char-")},
    "albert-groups": ("albert", {**SMALL, "num_layers": 4, "layer_groups": 2}),
    "albert-nothing-shared": ("albert", {"pair_head": True, "sharing": "none"}),
    "albert-gelu": ("albert", {"embedding_size": 16, "activation": "gelu", "segments": 3}),
    "albert-one-segment": ("albert", {"segments": 1}),
    "shared-attention": ("albert", {**SMALL, "sharing": "attention"}),
    "shared-feed-forward": ("albert", {"sharing": "feed-forward", "pair_head": True}),
    "alibi-pairs": ("albert", {**SMALL, "position": "alibi"}),
}
"""What transformers can load: a variant, and what is changed in it."""
HEADS = {
    "topic": ClassificationConfig(3, ("art", "law", "sport"), "first", 0.1),
    "likeness": ClassificationConfig(1),
    "average": ClassificationConfig(2, (), "mean"),
}
TINY = {  # settings of RobertaConfig and AlbertConfig
    **{"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 64, "max_position_embeddings": 42, "layer_norm_eps": 1e-5},
    **{"type_vocab_size": 1, "pad_token_id": 1},
}
TINY_ALBERT = {
    **{**TINY, "embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 2},
    **{"type_vocab_size": 2, "max_position_embeddings": 40},
}


@pytest.fixture(scope="module")
def transformers(tmp_path_factory):
    """The library, offline, with a cache of its own; its warnings at import are not ours."""
    home = tmp_path_factory.mktemp("hugging-face")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(sys, "path", [*sys.path])  # remote code is found by an entry in it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library = pytest.importorskip("transformers")
            from transformers import dynamic_module_utils
        # Another test may have imported the library before the variables were set.
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(home / "modules"))
        patch.setattr(dynamic_module_utils, "get_imports", imports_of(dynamic_module_utils))
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        yield library
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]  # they are in this cache


def imports_of(dynamic_module_utils):
    """What finds the imports of a model's code, slowly: once for each content."""
    found, find = {}, dynamic_module_utils.get_imports

    def get_imports(path):
        content = Path(path).read_bytes()
        if content not in found:
            found[content] = find(path)
        return found[content]

    return get_imports


@pytest.fixture(scope="module")
def exported(tokenizer, tmp_path_factory):
    """`exported(name, head)`: a folder of one of MODELS, and what it was made of; made once."""

    @functools.cache
    def make(name, head=None, vocabulary=tokenizer):
        variant, overrides = MODELS[name]
        overrides = {"initial_beta": 3.0, **overrides}
        contents = random_contents(variant, vocabulary, HEADS.get(head), {"step": 7}, **overrides)
        folder = tmp_path_factory.mktemp("exports") / f"{name}-{head}"
        call = save_model(folder, contents)
        return SimpleNamespace(
            folder=folder, contents=contents, ours=build(folder, contents), call=call
        )

    return make


@pytest.fixture
def theirs(transformers):
    """`theirs(kind, **settings)`: a random model of transformers, no weight of it still zero."""

    def make(kind, **settings):
        torch.manual_seed(3)
        name = kind.partition("For")[0].removesuffix("Model")
        tiny = TINY_ALBERT if name == "Albert" else TINY
        config = getattr(transformers, f"{name}Config")(**{**tiny, **settings})
        model = getattr(transformers, kind)(config).eval()
        for weight in model.parameters():
            weight.data += 0.05 * torch.randn_like(weight)
        return model

    return make


def task_of(name):
    """What the language model of one of MODELS is called in transformers."""
    return "ForCausalLM" if name.startswith("causal-") else "ForMaskedLM"


def loaded(transformers, folder, task="ForMaskedLM", **settings):
    """The model of a folder; transformers found exactly its weights."""
    return copy.deepcopy(_loaded(transformers, folder, task, **settings))


@functools.cache
def _loaded(transformers, folder, task, **settings):
    auto = getattr(transformers, f"AutoModel{task}")
    model, report = auto.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **settings
    )
    assert not {name: what for name, what in report.items() if what}
    return model


def change(path, **values):
    """Set values of a JSON file; None removes."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def batch(vocab_size):
    """Ids and an integer mask: half of the second row is padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, vocab_size, (2, 24), generator=generator)
    ids[:, 0] = 0
    ids[0, 5] = vocab_size - 1
    mask = torch.ones(2, 24, dtype=torch.long)
    ids[1, 12:], mask[1, 12:] = 1, 0
    return ids, mask


def our_logits(ours, ids, mask=None, segments=None):
    """Our logits, [B, T, V] or [B, C], and those of the pairs, or None.

    The logit of a mask without a row is the lowest number, as in transformers.
    """
    if ours.classifier:
        return Classifier(ours.model.encoder, ours.classifier)(ids, mask, segments), None
    places, with_pairs = torch.arange(ids.numel()), ours.model.config.pair_head
    found = ours.model(ids, mask, places, segment_ids=segments, with_pairs=with_pairs)
    logits, pairs = found if with_pairs else (found, None)
    masks = int(ours.model.config.mask_embedding == "zero")
    logits = F.pad(logits, (0, masks), value=torch.finfo(logits.dtype).min)
    return logits.unflatten(0, ids.shape), pairs


def their_logits(theirs, **inputs):
    found = theirs(**inputs)
    logits = found["prediction_logits" if "prediction_logits" in found else "logits"]
    return logits, found.get("pair_logits", found.get("sop_logits"))


@torch.no_grad()
def check_same_logits(ours, theirs):
    """In segments and without, with padding on either side and without.

    ALBERT of transformers counts positions from the left, padding included, and its classifiers
    read the first token.
    """
    ids, mask = batch(theirs.config.vocab_size)
    halves = (torch.arange(24) > 6).long().expand_as(ids)
    name = type(theirs).__name__
    either_side = name.startswith("Zeroclap") or name == "RobertaForMaskedLM"
    for types in (None, halves) if ours.model.config.segments > 1 else (None,):
        for real in (mask, mask.bool(), mask.float(), None):
            logits, pairs = our_logits(ours, ids, None if real is None else mask.bool(), types)
            inputs = {"input_ids": ids, "attention_mask": real, "token_type_ids": types}
            found, found_pairs = their_logits(theirs, **inputs)
            whole = 0 if real is None else ...  # the row that has no padding
            places = whole if logits.dim() == 2 or real is None else mask.bool()
            close(found[places], logits[places])
            if pairs is not None:
                close(found_pairs[whole], pairs[whole])
            if either_side and real is not None:
                turned = {k: v if v is None else v.roll(12, dims=1) for k, v in inputs.items()}
                found, found_pairs = their_logits(theirs, **turned)
                one, other = found[1], logits[1]
                close(*((one, other) if logits.dim() == 2 else (one[12:], other[:12])))
                if pairs is not None:
                    close(found_pairs[1], pairs[1])
