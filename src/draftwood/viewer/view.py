"""Assemble the page that shows a trace: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from draftwood.viewer.payload import overview_and_trees
from draftwood.viewer.read import read_trace

SCRIPTS = ("elements.js", "tree.js", "tree_view.js", "charts.js", "text.js", "page.js")
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}


def render(trace_path: str | Path) -> str:
    """The page for a trace written by ``draftwood.trace``.

    Texts of the model reach the page as JSON in ASCII without ``<``, ``>`` and ``&``, and the
    document as text nodes only. A content security policy allows the page's own script and style
    by their hashes and no request at all.

    Args:
        trace_path: the JSON lines file.

    Returns:
        A complete HTML document.

    Raises:
        ValueError: not a trace, damaged, or without a cycle (see ``read_trace``).
        OSError: the file cannot be read.
    """
    path = Path(trace_path)
    overview, trees = overview_and_trees(read_trace(path), path.name)
    script = "\n".join(['"use strict";', "{", *(_resource(name) for name in SCRIPTS), "}"])
    style = _resource("page.css")
    return Template(_resource("page.html")).substitute(
        policy=f"default-src 'none'; script-src {csp_hash(script)}; style-src {csp_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        style=style,
        script=script,
        overview=embed(overview),
        trees="\n".join(trees),
    )


def embed(value: Any) -> str:
    """JSON that is safe inside a ``<script>`` element, whatever the strings hold."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _resource(name: str) -> str:
    return files("draftwood.viewer").joinpath(name).read_text(encoding="utf-8")


def csp_hash(text: str) -> str:
    """The source expression that lets a page's policy accept this inline script or style."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
