"""Checks that the table of clients and training modes is that of the marks of the tests."""

import pytest

import compatibility

pytestmark = pytest.mark.skipif(not compatibility.PAGE.exists(), reason="a source distribution has no guides")


def test_the_page_has_the_table_of_the_marks():
    """Checks the page that ``python tests/support/compatibility.py`` rewrites."""
    page = compatibility.PAGE.read_text()
    assert page[compatibility.place(page)] == compatibility.table()


def test_each_client_has_a_test():
    found = compatibility.cells()
    for client in compatibility.CLIENTS:
        assert (client, "one process") in found
    assert {mode for _, mode in found} == set(compatibility.MODES)


def test_a_mark_of_no_cell_raises(tmp_path, monkeypatch):
    folder = tmp_path / "tests/integrations"
    folder.mkdir(parents=True)
    monkeypatch.setattr(compatibility, "ROOT", tmp_path)
    for mark in "works('other', 'DDP')", "works('head', 'DP')":
        (folder / "test_it.py").write_text(f"@pytest.mark.{mark}\ndef test_it(): pass\n")
        with pytest.raises(ValueError, match="is no cell"):
            compatibility.cells()
