"""What several tests of records share."""

import pytest

from data_prep.common import files


@pytest.fixture
def no_waiting(monkeypatch):
    """What is read again after an error is read again at once."""
    monkeypatch.setattr(files, "_PAUSES", (0.0, 0.0, 0.0))
