"""What the pages point to is there: links and their anchors, files, tests by name, commands with their flags."""

from __future__ import annotations

import ast
import re
import shlex

import click
import pytest

from octavo.cli.main import cli
from tests.docs.pages import ROOT, page

PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
PATH = re.compile(r"(?:src|tests|native|docs|scripts)/[\w./-]+")


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page(name)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(file.read_text()), f"{name}: {target}"


def spans_with_paths(name: str) -> list[str]:
    return [span for span in re.findall(r"`([^`\n]+)`", page(name)) if PATH.fullmatch(span.partition("::")[0])]


@pytest.mark.parametrize("name", [name for name in PAGES if name != "docs/request-path.md"])  # which has a test of its own
def test_named_files_and_tests_exist(name: str) -> None:
    for span in spans_with_paths(name):
        path, _, inner = span.partition("::")
        file = ROOT / path
        assert file.exists(), f"{name}: {span}"
        if inner:
            functions = {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            assert inner in functions, f"{name}: {span}"


def test_the_map_of_tests_has_every_folder() -> None:
    folders = {f"tests/{file.parent.relative_to(ROOT / 'tests').parts[0]}" for file in (ROOT / "tests").rglob("test_*.py")}
    assert {folder for folder in folders if f"`{folder}`" not in page("docs/tests.md")} == set()


def commands(name: str) -> list[str]:
    """Lines of code blocks that call octavo, comments and environment taken off."""
    lines = re.findall(r"^    (?:[A-Z_]+=\S+ )?(octavo .+)$", page(name), re.MULTILINE)
    return [line.split("  #")[0].strip() for line in lines]


@pytest.mark.parametrize("line", sorted({line for name in PAGES for line in commands(name)}))
def test_commands_are_accepted(line: str) -> None:
    """Parsed as the program does, not run."""
    _, *args = shlex.split(line)
    command: click.Command = cli
    context = click.Context(cli, **cli.context_settings)
    while isinstance(command, click.Group):
        name, found, args = command.resolve_command(context, args)
        assert found is not None, line
        command, context = found, click.Context(found, parent=context, info_name=name)
    command.make_context(command.name, args, parent=context.parent)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", page("Makefile"), re.MULTILINE))
    for name in PAGES:
        assert set(re.findall(r"`make (\w+)`", page(name))) | set(re.findall(r"^    make (\w+)", page(name), re.MULTILINE)) <= targets
