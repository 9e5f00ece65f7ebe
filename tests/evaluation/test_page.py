"""The HTML page is well-formed, escaped and self-contained."""

import base64
import re
from html.parser import HTMLParser
from io import BytesIO

import pytest
from matplotlib.figure import Figure

from drafttrain.evaluation.page import render_page
from drafttrain.evaluation.report import DataFacts
from tests.evaluation.reports import batch_run, batched_report

VOID = {"meta", "img"}


class Outline(HTMLParser):
    """Checks that elements are nested properly, and collects the texts by element name."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.attributes = [], {}, []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def read(html):
    outline = Outline()
    outline.feed(html)
    outline.close()
    assert outline.open == []
    return outline


@pytest.fixture(scope="module")
def page():
    """The page of a report whose names need escaping."""
    figure, drawn = Figure(figsize=(4, 3)), BytesIO()
    figure.subplots().plot([1, 2], [3, 4])
    figure.savefig(drawn, format="png")
    plain, fast = batch_run("plain", 1, (100, 10, 1.0)), (171, 6, 1.71)
    data = DataFacts(path="/home/me/test.jsonl", prompts=40, references=0)
    report = batched_report().model_copy(
        update={"runs": [plain, batch_run("a<b> & k=5", 1, fast, k=5)], "data": data}
    )
    return render_page(report, drawn.getvalue()), drawn.getvalue()


def test_the_page_is_well_formed_escaped_and_needs_no_other_file(page):
    html, plot = page
    outline = read(html)
    assert outline.texts["h1"] == ["target with causal"]
    assert outline.texts["td"][0] == "plain" and "a<b> & k=5" in outline.texts["td"]
    assert outline.texts["b"] == ["a<b> & k=5"], "the fastest"
    assert html.count('class="best"') == 1
    assert "on test.jsonl, 40 inputs" in html and "/home/me" not in html
    assert '<tr class="best"><td>a&lt;b&gt; &amp; k=5</td>' in html
    tags = {tag for tag, *_ in outline.attributes} | set(outline.texts)
    assert not tags & {"script", "link", "iframe", "object", "a"}
    assert not re.search(r"https?:|url\(|@import", html)
    [source] = [value for tag, name, value in outline.attributes if name == "src"]
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == plot
