"""The breaks of tests/mutants.py are up to date: each changes one place of the sources, and words choose among them."""

import mutants


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
    assert files("cpu", "tile.cpp") == {"csrc/cpu/tile.cpp"}
    assert {"csrc/math.h"} <= files("cuda") and files("trainer", "collate") == {"sparse_ce/collate.py"}
    assert mutants.chosen(["no such text"]) == []
