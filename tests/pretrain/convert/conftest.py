"""Exports of tiny models, and the library that reads them."""

import copy
import functools
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_prep import tokenizer as tokenizers
from pretrain.convert.model_folder import build
from pretrain.convert.writing import save_model
from pretrain.model import presets
from pretrain.model.classification import ClassificationConfig
from tests.pretrain.convert.contents import random_contents

EXPORTED = [name for name in presets.VARIANTS if not name.startswith("char-")]
"""Variants that transformers can load."""
HEADS = {
    "topic": ClassificationConfig(3, ("art", "law", "sport"), "first", 0.1),
    "likeness": ClassificationConfig(1),
    "average": ClassificationConfig(2, (), "mean"),
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
def tokenizer(corpus):
    return tokenizers.load(corpus)


@pytest.fixture(scope="module")
def exported(tokenizer, tmp_path_factory):
    """`exported(variant, classifier, **overrides)`: a folder and what it was made of; made once."""

    @functools.cache
    def make(variant, classifier=None, **overrides):
        contents, modules = random_model(variant, tokenizer, classifier, **overrides)
        folder = tmp_path_factory.mktemp("exports") / f"{variant}-{classifier}"
        call = save_model(folder, contents)
        return SimpleNamespace(
            folder=folder,
            contents=contents,
            model=modules.model,
            classifier=modules.classifier,
            call=call,
        )

    return make


def random_model(variant, tokenizer, classifier=None, **overrides):
    """A model whose weights all differ from their initial values, and its modules."""
    overrides = {"initial_beta": 3.0, **overrides}
    contents = random_contents(variant, tokenizer, HEADS.get(classifier), {"step": 7}, **overrides)
    return contents, build(Path(), contents)


def task_of(variant):
    """What the language model of a variant is called in transformers."""
    return "ForCausalLM" if variant.startswith("causal-") else "ForMaskedLM"


def two_segments(ids):
    """The first seven tokens of each row in segment 0, the others in segment 1."""
    return (torch.arange(ids.shape[1]) > 6).long().expand_as(ids)


def batch(vocab_size):
    """Ids, an integer mask, and flat positions of real tokens: one row is half padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, vocab_size, (2, 24), generator=generator)
    ids[:, 0] = 0
    ids[0, 5] = vocab_size - 1
    mask = torch.ones(2, 24, dtype=torch.long)
    ids[1, 12:], mask[1, 12:] = 1, 0
    return ids, mask, mask.flatten().nonzero().flatten()


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
