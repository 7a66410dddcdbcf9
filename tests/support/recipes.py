"""Extracts the functions of the pages in docs/, so that the tests run the code that a page shows."""

import ast
from typing import Any, Callable, Dict

from pages import ROOT, session


def recipes(page: str = "recipes") -> Dict[str, Callable[..., Any]]:
    """Returns the functions of a page by name, without running its calls."""
    path = ROOT / "docs" / f"{page}.md"
    tree = ast.parse(session(path), str(path))
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    names: Dict[str, Any] = {}
    exec(compile(ast.Module([node for node in tree.body if isinstance(node, kept)], []), str(path), "exec"), names)
    return {node.name: names[node.name] for node in tree.body if isinstance(node, ast.FunctionDef)}


def lines(page: str = "recipes") -> Dict[str, int]:
    """Returns the number of lines of each function."""
    tree = ast.parse(session(ROOT / "docs" / f"{page}.md"))
    return {node.name: node.end_lineno - node.lineno + 1 for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None}
