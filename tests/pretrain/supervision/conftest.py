"""Processes that the tests end get less time than those of a run."""

import pytest

from pretrain.processes import processes


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 2.0)
