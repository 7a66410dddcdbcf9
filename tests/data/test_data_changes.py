"""Tests caches with missing parts, and parts that disappear while the cache is open."""

import multiprocessing
import os
import pickle
import re
import warnings

import pytest
import torch

from cache_cases import FORMATS, LENGTHS, K, V, assert_same, needs, sequence, write
from sparse_ce.data import CacheWriter, TeacherCache

MARKER = ".complete"


@pytest.fixture(params=FORMATS)
def format(request):
    needs(request.param)
    return request.param


# ------------------------------------------------------------------------------------------------------- missing shards

@pytest.mark.parametrize("left", range(3))
def test_one_shard_that_is_left_of_several_is_no_cache(tmp_path, format, left):
    folder = tmp_path / "teacher"
    sequences = write(folder, format=format, shard=2)
    (folder / MARKER).unlink()
    for i in {0, 1, 2} - {left}:
        (folder / f"shard-0000{i}.{format}").unlink()
    shard = folder / f"shard-0000{left}.{format}"
    if left:
        with pytest.raises(ValueError, match=f"sparse_ce: shards must be contiguous, got 0 sequences before "
                                             f"{re.escape(str(shard))}, which begins with sequence {2 * left}; a "
                                             "shard is"):
            TeacherCache(folder)
    else:
        with pytest.warns(UserWarning, match="The cache has 1 shards with 2 sequences"):
            assert len(TeacherCache(folder)) == 2
    assert_same(TeacherCache(shard)[0], *sequences[2 * left])  # a shard by its own path is a cache


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (1, 2)], ids=str)
def test_a_cache_that_was_whole_must_be_whole(tmp_path, format, lost):
    folder = tmp_path / "teacher"
    write(folder, format=format, shard=2)
    assert (folder / MARKER).exists()
    for i in lost:
        (folder / f"shard-0000{i}.{format}").unlink()
    with pytest.raises(ValueError, match="sparse_ce: shards must .*, got .*; .* missing") as caught:
        TeacherCache(folder)
    assert str(folder) in str(caught.value)
    if lost != (0,) and lost != (1,):
        assert f"shards must number 3 with 5 sequences, as {folder / MARKER} says, got {3 - len(lost)} with" in str(
            caught.value)


def test_a_cache_without_the_marker_is_read_with_a_warning(tmp_path, format):
    folder = tmp_path / "teacher"
    sequences = write(folder, format=format, shard=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TeacherCache(folder)
        (folder / MARKER).unlink()
        TeacherCache(folder / f"shard-00000.{format}")  # a shard by its own path is complete
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            cache = pickle.loads(pickle.dumps(TeacherCache(folder)))
            assert_same(cache[4], *sequences[4])
    words = [str(warning.message) for warning in caught]
    assert len(words) == 1 and caught[0].filename == __file__ and str(folder) in words[0], words
    assert words[0].startswith("sparse_ce: ") and "3 shards with 5 sequences" in words[0] and "resume=True" in words[0]
    with CacheWriter(folder, num_classes=V, k=K, format=format, resume=True):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TeacherCache(folder)


@pytest.mark.parametrize("text", ["", "[3, 5]", '{"shards": 3}', "\udcff", '{"shards": 3, "sequences": 5'])
def test_a_marker_that_cannot_be_read_is_named(tmp_path, text):
    write(tmp_path / "teacher", shard=2)
    marker = tmp_path / "teacher" / MARKER
    marker.write_bytes(text.encode("utf8", "surrogateescape"))
    with pytest.raises(ValueError, match=f"sparse_ce: {re.escape(str(marker))} must be whole, got .*; delete it"):
        TeacherCache(tmp_path / "teacher")


def test_a_writer_that_is_stopped_leaves_no_marker(tmp_path, format):
    folder, options = tmp_path / "teacher", dict(num_classes=V, k=K, shard=2, format=format)

    def add(count, resume, error=None):
        with CacheWriter(folder, **options, resume=resume) as writer:
            for i in range(len(writer), len(writer) + count):
                writer.add(sequence(3, i)[0])
                assert i % 2 == 0 or not (folder / MARKER).exists()  # another shard exists
            if error:
                raise error

    def read():
        with pytest.warns(UserWarning, match="sparse_ce: .*/teacher has no .complete: its writer was not closed"):
            return TeacherCache(folder)

    with pytest.raises(KeyError):
        add(5, False, KeyError())
    assert not (folder / MARKER).exists() and len(read()) == 4
    add(2, True)
    assert (folder / MARKER).exists() and len(TeacherCache(folder)) == 6
    with pytest.raises(KeyError):
        add(3, True, KeyError())  # resumes a complete cache and is interrupted
    assert not (folder / MARKER).exists() and len(read()) == 8
    add(0, True)
    assert (folder / MARKER).exists() and len(TeacherCache(folder)) == 8
    (folder / f"shard-00003.{format}").unlink()  # for example because it was damaged
    stopped = CacheWriter(folder, **options, resume=True)
    assert len(stopped) == 6
    with pytest.raises(ValueError, match="shards must number 4 with 8 sequences"):  # until a shard is written
        TeacherCache(folder)
    del stopped
    add(2, True)
    assert len(TeacherCache(folder)) == 8


def test_a_folder_of_which_the_marker_is_left_is_written_again(tmp_path, format):
    folder = tmp_path / "teacher"
    for _ in range(2):
        write(folder, format=format)
        assert len(TeacherCache(folder)) == len(LENGTHS)
        (folder / f"shard-00000.{format}").unlink()
        assert os.listdir(folder) == [MARKER]
    with CacheWriter(folder, num_classes=V, format=format, resume=True) as writer:
        assert len(writer) == 0
        writer.add(sequence(3)[0])
    assert len(TeacherCache(folder)) == 1


def test_the_marker_is_none_of_the_files_that_others_read(tmp_path):
    needs("parquet")
    import pyarrow.parquet as pq
    write(tmp_path / "teacher", format="parquet", shard=2)
    assert (tmp_path / "teacher" / MARKER).exists()
    assert pq.read_table(tmp_path / "teacher").num_rows == 5
    datasets = pytest.importorskip("datasets")
    read = datasets.load_dataset("parquet", data_dir=str(tmp_path / "teacher"), split="train",
                                 cache_dir=str(tmp_path / "cache"))
    assert len(read) == 5


def test_a_writer_without_a_sequence_says_so(tmp_path, format):
    for path in (tmp_path / f"teacher.{format}", tmp_path / "teacher"):
        with pytest.raises(ValueError, match=f"sparse_ce: writer must have at least one sequence, got none for "
                                             f"{re.escape(str(path))}; "):
            with CacheWriter(path, num_classes=V, format=format):
                pass
        assert not path.exists()
        with pytest.raises(KeyError):  # the cache does not change
            with CacheWriter(path, num_classes=V, format=format):
                raise KeyError
    write(tmp_path / "teacher", format=format)
    write(tmp_path / "teacher", format=format, lengths=(), resume=True)
    assert len(TeacherCache(tmp_path / "teacher")) == len(LENGTHS)


# -------------------------------------------------------------------------------- files that change while they are open

def read_behind_the_end(cache, file, size, last, said):
    cache[0]
    os.truncate(file, size)
    try:
        cache[last]
    except ValueError as error:
        said.put(str(error))
    else:
        said.put("nothing")


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_a_file_that_is_cut_off_behind_our_back(tmp_path, format, ragged, monkeypatch):
    """Runs in a separate process, because reading a memory map beyond the end of its file kills it with SIGBUS."""
    monkeypatch.setattr("sparse_ce.data.parquet.ENTRIES_OF_A_GROUP", 1000)
    path = tmp_path / f"teacher.{format}"
    target, rest = sequence(200, ragged=ragged)[0], torch.zeros(200)
    with CacheWriter(path, num_classes=V, k=None if ragged else K) as writer:
        for _ in range(40):
            writer.add(target, tokens=rest.long(), log_tail=rest)
    context = multiprocessing.get_context("fork")
    said = context.Queue()
    process = context.Process(target=read_behind_the_end, args=(TeacherCache(path), path, path.stat().st_size // 4, 39,
                                                                said))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    words = said.get(timeout=10)
    assert words.startswith("sparse_ce: ") and " must " in words and ", got " in words and str(path) in words, words
    if format != "parquet":
        assert "as when it was opened, got" in words and f"at sequence 39 of {path}" in words
