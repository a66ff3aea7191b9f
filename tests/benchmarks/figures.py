"""Measured figures and their targets."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line of a table; a figure without bounds has no target."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool:
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    def __str__(self) -> str:
        bounds = {"at least": self.at_least, "at most": self.at_most}
        said = [f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None]
        verdict = [] if self.is_met else ["MISSED"]
        return "  ".join([f"{self.name:54} {self.value:9.3g} {self.unit:4}", *said, *verdict])
