"""Study files: arms, which differ in the levels of factors, and how each arm is measured.

A study file is YAML. It names a recipe and factors; every combination of their levels is an arm,
and every arm is trained with every seed. `settings` hold for all arms. Keys are those of recipes,
in full: `optimizer.learning_rate`. The section `toy` overrides values for a trial at a small size.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common.files import named_errors
from data_prep.common.records import NonNegativeInt, PositiveInt, decode
from data_prep.common.wording import changes
from finetune import tasks
from pretrain.config.run import RunConfig
from pretrain.config.settings import flatten, merge, named_file, override, parse
from pretrain.model.config import ModelConfig

STUDIES = Path(__file__).parent
Settings = Mapping[str, Any]
"""Values by their dotted keys."""
Factors = dict[str, dict[str, dict[str, Any]]]
"""Settings by factor and level. The other levels are compared with the first one."""


@dataclasses.dataclass(frozen=True)
class OfTask:
    """How one task is fine-tuned otherwise than the rest."""

    seeds: list[NonNegativeInt] | None = None
    """None: those of the other tasks."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Besides `FineTuning.settings`."""


@dataclasses.dataclass(frozen=True)
class FineTuning:
    """What every model of a study is fine-tuned on."""

    tasks: list[str]
    """Tasks of GLUE."""
    seeds: list[NonNegativeInt] = dataclasses.field(default_factory=lambda: [1])
    """Of each fine-tuning of each model."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    factors: Factors = dataclasses.field(default_factory=dict)
    """Factors of fine-tuning: each model is fine-tuned in every combination of levels."""
    only: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Levels of these factors that only some models have, with the levels of those models."""
    by_task: dict[str, OfTask] = dataclasses.field(default_factory=dict)
    """Tasks with other seeds or further settings."""

    def __post_init__(self) -> None:
        """Check the section.

        Raises:
            ValueError: no tasks, one twice or unknown, a factor without levels, no seeds or one
                twice, a level or a task that is not one of the section's.
        """
        if not self.tasks:
            raise ValueError("finetune.tasks: there is none")
        _check(self.factors, self.seeds, "finetune.")
        _check_known("finetune.only", self.only, _levels(self.factors))
        _check_known("finetune.by_task", _names(self.by_task), _names(self.tasks))
        for task, own in self.by_task.items():
            if own.seeds is not None:
                _check({}, own.seeds, f"finetune.by_task.{task}.")

    @property
    def groups(self) -> list[tuple[list[str], list[int], list[str]]]:
        """Tasks that are fine-tuned alike, their seeds, and their own settings as `key=value`."""
        by_task = {task: own for key, own in self.by_task.items() for task in _names([key])}
        rest = [task for task in _names(self.tasks) if task not in by_task]
        groups = [(rest, self.seeds, list[str]())] if rest else []
        for task, own in by_task.items():
            groups.append(([task], own.seeds or self.seeds, _words(own.settings)))
        return groups

    @property
    def seeds_by_task(self) -> dict[str, int]:
        """The number of seeds of each task."""
        return {task: len(own) for names, own, _ in self.groups for task in names}


@dataclasses.dataclass(frozen=True)
class Study:
    """A study file."""

    title: str
    recipe: str
    factors: Factors
    seeds: list[NonNegativeInt]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    best: str = ""
    """A factor of which only the level with the lowest validation loss is reported, such as the
    learning rate. The comparison then is between arms that were tuned alike."""
    pairs: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Levels of one factor that are compared as well, the second with the first."""
    subsets: bool = False
    """Whether the perplexity of each subset of the validation text is reported."""
    lengths: list[PositiveInt] = dataclasses.field(default_factory=list)
    """Perplexity is measured on inputs of so many tokens; empty: on blocks as in training."""
    finetune: FineTuning | None = None

    def __post_init__(self) -> None:
        """Check factors, seeds, lengths and pairs.

        Raises:
            ValueError: no factor, a factor without levels or with another's name, no seeds or one
                twice, a length twice or below 2, a pair that is not two levels of one factor
                other than `best`.
        """
        _check(self.factors, self.seeds)
        if not self.factors:
            raise ValueError("factors: there is none; a study compares at least two arms")
        if len({*self.lengths}) < len(self.lengths) or min(self.lengths, default=2) < 2:
            raise ValueError(f"lengths {self.lengths}: must be different numbers, each at least 2")
        own, only = (self.finetune.factors, self.finetune.only) if self.finetune else ({}, {})
        if both := self.factors.keys() & own:
            raise ValueError(f"finetune.factors.{min(both)}: is the name of a factor above as well")
        _check_known("best", [self.best] if self.best else [], [*self.factors])
        for level, models in only.items():
            _check_known(f"finetune.only.{level}", models, _levels(self.factors))
        factors = {k: v for k, v in (self.factors | own).items() if k != self.best}
        for pair in self.pairs:
            _check_known("pairs", pair, _levels(factors))
            if not any(len(levels.keys() & {*pair}) == 2 for levels in factors.values()):
                raise ValueError(f"pairs: {', '.join(pair)}: must be two levels of one factor")


def _names(spelled: Iterable[str]) -> list[str]:
    """Return the names of tasks; raise ValueError if one is unknown or there twice."""
    return [task.name for task in tasks.find([*spelled])]


def _levels(factors: Factors) -> list[str]:
    return [level for levels in factors.values() for level in levels]


def _check_known(key: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{key}: {name!r} is not one of {', '.join(known)}")


def _check(factors: Factors, seeds: Sequence[int], section: str = "") -> None:
    for name, levels in factors.items():
        if not levels:
            raise ValueError(f"{section}factors.{name}: has no levels")
    if not seeds or len({*seeds}) < len(seeds):
        raise ValueError(f"{section}seeds {seeds}: must be different numbers, at least one")


def _words(settings: Settings) -> list[str]:
    """Return settings as `key=value`."""
    return [override(key, value) for key, value in settings.items()]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One combination of levels."""

    levels: tuple[tuple[str, str], ...]
    """(factor, level)."""
    settings: Settings = dataclasses.field(compare=False)

    @property
    def name(self) -> str:
        """In tables and pictures."""
        return ", ".join(level for _, level in self.levels)

    @property
    def folder(self) -> str:
        """In the names of folders; "all" of the only way of fine-tuning."""
        return re.sub(r"[^\w.]+", "-", self.name).strip("-") or "all"

    @property
    def recipe(self) -> str:
        """The study's, or that which a level names; "" of a way of fine-tuning."""
        return str(self.settings.get("recipe", ""))

    @property
    def words(self) -> list[str]:
        """The other settings as `key=value`."""
        return _words({key: value for key, value in self.settings.items() if key != "recipe"})


@dataclasses.dataclass(frozen=True)
class Run:
    """An arm with a seed."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.arm.folder}-seed{self.seed}"


@dataclasses.dataclass(frozen=True)
class Checked:
    """The recipe of an arm, which was read and checked."""

    config: RunConfig
    model: ModelConfig
    ranks: int


def load(name: str, *, toy: bool) -> Study:
    """Load a study file.

    Args:
        name: a YAML file, or the name of one of this folder.
        toy: at its small size.

    Raises:
        ValueError: there is no such study, or a key or value is not accepted; names the file.
    """
    path = named_file("study", name, STUDIES, ".yaml")
    with named_errors(path):
        values = parse(path.read_text(encoding="utf-8"), "YAML")
        if not isinstance(values, dict):
            raise ValueError("is not a mapping of keys to values")
        small = values.pop("toy", None)
        whole = decode(Study, values)
        if not toy:
            return whole
        if not isinstance(small, dict):
            raise ValueError("has no section `toy`; leave --toy out")
        merged = merge(values, small)
        # A factor that is tried at a small size has the levels that stand there, not more.
        if isinstance(levels := small.get("factors"), dict):
            merged["factors"] = values["factors"] | levels
        return decode(Study, merged)


def arms_of(factors: Factors, settings: Settings) -> list[Arm]:
    """Return every combination of levels; a level's settings come after those of all."""
    choices = [[(name, level) for level in levels] for name, levels in factors.items()]
    return [
        Arm(
            levels,
            {**settings} | {k: v for f, level in levels for k, v in factors[f][level].items()},
        )
        for levels in itertools.product(*choices)
    ]


def runs_of(arms: Sequence[Arm], seeds: Sequence[int]) -> list[Run]:
    """Return all runs, seed by seed, so that a whole comparison is finished first."""
    return [Run(arm, seed) for seed in seeds for arm in arms]


def lengths_of(study: Study, model: ModelConfig) -> list[int]:
    """Return the lengths that a model reads: learned positions end."""
    return [length for length in study.lengths if length <= (model.longest_input or math.inf)]


def pretraining_arms(study: Study) -> list[Arm]:
    """Return the arms of a study."""
    return arms_of(study.factors, {"recipe": study.recipe, **study.settings})


def finetuning_arms(study: Study, arm: Arm | None = None) -> list[Arm]:
    """Return the ways in which an arm's models are fine-tuned, by default all ways of the study.

    There is none without a section `finetune`.
    """
    if study.finetune is None:
        return []
    ways, only = arms_of(study.finetune.factors, study.finetune.settings), study.finetune.only
    if arm is None:
        return ways
    own = {level for _, level in arm.levels}
    return [way for way in ways if all(own & {*only.get(level, own)} for _, level in way.levels)]


def comparisons(
    arms: Iterable[Arm], best: str = "", pairs: Sequence[tuple[str, str]] = ()
) -> list[tuple[Arm, Arm]]:
    """Return the pairs of arms that differ in one factor, the factor's first level first.

    Args:
        arms: all that may be compared.
        best: a factor of which only the best level is kept; its levels are ignored.
        pairs: of levels that are compared as well (`Study.pairs`).
    """
    levels = {arm: {f: level for f, level in arm.levels if f != best} for arm in arms}
    first: dict[str, str] = {}
    for each in levels.values():
        first = each | first
    return [
        (one, other)
        for factor, base in first.items()
        for one, other in itertools.product(levels, levels)
        if (levels[one][factor] == base or (levels[one][factor], levels[other][factor]) in pairs)
        and {name for name, _ in levels[one].items() ^ levels[other].items()} == {factor}
    ]


def differences(one: Checked, other: Checked) -> list[str]:
    """Return the settings in which two arms differ, the architecture field by field.

    If there are several, the comparison is confounded.
    """
    return sorted(key for key, *_ in changes(resolved(one), resolved(other)))


def resolved(arm: Checked) -> dict[str, Any]:
    """Return the settings of an arm that decide what its models become, by their dotted keys."""
    settings = dataclasses.asdict(arm.config)
    settings["model"] = dataclasses.asdict(arm.model)
    # The zero vector of <mask> needs no row, and the folder decides nothing.
    del settings["model"]["vocab_size"], settings["folder"]
    return flatten(settings)
