"""Model folders: weights, architecture and vocabulary, together or not at all."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_prep import tokenizer as tokenizers
from pretrain.config.load import dump
from pretrain.convert.export import export_checkpoint
from pretrain.convert.model_folder import load_model
from pretrain.convert.reading import read_folder
from pretrain.convert.writing import save_model
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.causal import CausalLMConfig
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.sentence_pairs import SentencePairsConfig
from tests.hub import hub_of
from tests.pretrain.convert.contents import random_contents


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
    save_model(folder, contents)
    return folder, model


def change(folder, **values):
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: v for name, v in content.items() if v is not None}))


def test_a_model_comes_back_with_all_that_it_is(saved, tokenizer):
    folder, model = saved
    loaded = load_model(folder)
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


@pytest.mark.parametrize("part", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_part_that_is_damaged_or_missing_is_named(part, saved):
    folder, _ = saved
    path = folder / part
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"[1]"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=part):
            load_model(folder)
    path.unlink()
    if part == "tokenizer.json":
        assert load_model(folder).vocabulary is None
    else:
        with pytest.raises(ValueError, match=part):
            load_model(folder)
    path.write_bytes(content)
    load_model(folder)


TOO_MANY = r"config.json: describes .* its file has"


@pytest.mark.parametrize(
    "architecture",
    [
        {"num_layers": 10**8},
        {"hidden_size": 2**24},
        {"max_positions": 10**12, "position": "learned"},
        {"head": "untied", "vocab_size": 10**5, "embedding_size": 1, "mask_token_ids": [99_999]},
        {"segments": 10**12},
        {"latents": 10**12, "position": "none", "causal": True, "layer_norm": "pre"},
    ],
)
def test_more_weights_than_the_file_has_are_refused_before_any_is_made(architecture, saved):
    change(saved[0], **architecture)
    with pytest.raises(ValueError, match=TOO_MANY):
        load_model(saved[0])


def test_more_layers_than_any_model_has_are_refused(saved):
    """Layers that share their weights have none in the file."""
    change(saved[0], num_layers=10**8, sharing="all")
    with pytest.raises(ValueError, match="num_layers: 100,000,000; accepted: at most 10,000"):
        load_model(saved[0])


def test_a_vocabulary_of_another_size_is_left_out(saved, other_vocabulary):
    folder, _ = saved
    (folder / "tokenizer.json").write_bytes((other_vocabulary / "tokenizer.json").read_bytes())
    (note,) = read_folder(folder).notes
    assert "the vocabulary was left out" in note


def test_a_folder_that_is_none_says_how_to_make_one(tmp_path):
    with pytest.raises(ValueError, match="has no config.json .*zeroclap export"):
        load_model(tmp_path)


def test_a_model_of_the_hub_is_fetched(saved, tmp_path, monkeypatch, capsys):
    folder, model = saved
    (tmp_path / "hub" / "someone").mkdir(parents=True)
    folder.rename(tmp_path / "hub" / "someone" / "model")
    monkeypatch.chdir(tmp_path)
    with hub_of(tmp_path / "hub") as asked:
        loaded = load_model(Path("someone/model"))
        assert loaded.model.config == model.config
        assert not any("README" in path or path.endswith(".py") for path in asked)
        with pytest.raises(ValueError, match="someone/other: no such file, and not from the Hugg"):
            load_model(Path("someone/other"))


@pytest.mark.parametrize("sharing", ["none", "attention", "feed-forward", "all"])
def test_the_weights_of_shared_layers_stand_in_the_file_once(sharing, tokenizer, tmp_path):
    overrides = {"sharing": sharing, "embedding_size": 16, "pair_head": True}
    contents = random_contents("albert", tokenizer, **overrides)
    model = LanguageModel(contents.config).eval()
    model.load_state_dict(contents.weights)
    save_model(tmp_path / "model", contents)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(x.numel() for x in weights.values()) == sum(x.numel() for x in model.parameters())
    loaded = load_model(tmp_path / "model").model
    ids, places = torch.arange(4, 24)[None], torch.arange(20)
    found, expected = (m(ids, None, places, with_pairs=True) for m in (loaded, model))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_the_objective_comes_back_with_its_settings(saved, tokenizer, tmp_path):
    folder, model = saved
    assert load_model(folder).objective == MaskedLMConfig()
    section = {"name": "sentence-pairs", "pair_task": "nsp", "longest_ngram": 3}
    change(folder, provenance={"recipe": {"objective": section}})
    expected = SentencePairsConfig(pair_task="nsp", longest_ngram=3)
    assert load_model(folder).objective == expected
    for wrong, message in (
        ({"name": "electra"}, "its objective 'electra' is not one of masked-lm, "),
        ({"name": "sentence-pairs", "pair_task": "sos"}, "objective.pair_task: 'sos' is not"),
    ):
        change(folder, provenance={"recipe": {"objective": wrong}})
        with pytest.raises(ValueError, match=f"{folder}: {message}"):
            load_model(folder).objective  # noqa: B018


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
    save_model(tmp_path / "model", random_contents(variant, tokenizer, **overrides))
    loaded = load_model(tmp_path / "model")
    assert loaded.objective == expected
    assert loaded.packing == ("sentence-pairs" if overrides else "complete")


def test_a_model_without_a_vocabulary_takes_ids_and_says_so_when_asked_for_text(tmp_path):
    folder = tmp_path / "without"
    save_model(folder, random_contents("zero-clap", None, rows=50))
    loaded = load_model(folder)
    assert loaded.vocabulary is None
    with pytest.raises(ValueError, match="without: has no vocabulary"):
        loaded.tokenizer  # noqa: B018


def test_a_fine_tuned_model_knows_the_training_of_the_model_it_was_made_from(saved):
    folder, _ = saved
    of_training = {"recipe": {"objective": {"name": "masked-lm", "probability": 0.3}}, "step": 9}
    change(
        folder,
        provenance={"step": 7, "pretrained": {"max_tokens": 2048, "pretrained": of_training}},
    )
    loaded = load_model(folder)
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


def test_tokens_that_a_user_added_come_back_as_they_were(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path / "tokenizer.json")
    added = {"content": "<ent>", "lstrip": True}
    listed = {"additional_special_tokens": [added, "[X]"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(listed))
    words = tokenizers.load(tmp_path)
    save_model(tmp_path / "model", random_contents("baseline", words))
    assert load_model(tmp_path / "model").tokenizer.digest() == words.digest()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = ["the  <ent> value[X]", "of <ent>"]
    ours = [ids.tolist() for ids in words.encode_batch(texts)]
    assert theirs(texts, add_special_tokens=False)["input_ids"] == ours
    assert all(words.vocab_size - 3 in ids for ids in ours)
