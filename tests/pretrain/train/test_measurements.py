"""The time of a rank's own forward passes."""

import pytest
import torch
from torch import nn

from pretrain.train import measurements
from pretrain.train.measurements import ForwardTimer


def test_passes_in_training_are_counted_and_others_are_not():
    model = nn.Linear(4, 4)
    timer = ForwardTimer(model, torch.device("cpu"))
    model.eval()
    model(torch.ones(2, 4))
    assert timer.take() == 0
    model.train()
    model(torch.ones(2, 4))
    assert timer.take() > 0
    assert timer.take() == 0


def test_on_a_gpu_events_are_read_when_they_are_done(monkeypatch):
    """With events that stand in for a GPU's: nothing waits for them."""
    made = []

    class Event:
        def __init__(self):
            self.recorded, self.done = False, False
            made.append(self)

        def record(self):
            self.recorded = True

        def query(self):
            return self.done

        def elapsed_time(self, end):
            assert self.recorded
            assert end.done
            return 250.0

    monkeypatch.setattr(measurements, "_new_event", Event)
    model = nn.Linear(4, 4)
    timer = ForwardTimer(model, torch.device("cuda"))
    model.eval()
    model(torch.ones(2, 4))
    assert made == []
    model.train()
    model(torch.ones(2, 4))
    model(torch.ones(2, 4))
    assert timer.take() == 0
    made[1].done = True
    assert timer.take() == pytest.approx(0.25)
    made[3].done = True
    assert timer.take() == pytest.approx(0.25)
    assert timer.take() == 0
