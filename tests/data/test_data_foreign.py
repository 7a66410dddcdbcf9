"""Tests files of other programs: missing information, and contents that could be misread."""

import re

import pytest

from cache_cases import V, needs, sequence, write
from sparse_ce.data import TeacherCache

np = pytest.importorskip("numpy")
library = pytest.importorskip("safetensors.numpy")
IDS, VALUES = np.array([[3, 5], [7, 1], [2, 4]]), -np.ones((3, 2), "float32")


def refused(read, path, *words):
    with pytest.raises(ValueError) as caught:
        read()
    text = str(caught.value)
    assert re.search(r"^sparse_ce: .+ must .+, got .+", text, re.S) and str(path) in text, text
    assert all(word in text for word in words), text


def arrays(path, **changes):
    whole = {"ids": IDS, "log_probs": VALUES, "sequences": np.array([0, 2, 3]), "tokens": np.array([1, 2, 3])}
    library.save_file({name: array for name, array in {**whole, **changes}.items() if array is not None}, path)
    return path


@pytest.mark.parametrize("changes, words", [
    (dict(sequences=np.zeros(0, "int64")), "sequences must be (N + 1,) integers, got torch.int64 [0]"),
    (dict(sequences=np.array([0.0, 2.0, 3.0])), "sequences must be (N + 1,) integers, got torch.float64 [3]"),
    (dict(sequences=np.array([[0, 2, 3]])), "sequences must be (N + 1,) integers, got torch.int64 [1, 3]"),
    (dict(ids=IDS + 0.7), "ids must be integers, got torch.float64"),
    (dict(tokens=np.array([1.5, 2, 3])), "tokens must be integers, got torch.float64"),
    (dict(crc32=np.zeros(2)), "crc32 must be integers, got torch.float64"),
    (dict(ids=IDS[0], log_probs=VALUES[0], tokens=None, sequences=np.array([0, 2])), "ids must be (P, K)"),
    (dict(ids=IDS.flatten(), log_probs=VALUES.flatten(), entries=np.zeros(0, "int64")),
     "entries must be (P + 1,) integers, got torch.int64 [0]"),
    (dict(ids=IDS.flatten(), log_probs=VALUES.flatten(), entries=np.array([0., 2, 4, 6])),
     "entries must be (P + 1,) integers, got torch.float64 [4]"),
    (dict(entries=np.array([0, 1, 2, 3])), "ids must be (E,) with entries, got [3, 2]")])
def test_arrays_that_are_none_of_ours(tmp_path, changes, words):
    path = arrays(tmp_path / "x.safetensors", **changes)
    refused(lambda: list(TeacherCache(path, num_classes=V)), path, words)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "uint16", "uint8", "int64"])
def test_offsets_of_any_integers(tmp_path, dtype):
    path = arrays(tmp_path / "x.safetensors", ids=IDS.flatten().astype(dtype), log_probs=VALUES.flatten(),
                    sequences=np.array([0, 2, 3], dtype), entries=np.array([0, 1, 1, 6], dtype))
    cache = TeacherCache(path, num_classes=V)
    assert cache[0]["target"].tolist() == [[(3, -1.0)], None] and len(cache[1]["target"].tolist()[0]) == 5


def test_no_sequence_is_none(tmp_path):
    assert list(TeacherCache(arrays(tmp_path / "x.safetensors", sequences=np.array([0])), num_classes=V)) == []


@pytest.mark.parametrize("columns, words", [
    (dict(ids=[[[1.7]], [[2.0]]]), "ids must be integers, got torch.float64 at sequence 1"),
    (dict(input_ids=[[1.5], [2.0]]), "input_ids must be integers, got torch.float64 at sequence 1"),
    (dict(ids=[[[1]], None]), "ids must have no nulls, got 1"),
    (dict(ids=[[[1]], [None]]), "ids must have no nulls, got 1"),
    (dict(ids=[[[1]], [[None]]]), "ids must have no nulls, got 1"),
    (dict(log_probs=[[[-1.0]], None]), "log_probs must have no nulls, got 1"),
    (dict(log_probs=[[[-1.0]], [None]]), "log_probs must have no nulls, got 1"),
    (dict(ids=[[[1]], [None]], log_probs=[[[-1.0]], [None]]), "must have no nulls, got 1"),
    (dict(ids=[[[1]], None], log_probs=[[[-1.0]], None], input_ids=[[1], None]), "must have no nulls, got 1"),
    (dict(input_ids=[[1], None]), "input_ids must have no nulls, got 1"),
    (dict(log_tail=[[-1.0], None]), "log_tail must have no nulls, got 1")])
def test_columns_that_would_be_read_as_something_else(tmp_path, columns, words):
    needs("parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"ids": [[[1]], [[2]]], "log_probs": [[[-1.0]], [[-2.0]]], **columns}), path)
    refused(lambda: TeacherCache(path, num_classes=V)[1], path, words)


# ---------------------------------------------------------------------------------------------- missing information

def without_header(tmp_path):
    """Returns (path, sequences) of a cache saved again by ``datasets`` without the column ``predicts``."""
    needs("parquet")
    import pyarrow.parquet as pq
    sequences = write(tmp_path / "teacher.parquet", predicts="token")
    path = tmp_path / "again.parquet"
    table = pq.read_table(tmp_path / "teacher.parquet").drop_columns("predicts")
    pq.write_table(table.replace_schema_metadata(None), path)
    return path, sequences


def test_what_rows_predict_must_be_said_where_they_are_moved(tmp_path):
    path, sequences = without_header(tmp_path)
    for wanted in ("next", "token"):
        refused(lambda: TeacherCache(path, num_classes=V, predicts=wanted), path,
                "written must be 'next' or 'token' if predicts is given and the files do not store it, got None")
    for written, wanted, moved in (("token", "token", 0), ("token", "next", -1), ("next", "token", 1),
                                   ("next", None, 0), (None, None, 0), ("next", "next", 0)):
        cache = TeacherCache(path, num_classes=V, predicts=wanted, written=written)
        for sample, (target, *_) in zip(cache, sequences):
            assert sample["target"].tolist() == target.shift(-moved).tolist()


def test_what_rows_predict_is_what_the_files_say(tmp_path):
    write(tmp_path / "teacher.safetensors", predicts="token")
    path = tmp_path / "teacher.safetensors"
    refused(lambda: TeacherCache(path, written="next"), path, "written must be 'token', as", "says, got 'next'")
    refused(lambda: TeacherCache(path, written="last"), path, "written must be 'next', 'token' or None, got 'last'")
    assert TeacherCache(path, written="token", predicts="token")[0]["target"].tolist() == sequence(7)[0].tolist()


@pytest.mark.parametrize("num_classes", ["x", 0, -1, 1.5, True])
def test_a_number_of_classes_that_is_none(tmp_path, num_classes):
    path = arrays(tmp_path / "x.safetensors")
    refused(lambda: TeacherCache(path, num_classes=num_classes), path,
            f"num_classes must be a positive integer, got {num_classes!r}")
