"""Adds tables and plots of the benchmark results, all measurements, summaries of the API and llms.txt to the pages that
MkDocs builds.

Also checks that a browser loads nothing from the network: no script, font or image.
"""

import re
import sys
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]
import summary  # noqa: E402

from harness import tables  # noqa: E402

_TABLE = re.compile(r"^<!-- records: (.+) -->$", re.MULTILINE)
_LOADED = re.compile(r"""<link[^>]*href=["']?(?:https?:)?//[^>]*|src=["']?(?:https?:)?//[^\s>]*|"""
                     r"""(?:url\(|@import)\s*["']?(?:https?:)?//[^\s)]*""")
_pages = {}  # name: title and text


def _fill(markdown: str) -> str:
    """Inserts the tables, and the places of results and pictures on the site."""
    moved = markdown.replace("](../benchmarks/results/README.md", "](results.md").replace("](../benchmarks/", "](")
    return _TABLE.sub(lambda found: tables.markdown(found[1]), moved)


def on_files(files, config):
    for picture in (ROOT / "benchmarks").glob("*.png"):
        files.append(File.generated(config, picture.name, abs_src_path=str(picture)))
    shim = ROOT / "third_party" / "iframe-worker" / "shim.js"
    files.append(File.generated(config, "iframe-worker/shim.js", abs_src_path=str(shim)))
    for page in (ROOT / "benchmarks" / "results").glob("*.md"):
        name, text = f"results/{page.name}", page.read_text()
        if page.stem == "README":
            name = "results.md"
            text = re.sub(r"\[[\w.]+\]\(\.\./([\w/]+\.py)\)", r"`benchmarks/\1`", text)  # not part of the site
            text = re.sub(r"\]\(([\w.-]+\.md)\)", r"](results/\1)", text)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    markdown = summary.with_tables(markdown) if page.file.src_uri == "api.md" else _fill(markdown)
    _pages[page.file.src_uri] = page.title, markdown
    return markdown


def _first_sentence(markdown: str) -> str:
    """Returns the first sentence of a page, without the addresses of its links."""
    found = re.match(r"# [^\n]+\n\n(.+?)(?:\.(?=\s)|:?\n\n)", markdown + "\n\n", re.DOTALL)
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", " ".join(found[1].split())) + "."


def on_page_content(html, page, config, files):
    return re.sub(r":(?:class|func|meth):(?=<code)", "", html)  # roles of docstrings


def on_post_build(config):
    """Writes llms.txt, a list of the pages by group with a sentence each, and the text of each page beside it.

    The API page is linked as HTML, because its text is in the docstrings.
    """
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for group in config.nav:
        for heading, entries in group.items():
            lines += ["", f"## {heading}", ""]
            for name in (name for entry in entries for name in entry.values()):
                title, text = _pages[name]
                link = name.replace(".md", ".html") if name == "api.md" else name
                lines.append(f"- [{title}]({link}): {_first_sentence(text)}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
    for name, (_, text) in _pages.items():
        if name != "api.md":
            (site / name).write_text(text)
    signatures = re.findall(r'<div class="[^"]*doc-signature.*?</div>', (site / "api.html").read_text(), re.DOTALL)
    if not signatures or any("Unpack" in signature for signature in signatures):
        raise PluginError("api.html must show one signature a function, got the overloads of type checkers")
    for path in (path for ending in ("html", "css") for path in site.rglob(f"*.{ending}")):
        found = _LOADED.search(path.read_text())
        if found:
            raise PluginError(f"{path.name} must load nothing from the network, got {found[0]}")
