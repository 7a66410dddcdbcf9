"""Tests damaged and truncated caches, and invalid log-probabilities: the error names the file and the row."""

import random
import re
import shutil

import numpy as np
import pytest
import torch

from cache_cases import FORMATS, LENGTHS, K, V, assert_same, change_header, needs, sequence, write
from sparse_ce import SparseTarget
from sparse_ce.data import CacheWriter, TeacherCache
from sparse_ce.data.safetensors import SafetensorsShard
from sparse_ce.data.sequence import Header, Stored, header_text
from sparse_ce.data.writer import FORMATS as WRITERS


@pytest.fixture(params=FORMATS)
def format(request):
    needs(request.param)
    return request.param


ARRAYS = "entries, ids, log_probs, log_tail, predicts, sequences, tokens"
COLUMNS = ("ids", "log_probs", "tokens", "log_tail")


def read_all(path):
    return list(TeacherCache(path))


def refusal(read, path):
    """Returns the error message for a cache, in the documented form."""
    with pytest.raises(ValueError) as caught:
        read()
    text = str(caught.value)
    assert re.search(r"^sparse_ce: .+ must .+, got .+", text, re.S) and str(path) in text, text
    return text


# ------------------------------------------------------------------------------------------------ truncated files

@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path, format, ragged):
    path = tmp_path / f"teacher.{format}"
    write(path, ragged=ragged)
    data = path.read_bytes()
    for size in sorted({0, 1, 5, 9, len(data) // 3, len(data) // 2, len(data) - 9, len(data) - 1}):
        path.write_bytes(data[:size])
        refusal(lambda: read_all(path), path)


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_what_is_cut_off_is_named_by_its_first_sequence_and_position(tmp_path, ragged):
    path = tmp_path / "teacher.safetensors"
    sequences = write(path, ragged=ragged)
    data, begin = path.read_bytes(), SafetensorsShard(path)._arrays["log_probs"].offset
    path.write_bytes(data[:-3])  # predicts is last, one byte per position: the widest dtypes come first
    assert "is truncated at sequence 4, position 6 of" in refusal(lambda: TeacherCache(path), path)
    counts = torch.cat([torch.full((n,), K) if not ragged else s[0].offsets.diff() for n, s in zip(LENGTHS, sequences)])
    begins = torch.tensor([0, *LENGTHS]).cumsum(0)
    for kept in (30, int(begins[3]), 13, int(begins[1])):  # remaining positions, from the end
        lost = kept + int((counts[kept:] > 0).to(torch.uint8).argmax())  # the first position that loses data
        number = int((begins <= lost).sum()) - 1
        path.write_bytes(data[:begin + int(counts[:kept].sum()) * 2 + 1])
        assert f"is truncated at sequence {number}, position {lost - begins[number]} of" in refusal(
            lambda: TeacherCache(path), path)


def test_a_parquet_file_without_its_end_has_no_sequence(tmp_path):
    needs("parquet")
    path = tmp_path / "teacher.parquet"
    write(path)
    path.write_bytes(path.read_bytes()[:-1])
    text = refusal(lambda: TeacherCache(path), path)
    assert "must be a whole Parquet file" in text and "delete it and write it again" in text


def test_bytes_too_many_are_refused(tmp_path):
    path = tmp_path / "teacher.safetensors"
    write(path)
    path.write_bytes(path.read_bytes() + b"\0\0")
    refusal(lambda: TeacherCache(path), path)


def test_a_file_that_is_cut_off_while_it_is_open(tmp_path):
    path = tmp_path / "teacher.safetensors"
    write(path)
    cache = TeacherCache(path)
    path.write_bytes(path.read_bytes()[:-3])
    text = refusal(lambda: list(cache), path)
    assert "predicts must have 32 rows" in text and "delete it and write it again" in text


def test_a_shard_that_is_missing_or_of_another_cache(tmp_path, format):
    write(tmp_path / "teacher", format=format, shard=2)
    write(tmp_path / "other", format=format, shard=2, vocab=V + 1)
    folder = tmp_path / "teacher"
    shards = sorted(folder.glob("shard-*"))
    shards[1].rename(tmp_path / "away")
    text = refusal(lambda: TeacherCache(folder), shards[2])
    assert "got 2 sequences before" in text and "a shard is missing" in text
    shutil.copy(tmp_path / "other" / shards[1].name, shards[1])
    assert f"num_classes must be {V}, as in" in refusal(lambda: TeacherCache(folder), shards[1])
    for changed, words in ((dict(metadata={"model": "other"}), "metadata must be {'model': 'one'}, as in"),
                           (dict(dtype=torch.float32), "dtype must be 'float16', as in"),
                           (dict(predicts="token"), "predicts must be 'next', as in"),
                           (dict(parts=False), "columns must be ('ids', 'log_probs', 'tokens', 'log_tail', 'predicts'"),
                           (dict(ragged=True), f"k must be {K}, as in")):
        one, two = (tmp_path / f"{name}-{words[:5]}" for name in ("one", "two"))
        write(one, format=format, shard=2, metadata={"model": "one"})
        write(two, format=format, shard=2, **{**dict(metadata={"model": "one"}), **changed})
        for name in ("shard-00001", "shard-00002"):
            (two / f"{name}.{format}").replace(one / f"{name}.{format}")
            assert words in refusal(lambda: TeacherCache(one), one / f"{name}.{format}")
            with pytest.raises(ValueError, match="must be"):
                CacheWriter(one, num_classes=V, k=K, format=format, metadata={"model": "one"}, resume=True)
            shutil.rmtree(one)
            write(one, format=format, shard=2, metadata={"model": "one"})
    with pytest.raises(FileNotFoundError, match="sparse_ce: path must be a cache, got .*nowhere"):
        TeacherCache(tmp_path / "nowhere")
    (tmp_path / "teacher.npy").mkdir()
    with pytest.raises(FileNotFoundError, match="sparse_ce: path must end in .parquet or .safetensors, or name a "
                                                "folder of such shards, got .*/teacher.npy, which has none"):
        TeacherCache(tmp_path / "teacher.npy")


# ------------------------------------------------------------------------------------------------------- flipped bits

def share_that_is_refused(path, sequences, step):
    """Returns the share of flipped bits, one in every ``step``-th byte, that raise an error which names the cache.

    All other sequences must be read unchanged.
    """
    data, draw, refused = bytearray(path.read_bytes()), random.Random(5), []
    for at in range(0, len(data), step):
        damaged = bytearray(data)
        damaged[at] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            samples = read_all(path)
        except ValueError as error:
            assert str(error).startswith("sparse_ce: ") and str(path) in str(error), error
            refused.append(True)
            continue
        assert len(samples) == len(sequences)
        for sample, expected in zip(samples, sequences):
            assert_same(sample, *expected)
        refused.append(False)
    path.write_bytes(data)
    return sum(refused) / len(refused)


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_a_flipped_bit_never_goes_unseen(tmp_path, ragged):
    """Checks every byte, except for spaces between words of a header."""
    path = tmp_path / "teacher.safetensors"
    sequences = write(path, ragged=ragged, lengths=(3, 1, 4))
    assert share_that_is_refused(path, sequences, 3) > 0.5
    assert len(read_all(path)) == 3


def test_a_flipped_bit_is_named_by_its_sequence(tmp_path):
    path = tmp_path / "teacher.safetensors"
    sequences = write(path, dtype=torch.float32)
    log_probs = sequences[2][0].values[:6].contiguous()  # the next position is ignored
    data = bytearray(path.read_bytes())
    at = bytes(data).index(log_probs.numpy().tobytes())
    data[at + 2] ^= 1
    path.write_bytes(data)
    cache = TeacherCache(path)
    for i in (0, 1, 3, 4):
        assert_same(cache[i], *sequences[i])
    text = refusal(lambda: cache[2], path)
    assert "checksum must be" in text and "at sequence 2 of" in text
    read = TeacherCache(path, verify=False)[2]["target"]
    assert (read.values[:6] != log_probs).sum() == 1 and torch.equal(read.indices[:6], sequences[2][0].indices[:6])


def test_parquets_own_checksums_name_the_row_group(tmp_path, monkeypatch):
    needs("parquet")
    import pyarrow.parquet as pq
    monkeypatch.setattr("sparse_ce.data.parquet.ENTRIES_OF_A_GROUP", 1)  # one group per entry
    path = tmp_path / "teacher.parquet"
    sequences = write(path)
    for name in range(4):
        data = bytearray(path.read_bytes())
        chunk = pq.ParquetFile(path).metadata.row_group(3).column(name)
        data[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 4
        damaged = tmp_path / f"{name}.parquet"
        damaged.write_bytes(data)
        cache = TeacherCache(damaged)
        for i in (0, 1, 2, 4):
            assert_same(cache[i], *sequences[i])
        text = refusal(lambda: cache[3], damaged)
        assert "row group 3 must be whole" in text and "CRC checksum" in text and "at sequences 3 to 3 of" in text


def test_a_flipped_bit_of_parquet_is_refused_or_harmless(tmp_path):
    """Checks that the footer, which has no checksum, is compared with the header, which has one."""
    needs("parquet")
    path = tmp_path / "teacher.parquet"
    sequences = write(path, lengths=(3, 1, 4))
    assert share_that_is_refused(path, sequences, 7) > 0.3


@pytest.mark.parametrize("change", ["num_classes", "version", "crc32", "text", "sequences"])
def test_a_header_that_is_not_whole(tmp_path, change):
    path = tmp_path / "teacher.safetensors"
    write(path)
    change_header(path, lambda text: {
        "num_classes": text.replace("1000", "1001"), "version": text.replace('_ce": 1', '_ce": 2'),
        "crc32": text.replace('"crc32": ', '"crc32": 1'), "text": text[:-1],
        "sequences": header_text(Header(V, K), 6)}[change])
    expected = "sequences must be 6, as the header says, got 5" if change == "sequences" else "header must be whole"
    assert expected in refusal(lambda: TeacherCache(path), path)


@pytest.mark.parametrize("name, change, words", [
    ("tokens", lambda a: a[:-1], "tokens must have 32 rows, got 31 in"),
    ("crc32", lambda a: a[:-1], "crc32 must have 5 rows, got 4 in"),
    ("sequences", lambda a: np.array([0, 7, 99, 20, 23, 32]), "sequences must ascend from 0 to 32, got 7 to 99 at seq"),
    ("sequences", lambda a: np.array([0, 7, 6, 20, 23, 32]), "sequences must ascend from 0 to 32, got 7 to 6 at seq"),
    ("entries", lambda a: a + 1000, "entries must ascend from 0 to"),
    ("entries", lambda a: np.where(np.arange(33) == 3, 10**6, a), "entries must ascend from 0 to"),
    ("log_probs", lambda a: a.astype("float32"), "log_probs must be of torch.float16, got torch.float32 in"),
    ("predicts", lambda a: a[:-1], "predicts must have 32 rows, got 31 in"),
    ("predicts", lambda a: a.astype("float32"), "predicts must be integers, got torch.float32 in"),
    ("predicts", lambda a: a * 0, "predicts must be 'next', as the file says, got 'token' at sequence 0 of"),
    ("predicts", lambda a: np.where(np.arange(32) == 9, 0, a), "at all positions, got [0, 1] at sequence 2 of"),
    ("predicts", lambda a: a + 1, "predicts must be 1, for 'next', or 0, for 'token', and the same at all"),
    ("crc32", None, f"arrays must be crc32, {ARRAYS}, got entries, ids, "),
    ("predicts", None, f"arrays must be crc32, {ARRAYS}, got crc32, entries"),
    ("tokens", None, f"arrays must be crc32, {ARRAYS}, got crc32, entries")])
def test_arrays_that_do_not_fit_together(tmp_path, name, change, words):
    library, path = pytest.importorskip("safetensors"), tmp_path / "teacher.safetensors"
    write(path, ragged=True)
    with library.safe_open(path, "np") as file:
        arrays, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    array = arrays.pop(name)
    if change is not None:
        arrays[name] = change(array)
    library.numpy.save_file(arrays, path, header)
    assert words in refusal(lambda: list(TeacherCache(path, verify=False)), path)


@pytest.mark.parametrize("change, words", [
    (lambda data: (10**6).to_bytes(8, "little") + data[8:], "fewer than its header"),
    (lambda data: data[:4], "fewer than its header"),
    (lambda data: data.replace(b'"shape": [32, 5]', b'"shape": [31, 5]', 1), "whose shapes do not match its data"),
    (lambda data: data.replace(b'"F16"', b'"F99"'), "got a header that cannot be read"),
    (lambda data: data.replace(b'{', b'(', 1), "got a header that cannot be read")])
def test_a_header_of_safetensors_that_is_not_whole(tmp_path, change, words):
    path = tmp_path / "teacher.safetensors"
    write(path)
    path.write_bytes(change(path.read_bytes()))
    assert words in refusal(lambda: TeacherCache(path), path)


def test_a_header_of_a_later_version(tmp_path, monkeypatch):
    monkeypatch.setattr("sparse_ce.data.sequence.VERSION", 2)
    write(tmp_path / "teacher.safetensors")
    monkeypatch.undo()
    assert "at most version 1, got 2" in refusal(lambda: TeacherCache(tmp_path / "teacher.safetensors"), tmp_path)


# ---------------------------------------------------------------------------------------------------- invalid values

def damaged_values(ragged):
    """Yields (words of the error, sequence 1 with one invalid value at position 2)."""
    def stored(**changes):
        target, tokens, log_tail = sequence(4, 7)
        parts = dict(ids=target.indices, log_probs=target.values, tokens=tokens, log_tail=log_tail)
        for name, value in changes.items():
            parts[name] = parts[name].clone()
            parts[name][(2, 3) if parts[name].dim() == 2 else 2] = value
        counts = None
        if ragged:
            parts["ids"], parts["log_probs"] = parts["ids"].flatten(), parts["log_probs"].flatten()
            counts = torch.full((4,), K)
        return Stored(parts["ids"].to(torch.uint16), parts["log_probs"], counts, parts["tokens"].to(torch.uint16),
                      parts["log_tail"])
    return [(f"ids must be in [0, {V}), got {V} at", stored(ids=V)),
            (f"ids must be in [0, {V}), got 65535 at", stored(ids=65535)),
            ("log_probs must be at most 0, got nan at", stored(log_probs=torch.nan)),
            ("log_probs must be at most 0, got 0.5 at", stored(log_probs=0.5)),
            ("log_tail must be at most 0, got 2.0 at", stored(log_tail=2.0)),
            ("log_tail must be at most 0, got nan at", stored(log_tail=torch.nan)),
            (f"tokens must be in [0, {V}), got {V} at", stored(tokens=V))], stored


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_values_that_are_none_are_named_by_sequence_and_position(tmp_path, format, ragged):
    cases, stored = damaged_values(ragged)
    for i, (words, wrong) in enumerate(cases):
        path = tmp_path / f"{i}.{format}"
        WRITERS[format](path, [stored(), wrong], Header(V, None if ragged else K, "float32", "next", COLUMNS))
        cache = TeacherCache(path)
        assert cache[0]["target"].shape == (4,)
        assert f"{words} sequence 1, position 2 of {path}" in refusal(lambda: cache[1], path)
        assert TeacherCache(path, verify=False)[1]["target"].shape == (4,)
    path = tmp_path / f"padding.{format}"  # an unused id may be anything
    padding = stored(ids=60000, log_probs=-torch.inf)
    WRITERS[format](path, [padding], Header(V, None if ragged else K, "float32", "next", COLUMNS))
    assert TeacherCache(path)[0]["target"].ne(-100).all()


def test_other_numbers_of_entries_than_the_header_says(tmp_path):
    needs("parquet")
    stored = Stored(torch.zeros(3, dtype=torch.uint16), -torch.ones(3), torch.tensor([2, 1]))
    WRITERS["parquet"](tmp_path / "k.parquet", [stored], Header(V, 2, "float32"))
    assert "ids must have 2 entries, got 1 at sequence 0, position 1 of" in refusal(
        lambda: TeacherCache(tmp_path / "k.parquet")[0], tmp_path)
    import pyarrow as pa
    import pyarrow.parquet as pq
    for table, words in (({"ids": [[[1, 2]]], "log_probs": [[[-1.0], [-1.0]]]}, "log_probs must have as many entries"),
                         ({"ids": [[[1]]], "log_probs": [[[-1.0]]], "log_tail": [[-1.0, -1.0]]},
                          "log_tail must be (1,)"),
                         ({"ids": [[[1, None]]], "log_probs": [[[-1.0, 1.0]]]}, "ids must have no nulls"),
                         ({"ids": [[["a"]]], "log_probs": [[[-1.0]]]}, "ids must be of numbers"),
                         ({"ids": [1], "log_probs": [[[-1.0]]]}, "ids must be a list"),
                         ({"ids": [[[1]]], "log_probs": [[[1]]]}, "log_probs must be of torch.float16"),
                         ({"ids": [[[1]]]}, "columns must be 'ids' and 'log_probs'")):
        pq.write_table(pa.table(table), tmp_path / "wrong.parquet")
        assert words in refusal(lambda: TeacherCache(tmp_path / "wrong.parquet", num_classes=V)[0], tmp_path)


@pytest.mark.parametrize("k", [2, None])
def test_the_writer_refuses_them_too(tmp_path, k):
    def target(ids=(3, 4), values=(-1.0, -2.0), vocab=V):
        return SparseTarget.from_topk(torch.tensor([[1, 2], ids]), torch.tensor([[-1.0, -2.0], values]),
                                      values_are="log_probs", num_classes=vocab)

    path = tmp_path / "teacher.safetensors"
    writer = CacheWriter(path, num_classes=V, k=k)
    writer.add(target())
    where = f"at sequence 1, position 1 of {path}"
    for wrong, words in ((dict(target=target(ids=(3, V))), f"ids must be in [0, {V}), got {V} {where}"),
                         (dict(target=target(ids=(3, -1))), f"ids must be in [0, {V}), got -1 {where}"),
                         (dict(target=target(ids=(3, 65536 + 3))), f"ids must be in [0, {V}), got 65539 {where}"),
                         (dict(target=target(values=(0.25, -1))), f"log_probs must be at most 0, got 0.25 {where}"),
                         (dict(target=target(values=(2e-3, -1))), "log_probs must be at most 0, got 0.002"),
                         (dict(target=target(values=(-1, torch.nan))), f"log_probs must be at most 0, got nan {where}"),
                         (dict(target=target(vocab=V + 1)), f"target must have {V} classes, got {V + 1}"),
                         (dict(target=target().probs()), "target must be a SparseTarget of log-probabilities"),
                         (dict(target=SparseTarget.from_index(torch.tensor([1]))), "target must be a SparseTarget"),
                         (dict(target=target().reshape(1, 1, 2)), "target must be (S,) or (B, S), got [1, 1, 2]"),
                         (dict(target=target(), lengths=[3]), "lengths must be 1 integers in [0, 2], got [3]"),
                         (dict(target=target(), lengths=[1, 1]), "lengths must be 1 integers")):
        with pytest.raises(ValueError, match=re.escape(words)):
            writer.add(**wrong)
    writer.close()
    assert len(writer) == len(TeacherCache(path)) == 1
    writer = CacheWriter(tmp_path / "other.safetensors", num_classes=V, k=k)
    for wrong, words in ((dict(tokens=torch.tensor([0, V])), f"tokens must be in [0, {V}), got {V}"),
                         (dict(tokens=torch.tensor([0, -100])), f"tokens must be in [0, {V}), got -100"),
                         (dict(tokens=torch.tensor([0])), "tokens must be [2], as target, got [1]"),
                         (dict(log_tail=torch.tensor([0.0, 0.5])), "log_tail must be at most 0, got 0.5")):
        with pytest.raises(ValueError, match=re.escape(words)):
            writer.add(target(), **wrong)


def test_more_entries_than_k_are_refused(tmp_path):
    writer = CacheWriter(tmp_path / "teacher.safetensors", num_classes=V, k=2)
    with pytest.raises(ValueError, match="sparse_ce: target must have at most 2 entries in a row, the writer's k, got "
                                         f"{K} at sequence 0, position 0 of"):
        writer.add(sequence(4)[0])


@pytest.mark.parametrize("options, words", [
    (dict(num_classes=0), "num_classes must be an integer in [1, 2147483648], got 0"),
    (dict(num_classes=None), "num_classes must be an integer"),
    (dict(k=0), f"k must be an integer in [1, {V}], got 0"), (dict(k=V + 1), "k must be an integer"),
    (dict(shard=0), "shard must be an integer"), (dict(dtype=torch.float64), "dtype must be float16"),
    (dict(predicts="last"), "predicts must be 'next' or 'token'"), (dict(format="csv"), "format must be one of")])
def test_arguments_of_the_writer(tmp_path, options, words):
    with pytest.raises(ValueError, match=re.escape("sparse_ce: " + words)):
        CacheWriter(tmp_path / "teacher", **{**dict(num_classes=V), **options})


def test_a_library_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"sparse_ce: pyarrow must be installed for Parquet, got .*; pip install "
                                          r"'sparse_ce\[data\]'"):
        CacheWriter(tmp_path / "teacher.parquet", num_classes=V)
    (tmp_path / "there.parquet").write_bytes(b"PAR1")
    with pytest.raises(ImportError, match="sparse_ce: pyarrow must be installed for Parquet"):
        TeacherCache(tmp_path / "there.parquet")
