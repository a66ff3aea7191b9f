"""Model folders: weights, architecture and vocabulary, together or not at all."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from data_prep import tokenizer as tokenizers
from pretrain.config.load import dump
from pretrain.inference import model_folder
from pretrain.inference.export import export_checkpoint
from pretrain.model.classification import ClassificationConfig
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.causal import CausalLMConfig
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.sentence_pairs import SentencePairsConfig
from tests.pretrain.inference.contents import random_contents


@pytest.fixture
def tokenizer(corpus):
    return tokenizers.load(corpus)


@pytest.fixture
def saved(tokenizer, tmp_path):
    """A folder, and the model that it holds."""
    contents = random_contents("zero-clap", tokenizer, None, {"step": 7}, initial_beta=2.0)
    model = LanguageModel(contents.config)
    model.load_state_dict(contents.weights)
    folder = tmp_path / "deep" / "model"
    model_folder.save_model(folder, contents)
    return folder, model


def change(folder, **values):
    path = folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_model_comes_back_with_all_that_it_is(saved, tokenizer):
    folder, model = saved
    loaded = model_folder.load_model(folder)
    assert loaded.model.config == model.config
    assert not loaded.model.training
    assert loaded.tokenizer.digest() == tokenizer.digest()
    assert loaded.provenance == {"step": 7}
    ids, places = torch.arange(4, 24)[None], torch.arange(20)
    assert torch.equal(loaded.model(ids, None, places), model.eval()(ids, None, places))


def test_every_file_is_readable_as_the_umask_says(saved):
    folder, _ = saved
    umask = os.umask(0)
    os.umask(umask)
    for path in [folder, *folder.iterdir()]:
        assert path.stat().st_mode & 0o444 == 0o444 & ~umask, path


@pytest.mark.parametrize("part", ["model.json", "model.safetensors", "tokenizer.json"])
def test_a_part_that_is_missing_or_damaged_is_named(part, saved):
    folder, _ = saved
    path = folder / part
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=part):
        model_folder.load_model(folder)
    path.unlink()
    with pytest.raises(ValueError, match=part.removesuffix(".json")):
        model_folder.load_model(folder)
    path.write_bytes(content)
    model_folder.load_model(folder)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"format_version": 1, "architecture": 3}'])
def test_a_description_of_another_shape_is_named(text, saved):
    (saved[0] / "model.json").write_text(text)
    with pytest.raises(ValueError, match="model.json"):
        model_folder.load_model(saved[0])


TOO_MANY = r"describes .* its file has"
PRE_NORM = {"causal": True, "layer_norm": "pre"}


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({"hidden_size": 64}, r"does not fit model\.json"),
        ({"head": "roberta"}, r"does not fit model\.json"),
        ({"vocab_size": None}, r"missing \['vocab_size'\], unknown \[\]"),
        ({"rope_theta": 1e4}, r"missing \[\], unknown \['rope_theta'\]"),
        # more weights than the file has, of which none are made
        ({"num_layers": 10**8}, TOO_MANY),
        ({"num_layers": 10**8, "sharing": "all"}, "num_layers: 100,000,000; accepted: at most 10,"),
        ({"hidden_size": 2**24}, TOO_MANY),
        ({"max_positions": 10**12, "position": "learned"}, TOO_MANY),
        ({"head": "untied", "vocab_size": 10**5, "embedding_size": 1}, TOO_MANY),
        ({"segments": 10**12}, TOO_MANY),
        ({"latents": 10**12, "position": "none", **PRE_NORM}, TOO_MANY),
    ],
)
def test_an_architecture_that_does_not_fit_the_weights_is_refused(architecture, message, saved):
    folder, model = saved
    fields = {**model.config.to_dict(), **architecture}
    change(folder, architecture={name: v for name, v in fields.items() if v is not None})
    with pytest.raises(ValueError, match=rf"{folder}/model\..*{message}"):
        model_folder.load_model(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format_version": 99}, "format version 99 was written by a later version"),
        ({"adapters": {}}, "unknown key 'adapters'; known are arch"),
        ({"classification_heads": {"topic": {"labels": []}}}, "classes"),
        ({"classification_heads": {"topic": {"classes": 3, "temperature": 1.0}}}, "temperature"),
        ({"classification_heads": {"topic": 3}}, ""),
        ({"classification_heads": {"topic": {"classes": 10**12}}}, TOO_MANY),
        ({"classification_heads": {"topic": {"classes": 3}}}, "does not fit"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(values, message, saved):
    folder, _ = saved
    change(folder, **values)
    with pytest.raises(ValueError, match=rf"{folder}/model\..*{message}"):
        model_folder.load_model(folder)


def test_another_vocabulary_in_the_folder_is_refused(saved, other_vocabulary):
    folder, _ = saved
    (folder / "tokenizer.json").write_bytes((other_vocabulary / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="tokenizer.json is not the vocabulary"):
        model_folder.load_model(folder)


def test_a_folder_that_is_none_says_how_to_make_one(tmp_path):
    with pytest.raises(ValueError, match="zeroclap export"):
        model_folder.load_model(tmp_path)


@pytest.mark.parametrize("sharing", ["none", "attention", "feed-forward", "all"])
def test_the_weights_of_shared_layers_stand_in_the_file_once(sharing, tokenizer, tmp_path):
    overrides = {"sharing": sharing, "embedding_size": 16, "pair_head": True}
    contents = random_contents("albert", tokenizer, **overrides)
    model = LanguageModel(contents.config).eval()
    model.load_state_dict(contents.weights)
    model_folder.save_model(tmp_path / "model", contents)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(x.numel() for x in weights.values()) == sum(x.numel() for x in model.parameters())
    loaded = model_folder.load_model(tmp_path / "model").model
    ids, places = torch.arange(4, 24)[None], torch.arange(20)
    found, expected = (m(ids, None, places, with_pairs=True) for m in (loaded, model))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_the_objective_comes_back_with_its_settings(saved, tokenizer, tmp_path):
    folder, model = saved
    assert model_folder.load_model(folder).objective == MaskedLMConfig()
    section = {"name": "sentence-pairs", "pair_task": "nsp", "longest_ngram": 3}
    change(folder, provenance={"recipe": {"objective": section}})
    expected = SentencePairsConfig(pair_task="nsp", longest_ngram=3)
    assert model_folder.load_model(folder).objective == expected
    for wrong, message in (
        ({"name": "electra"}, "its objective 'electra' is not one of masked-lm, "),
        ({"name": "sentence-pairs", "pair_task": "sos"}, "objective.pair_task: 'sos' is not"),
    ):
        change(folder, provenance={"recipe": {"objective": wrong}})
        with pytest.raises(ValueError, match=f"{folder}: {message}"):
            model_folder.load_model(folder).objective  # noqa: B018


@pytest.mark.parametrize(
    ("variant", "overrides", "expected"),
    [
        ("causal-alibi", {}, CausalLMConfig()),
        ("albert", {"pair_head": True}, SentencePairsConfig()),
    ],
)
def test_a_model_without_a_record_has_the_objective_that_its_architecture_is_for(
    variant, overrides, expected, tokenizer, tmp_path
):
    model_folder.save_model(tmp_path / "model", random_contents(variant, tokenizer, **overrides))
    loaded = model_folder.load_model(tmp_path / "model")
    assert loaded.objective == expected
    assert loaded.packing == ("sentence-pairs" if overrides else "complete")


def test_classification_heads_come_back_under_their_names(tokenizer, tmp_path):
    configs = {
        "topic": ClassificationConfig(3, ("a", "b", "c"), "mean", 0.1),
        "score": ClassificationConfig(1),
    }
    contents = random_contents("zero-clap", tokenizer, configs)
    model_folder.save_model(tmp_path / "with heads", contents)
    loaded = model_folder.load_model(tmp_path / "with heads")
    assert {name: head.config for name, head in loaded.classification_heads.items()} == configs
    assert not any(head.training for head in loaded.classification_heads.values())
    again = loaded.contents()
    assert (again.config, again.classification_heads) == (contents.config, configs)
    assert again.weights.keys() == contents.weights.keys()
    assert all(torch.equal(again.weights[key], w) for key, w in contents.weights.items())


def test_a_model_without_a_vocabulary_takes_ids_and_says_so_when_asked_for_text(tmp_path):
    folder = tmp_path / "without"
    model_folder.save_model(folder, random_contents("zero-clap", None, rows=50))
    loaded = model_folder.load_model(folder)
    assert loaded.vocabulary is None
    with pytest.raises(ValueError, match="without: has no vocabulary"):
        loaded.tokenizer  # noqa: B018


@pytest.mark.parametrize("key", ["provenance", "pretrained"])
def test_a_converted_or_fine_tuned_model_knows_the_training_of_the_model_it_was_made_from(
    saved, key
):
    folder, _ = saved
    of_training = {"recipe": {"objective": {"name": "masked-lm", "probability": 0.3}}, "step": 9}
    change(folder, provenance={"step": 7, key: {"max_tokens": 2048, "pretrained": of_training}})
    loaded = model_folder.load_model(folder)
    assert loaded.objective == MaskedLMConfig(probability=0.3)
    assert [loaded.recorded(name) for name in ("step", "max_tokens")] == [7, 2048]
    assert loaded.recorded("packing") is None


def test_a_run_without_checkpoints_says_so(recipe, tmp_path):
    config = recipe.load(tmp_path / "run")
    (tmp_path / "run").mkdir()
    dump(config, tmp_path / "run" / "run.yaml")
    for step, message in ((None, "has no checkpoint yet"), (7, "has no checkpoint of step 7")):
        with pytest.raises(ValueError, match=rf"run: {message}; --step may be 0, where 0 is the"):
            export_checkpoint(tmp_path / "run", tmp_path / "model", step)
