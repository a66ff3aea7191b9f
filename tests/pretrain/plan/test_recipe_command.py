"""`zeroclap recipes` and `show`: the list, and all settings of one."""

import dataclasses

import pytest
import yaml

from data_prep.common.records import docstrings
from finetune.zeroclap import main
from pretrain.config.load import RECIPES, load, sources
from pretrain.config.run import RunConfig
from pretrain.config.sections import ADVANCED
from pretrain.config.settings import flatten, is_within
from pretrain.data.sources import SOURCES
from pretrain.model.config import ModelConfig
from pretrain.model.presets import SIZES, VARIANTS
from pretrain.objectives.registry import SETTINGS_BY_NAME


def test_the_list_has_every_recipe_size_variant_objective_and_named_setting(capsys):
    assert main(["recipes"]) == 0
    rows = dict(
        line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[:2] == "  "
    )
    assert {path.stem for path in RECIPES.glob("*.yaml")} <= rows.keys()
    assert {*SIZES, *VARIANTS, *SETTINGS_BY_NAME} <= rows.keys()
    assert rows["large"].startswith("hidden_size 1024, num_layers 24")
    assert rows["demo"].startswith("A small zero-clap")
    assert rows["schedule.name"] == "overestimated-cosine, cosine, linear, constant, wsd"
    assert rows["data.packing"] == ", ".join(SOURCES)
    assert rows["model.overrides.sharing"] == "none, all, attention, feed-forward"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_recipe_begins_with_a_sentence_that_describes_it(path):
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")


def test_every_setting_has_a_description():
    def check(record):
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if dataclasses.is_dataclass(value):
                check(value)
            else:
                assert docstrings(type(record)).get(field.name) or field.name == "name"

    for objective in SETTINGS_BY_NAME.values():
        check(RunConfig(objective=objective()))
    check(ModelConfig(vocab_size=9))


SHOWN = [
    ("demo", ["folder=a # b: c", "optimizer.learning_rate=3e-3", "model.overrides.dropout=0.1"]),
    ("demo", ["model.overrides={}", "data.corpus='yes'", "objective.longest_ngram=3"]),
    ("demo", ["profile.steps=[1, 3]", "notify.command=[mail, 'a: # b', ']']", "tracker=wandb"]),
    (
        "small",
        [
            "data.corpora={web: {path: w, weight: 3}, dropout: {path: b}, 'no': {path: n}}",
            "data.corpora.web.weight=0.5",
            "phases=[{steps: 200, data: {corpora: {web: {weight: 0}}}}, {}]",
        ],
    ),
]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        *((path.stem, ["--changed"]) for path in RECIPES.glob("*.yaml")),
        *(
            (recipe, [*words, *more])
            for recipe, words in SHOWN
            for more in ([], ["--changed"], ["--all"])
        ),
    ],
)
def test_what_show_prints_is_a_recipe_of_the_same_run(recipe, words, tmp_path, capsys):
    assert main(["show", recipe, *words]) == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    expected = load(recipe, [word for word in words if not word.startswith("--")])
    if expected.folder == f"runs/{recipe}":
        expected = dataclasses.replace(expected, folder="runs/shown")
    assert load(str(shown)) == expected
    assert max(map(len, shown.read_text().splitlines())) <= 100


def test_show_changed_has_only_what_differs_from_the_defaults_and_its_source(tmp_path, capsys):
    (tmp_path / "base.yaml").write_text("training: {seed: 7, steps: 500000}\n")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: base\nobjective: {name: causal-lm}\nspike: {deviations: 6}\n")
    words = ["model.variant=causal-alibi", "model.overrides.dropout=0", "schedule.warmup_steps=9"]
    steps = RunConfig().training.steps
    assert main(["show", str(recipe), *words, f"training.steps={steps}", "--changed"]) == 0
    assert capsys.readouterr().out == (
        "model:\n  variant: causal-alibi  # command line\n"
        "  overrides:\n    dropout: 0  # command line\n"
        f"objective:\n  name: causal-lm  # {recipe}\n"
        "schedule:\n  warmup_steps: 9  # command line\n"
        f"training:\n  seed: 7  # {tmp_path / 'base.yaml'}\n"
    )


def test_show_documents_every_setting_and_names_its_source(capsys):
    words = ["model.variant=alibi", "model.overrides.alibi=offset"]
    assert main(["show", "pile-large", "--all", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    sections = [line for line in lines if line.endswith(":") and line[0] not in " #"]
    names = [field.name for field in dataclasses.fields(RunConfig)]
    values = ("folder", "tracker", "phases")
    assert sections == [f"{name}:" for name in names if name not in values]
    for before, line in (
        ("  # Peak of the schedule.", "  learning_rate: 0.0004  # pile-large.yaml"),
        ("  # Decay rate of the first moment.", "  beta1: 0.9  # pile-base.yaml"),
        ("  # Positions, embeddings and head, by name.", "  variant: alibi  # command line"),
        (
            '    # Shape of ALiBi\'s bias, where `position` is "alibi"',
            "    alibi: offset  # command line",
        ),
    ):
        assert lines[lines.index(line) - 1].startswith(before)
    settings = [n for n, line in enumerate(lines) if "  # " in line and line.lstrip()[0] != "#"]
    undocumented = [lines[n] for n in settings if not lines[n - 1].lstrip().startswith("# ")]
    assert undocumented == ["  name: masked-lm  # default"]


def test_show_has_every_field_of_the_model_and_what_decides_it(capsys):
    assert main(["show", "small", "model.overrides.num_heads=2", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    fields = [line.strip(" #").partition(":")[0] for line in lines if line.startswith("    ")]
    names = {field.name for field in dataclasses.fields(ModelConfig)} - {"vocab_size", "pair_head"}
    assert names == {name for name in fields if name in names}
    assert "    num_heads: 2  # command line" in lines
    for line in (
        "    #num_layers: 4  # size small",
        "    #position: alibi  # variant zero-clap",
        "    #alibi: offset  # default",
    ):
        assert lines[lines.index(line) - 1].startswith("    # ")


def test_show_leaves_out_advanced_settings_that_nothing_sets(capsys):
    words = ["training.deterministic=false", "profile.steps=[1, 3]"]
    shown = []
    for more in ([], ["--all"]):
        assert main(["show", "pile-base", *words, *more]) == 0
        shown.append(yaml.safe_load(capsys.readouterr().out))
    usual, every = map(flatten, shown)
    advanced = {key for key in every if any(is_within(key, name) for name in ADVANCED)}
    set_here = set(sources("pile-base", words))
    assert every.keys() - usual.keys() == advanced - set_here
    assert advanced & set_here >= {"training.deterministic", "optimizer.beta1"}
    assert "spike" not in shown[0]


def test_an_advanced_setting_exists():
    keys = flatten(dataclasses.asdict(RunConfig()))
    assert not [name for name in ADVANCED if not any(is_within(key, name) for key in keys)]
