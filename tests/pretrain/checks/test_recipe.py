"""Checks of a recipe before a run starts, and their messages on the command line."""

import re
import sysconfig

import pytest

from data_prep.manifest import load_manifest
from finetune import zeroclap as command_line
from pretrain.checks import recipe as recipe_checks
from pretrain.checks.recipe import check
from pretrain.data.sources import open_source
from tests.fixtures import prepared


def test_a_valid_recipe_gives_the_model(recipe, corpus, tmp_path):
    model = check(recipe.load(tmp_path), 2)
    assert model.vocab_size == load_manifest(corpus).vocab_size - 1
    assert model.position == "alibi"


PERCEIVER = ["model.variant=char-perceiver", "objective.name=causal-lm"]
PAIRS = ["objective.name=sentence-pairs", "data.packing=sentence-pairs"]
WHOLE = "data.packing=contiguous"
FLEX = ["training.attention_backend=flex", "model.overrides.attention_dropout=0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["folder="], "folder: None .* text"),
        (["data.corpus=''"], "data.corpus: is not set"),
        (["data.corpus=/nowhere"], "error: data.corpus: /nowhere: no such folder"),
        (
            [*FLEX, "training.deterministic=true", "model.overrides.alibi_slopes=trained"],
            "with training.deterministic use auto or dense",
        ),
        (["supervision.processes_per_node=5"], "8 is less than .* 2 x 5 ranks; set .*=1$"),
        (
            ["objective.name=causal-lm"],
            "objective.name causal-lm does not fit model.variant zero-clap, which sees the tokens "
            "that it would predict; accepted: objective.name=masked-lm, or .* of causal-learned",
        ),
        (
            ["model.overrides.causal=true"],
            "masked-lm does not fit model.overrides.causal True, .*=causal-lm, or False there$",
        ),
        ([PERCEIVER[0], *PAIRS], "objective.name sentence-pairs does not fit .* char-perceiver"),
        (["objective.probability=0.01"], "0.01 of .*64 leaves.*8 blocks.*accepted: 0.015625 or"),
        (["batch.global_batch_size=1024"], "fewer than the 1,024 of batch.global_batch_size 1,024"),
        (["model.overrides.hidden_size=1000000"], "memory: .* of 2 ranks need"),
        ([*PERCEIVER, "data.packing=best-fit"], "best-fit does not fit a model with 64 latents"),
        ([*PERCEIVER, WHOLE, "model.overrides.latents=65"], "latents 65: accepted: at most .* 64"),
        ([*PERCEIVER, WHOLE, *FLEX], "training.attention_backend: 'flex' .* with latents 64"),
        (
            [*FLEX, "model.overrides.attention_dropout=0.1"],
            "error: training.attention_backend: 'flex' .* 0.1; 'flex' needs attention_dropout 0$",
        ),
        (["model.overrides.num_heads=3"], "error: model.overrides.hidden_size: 32 .*3 heads"),
    ],
)
def test_a_wrong_recipe_is_refused_before_anything_starts(words, message, recipe, tmp_path, capsys):
    arguments = ["supervise", str(recipe.path), f"folder={tmp_path / 'run'}", *words]
    assert command_line.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("zeroclap supervise: error: ")
    assert re.search(message, error), error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["model.variant=baseline", "data.sequence_length=65"], "data.sequence_length 65"),
        (["training.deepspeed=zero9"], "training.deepspeed: 'zero9'"),
        (["profile.steps=[1000000, 1000001]"], "profile.steps"),
        (["phases=[{steps: 20, objective: {probability: 0.2}, data: {packing: lines}}, {}]"], "1"),
    ],
)
def test_show_and_plan_refuse_the_settings_that_supervise_refuses(
    words, setting, here, recipe, tmp_path, capsys
):
    corpus = [] if here else ["data.corpus=/nowhere"]
    words = [str(recipe.path), f"folder={tmp_path / 'run'}", *corpus, *words]
    for command in ([["supervise"]] if here else []) + [["plan", "--gpus", "2"], ["show"]]:
        assert command_line.main([*command, *words]) == 2
        assert setting in capsys.readouterr().err


def test_plan_refuses_a_corpus_that_supervise_refuses(recipe, tmp_path, capsys):
    words = [str(recipe.path), f"folder={tmp_path / 'run'}", "batch.global_batch_size=1024"]
    assert command_line.main(["plan", "--gpus", "2", *words]) == 2
    assert "fewer than the 1,024 of batch.global_batch_size 1,024" in capsys.readouterr().err


DEVICES = [
    ("training.deepspeed=zero1_bf16", "cuda", 7.5, "zero1_bf16 computes .* 7.5; .* zero1_fp16$"),
    ("training.deepspeed=zero1_bf16", "cuda", 8.0, None),
    ("training.deepspeed=zero1_bf16", "cuda", None, None),
    ("training.deepspeed=zero1_bf16", "cpu", None, None),
    ("training.deepspeed=zero1_fp16", "cuda", 7.5, None),
    ("training.deepspeed=zero1_fp16", "cpu", None, "zero1_fp16 computes in fp16, .* zero1_fp32$"),
    ("training.deepspeed=zero1_fp32", "cuda", 7.5, None),
    ("training.attention_backend=flex", "cpu", None, "'flex' needs a GPU; on cpu write dense"),
    ("training.attention_backend=flex", "cuda", 8.0, None),
    ("training.attention_backend=auto", "cpu", None, None),
    ("training.attention_backend=dense", "cpu", None, None),
]


@pytest.mark.parametrize(("word", "device", "capability", "message"), DEVICES)
def test_what_a_device_does_not_have_is_refused_with_what_would_work(
    word, device, capability, message, recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr(recipe_checks, "cpu_has_fp16", lambda: False)
    monkeypatch.setattr(recipe_checks.gpus, "least_capability", lambda: capability)
    config = recipe.load(tmp_path, word)
    if message is None:
        return recipe_checks.check_device(config, 2, device)
    with pytest.raises(ValueError, match=message):
        recipe_checks.check_device(config, 2, device)


@pytest.mark.parametrize(
    ("wanted", "device"), [("auto", "cuda"), ("false", "cuda"), ("true", "cpu")]
)
def test_compiled_layers_need_a_compiler(wanted, device, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda *of: str(tmp_path))
    config = recipe.load(tmp_path, f"training.compile={wanted}")
    with pytest.raises(ValueError, match=f"no {tmp_path}/Python.h; .* write .*=false"):
        recipe_checks.check_device(config, 2, device)
    (tmp_path / "Python.h").touch()
    recipe_checks.check_device(config, 2, device)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="no g.* write .*=false and .*=dense"):
        recipe_checks.check_device(config, 2, device)
    monkeypatch.setenv({"cuda": "CC", "cpu": "CXX"}[device], "/opt/compiler")
    recipe_checks.check_device(config, 2, device)


def test_fp16_is_refused_on_a_cpu_where_deepspeed_refuses_it(recipe, tmp_path, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    assert recipe_checks.cpu_has_fp16() == bool(get_accelerator().is_fp16_supported())
    monkeypatch.setattr(recipe_checks, "cpu_has_fp16", lambda: True)
    config = recipe.load(tmp_path, "training.deepspeed=zero1_fp16")
    recipe_checks.check_device(config, 2, "cpu")


def test_a_batch_that_no_phase_has_is_not_looked_at(recipe, tmp_path):
    phase = "{steps: 4, batch: {global_batch_size: 12, micro_batch_size: 2}}"
    config = recipe.load(tmp_path, f"phases=[{phase}, {phase}]", "training.steps=8")
    with pytest.raises(ValueError, match="8 is less than"):
        config.batch.accumulation_steps(6)
    recipe_checks.check_device(config, 6, "cuda")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("profile.steps=[40, 45]", "must begin below training.steps"),
        ("tracker=wandb", "tracker wandb: its package is not installed; .*zeroclap.wandb"),
    ],
)
def test_what_could_never_be_shown_is_refused(word, message, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_checks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        check(recipe.load(tmp_path, word), 2)


def test_a_folder_of_the_tracker_s_name_is_no_package(recipe, tmp_path, monkeypatch):
    (tmp_path / "mere_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    folder = recipe_checks.importlib.util.find_spec("mere_folder")
    monkeypatch.setattr(recipe_checks.importlib.util, "find_spec", lambda name: folder)
    with pytest.raises(ValueError, match="its package is not installed"):
        check(recipe.load(tmp_path, "tracker=wandb"), 2)


def test_alibi_is_trained_on_longer_blocks_than_its_preset(recipe, tmp_path):
    assert check(recipe.load(tmp_path, "data.sequence_length=100"), 2)


PAIRS = ["model.variant=albert", "objective.name=sentence-pairs", "data.packing=sentence-pairs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.variant=alibi"], "model.variant alibi has segments 0"),
        (["data.packing=chunked"], "chunked does not fit objective sentence-pairs"),
        (["objective.name=masked-lm"], "sentence-pairs does not fit objective masked-lm"),
        (["objective.pair_task=order"], "objective.pair_task: 'order'.*sop"),
        (["data.sequence_length=4"], "data.sequence_length 4: accepted .* 5 or more"),
        (
            ["objective.pair_task=none", "objective.probability=0.001"],
            "objective.probability 0.001 of .* without anything to predict",
        ),
    ],
)
def test_a_wrong_recipe_of_pairs_is_refused(words, message, sentence_corpus, recipe, tmp_path):
    words = [f"data.corpus={sentence_corpus}", *PAIRS, *words]
    with pytest.raises(ValueError, match=message):
        check(recipe.load(tmp_path, *words), 2)


@pytest.mark.parametrize("task", ["sop", "nsp", "none"])
def test_a_recipe_of_pairs_gives_a_model_with_a_pair_head(task, sentence_corpus, recipe, tmp_path):
    words = [f"data.corpus={sentence_corpus}", *PAIRS, f"objective.pair_task={task}"]
    config = recipe.load(tmp_path, *words)
    assert check(config, 2).pair_head
    train, _ = recipe_checks.data_summary(config, 2)
    assert re.search(r"[\d,]+ tokens of documents of one sentence, .* are dropped", train)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_next_sentences_of_one_document_alone_are_refused(split, corpus, recipe, tmp_path):
    texts = {}
    for name in ("train", "valid"):
        text = " ".join(f"Sentence {n} of {name}." for n in range(60))
        texts[name] = [text] if name == split else [text, text + " More."]
    (valid := tmp_path / "valid.txt").write_text("\n\n".join(texts["valid"]))
    words = ["--sentences", "--valid-input", str(valid)]
    prepared(tmp_path / "corpus", texts["train"], corpus, *words)
    words = [f"data.corpus={tmp_path / 'corpus'}", *PAIRS, "batch.global_batch_size=2"]
    assert check(recipe.load(tmp_path, *words, "objective.pair_task=sop"), 1)
    with pytest.raises(ValueError, match=f"blocks of split '{split}' are of one document"):
        check(recipe.load(tmp_path, *words, "objective.pair_task=nsp"), 1)


def test_a_corpus_without_validation_text_is_refused(corpus, recipe, tmp_path):
    prepared(tmp_path / "corpus", ["Some text."], corpus, "--valid-fraction", "0")
    with pytest.raises(ValueError, match="corpus: the valid split is empty"):
        check(recipe.load(tmp_path, f"data.corpus={tmp_path / 'corpus'}"), 2)


def test_a_summary_says_what_is_read_and_what_is_dropped(recipe, tmp_path):
    trial = ("training.steps=5", "schedule.warmup_steps=0", "training.checkpoint_interval=1")
    warning, *_ = recipe_checks.data_summary(recipe.load(tmp_path, *trial), 2)
    assert warning.startswith("WARNING: (training.checkpoints_kept - 1)")
    train, valid = recipe_checks.data_summary(recipe.load(tmp_path), 2)
    assert re.fullmatch(
        r"train: \d+ blocks of 64 hold 100.0% of [\d,]+ tokens \(chunked, 9\d.\d% full\)", train
    )
    assert valid.startswith("valid: ")
    empty, *rest = recipe_checks.data_summary(recipe.load(tmp_path), 3)
    assert empty == (
        "3 ranks compute 6 micro-batches of 2 for an update of 8 blocks, 2 of them empty"
    )
    assert rest == [train, valid]


@pytest.mark.parametrize("packing", ["best-fit", "complete"])
def test_blocks_that_drop_much_of_a_split_are_warned_of(packing, recipe, tmp_path):
    """Where more than a tenth of its tokens is dropped: at 60 of the help topics of Python 3.11
    from the validation split alone.
    """
    for length in (24, 60):
        words = [f"data.packing={packing}", f"data.sequence_length={length}"]
        config = recipe.load(tmp_path, *words)
        summary = recipe_checks.data_summary(config, 2)
        for split, text in zip(("train", "valid"), summary, strict=True):
            lengths = open_source(config.segments.sources[0], split).corpus.lengths
            dropped = lengths[lengths >= length].sum()
            assert text.startswith("WARNING: ") == (dropped > 0.1 * lengths.sum())
        said = f"{dropped:,} tokens of longer documents are dropped; another data.packing or longer"
        assert f"{1 - dropped / lengths.sum():.1%} of {lengths.sum():,} tokens" in summary[1]
        assert (said in summary[1]) == (dropped > 0)


def test_a_validation_split_with_nothing_to_predict_is_refused_before_anything_starts(
    unpredictable, recipe, tmp_path, capsys
):
    overrides = [f"folder={tmp_path / 'run'}", f"data.corpus={unpredictable}"]
    assert command_line.main(["supervise", str(recipe.path), *overrides]) == 2
    assert "has nothing to predict" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
