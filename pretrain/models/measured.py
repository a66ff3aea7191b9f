"""The results that the tables and pictures of `evaluate` show."""

from __future__ import annotations

import dataclasses

from pretrain.models.evaluate import Evaluation, Refusal

_FEWEST_TARGETS = 100
"""Groups of positions with fewer are too noisy for the table and the picture."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The results of one model."""

    model: str
    """Its name in the picture and the files."""
    trained_length: int
    """Tokens of the blocks of its training."""
    results: list[Evaluation | Refusal] = dataclasses.field(default_factory=list)
    pair_task: str | None = None
    """What its pair head was trained on, such as "sop"; "-" where nothing says; None without such a
    head."""

    @property
    def evaluations(self) -> list[Evaluation]:
        """The results without refusals, by length."""
        found = [result for result in self.results if isinstance(result, Evaluation)]
        return sorted(found, key=lambda each: each.length)


def perplexity_by_position(evaluation: Evaluation) -> dict[int, float]:
    """Perplexity by the first position of a group, of groups with enough targets."""
    return {
        edge: score.perplexity
        for edge, score in evaluation.positions.items()
        if score.targets >= _FEWEST_TARGETS
    }


def short_number(value: float | None) -> str:
    """A perplexity in few characters; "-" where there is none."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1e6 else f"{value:.1e}"
