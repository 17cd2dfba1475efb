"""What the documentation says is there is there: tests, pages, links, commands, names."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from typer.main import get_command

from draftwood.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md"]
MAX_PICTURE_BYTES = 150_000

_FENCE = re.compile(r"^( *)(```+)(\S*)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def test_every_known_fault_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d+) \|(.*)$", text, re.MULTILINE))
    assert [int(number) for number in rows] == list(range(1, 17))
    files = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*/test_*.py")}
    for number, row in rows.items():
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, f"fault {number} names no test"
        for file, test in named:
            assert re.search(rf"def {test}\(", files.get(file, "")), (
                f"fault {number}: {file}::{test}"
            )


def prose(path: Path) -> str:
    """A page without its code."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]*`", "", text)


def code(path: Path, language: str) -> list[str]:
    """The blocks of a page in a language."""
    text = path.read_text(encoding="utf-8")
    return [textwrap.dedent(m[4]) for m in _FENCE.finditer(text) if m[3] == language]


def nav_entries(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from nav_entries(item)


def anchors(path: Path) -> set[str]:
    """Of a page's headings, where a forge and the site agree on them."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", text, re.MULTILINE):
        plain = (
            re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
            .strip()
            .lower()
        )
        forge, site = plain.replace(" ", "-"), re.sub(r"[-\s]+", "-", plain)
        if forge == site and plain.isascii():
            found.add(site)
    return found


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    entries = list(nav_entries(config["nav"]))
    assert len(entries) == len(set(entries))
    assert set(entries) == {str(page.relative_to(DOCS)) for page in PAGES}


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: no such file"
        if page != ROOT / "README.md":
            assert target.is_relative_to(DOCS), f"{link}: not part of the site"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


def test_pictures_are_small_and_used() -> None:
    used = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in TEXTS
        for link in _LINK.findall(prose(page))
    }
    pictures = [path for path in (DOCS / "img").iterdir() if path.suffix in (".png", ".svg")]
    assert pictures
    for path in pictures:
        assert path.stat().st_size <= MAX_PICTURE_BYTES, path.name
        assert path in used, f"{path.name} is on no page"


def test_every_example_is_shown() -> None:
    shown = set(re.findall(r'--8<-- "(.*)"', (DOCS / "examples.md").read_text(encoding="utf-8")))
    assert shown == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda path: path.stem)
def test_the_reference_names_what_exists(page: Path) -> None:
    names = re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert names
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_the_text_parses(page: Path) -> None:
    for block in code(page, "python"):
        if "--8<--" not in block:
            ast.parse(block)


def documented_commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(subcommand, its options) of every ``draftwood …`` line on a page, code or not."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"\bdraftwood ([a-z][^\n`&|#]*)", text):
        command, _, rest = line.partition(" ")
        unquoted = re.sub(r'"[^"]*"|\'[^\']*\'', "", rest)
        yield command, re.findall(r"(?<!\S)(--?[a-zA-Z][\w-]*)", unquoted)


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_the_text_have_these_options(page: Path) -> None:
    known = get_command(app).commands  # type: ignore[attr-defined]
    for name, used in documented_commands(page):
        if name not in known:
            assert not used, f"draftwood {name} is no command"
            continue
        options = {"--help", "-h"}
        for parameter in known[name].params:
            options.update(parameter.opts, parameter.secondary_opts)
        assert set(used) <= options, f"draftwood {name}: {set(used) - options}"


def test_the_pages_do_document_commands() -> None:
    found = {name for page in TEXTS for name, used in documented_commands(page) if used}
    assert {"generate", "bench", "train", "record", "simulate"} <= found
