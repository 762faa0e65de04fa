"""README, CHANGELOG and CONTRIBUTING as pages of the site, whose links begin elsewhere than the repository's.

MkDocs calls `on_files` once and `on_page_markdown` for each page (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "LICENSE": "https://www.apache.org/licenses/LICENSE-2.0",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "notebooks": "notebooks/quickstart.ipynb",
    "docs": "will-it-fit.md",
}
_INCLUDED = re.compile(r'--8<-- "([A-Z]+\.md)"\n?')
_LINK = re.compile(r"\]\(([^):#]+)")


def on_files(files: Files, config: Any) -> Files:
    """README's link to how to cite leads to the file itself, which lies outside of the documents."""
    files.append(File.generated(config, "CITATION.cff", abs_src_path=str(ROOT / "CITATION.cff")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    included = _INCLUDED.fullmatch(markdown)
    if not included:
        return markdown
    text = (ROOT / included[1]).read_text(encoding="utf-8")
    return _LINK.sub(lambda link: f"]({ELSEWHERE.get(link[1], link[1].removeprefix('docs/'))}", text)
