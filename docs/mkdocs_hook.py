"""What mkdocs calls while it builds the site (mkdocs.yml, `hooks`).

Some pages are files that belong elsewhere in the repository, the README among them: the site shows those, there
is no second copy. A link in any page may name any file of the repository: a page becomes a link to that page, a
picture is copied into the site, everything else is looked up in the repository.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Page of the site: file of the repository.
ELSEWHERE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "recipes.md": "recipes/README.md",
    "suites.md": "evals/README.md",
    "experiments.md": "experiments/README.md",
    "changelog.md": "CHANGELOG.md",
}
PICTURES = (".png", ".svg")
REPOSITORY = "https://github.com/ctxext/ctxext"
RAW = "https://raw.githubusercontent.com/ctxext/ctxext/main/"
LINK = re.compile(r"(?<=\]\()([^)#\s]+)")


def repository_path(link: str, source: str) -> str | None:
    """The file that a link in `source` names, relative to the repository; None for a link to somewhere else."""
    for own in (RAW, f"{REPOSITORY}/blob/main/", f"{REPOSITORY}/tree/main/"):
        if link.startswith(own):
            return link.removeprefix(own)
    if ":" in link:
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def source_of(page: str) -> str:
    """The file of the repository that a page of the site shows."""
    return ELSEWHERE.get(page, f"docs/{page}")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for picture in sorted(ROOT.glob("experiments/results/**/*")):
        if picture.suffix in PICTURES:
            name = picture.relative_to(ROOT).as_posix()
            files.append(File.generated(config, f"pictures/{name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = source_of(page.file.src_uri)
    pages = {source_of(file.src_uri): file.src_uri for file in files.documentation_pages()}

    def inside(found: re.Match[str]) -> str:
        name = repository_path(found[0], source)
        if name is None:
            return found[0]
        if name in pages:
            target = pages[name]
        elif name.endswith(PICTURES):
            target = name.removeprefix("docs/") if name.startswith("docs/") else f"pictures/{name}"
        else:
            kind = "tree" if (ROOT / name).is_dir() else "blob"
            return f"{REPOSITORY}/{kind}/main/{name}"
        return os.path.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(inside, markdown)
