"""What a fork copies of its source."""

from pretrain.records import fork


def test_a_whole_last_line_without_its_line_feed_is_copied_and_a_torn_one_is_not(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for last, kept in ((b'{"number": 1}', b'{"number": 1}\n'), (b'{"number": ', b"")):
        source.write_bytes(b'{"number": 0}\n' + last)
        fork._copy_lines(source, target, lambda record: True)
        assert target.read_bytes() == b'{"number": 0}\n' + kept
