"""The README is the site's first page: mkdocs calls these."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds index.md, the README as it is seen from docs/."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to the README lead to that page."""
    return markdown.replace("](../README.md", "](index.md")


def on_page_content(html: str, **_: Any) -> str:
    """A diff is copied without its signs and without what it removes: site.css makes both unselectable."""
    return re.sub(r'(<span class="g[id]">)([+-])', r'\1<span class="sign">\2</span>', html)
