"""Runs that start from another model: its loss at step 0, its copy, and what is refused."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_prep.common.files import sha256_of
from data_prep.manifest import load_manifest
from finetune.zeroclap import main as pretrain
from pretrain.config.load import dump, public
from pretrain.convert import initial_weights
from pretrain.convert.export import export_checkpoint
from pretrain.convert.initial_weights import initial_model
from pretrain.convert.model_folder import load_model
from pretrain.convert.reading import read_folder
from pretrain.convert.writing import save_model
from pretrain.model.language_model import LanguageModel
from pretrain.records import audit, ledger, metrics
from pretrain.records import folder as run_folder
from tests.fixtures import data_prep
from tests.pretrain.builders import failing, short
from tests.pretrain.convert.conftest import HEADS
from tests.pretrain.convert.contents import random_contents, without_pair_projection

SHORT = short(4, 2, confirm_steps=1)


@pytest.fixture
def attempt(train_ranks):
    """`attempt(folder, *overrides)`: exit code and output of a run of one rank."""

    def run(folder, *overrides):
        ((code, output, errors),) = train_ranks(folder, *SHORT, *overrides, ranks=1)
        return code, output + errors

    return run


@pytest.fixture
def source(recipe, tokenizer, tmp_path):
    """`source(variant)`: a model folder that says how it was trained, as an export does."""

    def make(variant="zero-clap", vocabulary=tokenizer, classifier=None, rows=400, **overrides):
        config = recipe.load(tmp_path, f"model.variant={variant}")
        provenance = {"run": "before", "step": 7, "recipe": public(config)}
        path = tmp_path / f"source-{variant}"
        head = HEADS.get(classifier)
        save_model(path, random_contents(variant, vocabulary, head, provenance, rows, **overrides))
        return path

    return make


def validation(run):
    return {line["step"]: line["loss"] for line in metrics.read_metrics(run / metrics.VALIDATION)}


def evaluated(model, corpus, tmp_path):
    written = tmp_path / f"{model.name}.json"
    words = ["evaluate", str(model), "--data", str(corpus), "--json", str(written)]
    assert pretrain([*words, "--device", "cpu"]) == 0
    (found,) = json.loads(written.read_text())
    return found["total"]["loss"]


def exported(run, step, tmp_path):
    output = tmp_path / f"exported-{run.name}-{step}"
    assert pretrain(["export", str(run), "--output", str(output), "--step", str(step)]) == 0
    return output


def checked(config):
    manifest = load_manifest(Path(config.data.corpus))
    return initial_weights.read_initial_model(
        config, config.architecture(manifest.vocab_size), manifest
    )


@pytest.mark.slow
def test_a_run_begins_with_the_loss_of_the_model_and_never_needs_it_again(
    attempt, source, corpus, tmp_path, capsys
):
    """Continued, interrupted before its first checkpoint, and begun again without the model."""
    model, run = source(), tmp_path / "run"
    begin = [f"model.init_from={model}", "training.steps=2"]
    expected = evaluated(model, corpus, tmp_path)
    code, output = attempt(run, *begin)
    assert code == 0, output
    assert validation(run)[0] == expected
    moved = model.rename(tmp_path / "elsewhere")
    same = load_file(str(exported(run, 0, tmp_path) / "model.safetensors"))
    for name, weight in load_file(str(moved / "model.safetensors")).items():
        assert torch.equal(same[name], weight), name
    again = shutil.copytree(run, tmp_path / "again")  # as it was before its first checkpoint
    shutil.rmtree(again / "checkpoints")
    kept = (again / ledger.FILE_NAME).read_bytes().splitlines(keepends=True)[:2]
    (again / ledger.FILE_NAME).write_bytes(b"".join(kept))
    (again / metrics.METRICS).unlink()
    (again / "train.lock").unlink()
    assert attempt(again, *begin)[0] == 0
    assert attempt(run, *begin, "training.steps=4", "--from=2")[0] == 0, "it resumed"
    first, second = (metrics.read_metrics(path / metrics.METRICS)[:2] for path in (run, again))
    assert [line["loss"] for line in first] == [line["loss"] for line in second]
    capsys.readouterr()
    assert pretrain(["audit", str(run)]) == 0
    assert f"initial weights: those of {model} (model.safetensors " in capsys.readouterr().out
    assert pretrain(["status", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["init_from"]["path"] == str(model)
    assert pretrain(["status", str(run)]) == pretrain(["status", str(run), "--report"]) == 0
    for text in (capsys.readouterr().out, (run / "report.md").read_text()):
        assert f"those of {model} (model.safetensors " in text
    (run / run_folder.INITIAL_WEIGHTS).write_bytes(b"other")
    with pytest.MonkeyPatch.context() as disk:
        disk.setattr(audit, "sha256_of", failing(sha256_of, [errno.EIO]))
        assert pretrain(["audit", str(run)]) == 1
    assert f"{run_folder.INITIAL_WEIGHTS}: Input/output error\n" in capsys.readouterr().out
    assert pretrain(["audit", str(run)]) == 1
    assert "is missing, or is not what the run began with" in capsys.readouterr().out
    assert pretrain(["export", str(run), "--output", str(tmp_path / "x"), "--step", "0"]) == 2
    assert "is missing or is not what was recorded" in capsys.readouterr().err


@pytest.mark.slow
def test_a_roberta_of_transformers_is_continued(attempt, theirs, tokenizer, corpus, tmp_path):
    """As the guide says: its vocabulary is taken for the corpus, and it is continued."""
    theirs = theirs("RobertaForMaskedLM", vocab_size=400, max_position_embeddings=66)
    folder, run = tmp_path / "roberta", tmp_path / "run"
    theirs.save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    domain = tmp_path / "domain"
    words = ["--tokenizer", str(folder), "--output", str(domain), "--valid-fraction", "0.1"]
    data_prep(["prepare", "--input", str(corpus.parent / "topics.jsonl"), *words])
    begin = ["model.variant=baseline", f"data.corpus={domain}"]
    code, output = attempt(run, f"model.init_from={folder}", *begin)
    assert code == 0, output
    assert pretrain(["plan", str(run / "run.yaml"), "--gpus=1", f"model.init_from={folder}"]) == 0
    initial = exported(run, 0, tmp_path)
    assert validation(run)[0] == evaluated(initial, domain, tmp_path)
    ids = torch.arange(4, 36)[None]
    ours = load_model(initial).model
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits[0]
        torch.testing.assert_close(ours(ids, None, torch.arange(32)), expected)
    assert validation(run)[4] < validation(run)[0]


def test_step_0_of_a_run_that_draws_its_weights_can_be_exported(attempt, corpus, tmp_path, capsys):
    run = tmp_path / "run"
    assert attempt(run, "optimizer.learning_rate=1e-12", "schedule.minimum_learning_rate=0")[0] == 0
    loss = evaluated(exported(run, 0, tmp_path), corpus, tmp_path)
    assert loss == pytest.approx(validation(run)[4], abs=1e-6), "hardly trained since"
    capsys.readouterr()
    facts = load_model(exported(run, 2, tmp_path)).contents.provenance
    assert "step 2 of the run's 4\n" in capsys.readouterr().out
    assert (facts["step"], facts["training"]["validation"]["step"]) == (2, 2)
    lines = metrics.read_metrics(run / metrics.METRICS)
    assert facts["training"]["tokens"] == sum(line["tokens"] for line in lines[:2]) > 0


def test_the_model_card_of_an_export_says_how_it_was_trained(attempt, source, recipe, tmp_path):
    """Data, tokens, recipe, perplexity, spikes survived, initial weights.

    Nothing else: neither what only this machine, its user or a service should know, nor a path.
    """
    run = tmp_path / "run"
    private = ["notify.command=[curl, S3CRET]", "supervision.hostfile=S3CRET"]
    assert attempt(run, f"model.init_from={source()}", *private)[0] == 0
    model = exported(run, 4, tmp_path)
    text = (model / "README.md").read_text()
    perplexity = metrics.read_metrics(run / metrics.VALIDATION)[-1]["perplexity"]
    tokens = sum(line["tokens"] for line in metrics.read_metrics(run / metrics.METRICS))
    corpus = load_manifest(Path(recipe.load(run).data.corpus))
    train = corpus.totals["train"]
    for part in (
        f"| corpus | made (digest {corpus.digest()[:12]}): {train.documents:,} documents of "
        f"{train.tokens:,} tokens |",
        f"| tokens read | {tokens:,} |",
        "| loss spikes that the training survived | 0, with 0 rollbacks |",
        "| initial weights | those of source-zero-clap (model.safetensors ",
        f"| validation perplexity | {perplexity:.3f} after 4 steps |",
        '"variant": "zero-clap"',
    ):
        assert part in text, part
    for folder in (run / "checkpoints", run / run_folder.INITIAL, model):
        for path in filter(Path.is_file, folder.rglob("*")):
            content = path.read_bytes()
            assert b"S3CRET" not in content, path
            assert not any(str(p).encode() in content for p in (tmp_path, recipe.path.parent)), path


def test_another_vocabulary_is_refused_before_anything_starts_and_both_are_named(
    source, other_vocabulary, recipe, tmp_path, capsys
):
    model, run = source(), tmp_path / "run"
    words = [f"model.init_from={model}", f"folder={run}", f"data.corpus={other_vocabulary}"]
    for command in (["supervise"], ["plan", "--gpus=1"]):
        assert pretrain([*command, str(recipe.path), *words]) == 2
        error = capsys.readouterr().err
        assert f"model.init_from {model}: has a vocabulary of 400 ids (" in error
        assert f"), but the corpus {other_vocabulary} was made with one of 380 ids (" in error
    assert not run.exists()


def test_a_plan_says_what_is_continued(source, recipe, capsys):
    model = source("baseline")
    words = ["plan", str(recipe.path), "--gpus", "1", "model.variant=baseline"]
    words += [f"model.init_from={model}"]
    assert pretrain(words) == 0
    assert f"initial weights: those of {model}\n" in capsys.readouterr().out
    assert pretrain([*words, "model.init_from=/nowhere"]) == 0
    assert "initial weights: /nowhere (not checked: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variant", "overrides"),
    [
        ("alibi", {}),
        ("learned-clap", {"num_layers": 1}),
        ("baseline", {"intermediate_size": 48, "num_heads": 2, "max_positions": 100}),
        ("albert", {"pair_head": True}),
    ],
)
def test_another_architecture_is_refused_with_the_settings_that_describe_it(
    variant, overrides, source, recipe, tmp_path
):
    model = source(variant, **overrides)
    with pytest.raises(ValueError, match="is not the model that the recipe describes") as refused:
        checked(recipe.load(tmp_path, f"model.init_from={model}", "model.overrides.num_heads=1"))
    settings = str(refused.value).partition("; set ")[2].split()
    fitted = checked(recipe.load(tmp_path, f"model.init_from={model}", *settings))
    theirs = read_folder(model).config
    free = {"dropout": theirs.dropout, "attention_dropout": theirs.attention_dropout}
    free |= {"initial_weights": theirs.initial_weights, "initial_beta": theirs.initial_beta}
    assert dataclasses.replace(fitted.config, **free) == theirs


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (None, "/nowhere: no such folder"),
        ({"vocabulary": None}, "has no vocabulary to compare with that of the corpus"),
        ({"classifier": "topic"}, "has no head over the vocabulary"),
        ({"rows": 392}, "has 391 rows of tokens, but its vocabulary needs 399"),
    ],
)
def test_a_model_that_cannot_be_continued_is_refused(changed, message, source, recipe, tmp_path):
    model = "/nowhere" if changed is None else source(**changed)
    config = recipe.load(tmp_path, f"model.init_from={model}", "model.variant=zero-clap")
    with pytest.raises(ValueError, match=f"model.init_from.*{message}"):
        checked(config)


@pytest.mark.parametrize("variant", ["baseline", "learned-clap", "causal-alibi", "untied"])
def test_a_padded_vocabulary_is_accepted_without_its_padding(variant, source, recipe, tmp_path):
    """As transformers' resize_token_embeddings(pad_to_multiple_of=...) leaves it."""
    overrides = {"head": "untied"} if variant == "untied" else {}
    variant = "baseline" if overrides else variant
    model = source(variant, rows=448, **overrides)
    words = [f"model.init_from={model}", f"model.variant={variant}"]
    words += [f"model.overrides.{key}={value}" for key, value in overrides.items()]
    found = checked(recipe.load(tmp_path, *words))
    assert found.notes == ("its last 48 rows of tokens, which have no id, were left out",)
    for name, weight in read_folder(model).weights.items():
        kept = weight[:400] if len(weight) == 448 else weight
        assert torch.equal(found.weights[name], kept), name


def test_a_run_leaves_the_pooler_of_a_masked_albert(source, recipe, tmp_path):
    model = source("albert", pair_head=True)
    without_pair_projection(model)
    found = checked(recipe.load(tmp_path, f"model.init_from={model}", "model.variant=albert"))
    assert found.weights.keys() == LanguageModel(found.config).state_dict().keys()
    assert found.notes == ("its pooler was left out",)


def test_a_run_without_checkpoints_says_so(recipe, tmp_path):
    config = recipe.load(tmp_path / "run")
    (tmp_path / "run").mkdir()
    dump(config, tmp_path / "run" / "run.yaml")
    for step, message in ((None, "has no checkpoint yet"), (7, "has no checkpoint of step 7")):
        with pytest.raises(ValueError, match=rf"run: {message}; --step may be 0, where 0 is the"):
            export_checkpoint(tmp_path / "run", tmp_path / "model", step)


@pytest.mark.parametrize(("word", "passes"), [("false", 1), ("true", 2)])
def test_layers_are_computed_again_where_the_recipe_says_so(word, passes, recipe, tmp_path):
    config, calls = recipe.load(tmp_path, f"training.activation_checkpointing={word}"), []
    model = initial_model(config, config.architecture(97))
    model.encoder.layers[0].attention.register_forward_pre_hook(lambda *_: calls.append(1))
    model(torch.arange(4, 24)[None], None, torch.arange(20)).sum().backward()
    assert len(calls) == passes
