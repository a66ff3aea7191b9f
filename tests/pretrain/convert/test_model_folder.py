"""Model folders: what they hold comes back, in every layout, or is refused by name."""

import ast
import dataclasses
import functools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep import tokenizer as tokenizers
from pretrain import model as sources
from pretrain.convert.model_folder import build, load_model
from pretrain.convert.names import ALBERT_PROJECTION, TOKEN_TYPES
from pretrain.convert.reading import read_folder
from pretrain.convert.writing import save_model
from pretrain.model import presets
from pretrain.model.config import ModelConfig
from pretrain.objectives.causal import CausalLMConfig
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.sentence_pairs import SentencePairsConfig
from tests.hub import hub_of
from tests.pretrain.convert.conftest import change, check_same_logits, our_logits
from tests.pretrain.convert.contents import random_contents


@pytest.fixture
def copied(exported, tmp_path):
    """`copied(name, head)`: a folder of one of MODELS, to be spoiled."""

    def copy(name="zero-clap", head=None):
        return shutil.copytree(exported(name, head).folder, tmp_path / "model")

    return copy


# --- what comes back -----------------------------------------------------------------------------

ALONE = {
    **{"hidden_size": 64, "embedding_size": 16, "num_layers": 4, "num_heads": 2},
    **{"intermediate_size": 48, "sharing": "feed-forward", "max_positions": 50},
    **{"position_offset": 1, "position": "sinusoidal", "alibi": "symmetric"},
    **{"alibi_slopes": "trained", "causal": True, "segments": 3, "pair_head": True},
    **{"layer_norm": "pre", "activation": "gelu-tanh", "gated": True, "biases": False},
    **{"local_window": 2, "head": "clap", "normalize_embeddings": True, "dropout": 0.2},
    **{"embedding_scale": "sqrt-hidden", "embedding_norm": False, "mask_embedding": "zero"},
    **{"attention_dropout": 0.3, "layer_norm_epsilon": 0.3, "initial_weights": "truncated-normal"},
}
FIELDS = {name: {name: value} for name, value in ALONE.items()} | {
    "vocab_size": {"rows": 61},
    "layer_groups": {"sharing": "all", "num_layers": 4, "layer_groups": 2},
    "final_norm": {"final_norm": True, "layer_norm": "pre"},
    "global_every": {"global_every": 2, "local_window": 2},
    "initial_beta": {"initial_beta": 2, "head": "clap"},
    "latents": {
        **{"latents": 2, "causal": True, "layer_norm": "pre"},
        **{"sharing": "none", "position": "learned"},
    },
}
"""Another value of each field, with what it needs."""
OPPOSITES = {
    ("albert", "activation"): {"activation": "gelu"},
    ("albert", "initial_weights"): {"initial_weights": "normal"},
}
"""Where a variant has the value above."""


def test_every_field_is_tried():
    assert FIELDS.keys() == {field.name for field in dataclasses.fields(ModelConfig)}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("variant", ["baseline", "albert", "alibi"])
@torch.no_grad()
def test_a_changed_field_comes_back(variant, name, tmp_path):
    """What comes back was read from config.json, and computes the same."""
    values = {"rows": 60, **OPPOSITES.get((variant, name), FIELDS[name])}
    contents = random_contents(variant, None, None, {"step": 7}, scale=0.3, **values)
    config, weights = contents.config, contents.weights
    assert getattr(config, name) != getattr(presets.build("tiny", variant, 60, {}), name)
    save_model(tmp_path / "model", contents)
    assert not any((tmp_path / "model").glob("tokenizer*"))
    back = read_folder(tmp_path / "model")
    assert (back.provenance, back.notes, back.vocabulary) == ({"step": 7}, (), None)
    assert back.weights.keys() == weights.keys()
    assert all(torch.equal(back.weights[key], weight) for key, weight in weights.items())
    ids = torch.tensor([[0, 7, 9, 2, 21, 22, 2], [0, 30, 59, 8, 5, 2, 2]])
    halves = (torch.arange(7) > 3).long().expand_as(ids) if config.segments else None
    found, expected = (our_logits(build(Path(), x), ids, None, halves) for x in (back, contents))
    assert torch.equal(found[0], expected[0])
    assert expected[1] is None or torch.equal(found[1], expected[1])
    for field in ("dropout", "attention_dropout", "max_positions"):  # read in training
        assert getattr(back.config, field) == getattr(config, field)


def test_reading_a_folder_executes_nothing(copied, exported):
    folder = copied()
    for path in folder.glob("*.py"):
        path.write_text("raise RuntimeError('read executes nothing')")
    back = load_model(folder)
    assert back.model.config == exported("zero-clap").contents.config
    assert back.tokenizer.digest() == exported("zero-clap").contents.vocabulary.digest()
    assert not back.model.training


def test_every_file_is_readable_as_the_umask_says(exported):
    umask = os.umask(0)
    os.umask(umask)
    folder = exported("zero-clap").folder
    for path in [folder, *folder.iterdir()]:
        assert path.stat().st_mode & 0o444 == 0o444 & ~umask, path


def test_an_export_is_one_file_of_the_model_s_own_sources(exported):
    (file,) = exported("zero-clap").folder.glob("*.py")
    code = file.read_text()
    assert "SPDX-License-Identifier: Apache-2.0" in code.partition("\n")[0]
    names = [node.name for node in ast.parse(code).body if hasattr(node, "name")]
    assert len(names) == len({*names}) > 40
    for module in ("attention", "encoder", "positions"):
        text = (Path(sources.__file__).parent / f"{module}.py").read_text()
        assert text.split("\n\n\n", 1)[1].strip() in code
    assert not re.search(r"^(from|import) (\.|pretrain)", code, re.MULTILINE)


def test_the_model_card_describes_the_model(exported):
    card = (exported("zero-clap", "topic").folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-classification\n")
    assert "trust_remote_code" in card
    assert '"step": 7' in card
    assert "trust_remote_code" not in (exported("baseline").folder / "README.md").read_text()


def test_a_model_of_the_hub_is_fetched(copied, tmp_path, monkeypatch):
    config = load_model(copied()).model.config
    (tmp_path / "hub" / "someone").mkdir(parents=True)
    (tmp_path / "model").rename(tmp_path / "hub" / "someone" / "model")
    monkeypatch.chdir(tmp_path)
    with hub_of(tmp_path / "hub") as asked:
        assert load_model(Path("someone/model")).model.config == config
        assert not any("README" in path or path.endswith(".py") for path in asked)
        with pytest.raises(ValueError, match="someone/other: no such file here, and not to be had"):
            load_model(Path("someone/other"))


RECIPE = {"objective": {"name": "sentence-pairs", "pair_task": "nsp", "longest_ngram": 3}}
OF_TRAINING = {"recipe": {"objective": {"name": "masked-lm", "probability": 0.3}}, "step": 9}
FINE_TUNED = {"step": 7, "pretrained": {"max_tokens": 2048, "pretrained": OF_TRAINING}}
ELECTRA = {"recipe": {"objective": {"name": "electra"}}}
SOS = {"recipe": {"objective": {"name": "sentence-pairs", "pair_task": "sos"}}}


@pytest.mark.parametrize(
    ("name", "provenance", "expected"),
    [
        ("zero-clap", {}, MaskedLMConfig()),
        ("causal-alibi", {}, CausalLMConfig()),
        ("alibi-pairs", {}, SentencePairsConfig()),
        ("zero-clap", {"recipe": RECIPE}, SentencePairsConfig(pair_task="nsp", longest_ngram=3)),
        ("zero-clap", FINE_TUNED, MaskedLMConfig(probability=0.3)),
        ("zero-clap", ELECTRA, "objective.*'electra'.*masked-lm, "),
        ("zero-clap", SOS, "objective.pair_task: 'sos' is not"),
    ],
)
def test_the_objective_is_that_of_the_training_or_what_the_architecture_is_for(
    name, provenance, expected, copied
):
    folder = copied(name)
    change(folder / "config.json", provenance=provenance)
    model = load_model(folder)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"{folder}: .*{expected}"):
            model.objective  # noqa: B018
        return
    assert model.objective == expected
    assert model.data.packing == ("sentence-pairs" if expected.pairs else "complete")
    if provenance is FINE_TUNED:
        assert [model.recorded(name) for name in ("step", "max_tokens")] == [7, 2048]
        assert model.recorded("packing") is None


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"data": {"packing": "loose"}}, "data.packing: 'loose' is not .*chunked"),
        ({"data": {"sequence_length": "long"}}, "data.sequence_length: 'long' is not"),
    ],
)
def test_a_setting_of_its_training_that_is_not_accepted_is_named(recipe, message, copied):
    folder = copied()
    change(folder / "config.json", provenance={"recipe": recipe})
    model = load_model(folder)
    with pytest.raises(ValueError, match=f"{folder}: {message}"):
        model.data  # noqa: B018


# --- layouts of transformers' files --------------------------------------------------------------


def test_weights_of_eight_bits_are_read(copied):
    path = copied() / "model.safetensors"
    fewer = {name: weight.to(torch.float8_e4m3fn) for name, weight in load_file(path).items()}
    save_file(fewer, path)
    for name, weight in read_folder(path.parent).weights.items():
        assert torch.equal(weight, fewer[name][: len(weight)].float())


def test_weights_in_several_files_are_read(theirs, tmp_path):
    model = theirs("RobertaForMaskedLM")
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_same_logits(load_model(tmp_path), model)
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    change(index, weight_map={**places, "lm_head.bias": "../elsewhere.safetensors"})
    with pytest.raises(ValueError, match="'../elsewhere.safetensors' is not a file of this folder"):
        read_folder(tmp_path)
    index.unlink()
    others = {name: f"{place}.bin" for name, place in places.items()}
    for place in {*places.values()}:
        torch.save(load_file(tmp_path / place), tmp_path / f"{place}.bin")
        (tmp_path / place).unlink()
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": others}))
    check_same_logits(load_model(tmp_path), model)
    (tmp_path / others["lm_head.bias"]).unlink()
    with pytest.raises(ValueError, match="'model-0000.-of-.*' is not a file of this folder"):
        read_folder(tmp_path)


def test_the_layout_of_old_files_is_read(theirs, tmp_path):
    """Pickled tensors, gamma and beta, position ids, a pooler, tied weights a second time."""
    model = theirs("RobertaForMaskedLM")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    old = {
        "roberta.embeddings.position_ids": torch.arange(42)[None],
        "roberta.pooler.dense.weight": torch.ones(32, 32),
        "roberta.pooler.dense.bias": torch.ones(32),
    }
    for name, weight in model.state_dict().items():
        if "LayerNorm" in name:
            name = name.replace("weight", "gamma").replace("bias", "beta")
        old[name] = weight.clone()
    assert "lm_head.decoder.weight" in old
    torch.save(old, tmp_path / "pytorch_model.bin")
    check_same_logits(load_model(tmp_path), model)
    table = "roberta.embeddings.word_embeddings.weight"  # safetensors.torch.save_model drops it
    torch.save({n: w for n, w in old.items() if n != table}, tmp_path / "pytorch_model.bin")
    check_same_logits(load_model(tmp_path), model)
    torch.save({**old, "lm_head.bias": functools.partial(print)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: was not read"):
        read_folder(tmp_path)
    old["lm_head.decoder.weight"][5] += 1
    torch.save(old, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"lm_head\.decoder\.weight differs from"):
        read_folder(tmp_path)


# --- vocabularies --------------------------------------------------------------------------------


def in_two_files(folder):
    """tokenizer.json as vocab.json and merges.txt."""
    content = json.loads((folder / "tokenizer.json").read_text())
    mask = content["added_tokens"][-1]
    vocab = {**content["model"]["vocab"], "<mask>": mask["id"]}
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocab))
    merges = "\n".join(map(" ".join, content["model"]["merges"]))
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")


def with_other_ids(folder):
    in_two_files(folder)
    change(folder / "vocab.json", **{"<s>": 1, "<pad>": 0})


def with_one_more(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    *others, mask = content["added_tokens"]
    added = [*others, {**mask, "content": "more", "special": False}]
    change(folder / "tokenizer.json", added_tokens=[*added, {**mask, "id": mask["id"] + 1}])


def with_fewer(folder):
    words = tokenizers.train(iter(["a text"]), 300)
    words.save(folder / "tokenizer.json")


def without(folder):
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("baseline", without, ""),
        ("baseline", with_other_ids, "special ids: <pad> has 0, the model's pad_token_id is 1"),
        ("baseline", with_one_more, "has 401 ids, the model 400 rows"),
        ("zero-clap", with_fewer, "the vocabulary was left out"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_left_out_and_said_when_asked_for_text(
    name, spoil, reason, copied
):
    folder = copied(name)
    spoil(folder)
    model = load_model(folder)
    assert model.contents.vocabulary is None
    assert len(model.contents.notes) == bool(reason)
    with pytest.raises(ValueError, match=f"model: has no vocabulary.*{reason}"):
        model.tokenizer  # noqa: B018


def test_a_vocabulary_in_two_files_is_read(copied, tokenizer):
    folder = copied("baseline")
    in_two_files(folder)
    assert read_folder(folder).vocabulary.digest() == tokenizer.digest()


def test_a_mask_with_another_id_moves_with_its_row(copied, exported, tokenizer):
    """The same model after the ids were changed as in tokenizers that people train."""
    folder = copied("baseline")
    new = [0, 1, 2, 3, *range(5, tokenizer.vocab_size), 4]  # of each of our ids
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab, added = content["model"]["vocab"], content["added_tokens"]
    content["model"]["vocab"] = {t["content"]: new[t["id"]] for t in added}
    content["model"]["vocab"] |= {token: new[id] for token, id in vocab.items()}
    content["added_tokens"] = [{**t, "id": new[t["id"]]} for t in added]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    weights = load_file(folder / "model.safetensors")
    for name in ("roberta.embeddings.word_embeddings.weight", "lm_head.bias"):
        weights[name] = weights[name][torch.tensor(new).argsort()]
    save_file(weights, folder / "model.safetensors")
    back = read_folder(folder)
    (note,) = back.notes
    assert f"<mask> has the last, {tokenizer.mask_id} (here 4)" in note
    assert back.vocabulary.digest() == tokenizer.digest()
    for name, weight in exported("baseline").contents.weights.items():
        assert torch.equal(back.weights[name], weight), name


def test_tokens_that_a_user_added_come_back_as_they_were(tokenizer, transformers, tmp_path):
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


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_part_that_is_damaged_or_missing_is_named(part, copied):
    path = copied() / part
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"[1]"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=part):
            load_model(path.parent)
    path.unlink()
    if part != "tokenizer.json":
        with pytest.raises(ValueError, match="has no(ne of)? .*" + part):
            load_model(path.parent)


def test_a_folder_that_is_none_says_how_to_make_one(tmp_path):
    with pytest.raises(ValueError, match="has no config.json .*zeroclap export"):
        load_model(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    with pytest.raises(ValueError, match=f"its model is in {tmp_path}/model"):
        load_model(tmp_path)  # the folder of a run of fine-tuning


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("baseline", {"hidden_act": "relu"}, "hidden_act: 'relu' .* must be 'gelu'"),
        ("baseline", {"position_embedding_type": "relative_key"}, "_type: 'relative_key'"),
        ("baseline", {"pad_token_id": 0}, "pad_token_id: 0 is not accepted; it must be 1"),
        ("baseline", {"tie_word_embeddings": False}, "tie_word_embeddings: False"),
        ("baseline", {"quantization_config": {"bits": 4}}, "quantization_config: {'bits': 4}"),
        ("baseline", {"layer_norm_eps": None}, "has no layer_norm_eps"),
        ("baseline", {"hidden_size": "wide"}, "hidden_size: 'wide'"),
        ("baseline", {"hidden_size": 64}, r"\[400, 32\] instead of \[400, 64"),
        ("baseline", {"max_position_embeddings": 2}, "max_position_embeddings: 2 .* 3 or more"),
        ("baseline", {"num_hidden_layers": 3}, r"missing: roberta\.encoder\.layer\.2"),
        ("baseline", {"num_hidden_layers": 1}, r"left over: roberta\.encoder\.layer\.1"),
        ("baseline", {"model_type": "bert"}, "model_type: 'bert' .* one of roberta, "),
        ("albert", {"inner_group_num": 2}, "inner_group_num: 2 .* must be 1"),
        ("albert", {"hidden_act": "relu"}, "hidden_act: 'relu' .* one of gelu, gelu_new"),
        ("albert", {"embedding_size": 64}, "embedding_size: 64"),
        ("albert", {"num_hidden_groups": 3}, "num_hidden_groups: 3 .* of num_hidden_layers 2"),
        ("albert", {"num_attention_heads": 3}, "hidden_size: 32 .* 3 \\(3 heads"),
        ("baseline", {"num_attention_heads": 0}, "num_attention_heads: 0 .* 1 to 1,000$"),
        ("albert", {"type_vocab_size": 3}, r"token_type_embeddings\.weight \[2, 32\] instead"),
        ("albert", {"embedding_size": None}, "has no embedding_size"),
        ("zero-clap", {"quantization_config": {"bits": 4}}, "quantization_config: {'bits': 4}"),
        ("zero-clap", {"vocab_size": None}, "vocab_size: is missing"),
        ("zero-clap", {"head": "wide"}, "head: 'wide'"),
        ("zero-clap", {"head": "roberta"}, r"left over: head\.beta$"),
        ("zero-clap", {"id2label": {"0": "a", "2": "b"}}, "id2label: .* with a label for each"),
        ("zero-clap", {"problem_type": "multi_label_classification"}, "problem_type: .* labels"),
        ("zero-clap", {"classifier_pooling": "max"}, "pooling: 'max'"),
        ("zero-clap", {"mask_token_ids": [3]}, r"mask_token_ids: \[3\] .* 400 rows"),
        ("zero-clap", {"mask_token_ids": 3}, "mask_token_ids: 3"),
        # Settings never make a weight: the file's are compared with sizes alone.
        ("zero-clap", {"hidden_size": 2**23}, r" instead of \[25165824, 8388608\]"),
        ("albert", dict.fromkeys(("hidden_size", "embedding_size"), 10**7), ", 32] instead of "),
        # What costs time or memory without a weight: layers, which may share theirs, and heads.
        ("zero-clap", {"num_layers": 1001, "sharing": "all"}, "_layers: 1001 .* be 1 to 1,000$"),
        ("zero-clap", {"num_heads": 10**7, "hidden_size": 10**7}, "num_heads: .* be 1 to 1,000$"),
    ],
)
def test_settings_that_our_model_lacks_are_named(name, values, message, copied):
    head = "topic" if name == "zero-clap" and "head" not in values else None
    folder = copied(name, head)
    change(folder / "config.json", **values)
    with pytest.raises(ValueError, match=rf"(config\.json|model\.safetensors): .*{message}"):
        read_folder(folder)


IDENTITY = f"{ALBERT_PROJECTION}.weight"


@pytest.mark.parametrize(
    ("name", "weight", "value", "message"),
    [
        ("baseline", "lm_head.bias", None, r"settings; missing: lm_head\.bias$"),
        ("baseline", TOKEN_TYPES, None, r"missing: .*token_type_embeddings\.weight$"),
        ("baseline", TOKEN_TYPES, torch.ones(1, 31), r"\[1, 31\] instead of \[1, 32\]"),
        ("baseline", TOKEN_TYPES, torch.ones(0, 32), r"\[0, 32\] instead of \[1, 32\]"),
        ("albert", IDENTITY, torch.ones(32, 32), "changes the token vectors; it must be the ident"),
    ],
)
def test_weights_that_do_not_fit_are_named(name, weight, value, message, copied):
    path = copied(name) / "model.safetensors"
    weights = {**load_file(path), weight: value}
    save_file({name: w for name, w in weights.items() if w is not None}, path)
    with pytest.raises(ValueError, match=rf"model\.safetensors: .*{message}"):
        read_folder(path.parent)
