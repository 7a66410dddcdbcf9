"""Creates the summary tables of the API page from the first sentence of each docstring. It needs neither torch nor
MkDocs."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = re.compile(r"^::: (\S+)$", re.MULTILINE)


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _source(path: Path, module: str, node: ast.ImportFrom) -> str:
    """Returns the absolute name of the module that an import reads."""
    parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    parts = parts[:len(parts) - node.level + 1] if node.level else []
    return ".".join([*parts, *([node.module] if node.module else [])])


def _docstring(module: str, name: str) -> str:
    """Returns the docstring of a function or class, also if the module imports it from another module."""
    path = _file(module)
    stars = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name and ast.get_docstring(node):
            return ast.get_docstring(node) or ""  # an overload has none
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _docstring(_source(path, module, node), alias.name)
                if alias.name == "*":
                    stars.append(_source(path, module, node))
    for star in stars:
        try:
            return _docstring(star, name)
        except LookupError:
            continue
    raise LookupError(f"{module} has no {name}")


def sentence(path: str) -> str:
    """Returns the first sentence of a docstring as Markdown."""
    module, _, name = path.rpartition(".")
    text = ast.get_docstring(ast.parse(_file(path).read_text())) if _file(path).exists() else _docstring(module, name)
    first = re.split(r"(?<=\.)\s", " ".join((text or "").split("\n\n")[0].split()))[0]
    first = re.sub(r":(?:class|func|meth|mod):`(?:[\w.]+\.)?(\w+)`", r"`\1`", first)
    return first.replace("``", "`").replace("|", r"\|")


def with_tables(page: str) -> str:
    """Returns the API page with a table of names and sentences below each heading."""
    parts = re.split(r"(?=^## )", page, flags=re.MULTILINE)
    return "".join(parts[:1] + [_with_table(part) for part in parts[1:]])


def _with_table(part: str) -> str:
    heading, _, rest = part.partition("\n")
    rows = [f"| [`{name.rpartition('.')[2]}`](#{name}) | {sentence(name)} |" for name in NAME.findall(part)]
    return "\n".join([heading, "", "| name | what it does |", "|---|---|", *rows, rest])
