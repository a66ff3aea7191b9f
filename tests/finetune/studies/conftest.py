"""A small study: learned positions and ALiBi, with a recipe and a corpus of the tests."""

from pathlib import Path

import pytest

STUDY = """
title: Positions at a tiny size
recipe: {recipe}
factors:
  positions:
    learned: {{model.variant: baseline}}
    ALiBi: {{model.variant: alibi}}
  dropout:
    some: {{model.overrides.dropout: 0.1}}
    none: {{model.overrides.dropout: 0.0}}
settings: {{supervision.processes_per_node: 1, training.steps: 20}}
seeds: [1, 2]
lengths: [32, 64, 128]
toy:
  factors: {{dropout: {{some: {{model.overrides.dropout: 0.1}}}}}}
"""


@pytest.fixture(scope="session")
def study_file(recipe, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("study") / "positions.yaml"
    path.write_text(STUDY.format(recipe=recipe.path))
    return path
