"""The commands of the assignment, what they make, and what they refuse."""

import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data_prep.common.arguments import parse_arguments, program
from data_prep.manifest import load_manifest
from finetune.birthplaces import rows, training
from finetune.birthplaces.rows import read_rows
from finetune.zeroclap import GROUPS
from pretrain.convert.model_folder import load_model
from tests.finetune.birthplaces.conftest import TINY

PAD, MASK = "\u25a1", "\u2047"
TRAIN = "--finetune_corpus_path birth_places_train.tsv"
DEV, TEST = "--eval_corpus_path birth_dev.tsv", "--eval_corpus_path birth_test_inputs.tsv"
WIDE = "perceiver wiki.txt --bottleneck_dim 64"
ASSIGNMENT = [
    f"finetune vanilla wiki.txt --writing_params_path vanilla.model.params {TRAIN}",
    f"evaluate vanilla wiki.txt --reading_params_path vanilla.model.params {DEV} "
    "--outputs_path vanilla.nopretrain.dev.predictions",
    f"evaluate vanilla wiki.txt --reading_params_path vanilla.model.params {TEST} "
    "--outputs_path vanilla.nopretrain.test.predictions",
    "pretrain vanilla wiki.txt --writing_params_path vanilla.pretrain.params",
    "finetune vanilla wiki.txt --reading_params_path vanilla.pretrain.params "
    f"--writing_params_path vanilla.finetune.params {TRAIN}",
    f"evaluate vanilla wiki.txt --reading_params_path vanilla.finetune.params {DEV} "
    "--outputs_path vanilla.pretrain.dev.predictions",
    f"evaluate vanilla wiki.txt --reading_params_path vanilla.finetune.params {TEST} "
    "--outputs_path vanilla.pretrain.test.predictions",
    f"pretrain {WIDE} --pretrain_lr 6e-3 --writing_params_path perceiver.pretrain.params",
    f"finetune {WIDE} --reading_params_path perceiver.pretrain.params "
    f"--writing_params_path perceiver.finetune.params {TRAIN}",
    f"evaluate {WIDE} --reading_params_path perceiver.finetune.params {DEV} "
    "--outputs_path perceiver.pretrain.dev.predictions",
    f"evaluate {WIDE} --reading_params_path perceiver.finetune.params {TEST} "
    "--outputs_path perceiver.pretrain.test.predictions",
]
"""In its order: without pretraining, the ordinary transformer, the Perceiver."""


@pytest.mark.parametrize("words", ASSIGNMENT)
def test_a_command_of_the_assignment_is_that_of_its_model(words):
    options = parse_arguments(program(GROUPS), ["birthplaces", *shlex.split(words)])
    assert options.function == words.split()[0]
    options.overrides = []
    config = training.recipe(options)
    architecture = config.architecture(256)
    assert architecture.causal
    assert architecture.latents == (64 if "perceiver" in words else 0)
    assert architecture.max_positions == config.data.sequence_length == 128


@pytest.mark.slow
def test_the_assignments_commands_run_in_their_order(task, birthplaces, capsys):
    shutil.copy(task.text, "wiki.txt")
    shutil.copy(task.train, "birth_places_train.tsv")
    shutil.copy(task.dev, "birth_dev.tsv")
    questions = [row[0] for row in read_rows(task.dev)]
    Path("birth_test_inputs.tsv").write_text("".join(f"{each}\n" for each in questions))
    small = {
        "pretrain": f"--epochs 8 {TINY} batch.global_batch_size=16 batch.micro_batch_size=8",
        "finetune": "--epochs 2",
        "evaluate": "",
    }
    for line in ASSIGNMENT:
        words = f"{line} {small[line.split()[0]]}"
        assert birthplaces(f"{words} {TINY}" if line == ASSIGNMENT[0] else words) == 0
    shown = capsys.readouterr().out
    assert shown.count("correct: ") == shown.count("no accuracy: the file has no answers") == 3
    for path in Path().glob("*.predictions"):
        assert len(path.read_text().splitlines()) == len(questions)
    assert len(list(Path().glob("*.predictions"))) == 6
    runs = {str(path.relative_to("expt")) for path in Path("expt").glob("*t*n*/*/*")}
    assert runs == {
        "finetune/run_vanilla_ft_lr_0.000600_seed_1/vanilla.model.params",
        "finetune/run_vanilla_ft_lr_0.000600_seed_1/vanilla.finetune.params",
        "finetune/run_perceiver_64_ft_lr_0.000600_seed_1/perceiver.finetune.params",
        "pretrain/run_vanilla_pt_lr_0.006000_seed_1/vanilla.pretrain.params",
        "pretrain/run_perceiver_64_pt_lr_0.006000_seed_1/perceiver.pretrain.params",
    }
    loaded = load_model(Path("perceiver.finetune.params"))
    assert loaded.contents.provenance["pretrained"]["step"] == 30
    assert loaded.objective.name == "span-corruption"
    # The run is finished: the same command only makes its model folder again.
    pretraining, output = f"{ASSIGNMENT[3]} {small['pretrain']}", Path("vanilla.pretrain.params")
    output.rename("before")
    assert birthplaces(pretraining) == 0
    for file in ("model.safetensors", "tokenizer.json"):
        assert (output / file).read_bytes() == (Path("before") / file).read_bytes()
    output.rename("again")
    assert birthplaces(f"{pretraining} batch.micro_batch_size=4 optimizer.beta1=0.8") == 2
    assert "beta1" in capsys.readouterr().err


def test_a_fresh_model_learns_to_repeat_the_answers_of_its_training(task, birthplaces, capsys):
    Path("few.tsv").write_text("".join(task.train.read_text().splitlines(keepends=True)[:6]))
    begin = f"perceiver {task.text} --bottleneck_dim 48"
    plain = "model.overrides.dropout=0 model.overrides.attention_dropout=0"
    assert not birthplaces(
        f"finetune {begin} --finetune_corpus_path few.tsv --writing_params_path model "
        f"--finetune_lr 1e-2 --epochs 120 {TINY} {plain}"
    )
    assert not birthplaces(
        f"evaluate {begin} --reading_params_path model --eval_corpus_path few.tsv "
        "--outputs_path predictions"
    )
    assert capsys.readouterr().out.endswith("correct: 6 of 6, 100.0 %\n")
    answers = [answer for _, answer in read_rows(Path("few.tsv"))]
    assert Path("predictions").read_text().splitlines() == answers
    (folder,) = Path("expt").glob("finetune/*/model")
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    losses = [event.value for event in board.Scalars("train/loss")]
    assert len(losses) == 120
    assert losses[-1] < 0.1 < losses[0]


def test_fine_tuning_starts_from_the_pretrained_weights_and_repeats_bit_for_bit(
    task, fresh, birthplaces
):
    start = fresh("vanilla").reading_params_path
    words = f"finetune vanilla {task.text} --finetune_corpus_path {task.train} --epochs 2 --seed 3"
    words += f" --reading_params_path {start} optimizer.weight_decay=0 --finetune_lr"
    for name, rate in (("same", 1e-9), ("a/b", 1e-3), ("a_b", 1e-3)):
        assert birthplaces(f"{words} {rate} --writing_params_path {name}") == 0
    assert len(list(Path("expt").glob("finetune/*/*/tensorboard"))) == 3
    before, same = (load_model(Path(name)).model for name in (start, "same"))
    for name, weights in before.state_dict().items():
        torch.testing.assert_close(same.state_dict()[name], weights, rtol=0, atol=1e-7)
    first, second = (Path(name, "model.safetensors").read_bytes() for name in ("a/b", "a_b"))
    assert first == second != Path("same/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("batch_size", "epochs", "steps"), [(256, 1, 1), (256, 3, 3), (41, 3, 4), (8, 3, 16)]
)
def test_every_epoch_is_read_in_an_order_of_the_seed_and_few_rows_are_one_batch(
    task, tmp_path, monkeypatch, batch_size, epochs, steps
):
    """A row more than a batch is not two batches."""

    def trained(start, recipe, batches, *_):
        first.append(batches.chosen(0))
        assert recipe.training.steps == steps
        return start.weights

    first = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "_train", trained)
    monkeypatch.setattr(training, "BATCH_SIZE", batch_size)
    words = f"finetune vanilla {task.text} --finetune_corpus_path {task.train} {TINY}"
    words += f" --epochs {epochs}"
    for output, seed in (("a", 1), ("b", 1), ("c", 2)):
        more = f"--seed {seed} --writing_params_path {output}"
        training.finetune(parse_arguments(program(GROUPS), f"birthplaces {words} {more}".split()))
    assert first[0] == first[1] != first[2]
    assert load_model(Path("c")).contents.provenance["steps"] == steps


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pretrain vanilla {text} --epochs 0", "training.steps"),
        ("pretrain vanilla {text} --pretrain_lr 0", "learning_rate"),
        ("pretrain vanilla /nowhere.txt", "/nowhere.txt"),
        ("pretrain vanilla {text} --writing_params_path {text}", "exists; choose a new name"),
        ("pretrain perceiver {text} --bottleneck_dim 129", "latents 129"),
        ("finetune vanilla {text} {train} --epochs 0", "training.steps"),
        ("finetune vanilla {text} {train} model.overrides.causal=false", "has causal False"),
        ("finetune vanilla {text} {train} batch.micro_batch_size=4", "has no effect here"),
        ("finetune vanilla {text} {train} --reading_params_path a model.size=tiny", "no effect"),
        ("finetune vanilla {text} {train} --reading_params_path {text}", "is not a model folder"),
        ("finetune vanilla {text} {train} --device cuda:1", "--device cuda:1: this machine has "),
        ("evaluate vanilla {text} {dev} --reading_params_path a --outputs_path {text}", "exists"),
        ("evaluate vanilla {text} {dev} --reading_params_path vanilla --device cuda:9", "cuda:9: "),
        (
            "evaluate perceiver {text} {dev} --bottleneck_dim 16 --reading_params_path perceiver",
            "8 latents; accepted with perceiver: causal True and 16 latents",
        ),
        (
            "evaluate vanilla {text} {dev} --reading_params_path perceiver",
            "8 latents; accepted with vanilla: causal True and 0 latents",
        ),
        ("evaluate vanilla {dev_file} {dev} --reading_params_path vanilla", "dev: its characters,"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_trained(
    task, fresh, birthplaces, capfd, words, message
):
    options = {"train": f"--finetune_corpus_path {task.train}", "dev_file": task.dev}
    words = words.format(text=task.text, dev=f"--eval_corpus_path {task.dev}", **options)
    if "--writing" not in words and "--outputs" not in words:
        words += " --outputs_path m" if "evaluate" in words else " --writing_params_path m"
    models = [m for m in ("vanilla", "perceiver") if f"--reading_params_path {m}" in words]
    for name in models:
        fresh(name)
    assert birthplaces(words) == 2
    assert message in capfd.readouterr().err
    assert {path.name for path in Path().iterdir()} <= {"expt", *models}


def test_several_ranks_are_refused(task, birthplaces):
    words = f"finetune vanilla {task.text} --finetune_corpus_path {task.train} {TINY}"
    assert birthplaces(f"{words} --writing_params_path model", ranks=2) == 2


def test_a_line_is_a_document_and_a_corpus_is_made_once_for_each_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Ann was born.\n\n  \n\u00a0\nBob too.\n")
    texts = rows.documents(path)
    assert texts == ["Ann was born.", "Bob too."]
    with ThreadPoolExecutor() as pool:  # as of runs that begin together
        prepared, other = pool.map(rows.prepare, ["a", "a"], [texts, texts], [tmp_path, tmp_path])
    assert prepared == other
    assert load_manifest(prepared).totals["train"].documents == 2
    before = (prepared / "manifest.json").stat().st_mtime_ns
    assert rows.prepare("a", texts, tmp_path) == prepared
    assert (prepared / "manifest.json").stat().st_mtime_ns == before
    assert rows.prepare("a", texts[:1], tmp_path) != prepared
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(ValueError, match=r"a\.txt: line 2: bad-utf8"):
        rows.documents(path)


def test_every_question_about_a_person_of_the_text_can_be_asked():
    tokenizer = rows.vocabulary(["Bo lives."])
    (ids,) = tokenizer.encode_batch(["Where was Bo born?"])
    assert tokenizer.unk_id not in ids


def test_rows_of_fine_tuning_are_shown_as_the_assignment_shows_them(task, birthplaces, capsys):
    Path("one.tsv").write_text("Where was Ada born?\tAlton\n")
    words = f"dataset namedata {task.text}"
    assert birthplaces(f"{words} --finetune_corpus_path one.tsv") == 0
    read = f"Where was Ada born?{MASK}Alton{MASK}"
    predicted = f"{PAD * 18}{MASK}Alton{MASK}"  # each place predicts what follows it
    assert capsys.readouterr().out.splitlines() == [
        f"x: {read}{PAD * (127 - len(read))}",
        f"y: {predicted}{PAD * (127 - len(predicted))}",
    ]
    assert birthplaces(words) == 2


def test_a_row_of_pretraining_has_all_of_its_text_and_predicts_what_follows(
    task, birthplaces, capsys
):
    assert birthplaces(f"dataset charcorruption {task.text}") == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 8
    texts = task.text.read_text().splitlines()
    for text, x, y in zip(texts, shown[::2], shown[1::2], strict=False):
        prefix, suffix, span, padding = x.removeprefix("x: ").split(MASK)
        assert text.startswith(prefix + span + suffix)
        assert set(padding) == {PAD}
        assert y == f"y: {x[4:]}{PAD}"


def test_london_is_right_for_one_in_twenty_of_the_assignments_development_set(
    birthplaces, shared, capsys
):
    path = shared / "data" / "birthplaces" / "birth_dev.tsv"
    assert birthplaces(f"london --eval_corpus_path {path}") == 0
    assert capsys.readouterr().out == "correct: 25 of 500, 5.0 %\n"
