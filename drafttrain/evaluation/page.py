"""A report as a self-contained HTML page, in the reader's light or dark colour scheme.

The template is `page.html` in this folder.
"""

from base64 import b64encode
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from drafttrain.config.command_line import hide_folders
from drafttrain.evaluation.report import Report
from drafttrain.evaluation.tables import (
    METRICS,
    heading,
    main_table,
    note,
    parity_lines,
    search_tables,
    speedup_text,
    verdict_lines,
    winners,
)

TEMPLATE = Path(__file__).with_suffix(".html")


def render_page(report: Report, plot: bytes) -> str:
    """Returns the page as HTML, with style and plot (PNG) embedded.

    All text is escaped, and the folders of this machine are hidden in it.
    """
    shown = Environment(
        autoescape=True, finalize=lambda part: hide_folders(part) if type(part) is str else part
    )
    title, subtitle = heading(report)
    return shown.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        title=title,
        subtitle=subtitle,
        winners=winners(report),
        speed=lambda run: METRICS["tokens_per_second"].parts(run)[0],
        speedup=speedup_text,
        lines=[*parity_lines(report), *verdict_lines(report)],
        plot=Markup(b64encode(plot).decode("ascii")),
        tables=[main_table(report), *search_tables(report)],
        note=note(report),
    )
