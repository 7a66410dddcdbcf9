"""Extracts the Python code in README and in the pages of docs/."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def session(page: Path) -> str:
    """Returns the Python blocks of a page at their original lines, so that tracebacks point into the page."""
    lines, code = [], False
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        code = line == "```python" if fence else code
        lines.append(line if code and not fence else "")
    return "\n".join(lines)


WITH_CODE = [page for page in PAGES if session(page).strip()]
