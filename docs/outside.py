"""An MkDocs hook for what is outside of docs/: adds pages to the site, and rewrites links that leave docs/.

In the repository every link is relative, so that it works there. In the site a link to one of its pages leads to that
page. A link to any other file leads to the repository's web page (``repo_url``); if that is not known, it becomes the
file's path as text.
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
    "examples/bert-labels.md": "examples/bert-labels/README.md",
    "examples/bloomz-imdb.md": "examples/bloomz-imdb/README.md",
    "examples/llama-dolly.md": "examples/llama-dolly/README.md",
    "examples/llama-mixture.md": "examples/llama-mixture/README.md",
    "examples/mistral-kto-mix.md": "examples/mistral-kto-mix/README.md",
    "examples/mistral-pretrain.md": "examples/mistral-pretrain/README.md",
    "examples/mistral-ultrafeedback.md": "examples/mistral-ultrafeedback/README.md",
    "examples/pipelines.md": "examples/pipelines/README.md",
    "examples/qwen-nli.md": "examples/qwen-nli/README.md",
    "examples/serving.md": "examples/serving/README.md",
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
"""GitHub ends a table cell at a `|` even within code, so pages escape it; Python's Markdown shows the backslash."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are elsewhere in the repository."""
    for uri, source in PAGES.items():
        files.append(File.generated(config, uri, content=(_ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links and escapes of a page for the site."""
    uri = page.file.src_uri
    source = PAGES.get(uri, f"docs/{uri}")
    markdown = _LINK.sub(lambda link: _in_the_site(link, uri, source, config, files), markdown)
    return _CODE_IN_A_TABLE.sub(lambda code: code[0].replace(r"\|", "|"), markdown)


def _in_the_site(link: re.Match[str], uri: str, source: str, config: MkDocsConfig, files: Files) -> str:
    """The Markdown of a link for the site; the page ``uri`` is the file ``source`` of the repository."""
    text, anchor = link["text"], link["anchor"] or ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
    if "://" in link["target"] or not (_ROOT / path).exists():
        return link[0]  # MkDocs reports a missing file
    readme = f"{path}/README.md"
    file = readme if (_ROOT / readme).exists() else path
    target = _URIS.get(file, file.removeprefix("docs/"))
    if files.get_file_from_path(target) is not None:
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(uri) or '.')}{anchor})"
    if config.repo_url:
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{path}{anchor})"
    name = text.strip("`")
    return f"`{path}`" if path.endswith(name) else f"{text} (`{path}`)"
