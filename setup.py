"""What pyproject.toml cannot say: the README as a package index shows it, whose links lead to the repository."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")  # of a file of the repository


def described(readme: str, repository: str | None, version: str) -> str:
    """The README with links to this version's tag; without those links, and pictures, if no repository is named."""

    def link(match: re.Match[str]) -> str:
        picture, text, path = match.groups()
        if repository is None:
            return "" if picture else text
        return f"{picture}[{text}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(CODE.split(readme)))


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        long_description=described(
            (ROOT / "README.md").read_text(encoding="utf-8"),
            project.get("urls", {}).get("Repository"),
            runpy.run_path(str(ROOT / "cute_ops" / "version.py"))["__version__"],
        ),
        long_description_content_type="text/markdown",
    )
