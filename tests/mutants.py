"""Breaks the code on purpose, one change at a time, and checks that a test notices.

    python tests/mutants.py [-j N] [cuda cpu python trainer trl] [WORD ...]

A WORD is part of a file's name or of a text: `cpu tile.cpp` runs the CPU's mutants in that file. Each is built, meets
the tests that are about its file, and where those pass all others: a mutant that a test notices costs seconds, a
survivor the whole suite. Not part of `make test`. A change to a kernel's logic should come with a mutant of it.
tests/suite/test_mutants.py checks that every text is there to be changed.
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
from mutant_lists import CPU, CUDA, PYTHON, TRAINER, TRL

ROOT = Path(__file__).resolve().parent.parent

OBJECTS = ROOT / "build" / "mutants"
# The tests about a file have a word of its name in theirs, or of these; without any, of its folder's or the op's.
ABOUT = {"arguments": "errors_options_dimension", "autocast": "modes_candidates",
         **dict.fromkeys(("avx512", "avx512_columns", "avx512_smoothing", "avx512_softcap", "avx2_softcap",
                           "row_entries", "tile"), "select_tiles_values_shapes_softcap"),
         **dict.fromkeys(("exp_tile", "convert", "row_passes", "scalar_math"), "forecast_values_shapes_softcap"),
         "collation": "collate_target_rows_trainer",
         **dict.fromkeys(("data", "mapped_arrays", "whole", "lock"), "data"),
         "entries": "sparse_arguments_stock_target_rows_dimension", "errors": "errors_dimension",
         "sharded_linear_select": "sharded",
         **dict.fromkeys(("linear_cross_entropy", "linear_losses"), "linear"),
         **dict.fromkeys(("placements", "rows", "call"), "placements"),
         "row_losses": "row_loss_sharded", "linear_gradients": "row_loss_sharded", "topk": "topk_placements",
         **dict.fromkeys(("timm", "torchvision", "mixed_labels"), "vision"),
         "gradient_memory": "forecast", "safe_math": "zero_upstream", "integrations": "trainer",
         "active_rows": "linear", "logits": "trainer",
         **dict.fromkeys(("boxing", "library", "tensors", "torch_calls"), "raw_calls_out_memory"),
         **dict.fromkeys(("strided_logits", "strided_rows", "strided_columns", "strided_streams"), "strided_softcap"),
         "avx512_streams": "strided", "cross_entropy_inplace": "inplace",
         "select": "select_sharded",
         **dict.fromkeys(("sharded_select", "groups", "shard", "collectives", "shards"), "sharded_data"),
         "consistency": "agreement", "expected_grad": "forecast", "divergences": "divergence", "means": "masked_mean",
         "softmax": "sparse_softmax", "sparse_values": "patterns", "tensor_methods": "tensorlike_target",
         **dict.fromkeys(("options", "tensor_checks", "flags"), "errors_flags"),
         "smoothed": "soft_vision", "soft_target": "soft_vision",
         "loss_mean": "cross_entropy", "modules": "modules_options", "storage": "target",
         "reference": "transforms_failures_candidates", "indexing": "rows_target",
         "segments": "divergence_distillation",
         "accelerate": "arrays_training"}
LATE = ("bfloat16", "compile", "limits", "memory")  # take long, and rarely find what nothing else does


class DoesNotCompile(Exception):
    """No test has noticed anything then."""


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
    """A C++ source and what it includes of this project."""
    found, new = set(), {source.resolve()}
    while new:
        found |= new
        names = [(path.parent / name).resolve() for path in new
                 for name in re.findall(r'^#include "(.*)"', path.read_text(), re.M)]
        new = {path for path in names if path.exists()} - found
    return found


def by_likelihood(mutant: tuple, tests: list) -> tuple:
    """The names of the tests that are likely to notice a mutant, the likeliest first, and all others."""
    def shared(name):
        return len(words & set(name.split("_")))

    def rank(name):
        in_text = sum(word in mutant[1] for word in name.split("_"))
        # Of all the values a kernel's mutant gets the first wrong, and one of Python mostly none.
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
    planning = "test_emulation_planning"  # what programs take whichever way it is planned
    done = run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
                *tree.glob(f"tests/*/{planning}.py")], tree)
    return planning if done.returncode != 0 else ""


def of_suite(tree: Path, mutant: tuple, flavours: tuple = ("plain", "compilers", "clients"), pattern: str = "*",
             without: tuple = ()) -> str:
    """Without the test that finds the mutant's text gone."""
    paths = {path.stem: path for path in tree.glob(f"tests/*/test_{pattern}.py")
             if path.stem not in ("test_mutants", *without)}
    for part in by_likelihood(mutant, list(paths)):
        for flavour in flavours:
            tests = [paths[name] for name in part if FLAVOURS[flavour].has_file(name)]
            done = run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "mutants", "-p", "no:cacheprovider", "-m",
                        "not slow", *tests], tree, {"PYTHONPATH": f"{tree / 'package'}{os.pathsep}{tree / 'tests'}",
                                                    "SPARSE_CE_FLAVOUR": flavour, "OMP_NUM_THREADS": "1"}
                       ) if tests else None
            if done and done.returncode not in (0, 5):  # 5: all that are there are slow
                said = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M)
                return (said or done.stdout.strip().split("\n"))[-1]
    return ""


def pytest_collection_modifyitems(items: list) -> None:
    """As a plugin of that pytest: every test with its first parameters, then every one with its second, and so on."""
    seen, turn_of = Counter(), {}
    for item in items:
        function = item.nodeid.split("[")[0]
        turn_of[item] = seen[function]
        seen[function] += 1
    items.sort(key=turn_of.__getitem__)


def compiled(tree: Path, source: Path, flags: list) -> Path:
    """The object of a source, made once for all mutants that leave it and what it includes as they are."""
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
    """Without what compiles C++."""
    import sparse_ce
    package = tree / "package" / "sparse_ce"
    shutil.copytree(tree / "sparse_ce", package)
    for library in Path(sparse_ce.__file__).parent.glob("_C*.so"):
        shutil.copy(library, package)
    return of_suite(tree, mutant, pattern=pattern, without=("test_native_kernels",))


def of_trainer(tree: Path, mutant: tuple) -> str:
    return of_python(tree, mutant, "trainer*")


def of_trl(tree: Path, mutant: tuple) -> str:
    return of_python(tree, mutant, "trl*")


# What finds the test that notices a mutant in a tree of files: "" where none does.
GROUPS = {"cuda": (CUDA, of_programs), "cpu": (CPU, of_cpu), "python": (PYTHON, of_python),
          "trainer": (TRAINER, of_trainer), "trl": (TRL, of_trl)}


def problems() -> list:
    """The mutants whose text does not occur exactly once: nothing, or more than was meant, would be changed."""
    counts = [(group, file, text, (ROOT / file).read_text().count(text) if (ROOT / file).exists() else 0)
              for group, (mutants, _) in GROUPS.items() for file, text, _ in mutants]
    return [f"{group}: {file} has {text!r} {count} times" for group, file, text, count in counts if count != 1]


def chosen(words: list) -> list:
    """(search, mutant) for each that fits the words."""
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
