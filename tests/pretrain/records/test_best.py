"""Which checkpoint of a run is the best."""

from pretrain.records.best import best_checkpoint
from tests.pretrain.histories import SEED, History


def line(step, loss, attempt=1, measure="m"):
    return {"attempt": attempt, "step": step, "loss": loss, "measure": measure}


def make_history(*commits):
    history = History()
    history.begin()
    for step in commits:
        history.train(step - history.step)
        history.commit()
    return history


def best(history, *validation):
    found = best_checkpoint(history.records, validation, SEED)
    return found and found["step"]


def test_it_is_the_one_with_the_lowest_finite_loss_of_the_same_measure():
    history = make_history(2, 4, 6, 8)
    losses = line(2, 1.0, measure="other"), line(4, None), line(6, 3.0), line(7, 2.0), line(8, 4.0)
    assert best(history, *losses) == 6
    assert best(history, line(3, 1.0)) is None


def test_a_deleted_checkpoint_does_not_count():
    history = make_history(2, 4)
    history.add("delete", step=2)
    assert best(history, line(2, 1.0), line(4, 2.0)) == 4


def test_a_checkpoint_after_a_suspected_onset_does_not_count():
    history = make_history(2, 4, 6)
    history.spike(onset=3)
    assert best(history, line(2, 3.0), line(4, 1.0), line(6, 2.0)) == 2


def test_an_evaluation_of_weights_that_were_trained_again_does_not_count():
    history = make_history(2, 4)
    history.roll_back(2)
    history.begin()
    history.train(2)
    history.commit()
    assert best(history, line(2, 3.0), line(4, 1.0)) == 2
    assert best(history, line(2, 3.0), line(4, 1.0), line(4, 2.0, attempt=2)) == 4
