"""What MkDocs adds to the pages: tables and pictures of the records, all measurements, and llms.txt.

It also sees to it that a browser loads nothing from the network: links lead there, but no script, font or picture.
"""

import re
import sys
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from harness import tables  # noqa: E402

_TABLE = re.compile(r"^<!-- records: (.+) -->$", re.MULTILINE)
_LOADED = re.compile(r"""<link[^>]*href=["']?(?:https?:)?//[^>]*|src=["']?(?:https?:)?//[^\s>]*|"""
                     r"""(?:url\(|@import)\s*["']?(?:https?:)?//[^\s)]*""")
_pages = {}  # name: title and text


def _fill(markdown: str) -> str:
    return _TABLE.sub(lambda found: tables.markdown(found[1]), markdown)


def on_files(files, config):
    for picture in (ROOT / "benchmarks").glob("*.png"):
        files.append(File.generated(config, picture.name, abs_src_path=str(picture)))
    shim = ROOT / "third_party" / "iframe-worker" / "shim.js"
    files.append(File.generated(config, "iframe-worker/shim.js", abs_src_path=str(shim)))
    for page in (ROOT / "benchmarks" / "results").glob("*.md"):
        name, text = f"results/{page.name}", page.read_text()
        if page.stem == "README":
            name = "results.md"
            text = re.sub(r"\[[\w.]+\]\(\.\./([\w/]+\.py)\)", r"`benchmarks/\1`", text)  # no part of the site
            text = re.sub(r"\]\(([\w.-]+\.md)\)", r"](results/\1)", text)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    markdown = _fill(markdown)
    _pages[page.file.src_uri] = page.title, markdown
    return markdown


def on_page_content(html, page, config, files):
    return re.sub(r":(?:class|func|meth):(?=<code)", "", html)  # marks of docstrings for other readers


def on_post_build(config):
    """llms.txt: the pages in a line each; beside it their texts. The API is where the docstrings are."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    for name in (name for entry in config.nav for name in entry.values()):
        title, text = _pages[name]
        about = re.match(r"# [^\n]+\n\n(.+?)[.:](?:\s|$)", text, re.DOTALL)  # the first sentence says it all
        link = name.replace(".md", ".html") if name == "api.md" else name
        lines.append(f"- [{title}]({link}): {' '.join(about[1].split())}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
    for name, (_, text) in _pages.items():
        if name != "api.md":
            (site / name).write_text(text)
    for path in (path for ending in ("html", "css") for path in site.rglob(f"*.{ending}")):
        found = _LOADED.search(path.read_text())
        if found:
            raise PluginError(f"{path.name} must load nothing from the network, got {found[0]}")
