"""Checks README and the pages of docs/: their code runs, their links have a target, and their lists are complete."""

import inspect
import os
import re
import sys

import pytest

import forked
import sparse_ce
from pages import PAGES, ROOT, WITH_CODE, session

sys.path.insert(0, str(ROOT / "benchmarks"))
LIBRARIES = {"accelerate": "1.15", "datasets": "4", "lightning": "2.5", "peft": "0.21", "transformers": "5.24",
             "trl": "1.16"}
checkout = pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(),
                              reason="a source distribution has neither the site's settings nor the records")


def test_the_pages_with_code_are_found():
    assert {page.stem for page in WITH_CODE} >= {"README", "index", "targets", "losses", "linear-head", "kernels",
                                                 "training-loops", "replace"}


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    needed = [name for name in LIBRARIES if re.search(rf"^(from|import) {name}\b", session(page), re.MULTILINE)]
    for name in needed:
        pytest.importorskip(name, minversion=LIBRARIES[name])
    if not needed and "init_process_group" not in session(page):
        monkeypatch.chdir(tmp_path)
        exec(compile(session(page), str(page), "exec"), {"__name__": "__main__"})
        return
    # Training libraries and process groups keep their configuration for the life of the process.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    program = tmp_path / f"page_{page.stem}.py"  # a file named trl.py would shadow its import
    program.write_text(session(page))
    done = forked.run(program, cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **alone})
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_of_a_page_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if link.startswith("https://"):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.is_relative_to(ROOT / "benchmarks"):
            assert file.exists(), f"{page.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, link


def test_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100 and len(text.split()) <= 800


@checkout
def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- .+: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted([*(page.name for page in PAGES[1:]), "results.md"])


@checkout
def test_numbers_are_those_of_the_records():
    from harness import tables
    readme = " ".join((ROOT / "README.md").read_text().split())
    for said in tables.headline():
        assert said in readme, f"README should say: {said}"
    placed = [name for page in PAGES
              for name in re.findall(r"^<!-- records: (.+) -->$", page.read_text(), re.MULTILINE)]
    assert sorted(placed) == sorted(tables.TABLES)
    for name, table in tables.TABLES.items():
        text = tables.markdown(name)
        missing = [row for row in table.rows.values() if f"| {row} |" not in text and f"| **{row}** |" not in text]
        assert not missing, f"{name}: {missing}"


def test_the_options_listed_are_those_of_the_loss():
    table = (ROOT / "docs" / "losses.md").read_text().split("| option |")[1].split("\n\n")[0]
    listed = [part.partition("=") for cell in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
              for part in re.findall(r"`([^`]+)`", cell)]
    known = inspect.signature(sparse_ce.cross_entropy).parameters
    assert [name for name, _, _ in listed] == list(known)[2:]
    for name, _, default in listed:
        assert not default or eval(default) == known[name].default, name


def test_every_environment_variable_is_listed():
    page = (ROOT / "docs" / "errors.md").read_text()
    listed = set(re.findall(r"^\| `(SPARSE_CE_\w+)`", page, re.MULTILINE))
    sources = [path for folder in ("sparse_ce", "csrc", "tests", "benchmarks") for path in (ROOT / folder).rglob("*")
               if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh")]
    read = {name for path in [*sources, ROOT / "setup.py"]
            for name in re.findall(r"(?:getenv\(|environ\.get\(|environ\[)\"(SPARSE_CE_\w+)\"", path.read_text())}
    assert listed == read


@checkout
def test_the_api_page_has_a_sentence_for_every_name():
    sys.path.insert(0, str(ROOT / "docs"))
    import summary
    page = (ROOT / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| \[`\w+`\]\(#([\w.]+)\) \| [A-Z].*[^:]\. \|$", summary.with_tables(page), re.MULTILINE)
    assert rows == summary.NAME.findall(page) and len(rows) > 50


def test_every_example_is_in_the_gallery():
    page = (ROOT / "docs" / "examples.md").read_text()
    assert set(re.findall(r"`(\w+\.py)`", page)) == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_every_op_is_listed():
    table = (ROOT / "docs" / "kernels.md").read_text().split("| op |")[1].split("\n\n")[0]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)))
    schema = (ROOT / "csrc" / "torch" / "schema.cpp").read_text()
    assert sorted(listed) == sorted(re.findall(r"m\.def\(\s*\"(\w+)\(", schema))


def test_messages_of_the_errors_page_are_raised():
    """Finds the beginning of each message in the sources, where a literal may go on in the next line."""
    sources = "".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text())
                      for path in [*(ROOT / "sparse_ce").rglob("*.py"), ROOT / "setup.py", ROOT / "build_backend.py"])
    tables = (ROOT / "docs" / "errors.md").read_text().split("| message |")[1:]
    messages = [message for table in tables
                for message in re.findall(r"^\| `([^`]+)` \|", table.split("\n\n")[0], re.MULTILINE)]
    assert len(messages) > 6
    assert [message for message in messages if message.partition("...")[0] not in sources] == []


def test_every_message_of_a_failing_build_has_a_fix():
    sources = "".join(re.sub(r'"\s*\n\s*f?"', "", (ROOT / name).read_text())
                      for name in ("setup.py", "build_backend.py"))
    raised = [message for message in re.findall(r'"sparse_ce: (.+?)"', sources) if not message.startswith("building ")]
    assert len(raised) > 9
    page = (ROOT / "docs" / "errors.md").read_text()
    fixed = [re.escape(message) for message in re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)]
    assert [message for message in raised if not re.search(r", got .+: \w", message)
            and not re.match("|".join(fixed), message)] == []


def test_every_test_of_a_failure_names_its_line():
    """Checks tests/failures.md against the numbers in the names of tests: each number has a line, and each line a test,
    except for lines that the page explains."""
    tested = {int(number) for path in (ROOT / "tests").glob("*/test_*.py")
              for numbers in re.findall(r"^def test_(\d+(?:_\d+)*)_", path.read_text(), re.MULTILINE)
              for number in numbers.split("_")}
    page = (ROOT / "tests" / "failures.md").read_text()
    with_test, without = ([int(n) for n in re.findall(r"^\| (\d+) \|", part, re.MULTILINE)]
                          for part in page.partition("## Lines without a test")[::2])
    assert with_test == sorted(set(with_test)) == sorted(tested)
    assert not tested & set(without) and len(set(without)) == len(without)
