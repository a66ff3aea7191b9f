"""Copies to the device, with streams and tensors that stand in for a GPU's and note each call."""

import contextlib

import numpy as np
import pytest
import torch

from pretrain.engine import copies
from pretrain.engine.copies import Copies
from pretrain.loop.protocols import MicroBatch


class Stream:
    """A stream, or a tensor on it."""

    def __init__(self, name, events):
        self.name, self.events = name, events

    def wait_stream(self, other):
        self.events.append((self.name, "waits for", other.name))


class FakeTensor:
    """A tensor that remembers which stream copies it."""

    def __init__(self, array, machine):
        self.number, self.machine, self.pinned = int(array[0]), machine, False

    def pin_memory(self):
        self.pinned = True
        return self

    def to(self, device, *, non_blocking):
        assert self.pinned
        assert non_blocking
        self.machine.events.append((self.machine.stream, "copies", self.number))
        return self

    def record_stream(self, stream):
        self.machine.events.append((stream.name, "holds", self.number))


class Machine:
    def __init__(self, monkeypatch):
        self.events, self.stream, self.monkeypatch = [], "computing", monkeypatch
        monkeypatch.setattr(copies, "_new_stream", lambda: Stream("copying", self.events))
        monkeypatch.setattr(copies, "_current_stream", lambda: Stream("computing", self.events))
        monkeypatch.setattr(copies, "_on_stream", self.on_stream)
        monkeypatch.setattr(torch, "from_numpy", lambda array: FakeTensor(array, self))

    @contextlib.contextmanager
    def on_stream(self, stream):
        self.stream = stream.name
        yield
        self.stream = "computing"


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def batch(number):
    return MicroBatch(number, {"input_ids": np.array([number])}, 1, (1,))


def take_all(found, micro_batches, machine):
    for tensors in found.each(micro_batches):
        machine.events.append(("computes", tensors["input_ids"].number))


def test_each_copy_begins_before_the_batch_in_front_of_it_is_computed(machine):
    take_all(Copies(torch.device("cuda")), [batch(n) for n in range(3)], machine)
    assert machine.events == [
        ("copying", "copies", 0),
        ("computing", "waits for", "copying"),
        ("computing", "holds", 0),
        ("copying", "copies", 1),
        ("computes", 0),
        ("computing", "waits for", "copying"),
        ("computing", "holds", 1),
        ("copying", "copies", 2),
        ("computes", 1),
        ("computing", "waits for", "copying"),
        ("computing", "holds", 2),
        ("computes", 2),
    ]


def test_a_copy_that_was_started_early_is_used_and_one_of_another_batch_is_not(machine):
    found, first, other = Copies(torch.device("cuda")), batch(1), batch(2)
    found.start(first)
    take_all(found, [first], machine)
    found.start(first)
    take_all(found, [other], machine)
    copied = [event[2] for event in machine.events if event[1] == "copies"]
    computed = [event[1] for event in machine.events if event[0] == "computes"]
    assert copied == [1, 1, 2]
    assert computed == [1, 2]


def test_on_a_cpu_tensors_share_the_memory_of_the_arrays():
    found, only = Copies(torch.device("cpu")), batch(7)
    found.start(only)
    (tensors,) = found.each([only])
    assert tensors["input_ids"].data_ptr() == only.arrays["input_ids"].ctypes.data


@pytest.mark.parametrize(
    ("ids", "is_given"),
    [
        ([[True, True], [True, True]], False),
        ([[True, True], [True, False]], True),
        ([[1, 1], [1, 1]], True),
        ([[1, 1], [2, 2]], True),
    ],
)
def test_ids_of_rows_without_padding_are_not_given_to_the_model(ids, is_given, machine):
    """Integers may number several documents."""
    arrays = {"input_ids": np.ones((2, 2)), "document_ids": np.array(ids)}
    full = MicroBatch(0, arrays, 4, (1,))
    assert ("document_ids" in full.inputs()) == is_given
    found = Copies(torch.device("cuda"))
    machine.monkeypatch.setattr(torch, "from_numpy", lambda array: FakeTensor([0], machine))
    (tensors,) = found.each([full])
    assert ("document_ids" in tensors) == is_given
    assert "document_ids" in full.arrays
