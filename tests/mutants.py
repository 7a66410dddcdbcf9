"""Changes the code in one place at a time (a mutant) and checks that a test fails.

    python tests/mutants.py [-j N] [cuda cpu python trainer trl axolotl] [WORD ...]

A WORD is part of a file's name or of a text: `cpu tile.cpp` runs the CPU's mutants in that file. Each mutant is built
and runs the tests about its file. If they pass, it runs all others: a caught mutant costs seconds, a survivor the whole
suite. `make test` does not include this program. A change to a kernel's logic should come with a mutant.
tests/suite/test_mutants.py checks that every text occurs in its source.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flavours import FLAVOURS, digest_of, others
from mutant_lists import AXOLOTL, CPU, CUDA, PYTHON, TRAINER, TRL

ROOT = Path(__file__).resolve().parent.parent

OBJECTS = ROOT / "build" / "mutants"
# A test is about a file if their names share a word; this table replaces the words of a file's name. If no test
# matches, the words of its folder, or else of cross_entropy, are used.
ABOUT = {"arguments": "errors_options_dimension", "autocast": "modes_candidates",
         **dict.fromkeys(("avx512", "avx512_gradient", "avx512_columns", "avx512_smoothing", "avx512_softcap",
                           "avx2_softcap", "row_entries", "tile"), "select_tiles_values_shapes_softcap"),
         **dict.fromkeys(("exp_tile", "convert", "row_passes", "scalar_math"), "expected_values_shapes_softcap"),
         "collation": "collate_target_rows_trainer",
         **dict.fromkeys(("data", "atomic_files", "lock"), "data"),
         "entries": "sparse_arguments_stock_target_rows_dimension", "errors": "errors_dimension",
         **dict.fromkeys(("dense_divergences", "divergence_math", "near_divergence"), "dense_divergence"),
         "sharded_linear_select": "sharded", "head_rows": "blocks_sharded", "quantization": "quantized",
         **dict.fromkeys(("linear_cross_entropy", "linear_losses"), "linear"),
         **dict.fromkeys(("placements", "rows", "call", "teachers"), "placements"),
         "row_losses": "row_loss_sharded", "row_loss_autograd": "row_loss_teachers_sharded",
         "row_teachers": "row_teachers_loss", "linear_gradients": "row_loss_sharded", "topk": "topk_placements",
         "gradient_memory": "expected", "safe_math": "zero", "integrations": "trainer",
         "active_rows": "linear", "logits": "trainer",
         **dict.fromkeys(("boxing", "library", "tensors", "torch_calls"), "raw_calls_out_memory"),
         **dict.fromkeys(("strided_logits", "strided_rows", "strided_columns", "strided_streams"), "strided_softcap"),
         "avx512_streams": "strided", "cross_entropy_inplace": "inplace",
         **dict.fromkeys(("select", "select_stats"), "select_sharded"),
         **dict.fromkeys(("sharded_select", "groups", "shard", "collectives", "shards"), "sharded_data"),
         "consistency": "agreement", "expected_grad": "expected", "divergences": "divergence", "means": "masked_mean",
         "softmax": "sparse_softmax", "sparse_values": "patterns", "tensor_methods": "tensorlike_target",
         **dict.fromkeys(("options", "tensor_checks", "flags"), "errors_flags"),
         "smoothed": "smoothed",
         "loss_mean": "cross_entropy", "modules": "modules_options", "storage": "target",
         "reference": "transforms_failures_candidates", "indexing": "rows_target",
         "segments": "divergence_distillation",
         "accelerate": "arrays_training"}
LATE = ("bfloat16", "compile", "limits", "memory")  # slow tests that rarely catch a mutant which others miss


class DoesNotCompile(Exception):
    """Indicates that a mutant does not compile, so no test has caught it."""


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


def by_likelihood(mutant: tuple, tests: list) -> tuple:
    """Returns the names of the tests that are likely to catch a mutant, the likeliest first, and the names of all
    others."""
    def shared(name):
        return len(words & set(name.split("_")))

    def rank(name):
        in_text = sum(word in mutant[1] for word in name.split("_"))
        # A kernel's mutant mostly fails the first test of values, and a mutant of Python rarely does.
        return any(word in name for word in LATE), -shared(name), -in_text, name.endswith("values") == python, name

    path = Path(mutant[0])
    python = path.suffix == ".py"
    stem = f"linear_{path.stem}" if path.parent.name == "linear" else path.stem
    words = set(ABOUT.get(stem, stem).split("_"))
    if not any(map(shared, tests)):
        words = set(ABOUT.get(path.parent.name, "cross_entropy").split("_"))
    ordered = sorted(tests, key=rank)
    return [name for name in ordered if shared(name)], [name for name in ordered if not shared(name)]


def of_programs(tree: Path, mutant: tuple) -> str:
    flavour = next((name for name in ("tsan", "asan") if re.search(rf"/[/*] {name}\b", mutant[2])), "plain")
    options = {"tsan": ["--small", "--seeds", "1", "100"], "asan": ["--seeds", "1", "200"]}.get(
        flavour, ["--seeds", "1", "800"])
    for source in sorted(tree.glob("tests/emulation/*.cpp")):
        if (tree / mutant[0]).resolve() in included(source):
            build([sys.executable, "tests/emulation/build.py", flavour, source.stem], tree)
            program = f"{source.stem}_{flavour}"
            if run([f"tests/emulation/build/{program}", *options], tree).returncode != 0:
                return program
    # The programs accept any plan, and have a launch.cuh of their own.
    for test in ("test_emulation_planning", "test_launch_calls"):
        done = run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
                    *tree.glob(f"tests/*/{test}.py")], tree)
        if done.returncode != 0:
            return test
    return ""


def of_suite(tree: Path, mutant: tuple, flavours: tuple = ("plain", "compilers", "clients", "sharded"),
             pattern: str = "*", without: tuple = ()) -> str:
    """Returns the first failing test or "", without the test that checks the mutant's text."""
    paths = {path.stem: path for path in tree.glob(f"tests/*/test_{pattern}.py")
             if path.stem not in ("test_mutants", *without)}
    for part in by_likelihood(mutant, list(paths)):
        for flavour in flavours:
            tests = [paths[name] for name in part if FLAVOURS[flavour].has_file(name)]
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
    out = OBJECTS / f"{source.stem}-{digest_of(*included(source), below=tree.resolve())[:16]}.o"
    if not out.exists():
        OBJECTS.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(f".{os.getpid()}-{tree.parent.name}")
        build(["g++", *flags, "-c", source, "-o", part], tree)
        part.rename(out)
    return out


def of_cpu(tree: Path, mutant: tuple) -> str:
    from torch.utils.cpp_extension import include_paths, library_paths
    package = tree / "package" / "sparse_ce"
    shutil.copytree(tree / "sparse_ce", package, ignore=shutil.ignore_patterns("*.so"))
    flags = ["-std=c++17", "-O2", "-ftree-vectorize", "-fPIC", "-fopenmp-simd", "-fno-math-errno",
             "-fno-trapping-math", "-DTORCH_TARGET_VERSION=0x020b000000000000",
             *[f"-isystem{path}" for path in include_paths()]]
    objects = [compiled(tree, source, flags)
               for source in sorted(tree.glob("csrc/**/*.cpp")) if source.name != "bindings_cuda.cpp"]
    build(["g++", "-shared", *objects, "-o", package / "_C.so", *[f"-L{path}" for path in library_paths()],
           "-ltorch_cpu", "-lc10"], tree)
    of_this_library = [name for name in others() if FLAVOURS[name].environment and not FLAVOURS[name].build]
    return of_suite(tree, mutant, ("plain", *of_this_library))


def of_python(tree: Path, mutant: tuple, pattern: str = "*") -> str:
    """Returns the first failing test or "", without the tests that compile C++."""
    import sparse_ce
    package = tree / "package" / "sparse_ce"
    shutil.copytree(tree / "sparse_ce", package)
    for library in Path(sparse_ce.__file__).parent.glob("_C*.so"):
        shutil.copy(library, package)
    return of_suite(tree, mutant, pattern=pattern, without=("test_native_kernels",))


def of_trainer(tree: Path, mutant: tuple) -> str:
    return of_python(tree, mutant, "trainer*")


def of_axolotl(tree: Path, mutant: tuple) -> str:
    return of_python(tree, mutant, "axolotl*")


def of_trl(tree: Path, mutant: tuple) -> str:
    return of_python(tree, mutant, "trl*")


# Each group's mutants, and the function that returns the test which catches a mutant in a copy of the repository, or
# "".
GROUPS = {"cuda": (CUDA, of_programs), "cpu": (CPU, of_cpu), "python": (PYTHON, of_python),
          "trainer": (TRAINER, of_trainer), "trl": (TRL, of_trl), "axolotl": (AXOLOTL, of_axolotl)}


def problems() -> list:
    """Returns messages about the mutants whose text does not occur exactly once, so that nothing or too much is
    changed."""
    counts = [(group, file, text, (ROOT / file).read_text().count(text) if (ROOT / file).exists() else 0)
              for group, (mutants, _) in GROUPS.items() for file, text, _ in mutants]
    return [f"{group}: {file} has {text!r} {count} times" for group, file, text, count in counts if count != 1]


def chosen(words: list) -> list:
    """Returns (search, mutant) for each mutant that matches the words."""
    groups = [word for word in words if word in GROUPS] or list(GROUPS)
    parts = [word for word in words if word not in GROUPS]
    return [(search, mutant) for group in groups for mutants, search in [GROUPS[group]] for mutant in mutants
            if not parts or any(part in mutant[0] or part in mutant[1] for part in parts)]


def try_out(search, mutant: tuple) -> str:
    file, text, replacement = mutant
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "*.so", "out"))
        source = (tree / file).read_text()
        (tree / file).write_text(source.replace(text, replacement))
        try:
            test = search(tree, mutant)
            said = "caught" if test else "SURVIVED"
        except DoesNotCompile:
            test, said = "", "INVALID"
    print(f"{said:8}", file, "|", text.split("\n")[0][:90], f"| {test[:90]}" if test else "", flush=True)
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-j", type=int, default=1, metavar="N", help="so many mutants at once")
    parser.add_argument("words", nargs="*", metavar="WORD", help=f"{', '.join(GROUPS)}, or a part of a file or text")
    arguments = parser.parse_args()
    if problems():
        sys.exit("\n".join(problems()))
    mutants = chosen(arguments.words)
    if not mutants:
        sys.exit(f"no mutant fits {arguments.words}")
    with ThreadPoolExecutor(arguments.j) as pool:
        said = list(pool.map(lambda pair: try_out(*pair), mutants))
    print(f"{said.count('caught')} caught, {said.count('SURVIVED')} survived, {said.count('INVALID')} do not compile")
    return said.count("caught") != len(said)


if __name__ == "__main__":
    sys.exit(main())
