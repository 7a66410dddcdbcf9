"""Tests the mutants of tests/mutants.py: the operators that make them, how words and changed lines select among them,
and which tests run first."""

import ast
import subprocess
from pathlib import Path

import pytest

import mutant_operators
import mutants

TESTS = sorted(path.stem for path in Path(__file__).parents[1].glob("*/test_*.py"))


def mutated(name, source):
    return [source[:start] + new + source[end:] for start, end, new, _ in mutant_operators.edits(name, source)]


@pytest.mark.parametrize("source, expected", [
    ("if a < b: f()", ["if (a <= b): f()", "if False: f()", "if True: f()", "if a < b: pass"]),
    ("x = a and b", ["x = (a)", "x = (b)", "x = (a or b)"]),
    ("x = a if c else b", ["x = (a)", "x = (b)"]),
    ("x = a * b + 1", ["x = a * b + 0", "x = (1)", "x = (a * b)", "x = (a * b - 1)", "x = (a) + 1", "x = (b) + 1"]),
    ("x = f(a, b, k=1)", ["x = f(a, b, k=0)", "x = (a)", "x = (b)", "x = (f(a, b))", "x = (f(a, k=1))",
                          "x = (f(b, a, k=1))"]),
    ("def f(t):\n    t = t.clone()\n    return t\n", ["def f(t):\n    pass\n    return t\n",
                                                     "def f(t):\n    t = (t)\n    return t\n"]),
    ("if c:\n    raise ValueError('no 1')", ["if False:\n    raise ValueError('no 1')", "if c:\n    pass"]),
    ("def f(a: int = 0) -> Tuple[int]:\n    'Adds 1.'", ["def f(a: int = 1) -> Tuple[int]:\n    'Adds 1.'"]),
    ("é = max(é, x[i:])", ["é = (min(é, x[i:]))", "é = (é)", "é = (x[i:])", "é = (max(x[i:], é))", "é = (max(é))",
                           "é = max(é, x[:])"]),
    ("import a\nf'{1 + 1}'", []),
])
def test_operators_of_python(source, expected):
    assert sorted(mutated("x.py", source)) == sorted(expected)
    for text in mutated("x.py", source):
        ast.parse(text)


@pytest.mark.parametrize("source, expected", [
    ("if (a && b < c) f();", ["if (true) f();", "if (false) f();", "if (a) f();", "if (b < c) f();", "if (a && b) f();",
                              "if (a && c) f();", "if (a || b < c) f();", "if (a && b <= c) f();",
                              "if (a && true) f();", "if (a && false) f();", "if (a && b < c) ;"]),
    ("x = a ? b : c;", ["x = b;", "x = c;", ";"]),
    ("const T x = a - b;", ["const T x = a;", "const T x = b;", "const T x = a + b;"]),
    ("Group::sync();  // 0", [";  // 0"]),
    ("x += std::min(a, b[i]);", ["x -= std::min(a, b[i]);", "x = std::min(a, b[i]);", "x += std::max(a, b[i]);",
                                 "x += (a);", "x += (b[i]);", "x += std::min(b[i], a);", "x += std::min(a);",
                                 "x += std::min(a, b[0]);", ";"]),
    ("for (int i = k; i < n; i += s) g<true>(\"1 + 1\");", [
        f"for (int i = k; {head}) g<true>(\"1 + 1\");" for head in (
            "i + 1 < n; i += s", "i < n; i += 2 * s", "i <= n; i += s", "i; i += s", "n; i += s", "true; i += s",
            "false; i += s")] + [f"for (int i = k; i < n; i += s) {body};" for body in ("g<false>(\"1 + 1\")", "")]),
    ("#define ONE 1\ntemplate <int N = 1>\nstatic T f(const T* a, int b);", []),
    ("void f() {\n  if (!a) return;\n}", ["void f() {\n  if (true) return;\n}", "void f() {\n  if (false) return;\n}",
                                         "void f() {\n  if (a) return;\n}", "void f() {\n  if (!a) ;\n}"]),
])
def test_operators_of_cpp(source, expected):
    assert sorted(mutated("x.cu", source)) == sorted(expected)


def test_a_dropped_barrier_has_an_operator_of_its_own():
    operators = [edit.operator for edit in mutant_operators.edits("x.cu", "f();\n__syncthreads();")]
    assert operators == ["drop a statement", "drop a barrier"]


def test_a_page_has_mutants_in_its_python():
    assert mutated("x.md", "1 + 1\n```python\né[0]\n```\n") == ["1 + 1\n```python\né[1]\n```\n"]


def test_every_file_has_mutants_and_a_search():
    without = [file for file in mutants.files() if not mutants.groups_of(file)]
    assert without == ["csrc/torch/bindings_cuda.cpp", "csrc/torch/cuda_checks.h", "csrc/torch/cuda_device.h"]
    assert mutants.groups_of("csrc/core/math.h") == ["cpu", "cuda"]
    assert mutants.groups_of("sparse_ce/integrations/trl.py") == ["integrations"]
    assert mutants.groups_of("docs/recipes.md") == mutants.groups_of("sparse_ce/ops/logits/select.py") == ["python"]
    assert len(mutants.chosen(["sparse_ce/ops/logits/select.py"])) > 100 < len(mutants.chosen(["csrc/cpu/select.cpp"]))


def test_texts_by_hand_occur_exactly_once():
    assert mutants.problems() == []
    assert len(mutants.chosen(["by hand"])) == len(mutants.BY_HAND) <= 60


def test_words_and_lines_choose():
    def files(*words, **lines):
        return {mutant.file for mutant in mutants.chosen(list(words), **lines)}

    tile = "csrc/cpu/simd/tile.cpp"
    assert files("cpu", "tile.cpp") == {tile} == files(lines={tile: set(range(400))})
    assert "csrc/core/math.h" in files("cuda") & files("cpu") and not files("no such text")
    assert {mutant.operator for mutant in mutants.chosen(["drop a barrier"])} == {"drop a barrier"}
    line = mutants.chosen(["sparse_ce/ops/logits/select.py"])[0].line
    assert {mutant.line for mutant in mutants.chosen([], {"sparse_ce/ops/logits/select.py": {line}})} == {line}


def test_a_sample_tries_each_line_first():
    found = mutants.chosen(["sparse_ce/ops/logits/select.py"])
    lines = {mutant.line for mutant in found}
    assert {mutant.line for mutant in mutants.sample(found, len(lines), 0)} == lines
    assert mutants.sample(found, 10, 0) == mutants.sample(found, 10, 0) != mutants.sample(found, 10, 1)


def test_changed_lines_are_those_of_git(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    git("init", "--quiet")
    for text in ("1\n2\n3\n", "1\n3\n", "1\n3\n4\n5\n"):
        (tmp_path / "file").write_text(text)
        git("add", "file")
        git("commit", "--quiet", "-m", text)
    (tmp_path / "file").write_text("0\n3\n4\n5\n")
    assert mutants.changed_lines("HEAD") == {"file": {1}}
    assert mutants.changed_lines("") == {"file": {1, 3, 4}} == mutants.changed_lines("HEAD~1")
    with pytest.raises(subprocess.CalledProcessError):
        mutants.changed_lines("no-such-revision")


def test_the_tests_about_a_file_come_before_all_others():
    def first(file, text=""):
        likely, rest = mutants.by_likelihood(file, text, TESTS)
        assert sorted(likely + rest) == TESTS
        return likely

    assert set(first("csrc/cpu/linear.cpp")) == {name for name in TESTS if name.startswith("test_linear_")}
    assert first("csrc/core/math.h")[0] == "test_cross_entropy_values"
    assert first("sparse_ce/targets/collation.py")[0] == "test_target_collate"
    assert first("sparse_ce/ops/head/products.py", "gradients = ")[0] == "test_linear_gradients"
    assert {name for name in TESTS if "trainer" in name} <= set(first("sparse_ce/integrations/logits.py"))
    for words in mutants.ABOUT.values():
        assert all(any(word in name.split("_") for name in TESTS) for word in words.split("_")), words


def test_what_a_source_includes_is_followed_into_headers():
    names = {path.name for path in mutants.included(mutants.ROOT / "csrc/cpu/cross_entropy.cpp")}
    assert {"cross_entropy.cpp", "row_passes.h", "math.h", "target.h"} <= names
    assert not {"linear.h", "masked_mean.h", "bindings_cpu.cpp"} & names
