"""Changes the code in one place at a time (a mutant) and checks that a test fails.

    python tests/mutants.py [-j N] [--since REV] [--sample N] [--seed S] [--quick] [WORD ...]

mutant_operators.py makes the mutants; mutants_by_hand.py lists a few that no operator makes. By default, those in the
lines changed since REV are tried. If REV is not given, it is the commit where the branch left origin/main. A WORD
chooses mutants in all lines instead: it is a group (cpu, cuda, integrations or python), or a part of a file's name, of
a line, or of an operator's name. `cpu tile.cpp` chooses all mutants of that file. --sample without a WORD and a REV
chooses all mutants of all files. At most 50 of the chosen mutants are tried, or --sample: a random one of each line,
then a second one, and so on.

Each mutant is built and runs the tests about its file. If they pass, it runs all others: a caught mutant costs seconds,
a survivor the whole suite. With --quick, the others do not run. If a mutant of the CPU kernels compiles to the same
machine code, no test runs.

If a mutant survives, a test is missing, the code is not needed, or the mutant means the same. A reader decides which.
So this program fails only if a mutant by hand is not caught: none of them means the same.
"""

import argparse
import functools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from flavours import FLAVOURS, digest_of, others
from mutant_operators import edits
from mutants_by_hand import BY_HAND

ROOT = Path(__file__).resolve().parent.parent
OBJECTS = ROOT / "build" / "mutants"
# A test is about a file if its name shares a word with the file's name, or with the row of its folder. A row for the
# file's name replaces that name. If no test matches, those of cross_entropy are used.
ABOUT = {"simd/": "select_tiles_values_shapes_softcap", "rows/": "strided_select_values_shapes_softcap_expected",
         "memory/": "expected_values_shapes", "torch/": "raw_calls_memory_values_errors", "data/": "data",
         "dtensor/": "placements", "sharding/": "sharded_data", "targets/": "target_arguments",
         "integrations/": "trainer",
         "accelerate": "arrays_training", "arguments": "errors_options_dimension",
         "autocast": "modes_candidates", "cached_rows": "trl", "collation": "collate_target_rows_trainer",
         "comparison": "row_teachers_dense_divergence_sharded",
         "consistency": "agreement", "convert": "target_binary_arguments",
         "decode": "target_select_sharded", "dense_divergences": "dense_divergence",
         "divergence_math": "dense_divergence", "divergences": "divergence", "errors": "errors_dimension",
         "entries": "sparse_arguments_stock_target_rows_dimension", "flags": "errors_flags",
         "linear_gradients": "linear_row_loss_sharded", "linear_passes": "linear_row_loss_sharded",
         "linear_select": "linear_select_sharded", "linear_losses": "linear", "loss_mean": "cross_entropy",
         "means": "masked_mean",
         "near_divergence": "dense_divergence", "options": "errors_flags", "per_token": "trl", "positives": "metrics",
         "quantization": "quantized", "row_loss_autograd": "row_loss_teachers_sharded",
         "row_losses": "row_loss_sharded", "rows": "placements",
         "safe_math": "zero_exact_failures", "scalar_math": "expected_values_shapes_softcap",
         "segments": "divergence_distillation",
         "select": "select_sharded", "softmax": "sparse_softmax", "sparse_values": "patterns",
         "teacher": "teacher_row_teachers_sharded", "teachers": "placements",
         "tensor_checks": "errors_flags", "tensor_methods": "tensorlike_target", "topk": "topk_placements",
         "torch_calls": "raw_calls_out_memory"}
LATE = ("bfloat16", "compile", "limits", "memory")  # slow tests that rarely catch a mutant which others miss


class Mutant(NamedTuple):
    file: str
    start: int
    end: int
    new: str
    operator: str
    line: int
    text: str  # the lines that it changes


class DoesNotCompile(Exception):
    """Indicates that a mutant does not compile, so no test has caught it."""


class Unchanged(Exception):
    """Indicates that a mutant compiles to the same machine code."""


def run(command, cwd, env=None) -> subprocess.CompletedProcess:
    try:
        return subprocess.run([str(c) for c in command], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", env={**os.environ, **(env or {})}, timeout=3600)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "hangs")


def build(command, cwd) -> None:
    if run(command, cwd).returncode != 0:
        raise DoesNotCompile


def included(source: Path) -> set:
    """Returns a C++ source and the files of this project that it includes."""
    found, new = set(), {source.resolve()}
    while new:
        found |= new
        names = [(path.parent / name).resolve() for path in new
                 for name in re.findall(r'^#include "(.*)"', path.read_text(), re.M)]
        new = {path for path in names if path.exists()} - found
    return found


def by_likelihood(file: str, text: str, tests: list) -> tuple:
    """Returns the names of the tests that are likely to catch a mutant, the likeliest first, and the names of all
    others."""
    path = Path(file)
    python = path.suffix == ".py"
    stem = f"linear_{path.stem}" if path.parent.name in ("linear", "head") else path.stem
    of_file, of_folder = (set(row.split("_")) for row in (ABOUT.get(stem, stem), ABOUT.get(f"{path.parent.name}/", "")))
    if not any((of_file | of_folder) & set(name.split("_")) for name in tests):
        of_file = {"cross", "entropy"}

    def rank(name):
        words = set(name.split("_"))
        in_text = sum(word in text for word in words)
        # A kernel's mutant mostly fails the first test of values, and a mutant of Python rarely does.
        return (any(word in name for word in LATE), -len(words & of_file), -len(words & of_folder), -in_text,
                name.endswith("values") == python, name)

    ordered = sorted(tests, key=rank)
    likely = [name for name in ordered if (of_file | of_folder) & set(name.split("_"))]
    return likely, [name for name in ordered if name not in likely]


# A search returns the first failing test or "", of the tests that are likely to catch a mutant or of all others.


def of_programs(tree: Path, mutant: Mutant, likely: bool) -> str:
    # Only tsan sees that a barrier is missing. If plain programs pass, asan and tsan see wrong places and orders.
    barrier = mutant.operator == "drop a barrier"
    for flavour in (["tsan"] if barrier else ["plain"]) if likely else [] if barrier else ["asan", "tsan"]:
        options = {"tsan": ["--small", "--seeds", "1", "100"], "asan": ["--seeds", "1", "200"],
                   "plain": ["--seeds", "1", "800"]}[flavour]
        for source in sorted(tree.glob("tests/emulation/*.cpp")):
            if (tree / mutant.file).resolve() in included(source):
                build([sys.executable, "tests/emulation/build.py", flavour, source.stem], tree)
                program = f"{source.stem}_{flavour}"
                if run([f"tests/emulation/build/{program}", *options], tree).returncode != 0:
                    return program
    # The programs accept any plan, and have a launch.cuh of their own.
    for test in ("test_emulation_planning", "test_launch_calls") if likely else ():
        done = run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
                    *tree.glob(f"tests/*/{test}.py")], tree)
        if done.returncode != 0:
            return test
    return ""


def of_suite(tree: Path, mutant: Mutant, likely: bool, flavours: tuple = ("plain", "compilers", "clients", "sharded"),
             without: tuple = (), rest: str = "*") -> str:
    """Runs the suite except the tests in `without` and of mutants. `rest` is the folder of the tests that are not
    likely."""
    paths = {path.stem: path for path in tree.glob("tests/*/test_*.py") if path.stem not in ("test_mutants", *without)}
    part = by_likelihood(mutant.file, mutant.text, list(paths))[not likely]
    for flavour in flavours:
        tests = [paths[name] for name in part
                 if FLAVOURS[flavour].has_file(name) and (likely or fnmatch(paths[name].parent.name, rest))]
        done = run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "mutants", "-p", "no:cacheprovider", "-m",
                    "not slow", *tests], tree, {"PYTHONPATH": f"{tree / 'package'}{os.pathsep}{tree / 'tests'}",
                                                "SPARSE_CE_FLAVOUR": flavour, "OMP_NUM_THREADS": "1"}
                   ) if tests else None
        if done and done.returncode not in (0, 5):  # 5: all selected tests are slow
            said = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M)
            return (said or done.stdout.strip().split("\n"))[-1]
    return ""


def pytest_collection_modifyitems(items: list) -> None:
    """Sorts tests so that each one runs with its first parameters, then each with its second, and so on (a pytest
    plugin)."""
    seen, turn_of = Counter(), {}
    for item in items:
        function = item.nodeid.split("[")[0]
        turn_of[item] = seen[function]
        seen[function] += 1
    items.sort(key=turn_of.__getitem__)


def compiled(tree: Path, source: Path, flags: list) -> Path:
    """Returns the object file of a source, compiled once for all mutants that leave the source and its includes
    unchanged."""
    out = OBJECTS / f"{source.stem}-{digest_of(*included(tree / source), below=tree.resolve())[:16]}.o"
    if not out.exists():
        OBJECTS.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(f".{os.getpid()}-{tree.parent.name}")
        build(["g++", *flags, "-c", source, "-o", part], tree)
        part.rename(out)
    return out


def of_cpu(tree: Path, mutant: Mutant, likely: bool) -> str:
    package = tree / "package" / "sparse_ce"
    if not package.exists():
        from torch.utils.cpp_extension import include_paths, library_paths
        flags = ["-std=c++17", "-O2", "-ftree-vectorize", "-fPIC", "-fopenmp-simd", "-fno-math-errno",
                 "-fno-trapping-math", "-DTORCH_TARGET_VERSION=0x020b000000000000",
                 *[f"-isystem{path}" for path in include_paths()]]
        sources = [source.relative_to(tree) for source in sorted(tree.glob("csrc/**/*.cpp"))
                   if source.name != "bindings_cuda.cpp"]
        objects = [compiled(tree, source, flags) for source in sources]
        if all(compiled(ROOT, source, flags).read_bytes() == new.read_bytes() for source, new in zip(sources, objects)):
            raise Unchanged
        shutil.copytree(tree / "sparse_ce", package, ignore=shutil.ignore_patterns("*.so"))
        build(["g++", "-shared", *objects, "-o", package / "_C.so", *[f"-L{path}" for path in library_paths()],
               "-ltorch_cpu", "-lc10"], tree)
    of_this_library = [name for name in others() if FLAVOURS[name].environment and not FLAVOURS[name].build]
    return of_suite(tree, mutant, likely, ("plain", *of_this_library))


def of_python(tree: Path, mutant: Mutant, likely: bool, rest: str = "*") -> str:
    """Searches without the tests that compile C++."""
    package = tree / "package" / "sparse_ce"
    if not package.exists():
        import sparse_ce
        shutil.copytree(tree / "sparse_ce", package)
        for library in Path(sparse_ce.__file__).parent.glob("_C*.so"):
            shutil.copy(library, package)
    return of_suite(tree, mutant, likely, without=("test_native_kernels",), rest=rest)


def of_integrations(tree: Path, mutant: Mutant, likely: bool) -> str:
    return of_python(tree, mutant, likely, "integrations")


# The files of each group, and its search. The formulas are in two groups.
SHARED = ("csrc/core/*", "csrc/ops/*")
GROUPS = {"cpu": (("csrc/cpu/*", "csrc/torch/*", "csrc/torch_calls.h", *SHARED), of_cpu),
          "cuda": (("csrc/cuda/*", *SHARED), of_programs),
          "integrations": (("sparse_ce/integrations/*",), of_integrations),
          "python": (("sparse_ce/*", "docs/recipes.md"), of_python)}
NOT_BUILT = "csrc/torch/*cuda*"  # by any group


def groups_of(file: str) -> list:
    """Returns the groups of a file. A more special group precedes python."""
    groups = [name for name, (patterns, _) in GROUPS.items()
              if any(fnmatch(file, pattern) for pattern in patterns) and not fnmatch(file, NOT_BUILT)]
    return groups[:1] if "python" in groups else groups


def files() -> list:
    paths = [path for pattern in ("csrc/**/*.*", "sparse_ce/**/*.py", "docs/recipes.md") for path in ROOT.glob(pattern)]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


@functools.lru_cache(None)
def mutants_of(file: str) -> list:
    source = (ROOT / file).read_text()
    found = edits(file, source) + [(source.index(text), source.index(text) + len(text), new, "by hand")
                                   for name, text, new in BY_HAND if name == file and text in source]
    lines = []
    for start, end, new, operator in found:
        first, last = source.rfind("\n", 0, start) + 1, source.find("\n", end)
        lines.append(Mutant(file, start, end, new, operator, source.count("\n", 0, start) + 1, source[first:last]))
    return lines


def problems() -> list:
    """Returns messages about the mutants by hand whose text does not occur exactly once."""
    counts = [(file, text, (ROOT / file).read_text().count(text) if (ROOT / file).exists() else 0)
              for file, text, _ in BY_HAND]
    return [f"{file} has {text!r} {count} times" for file, text, count in counts if count != 1]


def chosen(words: list, lines: dict = None) -> list:
    """Returns all mutants that match the words and, if `lines` is given, are in these lines of their files."""
    groups = {word for word in words if word in GROUPS} or set(GROUPS)
    parts = [word for word in words if word not in GROUPS]
    return [mutant for file in files() if groups & set(groups_of(file)) and (lines is None or file in lines)
            for mutant in mutants_of(file)
            if (not parts or any(part in text for part in parts for text in (file, mutant.text, mutant.operator)))
            and (lines is None or lines[file] & set(range(mutant.line, mutant.line + mutant.text.count("\n") + 1)))]


def sample(mutants: list, most: int, seed: int) -> list:
    """Returns so many mutants in random order: one per line, then a second one of each line, and so on."""
    mutants = sorted(mutants)
    random.Random(seed).shuffle(mutants)
    seen, turns = Counter(), []
    for mutant in mutants:
        turns.append(seen[mutant.file, mutant.line])
        seen[mutant.file, mutant.line] += 1
    return [mutants[i] for i in sorted(range(len(mutants)), key=turns.__getitem__)][:most]


def changed_lines(since: str) -> dict:
    """Returns the numbers of the lines of each file that differ from a revision, by default from where this branch left
    origin/main, or else from the last commit's parent."""
    def git(*command, check=True):
        done = subprocess.run(["git", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=check)
        return done.stdout.strip()

    base = since or git("merge-base", "HEAD", "origin/main", check=False)
    if not since and base in ("", git("rev-parse", "HEAD")):
        base = "HEAD~1"
    found, file = {}, ""
    for line in git("diff", "--unified=0", "--no-prefix", "--no-ext-diff", base, "--").split("\n"):
        if line.startswith("+++ "):
            file = line[4:]
        elif match := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))?", line):
            first, count = int(match[1]), int(match[2] or 1)
            found.setdefault(file, set()).update(range(first, first + count))
    return found


def try_out(mutant: Mutant, groups: list, quick: bool) -> str:
    said, test = "SURVIVED", ""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "*.so", "out"))
        source = (tree / mutant.file).read_text()
        (tree / mutant.file).write_text(source[:mutant.start] + mutant.new + source[mutant.end:])
        try:
            for likely in (True, False)[:1 if quick else 2]:
                for group in list(groups):
                    try:
                        test = test or GROUPS[group][1](tree, mutant, likely)
                    except Unchanged:
                        groups.remove(group)
            said = "caught" if test else "SURVIVED" if groups else "the same"
        except DoesNotCompile:
            said = "INVALID"
    old, new = (" ".join(text.split())[:70] for text in (source[mutant.start:mutant.end], mutant.new))
    print(f"{said:8} {mutant.file}:{mutant.line} | {mutant.operator}: {old} -> {new}", f"| {test[:90]}" if test else "",
          flush=True)
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-j", type=int, default=1, metavar="N", help="so many mutants at once")
    parser.add_argument("--since", metavar="REV", help="only mutants in the lines changed since this revision")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of the chosen mutants, by default 50")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another sample for each number")
    parser.add_argument("--quick", action="store_true", help="only run the tests that are likely to fail")
    parser.add_argument("words", nargs="*", metavar="WORD", help=f"{', '.join(GROUPS)}, or a part of a file or line")
    arguments = parser.parse_args()
    if problems():
        sys.exit("\n".join(problems()))
    whole = not arguments.since and (arguments.words or arguments.sample)
    found = chosen(arguments.words, None if whole else changed_lines(arguments.since))
    mutants = sample(found, arguments.sample or 50, arguments.seed)
    print(f"{len(mutants)} of {len(found)} mutants; {len(found) - len(mutants)} are left out", flush=True)
    asked = {word for word in arguments.words if word in GROUPS} or set(GROUPS)
    with ThreadPoolExecutor(arguments.j) as pool:
        said = list(pool.map(lambda mutant: try_out(
            mutant, [group for group in groups_of(mutant.file) if group in asked], arguments.quick), mutants))
    print(", ".join(f"{count} {word}" for word, count in Counter(said).items()))
    return any(word != "caught" and mutant.operator == "by hand" for word, mutant in zip(said, mutants))


if __name__ == "__main__":
    sys.exit(main())
