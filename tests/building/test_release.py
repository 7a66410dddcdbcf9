"""Tests that ``.ci/release`` finds each disagreement between version, date, changelog and tag."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = (".ci/release", "pyproject.toml", "sparse_ce/_version.py", "CITATION.cff", "CHANGELOG.md")
# These replace the settings of this machine.
IDENTITY = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false",
            "-c", "tag.gpgsign=false"]
pytestmark = pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="the source distribution has no .ci")


class Copy:
    """Represents a copy of the files that ``.ci/release`` reads, with version 3.1.4, in a git repository."""

    def __init__(self, folder):
        self.folder = folder
        for name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        version = (ROOT / "sparse_ce" / "_version.py").read_text().split('"')[1]
        self.edit("pyproject.toml", f'version = "{version}"', 'version = "3.1.4"')
        self.edit("sparse_ce/_version.py", version, "3.1.4")
        self.edit("CITATION.cff", f"version: {version}", "version: 3.1.4")
        (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 3.1.4 (unreleased)\n\nAdded:\n\n- An entry.\n\n"
                                             "## 3.1.3 (2026-01-02): a title\n\n- An old entry.\n")
        self.git("init", "--quiet")
        self.commit()

    def edit(self, name, old, new):
        text = (self.folder / name).read_text()
        assert text.count(old) == 1, (name, old)
        (self.folder / name).write_text(text.replace(old, new))

    def git(self, *words):
        subprocess.run(["git", *IDENTITY, *words], cwd=self.folder, check=True, capture_output=True)

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", "a commit")

    def date(self, changelog="2026-11-28", citation="2026-11-28"):
        self.edit("CHANGELOG.md", "unreleased", changelog)
        self.edit("CITATION.cff", "version: 3.1.4", f"version: 3.1.4\ndate-released: {citation}")
        self.commit()

    def release(self, *words):
        return subprocess.run([sys.executable, ".ci/release", *words], cwd=self.folder, capture_output=True, text=True)

    def assert_agrees(self, *words):
        done = self.release(*words)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")

    def assert_sentence(self, sentence, *words):
        done = self.release(*words)
        assert (done.returncode, done.stderr, done.stdout) == (1, sentence + "\n", "")


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


def test_this_repository_agrees():
    done = subprocess.run([sys.executable, ROOT / ".ci" / "release"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unreleased_version_agrees_without_a_date(copy):
    copy.assert_agrees()


def test_a_release_agrees_before_and_after_its_tag(copy):
    copy.date()
    copy.assert_agrees()
    copy.assert_agrees("v3.1.4")
    copy.assert_agrees("3.1.4")
    copy.git("tag", "-a", "v3.1.4", "-m", "a tag")
    copy.assert_agrees("v3.1.4")


def test_the_versions_of_all_files_agree(copy):
    copy.edit("sparse_ce/_version.py", "3.1.4", "3.1.5")
    copy.assert_sentence("sparse_ce/_version.py: the version must be 3.1.4, as in pyproject.toml, got 3.1.5.")
    copy.edit("sparse_ce/_version.py", "3.1.5", "3.1.4")
    copy.edit("CITATION.cff", "version: 3.1.4", "version: 3.1")
    copy.assert_sentence("CITATION.cff: the version must be 3.1.4, as in pyproject.toml, got 3.1.")
    copy.edit("CITATION.cff", "\nversion: 3.1", "")
    copy.assert_sentence("CITATION.cff: the version must be 3.1.4, as in pyproject.toml, got none.")


def test_each_disagreement_has_a_line(copy):
    copy.edit("pyproject.toml", "3.1.4", "3.1.5")
    lines = copy.release().stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["sparse_ce/_version.py", "CITATION.cff", "CHANGELOG.md"]


@pytest.mark.parametrize("heading, sentence", [
    ("## 3.1.5 (unreleased)", "the first section must be of version 3.1.4, as in pyproject.toml, got 3.1.5."),
    ("## Unreleased", "the first heading must be '## VERSION (unreleased)' or '## VERSION (YYYY-MM-DD)', got "
                      "'## Unreleased'."),
    ("## 3.1.4 (unreleased)\n\n## 3.1.3 (2026-01-01)", "the section of version 3.1.4 must have an entry, got none."),
])
def test_the_changelog_begins_with_this_version(heading, sentence, copy):
    copy.edit("CHANGELOG.md", "## 3.1.4 (unreleased)", heading)
    copy.assert_sentence("CHANGELOG.md: " + sentence)


def test_the_dates_agree(copy):
    copy.edit("CHANGELOG.md", "unreleased", "2026-11-28")
    copy.assert_sentence("CITATION.cff: date-released must be 2026-11-28, as in CHANGELOG.md, got none.")
    copy.edit("CITATION.cff", "version: 3.1.4", "version: 3.1.4\ndate-released: '2026-11-27'")
    copy.assert_sentence("CITATION.cff: date-released must be 2026-11-28, as in CHANGELOG.md, got 2026-11-27.")
    copy.edit("CHANGELOG.md", "2026-11-28", "unreleased")
    copy.assert_sentence("CITATION.cff: date-released must be none, as in CHANGELOG.md, got 2026-11-27.")


def test_the_date_exists(copy):
    copy.date("2026-11-31", "2026-11-31")
    copy.assert_sentence("CHANGELOG.md: the date must exist, got 2026-11-31.")


def test_a_release_has_a_date(copy):
    copy.assert_sentence("CHANGELOG.md: the first section must have a date, got '(unreleased)'.", "v3.1.4")


def test_the_tag_names_the_version(copy):
    copy.date()
    copy.assert_sentence("The tag must be v3.1.4, as in pyproject.toml, got v3.1.", "v3.1")


def test_the_working_tree_is_clean(copy):
    copy.date()
    (copy.folder / "new.py").touch()
    copy.assert_agrees()
    copy.assert_sentence("The working tree must be clean, got changes in new.py.", "v3.1.4")


def test_head_is_the_tag(copy):
    copy.date()
    copy.git("tag", "v3.1.4")
    copy.commit()
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=copy.folder, capture_output=True, text=True)
    copy.assert_sentence(f"HEAD must be the commit of the tag v3.1.4, got {head.stdout.strip()}.", "v3.1.4")


def test_a_folder_without_git_is_no_release(copy):
    copy.date()
    shutil.rmtree(copy.folder / ".git")
    done = copy.release("v3.1.4")
    assert done.returncode == 1 and done.stderr.startswith("git status --porcelain must succeed, got ")


def test_the_notes_are_the_section_without_its_heading(copy):
    copy.date()
    done = copy.release("v3.1.4", "--notes")
    assert (done.returncode, done.stdout) == (0, "Added:\n\n- An entry.\n")
    copy.edit("sparse_ce/_version.py", "3.1.4", "3.1.5")
    assert copy.release("--notes").stdout == ""
