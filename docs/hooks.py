"""What the site has beside ``docs/``: other folders' pages, and a page for each linked file of the repository.

Links are written for a reader of the repository, ``../examples/llama/train.py``; here they become links of the site.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Pages that stand elsewhere in the repository.
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/results/README.md": "benchmarks.md",
    "examples/gallery/README.md": "gallery.md",
}
_AT = {page: path for path, page in MOVED.items()}
WIDE = {"faults.md", "features_jax.md", "features_torch.md"}  # tables that need the room of a table of contents
_LANGUAGES = {".py": "python", ".cpp": "cpp", ".toml": "toml", ".ipynb": "json"}
_CODE = re.compile(r"(```.*?^ *```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_TAG = re.compile(r"\[(core|torch|jax)\](?!\()")  # of a line of the changelog: no reference
# The target of a link or of a picture, without its anchor.
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The repository that pyproject.toml names, if it does, in the header of each page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if repository := project.get("urls", {}).get("Repository"):
        config.repo_url, config.repo_name = repository, repository.rstrip("/").rpartition("/")[2]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in MOVED.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    linked = {path for file in pages for path in _linked(file.src_uri, file.content_string)}
    for path in sorted(linked):
        found = ROOT / path
        if not found.exists():
            continue  # a broken link, which the build reports
        shown = {"abs_src_path": str(found)} if found.suffix == ".svg" else {"content": _shown(path)}
        files.append(File.generated(config, _page(path), **shown))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links of the site."""
    here = page.file.src_uri
    if here in WIDE:
        page.meta["hide"] = ["toc"]

    def link(match: re.Match[str]) -> str:
        return posixpath.relpath(_page(_path(here, match[1])), posixpath.dirname(here) or ".")

    parts = _CODE.split(markdown)
    return "".join(part if i % 2 else _LINK.sub(link, _TAG.sub(r"**\1**", part)) for i, part in enumerate(parts))


def _linked(page: str, text: str) -> Iterator[str]:
    """Files and folders of the repository outside of ``docs/`` that a page links to."""
    for part in _CODE.split(text)[::2]:
        for link in _LINK.findall(part):
            path = _path(page, link)
            if not path.startswith("docs/") and path not in MOVED:
                yield path


def _path(page: str, link: str) -> str:
    """``design.md``, ``../pyproject.toml`` -> ``pyproject.toml``."""
    folder = posixpath.dirname(_AT.get(page, f"docs/{page}"))
    path = posixpath.normpath(posixpath.join(folder, link))
    if path.startswith(".."):
        raise PluginError(f"{page}: the link {link} leaves the repository")
    return path


def _page(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}" if path.endswith(".svg") else f"files/{path}.md"


def _shown(path: str) -> str:
    """A page with a file's text, or with those of a folder's files."""
    found = ROOT / path
    files = sorted(each for each in found.iterdir() if each.suffix in _LANGUAGES) if found.is_dir() else [found]
    parts = ["---\nsearch: {exclude: true}\n---", f"# {path}"]
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        parts.append(f"## {name}" if found.is_dir() else "")
        parts.append(f"````{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8')}\n````")
    return "\n\n".join(parts)
