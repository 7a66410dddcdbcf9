"""Tests that the mutants of tests/mutants.py are up to date: each changes one place of the sources, and words select
among them."""

from pathlib import Path

import mutants

TESTS = sorted(path.stem for path in Path(__file__).parents[1].glob("*/test_*.py"))


def test_every_text_occurs_exactly_once():
    assert mutants.problems() == []


def test_no_mutant_leaves_its_file_as_it_is():
    everything = [mutant for listed, _ in mutants.GROUPS.values() for mutant in listed]
    assert len(everything) > 300
    assert [mutant for mutant in everything if mutant[1] == mutant[2]] == []


def test_words_choose_a_group_a_file_or_a_text():
    def files(*words):
        return {mutant[0] for _, mutant in mutants.chosen(list(words))}

    assert len(mutants.chosen([])) == sum(len(listed) for listed, _ in mutants.GROUPS.values())
    assert files("cpu", "tile.cpp") == {"csrc/cpu/simd/tile.cpp"}
    assert {"csrc/core/math.h"} <= files("cuda") and files("trainer", "collate") == {"sparse_ce/targets/collation.py"}
    assert mutants.chosen(["no such text"]) == []


def test_the_tests_about_a_file_come_before_all_others():
    def first(file, text=""):
        likely, rest = mutants.by_likelihood((file, text, ""), TESTS)
        assert sorted(likely + rest) == TESTS
        return likely

    assert set(first("csrc/cpu/linear.cpp")) == {name for name in TESTS if name.startswith("test_linear_")}
    assert first("csrc/core/math.h")[0] == "test_cross_entropy_values"
    assert first("sparse_ce/targets/collation.py")[0] == "test_target_collate"
    assert first("sparse_ce/ops/head/cross_entropy.py", "scaled(gradients")[0] == "test_linear_gradients"
    assert set(first("sparse_ce/integrations/logits.py")) == {name for name in TESTS if "trainer" in name}
    for words in mutants.ABOUT.values():
        assert all(any(word in name.split("_") for name in TESTS) for word in words.split("_")), words


def test_what_a_source_includes_is_followed_into_headers():
    names = {path.name for path in mutants.included(mutants.ROOT / "csrc/cpu/cross_entropy.cpp")}
    assert {"cross_entropy.cpp", "row_passes.h", "math.h", "target.h"} <= names
    assert not {"linear.h", "masked_mean.h", "bindings_cpu.cpp"} & names
