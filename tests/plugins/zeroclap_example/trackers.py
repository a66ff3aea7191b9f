"""Trackers: one writes lines, the other fails."""

import dataclasses
from typing import Annotated

from annotated_types import Gt


class Lines:
    @dataclasses.dataclass(frozen=True)
    class Settings:
        file: str = "lines.txt"
        every: Annotated[int, Gt(0)] = 1

    def __init__(self, shown, settings):
        self.file = (shown.folder / settings.file).open("a")
        self.every = settings.every

    def scalars(self, step, values):
        if step % self.every == 0 and "train/loss" in values:
            self.file.write(f"{step} {values['train/loss']}\n")

    def text(self, step, text):
        pass

    def sync(self, step):
        self.file.flush()

    def close(self):
        self.file.close()


class Fails:
    def __init__(self, shown):
        pass

    def scalars(self, step, values):
        raise RuntimeError("no such server")
