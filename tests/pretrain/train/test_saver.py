"""What follows a failed save."""

import pytest

from pretrain.train.saver import may_continue


@pytest.mark.parametrize(
    ("failed_saves", "has_checkpoint", "is_last", "expected"),
    [
        (1, True, False, True),
        (2, True, False, True),
        (3, True, False, False),
        (1, False, False, False),
        (1, True, True, False),
    ],
)
def test_training_continues_after_a_failed_save_while_little_can_be_lost(
    failed_saves, has_checkpoint, is_last, expected
):
    assert may_continue(failed_saves, has_checkpoint, is_last) == expected
