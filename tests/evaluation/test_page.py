"""The HTML page: well-formed, self-contained, and shown by a browser as it was meant."""

import base64
import re
import shutil
import subprocess
from html.parser import HTMLParser
from io import BytesIO

import pytest
from matplotlib.figure import Figure

from drafttrain.evaluation.page import Card, Column, Page, Table, render_page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
VOID = {"meta", "img"}
COLUMNS = [Column("method", lambda row: row[0]), Column("tok/s", lambda row: row[1])]
TABLE = Table(
    "Methods", COLUMNS, [("plain", 100), ("a<b> & k=5", 171)], is_best=lambda row: row[0] == "plain"
)


class Outline(HTMLParser):
    """Checks that elements nest, and collects the text of each kind."""

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
    figure, drawn = Figure(figsize=(4, 3)), BytesIO()
    figure.subplots().plot([1, 2], [3, 4])
    figure.savefig(drawn, format="png")
    return Page(
        title="Drafter <d> & target",
        subtitle="100 prompts, a machine",
        tables=[TABLE],
        plot=drawn.getvalue(),
        plot_text='speedup by "k"',
        cards=[Card("batch 1", "k=5", "1.71 times plain decoding")],
        verdicts=["k=5 is the fastest & exact"],
        notes=["95 % intervals"],
    )


def test_the_page_is_well_formed_escaped_and_needs_no_other_file(page):
    html = render_page(page)
    outline = read(html)
    assert outline.texts["h1"] == ["Drafter <d> & target"]
    assert outline.texts["td"] == ["plain", "100", "a<b> & k=5", "171"]
    assert "k=5 is the fastest & exact" in outline.texts["p"] and outline.texts["b"] == ["k=5"]
    assert html.count('class="best"') == html.count('<tr class="best"><td>plain</td>') == 1
    tags = {tag for tag, *_ in outline.attributes} | set(outline.texts)
    assert not tags & {"script", "link", "iframe", "object", "a"}
    assert not re.search(r"https?:|url\(|@import", html)
    [source] = [value for tag, name, value in outline.attributes if name == "src"]
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == page.plot


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_a_browser_shows_figure_and_table(page, tmp_path):
    """The image is decoded, the table laid out, and nothing is wider than the window."""
    probe = (
        "<script>onload = () => { const i = document.querySelector('img');"
        "document.title = [i.naturalWidth, i.clientWidth > 0, document.querySelectorAll('td')"
        ".length, document.body.scrollWidth <= innerWidth].join(' '); }</script>"
    )
    file = tmp_path / "page.html"
    file.write_text(render_page(page).replace("</body>", probe + "</body>"), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=800,600"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert read(done.stdout).texts["title"] == ["400 true 4 true"]
