"""What is read of a finished run."""

import pytest

from data_prep.common.files import write_json
from finetune.result import RESULT, read_result
from tests.finetune.conftest import result_like


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("best", {}, "collapsed: '' is not accepted; it must be a number"),
        ("last", {"matthews": "x"}, "matthews: 'x' is not accepted"),
        ("plan", {"task": "CoLa"}, "'CoLa'"),
        ("plan", {"config": {"best_epoch_by": "x"}}, "it must be one of benchmark or published"),
    ],
)
def test_a_result_of_another_form_is_refused_with_its_file_and_key(key, value, message, tmp_path):
    damaged = result_like("CoLA")
    damaged[key] = value and {**damaged[key], **value}
    write_json(tmp_path / RESULT, damaged)
    with pytest.raises(ValueError, match=rf"result\.json: not a result .*{message}.*; delete it"):
        read_result(tmp_path)
