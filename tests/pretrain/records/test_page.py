"""The report of a run as a page."""

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from data_prep.common import pictures
from pretrain.config import load as recipes
from pretrain.config.run import RunConfig
from pretrain.config.sections import PhaseConfig, ScheduleConfig, TrainingConfig
from pretrain.records import metrics
from pretrain.records.page import _thinned, to_html
from pretrain.records.report import write_report
from tests.pretrain.histories import SEED, History

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = (
    "</script><script>throw 1</script><img src=http://127.0.0.1:9/a onerror='throw 1'> `$$x$$`"
)


@pytest.fixture
def page(tmp_path):
    """The page of a run with a spike, two phases and three corpora; its texts are hostile."""
    history = History()
    history.begin()
    history.train(90)
    history.commit()
    history.train(50)
    for line in history.lines:
        line["loss"] = 4 + 4 / (1 + line["step"]) + 0.1 * math.sin(line["step"])
    history.spike(onset=130)
    history.roll_back(90)
    history.add("crash", attempt=1, reason=HOSTILE)
    history.begin()
    history.train(110)
    run = tmp_path / HOSTILE.replace("/", "")
    history.write(run)
    phases = [PhaseConfig(name="a", steps=60), PhaseConfig(name=HOSTILE)]
    training = TrainingConfig(steps=200, seed=SEED)
    schedule = ScheduleConfig(warmup_steps=10)
    config = RunConfig(training=training, schedule=schedule, phases=phases)
    recipes.dump(config, run / "run.yaml")
    (run / "environment.json").write_text(json.dumps({"platform": HOSTILE}))
    score = {"loss": 5.0, "perplexity": 148.4, "targets": 10}
    names = ("a", "b", HOSTILE)
    lines = [
        {"attempt": 1 + (step > 90), "step": step, **score, "subsets": {HOSTILE: score, "a": score},
         "corpora": {name: {**score, "loss": 4.5 + n} for n, name in enumerate(names)}}
        for step in (40, 80, 120, 160)
    ]  # fmt: skip
    (run / metrics.VALIDATION).write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(run)
    return run / "report.html"


class Elements(HTMLParser):
    """The elements of a page: (tag, attributes) of each, and the content of each script."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts.append(data)


def test_a_page_runs_only_its_own_scripts_and_loads_nothing(page):
    text = page.read_text()
    elements = Elements(text)
    (policy,) = (a["content"] for t, a in elements.found if t == "meta" and "http-equiv" in a)
    hashes = [hashlib.sha256(script.encode()).digest() for script in elements.scripts]
    allowed = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in hashes)
    assert policy.startswith(f"default-src 'none'; script-src {allowed}; ")
    assert not any(
        {"src", "href", "onerror"} & attributes.keys() for _, attributes in elements.found
    )
    assert text.count("throw 1") > 5


def test_the_page_has_the_tables_of_the_report_and_less_than_five_megabytes(page):
    tables = [t for t, _ in Elements(page.read_text()).found if t == "table"]
    separators = re.findall(r"^\| ---", page.with_name("report.md").read_text(), re.MULTILINE)
    assert len(tables) == len(separators) >= 4
    assert page.stat().st_size < 5e6


@pytest.mark.parametrize("text", ["[a](http://b)", "![a](http://b)", "<http://b>", "<b>a</b>"])
def test_markup_in_a_text_becomes_no_element(text):
    assert [tag for tag, _ in Elements(to_html(text)).found] == ["p"]


def test_a_long_curve_keeps_its_lowest_and_highest_points():
    values = np.sin(np.arange(100_000.0))
    values[[0, 12_345, 54_321, 77_777]] = math.nan, 1e6, -1e6, math.nan
    kept = _thinned(values, 500)
    assert {0, 12_345, 54_321, 99_999} <= {*kept}
    assert kept == sorted(kept)
    assert len(kept) <= 502
    assert _thinned(values[:500], 500) == [*range(500)]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium to open the page with")
@pytest.mark.parametrize(
    "wrong", ["", "<img src='http://127.0.0.1:9/a.png'>", "<script>1</script>"]
)
def test_a_browser_shows_the_curves_without_an_error_or_a_request(page, tmp_path, wrong):
    # Its policy makes each request of the page, and each script of another, an error.
    page.write_text(page.read_text() + wrong)
    picture = tmp_path / "page.png"
    options = (
        *("headless", "no-sandbox", "disable-gpu", f"user-data-dir={tmp_path / 'profile'}"),
        *("window-size=1200,2400", "virtual-time-budget=20000", "enable-logging=stderr"),
        f"screenshot={picture}",
    )
    command = [BROWSER, *(f"--{option}" for option in options), page.as_uri()]
    shown = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300)
    console = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    errors = [line for line in console if "setting log level" not in line]
    assert bool(errors) == bool(wrong), errors
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3)
    for color in (pictures.BLUE, pictures.RED):
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels - np.array(wanted)).max(axis=1) < 40).sum() > 500
