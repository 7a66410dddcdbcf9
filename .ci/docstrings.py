"""Checks that every docstring is a sentence with a verb, and that a function's begins with one in the third person.

    python .ci/docstrings.py [FOLDER_OR_FILE ...]

The check knows a verb by ``VERBS``. If a sentence is fine and its verb is not listed, add the verb. Sections follow
Google's style: "Args:", "Returns:", "Raises:", "Yields:", "Examples:".
"""

import ast
import re
import sys
from pathlib import Path
from typing import Iterator, List

# The base form; the third person adds "s", "es" or "ies".
VERBS = set("""
accept accumulate add align allocate allow analyze append apply assert assign attach average avoid broadcast build cache
call capture cast change check choose clear clip close collect combine compare compile complete compute concatenate
configure contain convert copy count create cut damage decide decode define delete depend describe detach detect
determine differentiate disable dispatch divide do draw drop emit enable encode end enter equal estimate evaluate
execute exit expand expect explain export expose extend extract fail fill find flatten fold follow forget fork format
free freeze fuse gather generate give go group guard handle hash have help hold hook identify ignore implement import
include index infer initialize insert install interleave iterate join keep kill launch let list load locate lock log
look make map mark mask match mean measure merge mirror move multiply name need normalize offer open override own pack
pad parse partition pass patch perform permute pick place plan point prepare preserve prevent print process produce
profile propagate prove provide publish put query raise read receive recompute record reduce refer refuse register
release remove render repeat replace replay report represent request require reserve reset reshape resolve restore
resume return round run sample save scale scatter search see select send serve set shard share shift show shuffle
simulate skip slice slide sort specify split stack start state step stop store stream strip subtract sum support switch
take tell test time total trace track train transfer transform truncate try turn unpack unwrap update upload use
validate verify visit wait walk warn weight work wrap write yield zero
""".split())
AUXILIARIES = set("is are was were has have can cannot must may do does will".split())
OTHER_SECTIONS = {"Arguments:", "Parameters:", "Return:", "Yield:", "Raise:", "Keyword Args:"}


def third_person(base: str) -> str:
    if base in ("have", "do", "go"):
        return {"have": "has", "do": "does", "go": "goes"}[base]
    if re.search(r"(s|sh|ch|x|z)$", base):
        return base + "es"
    return base[:-1] + "ies" if re.search(r"[^aeiou]y$", base) else base + "s"


CHECKED = ["sparse_ce", "benchmarks", "examples", "tests", ".ci", "setup.py", "build_backend.py"]
FINITE = {third_person(base) for base in VERBS}


def words(text: str) -> List[str]:
    return re.findall(r"[A-Za-z]+", re.sub(r"``[^`]*``", " ", text))


def problems(source: str, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            continue
        doc = ast.get_docstring(node)
        if doc is None:
            continue
        where = f"{name}:{getattr(node, 'lineno', 1)}: {getattr(node, 'name', 'module')}"
        first = doc.split("\n\n")[0]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            begin = first.split()[0].lower()
            if begin not in FINITE:
                yield f"{where}: a function's docstring begins with a verb in the third person, got {first.split()[0]}"
        elif not any(word in FINITE or word in VERBS or word in AUXILIARIES for word in map(str.lower, words(first))):
            yield f"{where}: a docstring is a sentence with a verb, got {' '.join(first.split()[:6])}"
        if not re.search(r"[.:?!`)]$", first.strip()):
            yield f"{where}: the first sentence ends with a period"
        for line in doc.splitlines():
            if line.strip() in OTHER_SECTIONS:
                yield f"{where}: sections are Args:, Returns:, Raises:, Yields:, got {line.strip()}"


def main(arguments: List[str]) -> int:
    found = []
    for argument in arguments or CHECKED:
        path = Path(argument)
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found += problems(file.read_text(), str(file))
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
