"""Generates the table of clients and training modes in docs/training-loops.md from the marks of the tests.

    python tests/support/compatibility.py    # rewrites the table

``@pytest.mark.works(client, *modes)`` marks a test that trains this client in these modes and compares its steps with
another implementation. tests/docs/test_compatibility.py checks that the page has the table of the marks.
"""

import ast
import sys
from pathlib import Path
from typing import Iterator, List, Set, Tuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/training-loops.md"
BEGIN, END = "| trains with |", "\n\n"
CLIENTS = {
    "own": "functions and modules in an own loop", "accelerate": "functions and modules with accelerate",
    "lightning": "functions and modules with Lightning", "loss": "`causal_lm_loss` with the Trainer",
    "head": "`fuse_lm_head` with the Trainer", "sft": "`fuse_lm_head` with TRL's `SFTTrainer`",
    "policies": "`fuse_lm_head` with DPO, KTO, GRPO, RLOO",
    "liger": "Liger's flag with the Trainer",
    "axolotl": "`SparseCEPlugin` with axolotl", "axolotl cache": "the same, distilling from a cache",
    "teacher": "`DistillationTrainer` with a teacher model", "cache": "`DistillationTrainer` with a cache",
}
MODES = ["one process", "accumulation", "bfloat16", "checkpointing", "PEFT", "compile", "DDP", "FSDP2", "ZeRO-2",
         "ZeRO-3"]


def marks(file: Path) -> Iterator[Tuple[str, List[str]]]:
    """Yields the client and the modes of each mark in a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "works":
            client, *modes = (ast.literal_eval(argument) for argument in node.args)
            yield client, modes


def cells() -> Set[Tuple[str, str]]:
    """Returns each client and mode that has a test."""
    found: Set[Tuple[str, str]] = set()
    for file in sorted((ROOT / "tests").glob("*/test_*.py")):
        for client, modes in marks(file):
            for mode in modes:
                if client not in CLIENTS or mode not in MODES:
                    raise ValueError(f"{file.name}: {client!r}, {mode!r} is no cell of the table")
                found.add((client, mode))
    return found


def table() -> str:
    found = cells()
    rows = [[text, ", ".join(mode for mode in MODES if (client, mode) in found)] for client, text in CLIENTS.items()]
    header = [BEGIN.strip("| "), "tested with"]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, *rows)).replace(
        "|\n", "|\n" + "|---" * len(header) + "|\n", 1)


def place(page: str) -> slice:
    begin = page.index(BEGIN)
    return slice(begin, page.index(END, begin))


def main() -> None:
    page = PAGE.read_text()
    PAGE.write_text(page[:place(page).start] + table() + page[place(page).stop:])


if __name__ == "__main__":
    sys.exit(main())
