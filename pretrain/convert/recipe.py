"""Load a recipe that leaves its architecture to the model that it starts from.

Imports no torch unless that model has to be read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pretrain.config.load import load, sources
from pretrain.config.run import RunConfig
from pretrain.config.settings import is_within
from pretrain.records import fork

ARCHITECTURE = ("size", "variant", "overrides")
"""The settings in section `model` that name an architecture."""


def load_complete(recipe: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, str]:
    """Load a recipe; with `model.init_from` alone, its architecture is that of the model.

    Then the settings of the architecture are written into the recipe, so that no later reader of it
    needs the model. A run that is resumed or forked keeps the settings that were recorded.

    Args:
        recipe: as for `load`.
        overrides: as for `load`.

    Returns:
        The recipe, and a line that says which architecture it took; "" if it names one itself.

    Raises:
        ValueError: as `load`; or there is no model to read.
    """
    config = load(recipe, overrides)
    found = sources(recipe, overrides)
    if not config.model.init_from or any(
        is_within(key, f"model.{name}") for key in found for name in ARCHITECTURE
    ):
        return config, ""
    if past := fork.recorded(config, fork.find(config)):
        model, whose = past.model, "the run so far"
    else:
        from pretrain.convert import init_from

        model, whose = init_from.recipe_of(config), config.model.init_from
    config = dataclasses.replace(
        config, model=dataclasses.replace(model, init_from=config.model.init_from)
    )
    others = "".join(f", {name} {value}" for name, value in model.overrides.items())
    return config, (
        f"architecture: that of {whose}: size {model.size}, variant {model.variant}{others}\n"
    )
