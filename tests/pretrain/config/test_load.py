"""Loading recipes, refusing wrong ones, comparing and writing them."""

import dataclasses
import json
import re
from pathlib import Path
from typing import get_args

import pytest

from data_prep.common import records
from pretrain.config import changes
from pretrain.config import load as recipes
from pretrain.config.run import RunConfig
from pretrain.config.sections import OptimizerConfig
from pretrain.config.settings import flatten
from pretrain.model import presets
from pretrain.model.backends import choose_backend
from pretrain.model.config import ModelConfig
from pretrain.objectives.masked import MaskedLMConfig

SHIPPED = sorted(path.stem for path in recipes.RECIPES.glob("*.yaml"))


def write(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.yaml").write_text(text)
    return str(folder / f"{name}.yaml")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_loads(name, tmp_path):
    config = recipes.load(name)
    recipes.dump(config, tmp_path / "run.yaml")
    assert recipes.load(str(tmp_path / "run.yaml")) == config
    assert "demo" in SHIPPED


def test_every_shipped_recipe_says_on_which_hardware_it_ran_and_when():
    for name in SHIPPED:
        text = (recipes.RECIPES / f"{name}.yaml").read_text()
        assert re.search(r"^# (Ran on .+\(20\d\d-\d\d-\d\d|Not run)", text, re.M), name


def test_what_leaves_a_run_says_nothing_of_its_machine_or_people(tmp_path):
    """Of paths the last name is left; sections that decide no weights are left out."""
    settings = [
        *("folder=/S3CRET/run", "tracker=wandb", "training.steps=9000", 'data.corpus=""'),
        "data.corpora={a: {path: /S3CRET/wiki}}",
        *("model.init_from=../S3CRET/roberta/", "training.deepspeed=/S3CRET/mine.json"),
        *("supervision.hostfile=/S3CRET/hosts", "notify.command=[/S3CRET/send, --token, S3CRET]"),
        "phases=[{steps: 5000}, {data: {corpora: {a: {path: /S3CRET/books}}}}]",
    ]
    config = recipes.load("small", settings)
    public = recipes.public(config)
    text = json.dumps(public)
    assert "S3CRET" not in text
    assert all(name in text for name in ("wiki", "roberta", "mine.json", "books"))
    again = recipes.load(write(tmp_path, "public", text))
    keys = [[t.partition(":")[0] for t in texts] for texts in recipes.differences(config, again)]
    assert keys == [[], ["model.init_from", "training.deepspeed"]]
    same = recipes.load("small", [*settings, "model.init_from=../S3CRET/./roberta"])
    assert recipes.differences(config, same) == ([], [])


def test_overrides_win_over_the_recipe_and_the_recipe_over_its_base(tmp_path):
    write(tmp_path, "a", "{training: {steps: 20000, seed: 3}, objective: {probability: 0.2}}")
    write(tmp_path, "b", "{extends: a, training: {seed: 4}, folder: b}")
    last = write(tmp_path, "c", "{extends: b, folder: c}")
    config = recipes.load(last, ["training.seed=5"])
    assert (config.training.steps, config.training.seed, config.folder) == (20000, 5, "c")
    assert config.objective.probability == 0.2
    assert recipes.load(last).training.seed == 4


def test_a_recipe_may_extend_a_shipped_one(tmp_path):
    config = recipes.load(write(tmp_path, "mine", "{extends: demo, training: {seed: 9}}"))
    demo = recipes.load("demo")
    training = dataclasses.replace(demo.training, seed=9)
    assert config == dataclasses.replace(demo, folder="runs/mine", training=training)


def test_a_run_has_the_recipes_name_unless_the_recipe_or_the_command_line_names_it(tmp_path):
    mine = write(tmp_path, "mine", "{}")
    assert recipes.load(mine).folder == "runs/mine"
    assert recipes.load("demo").folder == "runs/demo"
    assert recipes.load(mine, ["folder=''"]).folder == "runs/mine"
    assert recipes.load(mine, ["folder=there"]).folder == "there"
    assert recipes.load(write(tmp_path, "own", "{folder: here}")).folder == "here"
    recipes.dump(recipes.load(mine), tmp_path / recipes.RUN_FILE)
    assert recipes.load(str(tmp_path / recipes.RUN_FILE)).folder == "runs/mine"


def test_the_source_of_a_value_is_the_last_that_set_it(tmp_path):
    text = "{training: {steps: 20000, seed: 3}, fault: {random_labels: [7, 9]}}"
    base = write(tmp_path, "base", text)
    text = "{extends: base, training: {seed: 4}, batch: {micro_batch_size: 1}}"
    last = write(tmp_path, "last", text)
    words = ["batch.micro_batch_size=2", "fault={random_labels: []}", "model.overrides.dropout=0"]
    assert recipes.sources(last, words) == {
        "training.steps": base,
        "training.seed": last,
        "batch.micro_batch_size": "command line",
        "fault.random_labels": "command line",  # a whole section replaces the recipes' section
        "model.overrides.dropout": "command line",
    }
    assert recipes.sources("pile-large")["model.size"] == "pile-large.yaml"
    assert recipes.sources("pile-large")["batch.global_batch_size"] == "pile-base.yaml"


def test_recipes_that_extend_each_other_are_refused(tmp_path):
    write(tmp_path, "a", "{extends: b}")
    with pytest.raises(ValueError, match="extends itself, through .*b.yaml.*a.yaml"):
        recipes.load(write(tmp_path, "b", "{extends: a}"))
    with pytest.raises(ValueError, match="extends itself"):
        recipes.load(write(tmp_path, "c", "{extends: c}"))


def test_the_folder_of_a_run_is_no_recipe(tmp_path):
    """Nor is it taken for a recipe with a similar name."""
    write(tmp_path, "run", "{}")
    with pytest.raises(ValueError, match=r"is a run's folder; its recipe is .*/run\.yaml"):
        recipes.load(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not hold a mapping"),
        ("{extends: smal}", r"'smal' \(did you mean small\?\) is neither a file nor one of .*demo"),
        ("{trainig: {}}", "bad.yaml: unknown key 'trainig'; did you mean 'training'"),
        ("{model: {size: huge}}", "bad.yaml: model.size: 'huge' .* one of base, large"),
        ("{model: {overrides: {dropuot: 0}}}", "did you mean 'model.overrides.dropout'"),
        ("{model: {overrides: {vocab_size: 9}}}", "unknown key 'model.overrides.vocab_size'"),
    ],
)
def test_a_bad_recipe_is_refused_by_file_and_key(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        recipes.load(write(tmp_path, "bad", text))


def test_a_bad_setting_is_reported_with_the_recipe_and_the_overrides(tmp_path):
    recipe = write(tmp_path, "mine", "{}")
    with pytest.raises(ValueError, match="optimizer.beta1") as caught:
        recipes.load(recipe, ["training.seed=1", "optimizer.beta1=1"])
    assert str(caught.value).startswith(f"{recipe} training.seed=1 optimizer.beta1=1: ")


OUT_OF_RANGE = """
    batch.global_batch_size=-4 batch.micro_batch_size=0
    data.packing=loose data.sequence_length=1 data.sequence_length=2147483648
    objective.name=masked objective.probability=0 objective.probability=1.5 objective=3
    optimizer.beta2=1 optimizer.epsilon=-0.5 optimizer.gradient_clipping=-1
    optimizer.learning_rate=0 optimizer.learning_rate=nan optimizer.name=lam
    optimizer.weight_decay=-1 schedule.minimum_learning_rate=-1
    schedule.name=step schedule.warmup_steps=-1 spike.deviations=0
    spike.patience=0 spike.window=0 supervision.hang_seconds=0 supervision.processes_per_node=-2
    training.attention_backend=fast training.checkpoint_interval=0 training.checkpoints_kept=1
    training.compile=always training.data_workers=1000000000 training.steps=0
    training.evaluation_blocks=-1 training.seed=-1
"""


@pytest.mark.parametrize("override", OUT_OF_RANGE.split())
def test_values_out_of_range_are_refused_by_name(override):
    key, value = override.split("=")
    with pytest.raises(ValueError, match=rf"{key}: '?{value}'? .* it must be "):
        recipes.load("demo", [override.replace("=nan", "=.nan")])


def test_every_number_is_finite_and_none_overflows_what_is_computed_with_it():
    """In numpy's and torch's 64-bit whole numbers, fp32, and quotients of the spike detector.

    A check that tried to count the weights of such a model would not end.
    """
    hints = dict(records.keys(RunConfig, {}))
    del hints["model.overrides.vocab_size"]  # is no setting
    for key, hint in hints.items():
        kinds = (hint, *get_args(hint)[:1])
        not_finite = [".inf", "-.inf", ".nan", "1e999"] * (float in kinds)
        for text in [*not_finite, *["1e22"] * (int in kinds), *["1e300"] * (float in kinds)]:
            wanted = ".* a finite number$" if text in not_finite else "it must be "
            with pytest.raises(ValueError, match=rf"{key}: \S+ is not accepted; {wanted}"):
                recipes.load("demo", [f"{key}={text}"]).architecture(97)
    for key in ("spike.deviations", "optimizer.learning_rate"):
        with pytest.raises(ValueError, match=f"{key}: 1e-31 .* 1e-30 or above"):
            recipes.load("demo", [f"{key}=1e-31"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.steps=600", "schedule.warmup_steps=600"], "warmup_steps 600 is not below"),
        (["schedule.minimum_learning_rate=1"], "minimum_learning_rate 1.0 is above"),
        (["spike.margin_steps=100"], "= 100 steps is below .* = 110"),
        (["batch.micro_batch_size=5"], "global_batch_size 16 is not a multiple of .* 5"),
        (["objective.keep_probability=0.95"], "at most 1"),
        (["fault.random_labels=[5, 5]"], r"fault.random_labels: \[5, 5\] .* a later one, such"),
    ],
)
def test_values_that_contradict_each_other_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        recipes.load("small", overrides)


CHANGES_NO_RESULT = """
    folder=elsewhere batch.micro_batch_size=4 supervision.processes_per_node=1
    training.checkpoint_interval=60 training.checkpoints_kept=9 training.data_workers=2
    training.evaluation_blocks=3 spike.window=77 data.corpus=moved
"""


@pytest.mark.parametrize("override", CHANGES_NO_RESULT.split())
def test_what_changes_no_result_may_change_on_resume(override):
    config, changed = recipes.load("small"), recipes.load("small", [override])
    assert changed != config
    assert recipes.differences(config, changed) == ([], [])
    assert recipes.digest(config, []) == recipes.digest(changed, [])


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("training.seed=2", "training.seed: 1, now 2"),
        ("training.steps=700", "training.steps: 850, now 700"),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate: 0.002, now 0.001"),
        ("optimizer.name=lamb", "optimizer.name: 'adamw', now 'lamb'"),
        ("batch.global_batch_size=64", "batch.global_batch_size: 16, now 64"),
        ("model.overrides.dropout=0.1", "model.overrides.dropout: 0.0, now 0.1"),
        ("model.overrides.initial_beta=2", "model.overrides.initial_beta: None, now 2"),
        ("data.sequence_length=64", "data.sequence_length: 128, now 64"),
        ("data.packing=best-fit", "data.packing: 'chunked', now 'best-fit'"),
        ("objective.probability=0.3", "objective.probability: 0.15, now 0.3"),
        ("training.deepspeed=zero1_bf16", "training.deepspeed: 'zero1_fp32', now 'zero1_bf16'"),
        ("fault.random_labels=[480, 500]", "fault.random_labels: [], now [480, 500]"),
    ],
)
def test_what_changes_results_may_not_change_on_resume(override, difference):
    old = recipes.load("small")
    new = recipes.load("small", [override])
    ((found,),) = filter(None, recipes.differences(old, new))
    assert found.startswith(difference)
    assert recipes.digest(old, []) != recipes.digest(new, [])


def test_only_settings_are_suggested():
    """Not what a class says of all its records, such as whether an objective is causal."""
    known = {key for key, _ in records.keys(RunConfig, {"objective": {"name": "sentence-pairs"}})}
    config = recipes.load("albert-base")
    assert {key for key in known if key.startswith("objective.")} == {
        f"objective.{field.name}" for field in dataclasses.fields(config.objective)
    }


def test_every_setting_has_a_rule():
    for key in flatten(dataclasses.asdict(recipes.load("demo"))):
        changes.rule(key)


def test_a_recipe_that_is_not_utf_8_is_refused_by_name(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes("folder: café".encode("latin-1"))
    with pytest.raises(ValueError, match=f"^{path}: .*UTF-8"):
        recipes.load(str(path))


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lr", "'optimizer.learning_rate'"),
        ("optimizer.lerning_rate", "'optimizer.learning_rate'"),
        ("optimizer.warmup_steps", "'schedule.warmup_steps'"),
        ("steps", "'training.steps' or 'profile.steps'"),
        ("batch_size", "'batch.global_batch_size'"),
        ("model.hidden_size", "'model.overrides.hidden_size'"),
        ("spike.deviatons", "'spike.deviations'"),
        ("training.step", "'training.steps'"),
    ],
)
def test_an_unknown_key_is_answered_with_the_whole_key_that_was_meant(key, meant):
    with pytest.raises(ValueError, match=f"unknown key '{key}'; did you mean {meant}[?]"):
        recipes.load("demo", [f"{key}=3"])


def test_whole_numbers_may_be_written_as_floats():
    config = recipes.load("demo", ["training.steps=1e3", "profile.steps=[1e2, 105.0]"])
    assert config.training.steps == 1000
    assert type(config.training.steps) is int
    assert config.profile.steps == [100, 105]
    for key in ("data.sequence_length", "training.checkpoints_kept", "objective.longest_ngram"):
        recipes.load("demo", [f"{key}=1e3"])
    words = ["model.overrides.max_positions=1e3", "model.overrides.initial_beta=2.0"]
    shown = [*map(repr, recipes.load("demo", words).model.overrides.values())]
    assert shown[-2:] == ["1000", "2.0"]
    assert recipes.load("demo", [f"training.seed={2**62 - 1}"]).training.seed == 2**62 - 1
    recipes.load("demo", ["training.seed=1e3"])
    for text in ("1.5", "1e-3", ".inf", ".nan", "'1e3'"):
        with pytest.raises(ValueError, match=r"training.steps: .* a whole number"):
            recipes.load("demo", [f"training.steps={text}"])


# --- the format of recipes that the project writes ----------------------------------------------


@pytest.mark.parametrize("version", [0, 2, 99, "1", None])
def test_a_recipe_of_another_format_is_refused_by_name(version, tmp_path):
    path = write(tmp_path, "run", json.dumps({"format_version": version}))
    with pytest.raises(ValueError, match="format version") as caught:
        recipes.load(path)
    assert str(caught.value).startswith(f"{path}: format version {version!r} ")


# Every published configuration (EIFY/fairseq, config/pretraining):
# its file, our recipe and variant, and what sets the model apart from RoBERTa.
CLAP = {"head": "clap", "normalize_embeddings": True, "embedding_norm": False, "dropout": 0.0}
ALIBI = {"position": "alibi", "alibi": "offset"}
ZERO = {**CLAP, **ALIBI, "mask_embedding": "zero"}
SCALED = {**ZERO, "embedding_scale": "sqrt-hidden"}
UNDROPPED = {**ZERO, "attention_dropout": 0.0}
ZERO_UNNORMALIZED = {**ZERO, "normalize_embeddings": False}
CLAP_UNNORMALIZED = {**CLAP, "normalize_embeddings": False}
WIKI, BARE = "wikitext103", "zero-clap-unscaled"
PUBLISHED = [
    ("baseline_pile", "pile-base", "baseline", {}),
    ("sinusoidal_pile", "pile-base", "sinusoidal", {"position": "sinusoidal"}),
    ("learned_clap_pile", "pile-base", "learned-clap", CLAP),
    ("alibi_pile", "pile-base", "alibi", ALIBI),
    ("zero_clap_pile", "pile-base", "zero-clap", SCALED),
    ("large_pile", "pile-large", "baseline", {}),
    ("learned_clap_large_pile", "pile-large", "learned-clap", CLAP),
    ("alibi_large_pile", "pile-large", "alibi", ALIBI),
    ("zero_clap_large_pile", "pile-large", "zero-clap", SCALED),
    ("base", WIKI, "baseline", {}),
    ("sinusoidal", WIKI, "sinusoidal", {"position": "sinusoidal"}),
    ("alibi", WIKI, "alibi-symmetric", {**ALIBI, "alibi": "symmetric"}),
    ("alibi_asymmetrical", WIKI, "alibi", ALIBI),
    ("learned_clap", WIKI, "learned-clap", CLAP),
    ("learned_clap_unnormalized", WIKI, "learned-clap-unnormalized", CLAP_UNNORMALIZED),
    ("clap", WIKI, "alibi-clap", {**CLAP, **ALIBI, "attention_dropout": 0.0}),
    ("zero_clap", WIKI, f"{BARE}-no-dropout", UNDROPPED),
    ("zero_clap_attention_dropout", WIKI, BARE, ZERO),
    ("zero_clap_unnormalized_attention_dropout", WIKI, f"{BARE}-unnormalized", ZERO_UNNORMALIZED),
    ("zero_clap_scaled_embedding_attention_dropout", WIKI, "zero-clap", SCALED),
    ("zero_clap_self_masking", f"{WIKI}-self-masking", f"{BARE}-no-dropout", UNDROPPED),
]
LARGE = {"hidden_size": 1024, "num_layers": 24, "num_heads": 16, "intermediate_size": 4096}
ROBERTA = {
    "pile-base": ModelConfig(vocab_size=50265, max_positions=2048),
    "pile-large": ModelConfig(vocab_size=50265, max_positions=2048, **LARGE),
    "wikitext103": ModelConfig(vocab_size=50265, max_positions=512),
}
NUMBERS = {
    "pile-base": (512, 2048, 133082, 6e-4, 6e-5, "overestimated-cosine"),
    "pile-large": (512, 2048, 133082, 4e-4, 4e-5, "overestimated-cosine"),
    "wikitext103": (256, 512, 125000, 5e-4, 0.0, "linear"),
}


@pytest.mark.parametrize(
    ("published", "name", "variant", "apart"), PUBLISHED, ids=[row[0] for row in PUBLISHED]
)
def test_every_published_configuration_is_a_recipe_and_a_variant(published, name, variant, apart):
    config = recipes.load(name, [f"model.variant={variant}"])
    base = name.removesuffix("-self-masking")
    model = presets.build(config.model.size, config.model.variant, 50265, config.model.overrides)
    rows = 50264 if apart.get("mask_embedding") == "zero" else 50265
    assert model == dataclasses.replace(ROBERTA[base], vocab_size=rows, **apart)
    rate, schedule = config.optimizer.learning_rate, config.schedule
    sizes = config.batch.global_batch_size, config.data.sequence_length, config.training.steps
    assert NUMBERS[base] == (*sizes, rate, schedule.minimum_learning_rate, schedule.name)
    assert config.optimizer == OptimizerConfig("adamw", rate, 0.9, 0.98, 1e-6, 0.01, "all", 0.0)
    assert config.schedule.warmup_steps == 10000
    self_masking = MaskedLMConfig(0.15, 0.0, 0.0, "all")
    masking = self_masking if published.endswith("self_masking") else MaskedLMConfig(0.15, 0.1, 0.1)
    assert config.objective == masking
    assert config.training.seed == 1


@pytest.mark.parametrize("path", sorted(recipes.RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_only_published_recipes_may_drop_text(path):
    packing = recipes.load(str(path)).data.packing
    if path.stem in {row[1] for row in PUBLISHED}:
        assert packing == "complete"
    elif path.stem.startswith("birthplaces"):
        assert packing == "one-document"
    else:
        pinned = "complete" if path.stem.startswith(("unstable", "poisoned")) else "chunked"
        of_objective = {"causal": "contiguous", "albert": "sentence-pairs"}
        found = [packing for word, packing in of_objective.items() if word in path.stem]
        assert packing == (found or [pinned])[0]


@pytest.mark.parametrize("name", ["causal-wikitext103", "extrapolation-causal"])
@pytest.mark.parametrize("method", ["alibi", "sinusoidal", "rotary", "t5-bias", "learned", "none"])
def test_causal_recipes_take_every_causal_variant(name, method):
    config = recipes.load(name, [f"model.variant=causal-{method}", "data.corpus=corpus"])
    size, overrides = config.model.size, config.model.overrides
    model = presets.build(size, config.model.variant, 4096, overrides)
    assert config.objective.causal
    assert model.causal
    assert model.max_positions >= config.data.sequence_length


def test_the_model_of_the_alibi_paper():
    """Press et al. 2022, section 3: 16 layers, width 1024, 8 heads, 4096; 73,728 tokens a step."""
    config = recipes.load("causal-wikitext103", ["data.corpus=corpus"])
    model = presets.build("large", "causal-alibi", 50265, config.model.overrides)
    sizes = model.num_layers, model.hidden_size, model.num_heads, model.intermediate_size
    assert sizes == (16, 1024, 8, 4096)
    assert (model.layer_norm, model.activation, model.scale) == ("pre", "relu", 32)
    assert config.batch.global_batch_size * config.data.sequence_length == 8 * 9216


@pytest.mark.parametrize("name", ["pile-base", "pile-large"])
def test_a_fast_recipe_is_the_published_one_without_attention_dropout_in_full_rows(name):
    published, fast = recipes.load(name), recipes.load(f"{name}-fast")
    found = [text for texts in recipes.differences(published, fast) for text in texts]
    keys = {text.partition(":")[0] for text in found}
    assert keys == {"data.packing", "model.overrides.attention_dropout"}
    model = fast.architecture(50265)
    assert choose_backend(model, fast.training.attention_backend, on_gpu=True) == "flex"
    assert fast.training.compile == "auto"
