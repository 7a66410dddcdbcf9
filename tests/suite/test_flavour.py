"""Tests that SPARSE_CE_FLAVOUR selects the running test configuration, and that all of them together run every test."""

import ctypes
import os
from pathlib import Path

import pytest

import sparse_ce
from flavours import (
    BUILD,
    FLAVOURS,
    LONGEST,
    TESTS,
    available_instruction_sets,
    digest_of,
    is_ignored,
    mirror_python,
    named,
    others,
)
from linear_cases import way_of_products

FILES = sorted(path.stem for path in TESTS.glob("*/test_*.py"))


def test_the_kernels_are_those_of_the_flavour():
    unasked = os.environ.get("SPARSE_CE_CPU") or available_instruction_sets()[-1]
    kernels = {"baseline": "default", "avx2": "avx2", "emulated": "emulated CUDA"}.get(named(), unasked)
    assert sparse_ce.ops.instruction_set() == kernels
    if named() in ("float32", "native"):
        assert way_of_products() == named()
    assert hasattr(ctypes.CDLL(None), "__asan_init") == (named() == "sanitized")
    assert (BUILD in Path(sparse_ce.__file__).parents) == (FLAVOURS[named()].build is not None)


@pytest.mark.parametrize("stem", FILES)
def test_every_file_has_a_part_in_some_flavour(stem):
    names = ("plain", "compilers", "clients", "sharded", "programs", "builds")
    assert [name for name in names if FLAVOURS[name].has_file(stem)]


def test_every_file_has_a_folder_and_a_name_of_its_own():
    assert sorted(path.stem for path in TESTS.rglob("test_*.py")) == sorted(set(FILES))


def test_every_pattern_fits_a_file():
    patterns = {pattern for flavour in FLAVOURS.values() for pattern in (*flavour.files, *flavour.but)}
    unused = {p for p in patterns if not any(Path(stem).match(p) for stem in FILES)}
    assert unused == set() and set(LONGEST) <= set(FILES)


def test_a_slow_test_is_run_by_the_slow_flavour_alone():
    assert [name for name, flavour in FLAVOURS.items() if flavour.has_test("flavour bfloat16", True)] == ["slow"]
    assert FLAVOURS["slow"].has_file("test_cross_entropy_compile") and "slow" in others()


def test_what_the_command_line_names_runs_without_its_flavour(monkeypatch):
    monkeypatch.chdir(TESTS.parent)
    monkeypatch.delenv("SPARSE_CE_FLAVOUR", raising=False)
    sft, values = TESTS / "integrations" / "test_trl_sft.py", TESTS / "linear" / "test_linear_values.py"
    for everything in ([], ["tests"], ["."], [str(TESTS)]):
        assert is_ignored(sft, everything) and not is_ignored(values, everything)
    for part in ("tests/integrations", "tests/integrations/test_trl_sft.py", f"{sft}::test_lora"):
        assert not is_ignored(sft, [part])
    assert is_ignored(sft, ["tests/linear"])
    monkeypatch.setenv("SPARSE_CE_FLAVOUR", "baseline")
    assert is_ignored(sft, ["tests/integrations"])


def test_flavours_of_the_emulator_leave_out_what_their_words_name():
    assert not FLAVOURS["emulated"].has_test("test_many_rows[cpu]", False)
    assert not FLAVOURS["native"].has_test("test_of[float32]", False)
    assert not FLAVOURS["native"].has_test("test_at_once[bfloat16]", False)
    assert FLAVOURS["native"].has_test("test_of[bfloat16]", False)


def test_a_change_of_a_source_is_another_digest_and_python_files_are_mirrored(tmp_path):
    source, package = tmp_path / "source", tmp_path / "package"
    source.mkdir()
    (source / "a.py").write_text("1")
    package.mkdir()
    (package / "gone.py").write_text("2")
    (package / "_C.so").write_text("3")
    mirror_python(source, package)
    assert sorted(path.name for path in package.iterdir()) == ["_C.so", "a.py"]
    sources = [TESTS / "support" / "cases.py", TESTS / "support" / "close.py"]
    assert digest_of(*sources) == digest_of(*reversed(sources)) != digest_of(sources[0])
