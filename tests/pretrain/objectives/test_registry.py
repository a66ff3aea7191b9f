"""A new objective is a file and a line in the registry: nothing else names one."""

from pathlib import Path

import pytest

from pretrain.config import load as recipes
from pretrain.config.run import RunConfig
from pretrain.objectives.registry import SETTINGS_BY_NAME

PACKAGE = Path(recipes.__file__).parents[1]


@pytest.mark.parametrize("name", SETTINGS_BY_NAME)
def test_settings_are_read_back_from_a_run_s_recipe_by_their_name(name, tmp_path):
    config = RunConfig(folder="run", objective=SETTINGS_BY_NAME[name]())
    recipes.dump(config, tmp_path / "run.yaml")
    assert config.objective.name == name
    assert recipes.load(str(tmp_path / "run.yaml")) == config


def test_only_the_registry_the_recipe_s_default_and_one_measurement_name_an_objective():
    names = ("masked", "causal", "sentence_pairs", "spans")
    modules = [f"pretrain.objectives.{name}" for name in names]
    files = [p for p in PACKAGE.rglob("*.py") if any(m in p.read_text() for m in modules)]
    assert {str(path.relative_to(PACKAGE)) for path in files} == {
        "objectives/registry.py",
        "objectives/sentence_pairs.py",
        "config/run.py",
        # What is measured is theirs alone: both tasks of pairs.
        "inference/evaluate.py",
    }
