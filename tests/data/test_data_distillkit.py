"""Tests captures of DistillKit."""

import math
import re
import struct

import pytest
import torch

import sparse_ce
from distillkit_cases import CONFIGS, RECOMMENDED, K, V, capture
from sparse_ce.data import DistillKitCache, collate_sequences

pa = pytest.importorskip("pyarrow", minversion="18")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("extra", [0, 1])
def test_a_capture_is_read_as_it_is(tmp_path, name, extra):
    expected = capture(tmp_path / "data_0.parquet", CONFIGS[name], extra=extra)
    path = tmp_path / "data_0.parquet"
    cache = DistillKitCache(path, CONFIGS[name])
    assert repr(cache) == f"DistillKitCache({str(path)!r}, sequences=3, num_classes={V}, predicts='next')"
    assert len(cache) == 3 and cache.num_classes == V
    for i in (2, 0, 1, -1):
        tokens, ids, values = expected[i]
        target = cache[i]["target"]
        assert cache[i]["tokens"].tolist() == tokens and target.num_classes == V and target.values_are == "log_probs"
        assert torch.equal(target.indices, ids)
        torch.testing.assert_close(target.values, values, rtol=1e-6, atol=1e-6)
    batch = collate_sequences([cache[i] for i in range(3)])
    assert batch["tokens"].shape == (3, 9) and sparse_ce.cross_entropy(torch.randn(3, 9, V), batch["target"]) > 0


@pytest.mark.parametrize("vocab", [2, 256, 257, 151936])
def test_ids_have_as_many_bits_as_the_vocabulary_needs(tmp_path, vocab):
    c = dict(d=vocab, k=2, exact_k=2, exact_dtype="float32", residual_bins=[], delta_encoding=False)
    (_, ids, _), *_ = capture(tmp_path / "x.parquet", c)
    assert torch.equal(DistillKitCache(tmp_path / "x.parquet", c)[0]["target"].indices, ids)


def test_a_folder_with_its_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr("sparse_ce.data.shards.MOST_OPEN", 2)
    yaml = pytest.importorskip("yaml")
    c, expected = CONFIGS["recommended"], []
    for i in (0, 1, 2, 10):
        expected += capture(tmp_path / f"data_{i}.parquet", c, lengths=(i + 1, 2))
    with pytest.raises(ValueError, match="sparse_ce: config must be given if there is no compression_config.yaml"):
        DistillKitCache(tmp_path)
    (tmp_path / "compression_config.yaml").write_text(yaml.safe_dump(c))
    with pytest.raises(ValueError, match="sparse_ce: predicts must be 'next' or 'token' if names makes the target"):
        DistillKitCache(tmp_path, names={"target": "labels"})
    cache = DistillKitCache(tmp_path, predicts="token", names={"target": "labels"})
    assert len(cache) == 8 and [len(sample["tokens"]) for sample in cache] == [1, 2, 2, 2, 3, 2, 11, 2]
    labels = cache[6]["labels"]
    assert labels.ne(-100).tolist() == [False] + [True] * 10 and torch.equal(labels.indices[1:], expected[6][1][:-1])
    assert sum(rows._file is not None for rows in cache.shards.all) == 2
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"teacher": {"kind": "dataset"}, "logprob_compressor": c}))
    assert len(DistillKitCache(tmp_path, tmp_path / "run.yaml")) == 8


def test_plain_top_k(tmp_path):
    ids, values = [[[3, 5], [7, 1]]], [[[-0.5, -1.5], [-0.25, -2.0]]]
    table = pa.table({"input_ids": [[1, 2]], "token_ids": ids, "top_values": pa.array(
        values, pa.list_(pa.list_(pa.float16())))})
    pq.write_table(table, tmp_path / "x.parquet")
    cache = DistillKitCache(tmp_path / "x.parquet", num_classes=8)
    assert cache[0]["target"].tolist() == [[(3, -0.5), (5, -1.5)], [(7, -0.25), (1, -2.0)]]
    with pytest.raises(ValueError, match="sparse_ce: num_classes must be given if no configuration has it"):
        DistillKitCache(tmp_path / "x.parquet")


@pytest.mark.parametrize("invert, root", [(True, False), (False, True)])
def test_the_oldest_captures_hold_logits(tmp_path, invert, root):
    """Tests ids from the lowest bit on, seven of nine bits each in a 64-bit word."""
    c = dict(vocab_size=V, k=9, exact_k=2, polynomial_degree=2, invert_polynomial=invert, with_sqrt_term=root)
    draw = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(V, generator=draw)[:9] for _ in range(3)])
    exact = torch.tensor([[5.0, 4.5], [3.0, 2.0], [2.0, 1.0]])
    coeffs = torch.rand(3, 3 + root, generator=draw) / 100
    logits = [[*exact[r].tolist(), *(sum(a * t ** (-p if invert else p) for p, a in enumerate(coeffs[r, :3].tolist())) +
                                     (coeffs[r, 3].item() * math.sqrt(t) if root else 0) for t in range(1, 8))]
              for r in range(3)]
    packed = [[sum(n << (9 * i) for i, n in enumerate(row[b:b + 7])) for b in (0, 7)] for row in ids.tolist()]
    table = pa.table({"input_ids": [[1, 2, 3]], "packed_indices": pa.array([packed], pa.list_(pa.list_(pa.uint64()))),
                      "exact_values": [exact.tolist()], "coeffs": [coeffs.tolist()]})
    pq.write_table(table, tmp_path / "x.parquet")
    target = DistillKitCache(tmp_path / "x.parquet", c)[0]["target"]
    assert torch.equal(target.indices, ids)
    torch.testing.assert_close(target.values, torch.tensor(logits).log_softmax(-1))


# --------------------------------------------------------------------------------------------------------------- errors

def refused(make, *words):
    with pytest.raises(ValueError) as caught:
        make()
    said = str(caught.value)
    assert re.search(r"^sparse_ce: .+ must .+, got .+", said, re.S) and all(word in said for word in words), said


def test_another_configuration_than_it_was_written_with(tmp_path):
    path, c = tmp_path / "x.parquet", CONFIGS["residuals"]
    capture(path, c)
    where = f"at sequence 1 of {path}"
    refused(lambda: DistillKitCache(path, {**c, "exact_k": 5})[1],
            "compressed_logprobs must have 35 bytes", "got 33", where)
    refused(lambda: DistillKitCache(path, {**c, "residual_bins": []})[1], "compressed_logprobs must have 24 bytes",
            where)
    refused(lambda: DistillKitCache(path, {**c, "d": 2000})[1],
            "bytepacked_indices must have 17 bytes", "got 14", where)
    refused(lambda: DistillKitCache(path, {"d": V}), "config must have d, k, exact_k, got one without k, exact_k")
    refused(lambda: DistillKitCache(path, c, num_classes=5), "num_classes must be 300")


def test_values_that_are_none_and_files_that_are_damaged(tmp_path):
    path, c = tmp_path / "x.parquet", CONFIGS["exact alone"]
    capture(path, c)

    def changed(change):
        rows = pq.read_table(path).to_pylist()
        change(rows[1])
        schema = pq.read_schema(path)
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "y.parquet")
        return DistillKitCache(tmp_path / "y.parquet", c)

    nan, positive = list(struct.pack("<e", math.nan)), list(struct.pack("<e", 0.5))
    nan_cache = changed(lambda row: row["compressed_logprobs"][0].__setitem__(slice(4, 6), nan))
    where = f"at sequence 1, position 0 of {tmp_path / 'y.parquet'}"
    assert len(nan_cache[0]["tokens"]) == 5
    refused(lambda: nan_cache[1], "log_probs must be at most 0, got nan", where)
    cache = changed(lambda row: row["compressed_logprobs"][0].__setitem__(slice(4, 6), positive))
    assert cache[1]["target"].values[0, 2] == 0
    cache = changed(lambda row: row["bytepacked_indices"][0].__setitem__(0, 255))
    refused(lambda: cache[1], f"ids must be in [0, {V}), got", where)
    cache = changed(lambda row: row["input_ids"].append(0))
    refused(lambda: cache[1], "input_ids must have 1 tokens, as many as rows, or one more, got 3")
    cache = changed(lambda row: row["compressed_logprobs"].append([0]))
    refused(lambda: cache[1], "compressed_logprobs must have 24 numbers at each position, got 1 at sequence 1, pos")
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    refused(lambda: DistillKitCache(path, c), "must be a whole Parquet file", str(path))
    path.write_bytes(data[:30] + bytes(80) + data[110:])
    refused(lambda: list(DistillKitCache(path, c)), "row group 0 must be whole", f"sequences 0 to 1 of {path}")


def test_columns_of_somebody_else(tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "x.parquet")
    refused(lambda: DistillKitCache(tmp_path / "x.parquet", {}), "columns must be compressed_logprobs and")
    with pytest.raises(FileNotFoundError, match="sparse_ce: path must be a capture of DistillKit"):
        DistillKitCache(tmp_path / "nowhere", {})
    (tmp_path / "empty").mkdir()
    refused(lambda: DistillKitCache(tmp_path / "empty", {}), "path must contain Parquet files")


LEGACY = dict(vocab_size=V, k=K, exact_k=4, polynomial_degree=2)


@pytest.mark.parametrize("change, words", [
    (dict(d="x"), "d must be an integer in [1, 2147483648], got 'x'"), (dict(d=0), "d must be an integer in [1, "),
    (dict(d=1.5), "d must be an integer"), (dict(d=None), "d must be an integer in [1, 2147483648], got None"),
    (dict(k=None), "k must be an integer in [1, 2147483648], got None"), (dict(k=[3]), "k must be an integer"),
    (dict(k=True), "k must be an integer"),
    (dict(exact_k=K + 1), f"exact_k must be an integer in [0, {K}], got {K + 1}"),
    (dict(exact_k=-1), "exact_k must be an integer"), (dict(exact_k=None), "exact_k must be an integer"),
    (dict(exact_dtype="int8"), "exact_dtype must be one of float16, bfloat16, float32, float64, got 'int8'"),
    (dict(term_dtype="int8"), "term_dtype must be one of float16, bfloat16, float32, float64, got 'int8'"),
    (dict(exact_dtype=["float16"]), "exact_dtype must be one of"),
    (dict(polynomial_terms=[0, "cubic"]), "polynomial_terms must be powers, 'sqrt' or 'exp', got [0, 'cubic']"),
    (dict(polynomial_terms=3), "polynomial_terms must be powers, 'sqrt' or 'exp', got 3"),
    (dict(polynomial_terms="sqrt"), "polynomial_terms must be powers, 'sqrt' or 'exp', got 'sqrt'"),
    (dict(delta_encoding="no"), "delta_encoding must be true or false, got 'no'"),
    (dict(normalize_t=[]), "normalize_t must be true or false, got []"),
    (dict(residual_bins={"a": 1}), "residual_bins must be a list of mappings, got"),
    (dict(residual_bins=[5]), "residual_bins must be a list of mappings, got"),
    (dict(residual_bins=[dict(scale_dtype="float16", num_elements=3)]),
     "residual_bins must have element_bits, an integer in [1, 32], got None"),
    (dict(residual_bins=[dict(scale_dtype="float16", num_elements=3, element_bits=64)]),
     "residual_bins must have element_bits, an integer in [1, 32], got 64"),
    (dict(residual_bins=[dict(scale_dtype="float16", num_elements="x", element_bits=4)]),
     f"residual_bins must have num_elements, an integer in [0, {K - 4}], got 'x'"),
    (dict(residual_bins=[dict(element_bits=5, num_elements=3)]), "residual_bins must have scale_dtype, one of float16"),
    (dict(residual_bins=[dict(scale_dtype="float16", element_bits=5, num_elements=n) for n in (5, 4)]),
     f"residual_bins must have at most {K - 4} elements, k - exact_k, got 9"),
    (dict(residual_bins=[dict(scale_dtype="float16", element_bits=5, num_elements=9)]),
     f"residual_bins must have num_elements, an integer in [0, {K - 4}], got 9"),
    ({**LEGACY, "form": "legacy", "vocab_size": "x"}, "vocab_size must be an integer in [1, 2147483648], got 'x'"),
    ({**LEGACY, "form": "legacy", "polynomial_degree": -1}, "polynomial_degree must be an integer in [0, "),
    ({**LEGACY, "form": "legacy", "with_sqrt_term": "x"}, "with_sqrt_term must be true or false, got 'x'"),
    (dict(form="plain", d="x"), "d must be an integer in [1, 2147483648], got 'x'")])
def test_a_configuration_that_is_none_is_named(tmp_path, change, words):
    yaml = pytest.importorskip("yaml")
    path, form = tmp_path / "x.parquet", change.get("form", "compressed")
    columns = {"compressed": ("compressed_logprobs", "bytepacked_indices"), "plain": ("top_values", "token_ids"),
               "legacy": ("packed_indices", "exact_values", "coeffs")}[form]
    pq.write_table(pa.table({name: [[[1]]] for name in columns}), path)
    config = {**(RECOMMENDED if form == "compressed" else {}), **change}
    refused(lambda: DistillKitCache(path, config), words, f"in the configuration of {path}")
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(config))
    refused(lambda: DistillKitCache(path, tmp_path / "other.yaml"), words, f"in {tmp_path / 'other.yaml'}")


def test_bins_may_be_none(tmp_path):
    expected = capture(tmp_path / "x.parquet", RECOMMENDED)
    cache = DistillKitCache(tmp_path / "x.parquet", {**RECOMMENDED, "residual_bins": None, "delta_encoding": 0})
    assert torch.equal(cache[0]["target"].indices, expected[0][1])


@pytest.mark.parametrize("name, text, words", [
    ("x.json", "{", "must be JSON, got JSONDecodeError"), ("x.yaml", "{a: [", "must be YAML, got ParserError"),
    ("x.yaml", "\0", "must be YAML, got ReaderError"), ("x.json", "\udcff", "must be JSON, got UnicodeDecodeError"),
    ("x.yaml", "- 1\n", "config must be a mapping, got list in"),
    ("x.json", "3", "config must be a mapping, got int in"),
    ("x.yaml", "logprob_compressor: 3", "logprob_compressor must be a mapping, got int in")])
def test_a_file_that_is_no_configuration_is_named(tmp_path, name, text, words):
    pytest.importorskip("yaml")
    capture(tmp_path / "x.parquet", RECOMMENDED)
    (tmp_path / name).write_bytes(text.encode("utf8", "surrogateescape"))
    refused(lambda: DistillKitCache(tmp_path / "x.parquet", tmp_path / name), words, str(tmp_path / name))


def test_other_arguments_of_a_capture(tmp_path):
    path = tmp_path / "x.parquet"
    capture(path, RECOMMENDED)
    refused(lambda: DistillKitCache(path, [RECOMMENDED]), "config must be a mapping or the path of one, got list")
    with pytest.raises(FileNotFoundError, match="sparse_ce: config must be a file, got .*nowhere.yaml"):
        DistillKitCache(path, tmp_path / "nowhere.yaml")
    pq.write_table(pa.table({"token_ids": [[[1]]], "top_values": [[[-1.0]]]}), path)
    for number in ("x", 0, 1.5):
        refused(lambda: DistillKitCache(path, num_classes=number), "num_classes must be a positive integer, got "
                f"{number!r}", str(path))


@pytest.mark.parametrize("columns, words", [
    (dict(input_ids=[[1], [1.5]]), "input_ids must be integers, got torch.float64"),
    (dict(token_ids=[[[1]], [[1.7]]]), "token_ids must be integers, got torch.float64"),
    (dict(input_ids=[[1], None]), "input_ids must have no nulls, got 1"),
    (dict(token_ids=[[[1]], [None]]), "token_ids must have no nulls, got 1"),
    (dict(top_values=[[[-1.0]], None]), "top_values must have no nulls, got 1")])
def test_columns_that_would_be_read_as_something_else(tmp_path, columns, words):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"token_ids": [[[1]], [[2]]], "top_values": [[[-1.0]], [[-2.0]]], **columns}), path)
    refused(lambda: DistillKitCache(path, num_classes=V)[1], words, str(path))


def test_bytes_of_other_integers(tmp_path):
    """Reads columns of wider integers, as another program may save them."""
    expected, path = capture(tmp_path / "x.parquet", RECOMMENDED), tmp_path / "y.parquet"
    table, wide = pq.read_table(tmp_path / "x.parquet"), pa.list_(pa.list_(pa.int64()))
    for name in ("compressed_logprobs", "bytepacked_indices"):
        i = table.column_names.index(name)
        table = table.set_column(i, name, table[name].cast(wide))
    pq.write_table(table, path)
    for sample, (_, ids, values) in zip(DistillKitCache(path, RECOMMENDED), expected):
        assert torch.equal(sample["target"].indices, ids)
        torch.testing.assert_close(sample["target"].values, values, rtol=1e-6, atol=1e-6)
    for number, kind, words in ((256, pa.int64(), "must be bytes, in [0, 255], got 256 at sequence 0"),
                                (1.5, pa.float64(), "compressed_logprobs must be integers, got torch.float64")):
        rows = table.to_pylist()
        rows[0]["compressed_logprobs"][0][0] = number
        column = pa.array([row["compressed_logprobs"] for row in rows], pa.list_(pa.list_(kind)))
        pq.write_table(table.set_column(table.column_names.index("compressed_logprobs"), "compressed_logprobs", column),
                       path)
        refused(lambda: DistillKitCache(path, RECOMMENDED)[0], words, str(path))


def test_a_library_that_is_not_there_is_named(tmp_path, monkeypatch):
    capture(tmp_path / "data_0.parquet", RECOMMENDED)
    (tmp_path / "compression_config.yaml").write_text("d: 300\n")
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(ImportError, match=r"sparse_ce: PyYAML must be installed .*; pip install 'sparse_ce\[data\]'"):
        DistillKitCache(tmp_path)
    assert len(DistillKitCache(tmp_path, RECOMMENDED)) == 3
