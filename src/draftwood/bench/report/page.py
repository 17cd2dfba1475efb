"""Assemble the page of a report: one HTML file that needs nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from draftwood.bench.report.style import Chart, inline_svg
from draftwood.bench.report.tables import Entry, Table
from draftwood.bench.summary import ALL_SETS
from draftwood.viewer.view import csp_hash


def page(title: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """The document.

    All text is escaped. A content security policy allows the page's own script and style by their
    hashes, colours inside charts, and no request at all.

    Args:
        title: of the page.
        lead: a sentence below it.
        sections: (heading, HTML) each.
    """
    links, parts = [], []
    for heading, body in sections:
        anchor = re.sub(r"[^a-z]+", "-", heading.lower()).strip("-")
        links.append(f'<a href="#{anchor}">{escape(heading)}</a>')
        parts.append(
            f'<section id="{anchor}" aria-label="{escape(heading)}">'
            f"<h2>{escape(heading)}</h2>\n{body}</section>"
        )
    script, style = _resource("page.js"), _resource("page.css")
    script = f'"use strict";\n{script}'
    return Template(_resource("page.html")).substitute(
        policy=f"default-src 'none'; script-src {csp_hash(script)}; style-src {csp_hash(style)}; "
        "style-src-attr 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'",
        title=escape(title), lead=escape(lead), style=style, script=script,
        links="\n".join(links), sections="\n".join(parts),
    )  # fmt: skip


def paragraph(text: str, kind: str = "") -> str:
    """Text as a paragraph."""
    return f'<p class="{kind}">{escape(text)}</p>\n' if kind else f"<p>{escape(text)}</p>\n"


def table(one: Table) -> str:
    """A table whose columns can be sorted."""
    head = "".join(
        f'<th scope="col"><button type="button">{escape(name)}</button></th>' for name in one.header
    )
    rows = []
    for row in one.rows:
        total = ' class="total"' if row[0].text == ALL_SETS else ""
        cells = [_cell("th", row[0], ' scope="row"'), *(_cell("td", entry) for entry in row[1:])]
        rows.append(f"<tr{total}>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(one.caption)}">'
        f"<table><caption>{escape(one.caption)}</caption><thead><tr>{head}</tr></thead>\n"
        f"<tbody>{''.join(rows)}</tbody></table></div>\n"
    )


def _cell(tag: str, entry: Entry, attributes: str = "") -> str:
    text = escape(entry.text)
    if entry.strong:
        text = f"<strong>{text}</strong>"
    if entry.value is not None:
        attributes += f' data-value="{escape(str(entry.value))}"'
    below = "".join(f"<small>{escape(line)}</small>" for line in entry.below if line)
    return f"<{tag}{attributes}>{text}{below}</{tag}>"


def charts(found: Iterable[Chart]) -> str:
    """Charts side by side where there is room."""
    figures = [
        f'<figure role="img" aria-label="{escape(one.title)}. {escape(one.caption)}">'
        f"<h3>{escape(one.title)}</h3>{inline_svg(one)}"
        f"<figcaption>{escape(one.caption)}</figcaption></figure>"
        for one in found
    ]
    return f'<div class="charts">{"".join(figures)}</div>\n' if figures else ""


def folded(summary: str, lines: Sequence[str]) -> str:
    """A list that opens on demand."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<details><summary>{escape(summary)}</summary><ul>{items}</ul></details>\n"


def facts(values: dict[str, Any]) -> str:
    """Names and values; nested ones as JSON."""
    rows = []
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        rows.append(f"<dt>{escape(name)}</dt><dd><code>{escape(text)}</code></dd>")
    return f"<dl>{''.join(rows)}</dl>\n"


def _resource(name: str) -> str:
    return files("draftwood.bench.report").joinpath(name).read_text(encoding="utf-8")
