"""The HTML page is well-formed, escaped and self-contained."""

import base64
import re
from io import BytesIO
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from drafttrain.evaluation.page import render_page
from drafttrain.evaluation.report import DataFacts
from tests.evaluation.reports import batch_run, batched_report


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
    body = re.sub(r"<((?:meta|img)[^>]*)>", r"<\1/>", html.removeprefix("<!DOCTYPE html>"))
    elements = list(ElementTree.fromstring(body).iter())  # fails if tags or & are wrong
    texts = [(one.tag, one.text) for one in elements]
    assert ("h1", "target with causal") in texts
    assert ("td", "plain") in texts and ("td", "a<b> & k=5") in texts
    assert [text for tag, text in texts if tag == "b"] == ["a<b> & k=5"], "the fastest"
    assert html.count('class="best"') == 1
    assert "on test.jsonl, 40 inputs" in html and "/home/me" not in html
    assert '<tr class="best"><td>a&lt;b&gt; &amp; k=5</td>' in html
    assert not {one.tag for one in elements} & {"script", "link", "iframe", "object", "a"}
    assert not re.search(r"https?:|url\(|@import", html)
    [source] = [one.attrib["src"] for one in elements if "src" in one.attrib]
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == plot
