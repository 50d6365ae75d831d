"""The documentation holds together: links, pictures, tables that the code prints, and the site that is built."""

import re
import subprocess
import sys

import pytest
from pages import PAGES, ROOT, links, name_of

from ctxext import methods
from ctxext.cli.output import methods_markdown

RAW = "https://raw.githubusercontent.com/ctxext/ctxext/main/"
PAGE = ("https://github.com/ctxext/ctxext/blob/main/", "https://github.com/ctxext/ctxext/tree/main/")
README = ROOT / "README.md"


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 170


def test_the_readme_shows_on_a_package_index():
    """A package index has no files of ours: pictures by their raw address, pages by the repository's."""
    for link in links(README):
        assert link.startswith((RAW, *PAGE)), link
        assert link.startswith(RAW) == link.endswith((".png", ".svg")), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in links(page):
        target, _, heading = link.partition("#")
        path = next((target.removeprefix(own) for own in (RAW, *PAGE) if target.startswith(own)), None)
        if path is None and ":" in target:
            continue
        file = page if not target else ROOT / path if path is not None else page.parent / target
        assert file.exists(), link
        if heading:
            headings = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings_of(file)]
            assert heading in headings, link


def headings_of(page):
    return re.findall(r"^#+ (.*)", page.read_text(), re.M)


def test_method_table_is_the_registry():
    table = methods_markdown(methods.all_methods().values())
    assert table in (ROOT / "docs/methods.md").read_text(), f"put this into docs/methods.md:\n{table}"


def test_every_method_has_its_formula():
    """In docs/methods.md, or for what isn't a frequency in docs/positions.md."""
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \|", (ROOT / "docs/methods.md").read_text().split("## Formulas")[1], re.M
    )
    by_frequency = {name.strip("` ") for row in rows for name in row.split(",")}
    positions = (ROOT / "docs/positions.md").read_text()
    for name in methods.all_methods():
        assert name in by_frequency or f"(`{name}`;" in positions, name


def test_every_recipe_is_listed():
    text = (ROOT / "recipes/README.md").read_text()
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        stem = re.sub(r"(?<=135m-)(pi|yarn|dynamic-yarn)(?=-2x)", "{pi,yarn,dynamic-yarn}", recipe.stem)
        assert f"`{stem}`" in text, recipe.name


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    pytest.importorskip("material", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


def test_the_site_builds_without_a_warning(site):
    assert {p.stem for p in site.glob("*.html")} >= {"index", "methods", "recipes", "experiments", "changelog"}


def test_the_site_asks_no_other_host(site):
    """Links may lead away; nothing that a browser loads by itself does."""
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:img|script|link|iframe|source)\b[^>]*>", page.read_text()):
            if 'rel="canonical"' not in tag:
                assert not re.search(r"""(?:src|href|srcset)=["']?(?:https?:)?//""", tag), (page.name, tag)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text()), sheet.name


def test_every_picture_is_in_the_site(site):
    for page in site.glob("*.html"):
        for picture in re.findall(r'<img [^>]*src="([^"]+)"', page.read_text()):
            assert picture.startswith("data:") or (page.parent / picture).is_file(), (page.name, picture)
