"""What lies outside of docs/, in the site that MkDocs makes: pages that belong to it, and links that lead out of it.

In the repository every link is relative, so that it works in a browser there. In the site a link to one of its pages
leads to that page, and a link to any other file to where the repository can be seen (``repo_url``); where that is not
known, the path stands there as text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "examples/index.md": "examples/README.md",
    "examples/bloomz-imdb.md": "examples/bloomz-imdb/README.md",
    "examples/llama-dolly.md": "examples/llama-dolly/README.md",
    "examples/mistral-pretrain.md": "examples/mistral-pretrain/README.md",
    "examples/t5-wikisql.md": "examples/t5-wikisql/README.md",
    "examples/text-to-sql.md": "examples/text-to-sql/README.md",
    "examples/traces.md": "examples/traces/README.md",
    "reference/chart-values.md": "charts/spotune/README.md",
    "security.md": "SECURITY.md",
    "test-cluster.md": "tests/cluster/README.md",
}
"""Pages of the site that are files elsewhere in the repository."""
_ROOT = Path(__file__).parent.parent
_URIS = {source: uri for uri, source in PAGES.items()}
_LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<target>[^()#\s]+)(?P<anchor>#[^()\s]*)?\)")
_CODE_IN_A_TABLE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
"""A browser of the repository takes a `|` for the end of a cell even within code, Python's Markdown does not."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie elsewhere."""
    for uri, source in PAGES.items():
        files.append(File.generated(config, uri, content=(_ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns what is right in the repository into what is right in the site."""
    uri = page.file.src_uri
    source = PAGES.get(uri, f"docs/{uri}")
    markdown = _LINK.sub(lambda link: _in_the_site(link, uri, source, config, files), markdown)
    return _CODE_IN_A_TABLE.sub(lambda code: code[0].replace(r"\|", "|"), markdown)


def _in_the_site(link: re.Match[str], uri: str, source: str, config: MkDocsConfig, files: Files) -> str:
    """A link of the page ``uri``, which is the file ``source`` of the repository."""
    text, anchor = link["text"], link["anchor"] or ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
    if "://" in link["target"] or not (_ROOT / path).exists():
        return link[0]  # a missing one is MkDocs' to name
    readme = f"{path}/README.md"
    file = readme if (_ROOT / readme).exists() else path
    target = _URIS.get(file, file.removeprefix("docs/"))
    if files.get_file_from_path(target) is not None:
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(uri) or '.')}{anchor})"
    if config.repo_url:
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{path}{anchor})"
    return text if path in text else f"{text} (`{path}`)"
