"""Extracts the functions of docs/recipes.md, so that the tests run the code that the page shows."""

import ast
from typing import Any, Callable, Dict

from pages import ROOT, session

PAGE = ROOT / "docs" / "recipes.md"


def recipes() -> Dict[str, Callable[..., Any]]:
    """Returns the functions of the page by name, without running its calls."""
    tree = ast.parse(session(PAGE), str(PAGE))
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    names: Dict[str, Any] = {}
    exec(compile(ast.Module([node for node in tree.body if isinstance(node, kept)], []), str(PAGE), "exec"), names)
    return {node.name: names[node.name] for node in tree.body if isinstance(node, ast.FunctionDef)}


def lines() -> Dict[str, int]:
    """Returns the number of lines of each function."""
    tree = ast.parse(session(PAGE))
    return {node.name: node.end_lineno - node.lineno + 1 for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None}
