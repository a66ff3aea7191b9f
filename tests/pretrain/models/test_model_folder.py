"""Model folders: weights, architecture and vocabulary, together or not at all."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from data_prep import tokenizer as tokenizers
from pretrain.config.load import dump
from pretrain.model import presets
from pretrain.model.classification import ClassificationConfig
from pretrain.model.config import ModelConfig
from pretrain.model.heads import ClassificationHead
from pretrain.model.language_model import LanguageModel
from pretrain.models import model_folder
from pretrain.objectives.causal import CausalLMConfig
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.sentence_pairs import SentencePairsConfig


@pytest.fixture
def tokenizer(corpus):
    return tokenizers.load(corpus)


@pytest.fixture
def saved(tokenizer, tmp_path):
    """A folder, and the model that it holds."""
    torch.manual_seed(0)
    config = presets.build("tiny", "zero-clap", tokenizer.vocab_size, {"initial_beta": 2.0})
    model = LanguageModel(config)
    folder = tmp_path / "deep" / "model"
    save(folder, model, tokenizer, {"step": 7})
    return folder, model


def save(folder, model, tokenizer, provenance):
    contents = model_folder.ModelContents(model.config, model.state_dict(), tokenizer, provenance)
    model_folder.save(folder, contents)


def change(folder, **values):
    path = folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_model_comes_back_with_all_that_it_is(saved, tokenizer):
    folder, model = saved
    loaded = model_folder.load(folder)
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


def test_a_folder_with_something_in_it_is_not_written_into(saved, tokenizer):
    folder, model = saved
    before = (folder / "model.json").read_bytes()
    with pytest.raises(ValueError, match="model: is not empty"):
        save(folder, model, tokenizer, {})
    assert (folder / "model.json").read_bytes() == before


@pytest.mark.parametrize("part", ["model.json", "model.safetensors", "tokenizer.json"])
def test_a_part_that_is_missing_or_damaged_is_named(part, saved):
    folder, _ = saved
    path = folder / part
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=part):
        model_folder.load(folder)
    path.unlink()
    with pytest.raises(ValueError, match=part.removesuffix(".json")):
        model_folder.load(folder)
    path.write_bytes(content)
    model_folder.load(folder)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"format_version": 1, "architecture": 3}'])
def test_a_description_of_another_shape_is_named(text, saved):
    folder, _ = saved
    (folder / "model.json").write_text(text)
    with pytest.raises(ValueError, match="model.json"):
        model_folder.load(folder)


def test_a_description_that_does_not_fit_the_weights_is_refused(saved):
    folder, model = saved
    architecture = model.config.to_dict()
    change(folder, architecture={**architecture, "hidden_size": 64})
    with pytest.raises(ValueError, match="model.safetensors: does not fit model.json"):
        model_folder.load(folder)
    change(folder, architecture={**architecture, "head": "roberta"})
    with pytest.raises(ValueError, match="model.safetensors: does not fit model.json"):
        model_folder.load(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"num_layers": 10**8},
        {"num_layers": 10**8, "sharing": "all"},
        {"hidden_size": 2**24},
        {"max_positions": 10**12, "position": "learned"},
        {"position_offset": 10**12, "position": "learned"},
        {"head": "untied", "vocab_size": 10**5, "embedding_size": 1, "position": "learned"},
        {"segments": 10**12},
        {"latents": 10**12, "causal": True, "layer_norm": "pre", "position": "none"},
        {"classes": 10**12},
    ],
)
def test_more_weights_than_the_file_has_are_refused_before_they_are_made(values, saved):
    folder, model = saved
    classes = values.get("classes")
    heads = {"topic": {"classes": classes}} if classes else {}
    more = {} if classes else values
    change(folder, architecture={**model.config.to_dict(), **more}, classification_heads=heads)
    message = "its file has|num_layers: 100,000,000; accepted: at most 10,000"
    with pytest.raises(ValueError, match=rf"model\.json: .*({message})"):
        model_folder.load(folder)


def test_a_folder_of_an_earlier_version_is_read_with_the_defaults_of_later_fields(saved):
    folder, model = saved
    architecture = model.config.to_dict()
    for field in ("alibi", "layer_norm_epsilon"):
        assert architecture.pop(field) == getattr(ModelConfig(vocab_size=1), field)
        change(folder, architecture=architecture)
        assert model_folder.load(folder).model.config == model.config


def test_a_folder_without_a_size_or_with_a_field_of_a_later_version_is_refused(saved):
    folder, model = saved
    architecture = model.config.to_dict()
    change(folder, architecture={k: v for k, v in architecture.items() if k != "vocab_size"})
    with pytest.raises(ValueError, match=r"model.json: .*missing \['vocab_size'\], unknown \[\]"):
        model_folder.load(folder)
    change(folder, architecture={**architecture, "rope_theta": 1e4})
    with pytest.raises(ValueError, match=r"model.json: .*missing \[\], unknown \['rope_theta'\]"):
        model_folder.load(folder)
    change(folder, architecture=architecture, adapters={})
    with pytest.raises(ValueError, match="model.json: unknown key 'adapters'; known are arch"):
        model_folder.load(folder)


def test_another_vocabulary_in_the_folder_is_refused(saved, other_vocabulary):
    folder, _ = saved
    (folder / "tokenizer.json").write_bytes((other_vocabulary / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="tokenizer.json is not the vocabulary"):
        model_folder.load(folder)


def test_a_format_from_the_future_is_refused(saved):
    folder, _ = saved
    change(folder, format_version=99)
    with pytest.raises(ValueError, match="format version 99 was written by a later version"):
        model_folder.load(folder)


def test_a_folder_that_is_none_says_how_to_make_one(tmp_path):
    with pytest.raises(ValueError, match="zeroclap export"):
        model_folder.load(tmp_path)


@pytest.mark.parametrize("sharing", ["none", "attention", "feed-forward", "all"])
def test_the_weights_of_shared_layers_stand_in_the_file_once(sharing, tokenizer, tmp_path):
    overrides = {"sharing": sharing, "embedding_size": 16, "pair_head": True}
    config = presets.build("tiny", "albert", tokenizer.vocab_size, overrides)
    torch.manual_seed(0)
    model = LanguageModel(config).eval()
    save(tmp_path / "model", model, tokenizer, {})
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(x.numel() for x in weights.values()) == sum(x.numel() for x in model.parameters())
    loaded = model_folder.load(tmp_path / "model").model
    ids, places = torch.arange(4, 24)[None], torch.arange(20)
    found, expected = (m(ids, None, places, with_pairs=True) for m in (loaded, model))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_the_objective_comes_back_with_its_settings(saved, tokenizer, tmp_path):
    folder, model = saved
    assert model_folder.load(folder).objective == MaskedLMConfig()
    section = {"name": "sentence-pairs", "pair_task": "nsp", "longest_ngram": 3}
    change(folder, provenance={"recipe": {"objective": section}})
    expected = SentencePairsConfig(pair_task="nsp", longest_ngram=3)
    assert model_folder.load(folder).objective == expected
    for wrong, message in (
        ({"name": "electra"}, "its objective 'electra' is not one of masked-lm, "),
        ({"name": "sentence-pairs", "pair_task": "sos"}, "objective.pair_task: 'sos' is not"),
    ):
        change(folder, provenance={"recipe": {"objective": wrong}})
        with pytest.raises(ValueError, match=f"{folder}: {message}"):
            model_folder.load(folder).objective  # noqa: B018


def test_a_pair_head_without_a_recipe_is_for_sentence_order(tokenizer, tmp_path):
    config = presets.build("tiny", "albert", tokenizer.vocab_size, {"pair_head": True})
    save(tmp_path / "model", LanguageModel(config), tokenizer, {})
    loaded = model_folder.load(tmp_path / "model")
    assert loaded.objective == SentencePairsConfig()
    assert loaded.packing == "sentence-pairs"


def test_classification_heads_come_back_under_their_names(saved, tokenizer, tmp_path):
    _, model = saved
    configs = {
        "topic": ClassificationConfig(3, ("a", "b", "c"), "mean", 0.1),
        "score": ClassificationConfig(1),
    }
    heads = {name: ClassificationHead(32, config) for name, config in configs.items()}
    weights = {
        f"classification_heads.{name}.{key}": value
        for name, head in heads.items()
        for key, value in head.state_dict().items()
    }
    folder = tmp_path / "with heads"
    everything = {**model.state_dict(), **weights}
    contents = model_folder.ModelContents(model.config, everything, tokenizer, {}, configs)
    model_folder.save(folder, contents)
    loaded = model_folder.load(folder)
    assert {name: head.config for name, head in loaded.classification_heads.items()} == configs
    features = torch.randn(2, 5, 32)
    for name, head in loaded.classification_heads.items():
        assert not head.training
        assert torch.equal(head(features, None), heads[name].eval()(features, None))
    again = loaded.contents()
    assert (again.config, again.classification_heads) == (model.config, configs)
    assert again.weights.keys() == everything.keys()
    assert all(torch.equal(again.weights[key], value) for key, value in everything.items())


@pytest.mark.parametrize(
    "heads",
    [
        {"topic": {"labels": []}},
        {"topic": {"classes": 3, "temperature": 1.0}},
        {"topic": 3},
        {"topic": ClassificationConfig(3).to_dict()},
    ],
)
def test_a_head_that_does_not_fit_is_named(heads, saved):
    folder, _ = saved
    change(folder, classification_heads=heads)
    with pytest.raises(ValueError, match=r"model\.json"):
        model_folder.load(folder)


def test_a_head_of_an_earlier_version_has_the_defaults_of_later_fields():
    assert ClassificationConfig.from_dict({"classes": 3}) == ClassificationConfig(3)
    written = ClassificationConfig(2, ("no", "yes"), "mean", 0.1).to_dict()
    del written["dropout"]
    assert ClassificationConfig.from_dict(written) == ClassificationConfig(2, ("no", "yes"), "mean")


def test_a_model_without_a_vocabulary_takes_ids_and_says_so_when_asked_for_text(saved, tmp_path):
    _, model = saved
    folder = tmp_path / "without"
    save(folder, model, None, {})
    loaded = model_folder.load(folder)
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
    loaded = model_folder.load(folder)
    assert loaded.objective == MaskedLMConfig(probability=0.3)
    assert [loaded.recorded(name) for name in ("step", "max_tokens")] == [7, 2048]
    assert loaded.recorded("packing") is None


def test_a_causal_model_without_a_record_has_the_causal_objective(tokenizer, tmp_path):
    config = presets.build("tiny", "causal-alibi", tokenizer.vocab_size, {})
    save(tmp_path / "model", LanguageModel(config), tokenizer, {})
    assert model_folder.load(tmp_path / "model").objective == CausalLMConfig()


def test_a_run_without_checkpoints_says_so(recipe, tmp_path):
    config = recipe.load(tmp_path / "run")
    (tmp_path / "run").mkdir()
    dump(config, tmp_path / "run" / "run.yaml")
    for step, message in ((None, "has no checkpoint yet"), (7, "has no checkpoint of step 7")):
        with pytest.raises(
            ValueError, match=rf"run: {message}; accepted: --step 0, where 0 is the"
        ):
            model_folder.export(tmp_path / "run", tmp_path / "model", step)
