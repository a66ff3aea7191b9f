"""A classifier's passes for a GPU hold what a CUDA graph can: no wait of the host, and no copy."""

import pytest

from pretrain.model import presets

pytestmark = pytest.mark.slow


def test_a_graph_can_capture_the_passes_of_every_variant(rehearse, table):
    (lines,) = rehearse(["passes", *presets.VARIANTS])
    assert [line["name"] for line in lines] == [*presets.VARIANTS]
    for line in lines:
        assert "error" not in line, line["error"]
        assert line["waits"] == {}, line["name"]
    launches = (f"{line['name']:20} {line['launches']:4} launches" for line in lines)
    table("Two layers and a classifier's head, forward and backward, not compiled", launches)
