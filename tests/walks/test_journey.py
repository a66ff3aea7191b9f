"""The journey: the script that a reader can follow, with real text and a real task."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "journey.sh"


@pytest.mark.slow
def test_the_journey_from_raw_text_to_a_glue_score(tmp_path: Path) -> None:
    shared = os.environ.get("ZEROCLAP_SHARED")
    if not shared:
        pytest.skip(
            "ZEROCLAP_SHARED is not set; it names the folder with Wikipedia's text and GLUE"
        )
    text = Path(shared) / "data" / "corpora" / "wikipedia-en.jsonl.zst"
    folder = tmp_path / "journey"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(SCRIPT), str(text), str(Path(shared) / "data" / "glue"), str(folder)],
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "attempt 1 failed" in done.stdout
    assert "\nsound\n" in done.stdout
    for made in ("runs/mine/report.md", "runs/mine/loss.png", "scores/report.md"):
        assert (folder / made).stat().st_size > 0
