"""The report is one file that needs no network, says what the tables say, and shows hostile text as text."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser

import pytest

from flows.inspect.learned import Change
from flows.report import build_report
from flows.report.charts import Chart, Series, draw, format_value, nice_ticks
from flows.report.markup import tag
from flows.report.sections import verdict
from rft_core.errors import SettingsError
from tests.flows.sample_run import HOSTILE, build_sample_run


class Page(HTMLParser):
    """Elements with their attributes, the text outside of script and style, and the script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = self.script = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        self._inside = name

    def handle_endtag(self, name):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.script += data
        elif self._inside != "style":
            self.text += data


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    made = build_sample_run(tmp_path_factory.mktemp("report"))
    path = build_report(made.root, made.name)
    assert path.name == "report.html"
    return path.read_text()


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_needs_no_network(html, page):
    assert not {name for name, _ in page.elements} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    for _, attributes in page.elements:
        assert not {"src", "srcset", "action", "onload", "onerror"} & attributes.keys()
        assert attributes.get("href", "#").startswith("#")
    assert "url(" not in html
    assert "@import" not in html


def test_policy_allows_our_script_alone(page):
    assert sum(name == "script" for name, _ in page.elements) == 1
    (policy,) = (a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_hostile_text_stays_text(html, page):
    shown = HOSTILE.replace("\x1b", "\\u001b")
    assert shown in page.text
    assert "<img" not in html
    assert "\x1b" not in html


def test_says_what_was_learned_and_where_things_are(page):
    assert "Held-out sampled accuracy rose from 0.375 to 1.000 (+0.625, 95 % interval +0.500 to +0.750" in page.text
    assert "rft export sample --to sample-model" in page.text
    assert "step 4 of 4" in page.text
    assert "7" * 64 in page.text  # the weights' digest
    assert "sums.jsonl:91" in page.text  # a rejected row
    assert "unscored: timeout" in page.text or "no reward could be computed" in page.text
    assert "exact_match" in page.text
    assert "prompts_per_step: 2" in page.text  # the recipe


def test_charts_of_what_the_run_has(html, tmp_path):
    titles = _titles(html)
    assert titles[:3] == ["Held-out accuracy", "Reward", "Completion length"]
    assert {"Clipped completions", "Entropy", "Gradient norm", "Learning rate", "Loss", "Time per step"} <= set(titles)
    assert "Groups without signal" in titles
    assert not {"KL to the reference", "Effective sample size"} & set(titles)
    made = build_sample_run(tmp_path, steps=2, has_kl=True, is_off_policy=True)
    other = build_report(made.root, made.name, tmp_path / "deep" / "page.html")
    assert {"KL to the reference", "Effective sample size"} <= set(_titles(other.read_text()))


def _titles(html):
    return re.findall(r"<figcaption><b>([^<]+)</b>", html)


def test_pointer_data_reads_values_off(page):
    (first, *_) = (json.loads(a["data-chart"]) for name, a in page.elements if name == "svg")
    assert first[-1][1] == "step 4\nsampled  1  [0.9, 1]\ngreedy  1  [0.9, 1]"
    assert first[0][0] == 48  # the left edge of the plot


def test_run_that_has_only_begun_still_has_a_report(tmp_path):
    made = build_sample_run(tmp_path, steps=0, state="failed")
    text = Page(build_report(made.root, made.name).read_text()).text
    assert "Fewer than two policies were evaluated" in text
    assert "No rollout has a reward yet" in text
    with pytest.raises(SettingsError, match="no run 'nothing'"):
        build_report(made.root, "nothing")


def test_same_run_gives_the_same_page(tmp_path):
    made = build_sample_run(tmp_path, steps=1)
    pages = [build_report(made.root, made.name, tmp_path / f"{i}.html").read_bytes() for i in range(2)]
    assert pages[0] == pages[1]


# Charts: the plot spans x 48..368 and y 162..10.


def _chart(values, x=None, **more):
    return Chart("T", "t", "e", x or list(range(len(values))), [Series("s", values)], **more)


def test_line_goes_from_corner_to_corner():
    # x 0, 1 -> 48, 368; y 0, 1 within 0..1 -> 162, 10.
    assert 'd="M48 162L368 10"' in draw(_chart([0.0, 1.0], limits=(0.0, 1.0)))


def test_gap_lifts_the_pen():
    # x 0, 1, 2, 3 -> 48, 154.7, 261.3, 368.
    assert 'd="M48 162M261.3 10L368 162"' in draw(_chart([0.0, None, 1.0, 0.0], limits=(0.0, 1.0)))


def test_band_is_a_closed_path_of_both_edges():
    series = Series("s", [0.5, 0.5], low=[0.0, 0.0], high=[1.0, 1.0])
    drawn = draw(Chart("T", "t", "e", [0, 1], [series], limits=(0.0, 1.0)))
    assert 'd="M48 10L368 10L368 162L48 162Z"' in drawn


def test_bars_stack_from_zero():
    # Two layers of 1 and 3, axis 0..4 -> 38 units a second; one bar spans x -0.5..0.5, 78 % of 320 = 249.6 wide.
    chart = Chart("T", "t", "e", [1], [Series("a", [1.0]), Series("b", [3.0])], is_stacked=True)
    drawn = draw(chart)
    assert '<rect x="83.2" y="124" width="249.6" height="38" class="f0"/>' in drawn
    assert '<rect x="83.2" y="10" width="249.6" height="114" class="f1"/>' in drawn


@pytest.mark.parametrize("values", [[0.0], [5.0], [0.0, 0.0], [1e-9, 1e-9], [-3.0, -3.0], [1e12, 2e12]])
@pytest.mark.parametrize("limits", [(None, None), (0.0, 1.0), (0.0, None)])
def test_degenerate_values_still_draw(values, limits):
    drawn = draw(_chart(values, limits=limits))
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_nothing_to_draw_draws_nothing():
    assert draw(_chart([None, None])) == ""


def test_long_run_keeps_its_spike():
    values = [0.5] * 5000
    values[3333] = 1.0
    drawn = draw(_chart(values, limits=(0.0, 1.0)))
    path = re.search(r'd="(M[^"]+)"', drawn).group(1)
    assert path.count("L") < 420
    # x 3333 of 4999: 48 + 320 * 3333 / 4999 = 261.4.
    assert "L261.4 10" in path


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.03, 0.07), (12, 9_800), (1e-7, 3e-6), (0.1, 0.1000001)])
def test_ticks_cover_the_range_in_even_round_steps(low, high):
    ticks = nice_ticks(low, high, 4)
    assert ticks[0] <= low + 1e-12
    assert ticks[-1] >= high - 1e-12
    assert 2 <= len(ticks) <= 7
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-3)


def test_numbers_for_people():
    shown = [format_value(x) for x in (0, 0.123456, 12.5, 1234.5, 15_300, 2_000_000, 0.0000025, -0.5)]
    assert shown == ["0", "0.123", "12.5", "1234", "15.3k", "2M", "2.5e-6", "-0.5"]


def test_attributes_and_children_are_escaped():
    assert tag("p", '<&">', title='"><script>') == '<p title="&quot;&gt;&lt;script&gt;">&lt;&amp;&quot;&gt;</p>'
    assert tag("p", "a\u202eb\x00c") == "<p>a\\u202eb\\u0000c</p>"


@pytest.mark.parametrize(
    ("low", "high", "words"), [(0.1, 0.3, "rose"), (-0.3, -0.1, "fell"), (-0.1, 0.2, "no measurable difference")]
)
def test_verdict_follows_the_interval(low, high, words):
    ends = {"value": 0.5, "low": 0.4, "high": 0.6}
    change = Change("sampled_accuracy", ends, ends, (low + high) / 2, low, high, 10)
    assert words in verdict([change])
