"""Tests small files that request much memory, and files whose damage Python or a library meets first: the error names
the file before anything is allocated."""

import json
import os
import struct
import zlib

import pytest
import torch

import sparse_ce
from cache_cases import FORMATS, V, assert_same, change_header, needs, sequence, write
from sparse_ce._core.errors import described
from sparse_ce.data import CacheWriter, DistillKitCache, TeacherCache, collate_sequences, from_vllm
from sparse_ce.data.parquet import ParquetRows
from sparse_ce.data.sequence import Header, header_text

MANY = 2**24  # large enough to notice a missing error, small enough to survive one


def refused(read, path, *words, cause=None):
    with pytest.raises(ValueError) as caught:
        read()
    said = str(caught.value)
    assert said.startswith("sparse_ce: ") and " must " in said and ", got " in said and len(said) < 1500, said
    assert str(path) in said and all(word in said for word in words), said
    assert cause is None or isinstance(caught.value.__cause__, cause), repr(caught.value.__cause__)


# -------------------------------------------------------------------------------------------------------- safetensors

def safetensors(path, said, data=b""):
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def array(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ONE = {"ids": array("U16", [1, 1], 0, 2), "log_probs": array("F16", [1, 1], 2, 4)}
ROW = {"sequences": array("I64", [2], 4, 20)}


def test_rows_without_a_byte_are_not_counted_beyond_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    for said, data in (({"sequences": array("I64", [2], 0, 16), "ids": array("U16", [MANY, 0], 16, 16),
                         "log_probs": array("F16", [MANY, 0], 16, 16)}, struct.pack("<qq", 0, MANY)),
                       ({"ids": array("U16", [1, MANY, 0], 0, 0), "log_probs": array("F16", [1, MANY, 0], 0, 0)}, b""),
                       ({"ids": array("U16", [MANY, 0, 5], 0, 0), "log_probs": array("F16", [MANY, 0, 5], 0, 0)}, b"")):
        safetensors(path, said, data)
        refused(lambda: TeacherCache(path, num_classes=V)[0], path, f"rows, as many as {path} has bytes, got the")
    few = {"sequences": array("I64", [2], 0, 16), "ids": array("U16", [0, 5], 16, 16),
           "log_probs": array("F16", [0, 5], 16, 16)}
    assert len(TeacherCache(safetensors(path, few, bytes(16)), num_classes=V)[0]["target"]) == 0


@pytest.mark.parametrize("said, words", [
    (b"[" * 100000, "RecursionError"), (b'{"a":' * 100000, "RecursionError"), (b"[]", "JSON must be an object"),
    (b'{"ids": 5}', "TypeError"), (b'{"ids": {}}', "KeyError"), (b"\xff\xfe{}", "got a header that cannot be read"),
    (b'{"ids": ' + b"9" * 5000 + b"}", "got a header that cannot be read"),
    ({**ONE, "ids": array("U16", [1.0, 1], 0, 2)}, "shape must be a list of sizes, got [1.0, 1]"),
    ({**ONE, "ids": array("U16", [True, 1], 0, 2)}, "shape must be a list of sizes, got [True, 1]"),
    ({**ONE, "ids": array("U16", "11", 0, 2)}, "shape must be a list of sizes, got '11'"),
    ({**ONE, "ids": array("U16", [], 0, 2)}, "shape must be a list of sizes, got []"),
    ({**ONE, "ids": array("U16", [-1, -1], 0, 2)}, "shape must be a list of sizes, got [-1, -1]"),
    ({**ONE, "ids": array("U16", [1, 1], -2, 0)}, "must be a list of sizes, got [-2, 0]"),
    ({**ONE, "ids": array("U16", [1, 1], 0.0, 2.0)}, "must be a list of sizes, got [0.0, 2.0]"),
    ({**ONE, "ids": array("U16", [2**70, 2**70], 0, 2)}, "whose shapes do not match its data"),
    ({**ONE, "log_probs": array("F16", [1, 1], 0, 2)}, "whose shapes do not match its data"),
    ({**ONE, "log_probs": array("F16", [1, 1], 3, 5)}, "whose shapes do not match its data"),
    ({"ids": array("U16", [1, 1], 2, 4), "log_probs": array("F16", [1, 1], 4, 6)}, "shapes do not match its data"),
    ({**ONE, "ids": array(["U16"], [1, 1], 0, 2)}, "TypeError"),
    ({**ONE, "__metadata__": "cache"}, "__metadata__ must be an object, got a str"),
    ({**ONE, "__metadata__": {"cache": 5}}, "header must be whole, got TypeError"),
    ({**ONE, "__metadata__": {"cache": "[" * 9999}}, "header must be whole, got RecursionError"),
    ({**ONE, "__metadata__": {"cache": "{}"}}, "header must be whole, got KeyError: 'crc32'")],
    ids=lambda part: part if isinstance(part, str) else "")
def test_headers_of_safetensors(tmp_path, said, words):
    path = tmp_path / "x.safetensors"
    safetensors(path, said, bytes(4))
    refused(lambda: TeacherCache(path, num_classes=V), path, words)


def test_the_cause_is_kept(tmp_path):
    path = safetensors(tmp_path / "x.safetensors", b"[" * 100000)
    refused(lambda: TeacherCache(path), path, cause=RecursionError)
    path = safetensors(path, {**ONE, **ROW}, struct.pack("<HHqq", 1, 0, 0, 1))
    cache = TeacherCache(path, num_classes=V)
    cache.num_classes = "many"
    refused(lambda: cache[0], path, f"sequence 0 of {path} must be whole, got TypeError", cause=TypeError)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ImportError, FileNotFoundError(2, "gone", "name"),
                                   MemoryError, RecursionError, RuntimeError("alone"), ValueError("sparse_ce: alone")])
def test_which_errors_become_others(tmp_path, monkeypatch, error):
    write(tmp_path / "x.safetensors")
    cache = TeacherCache(tmp_path / "x.safetensors")

    def stopped(*_):
        raise error
    monkeypatch.setattr(cache.shards.all[0], "read", stopped)
    if error is KeyboardInterrupt or error is ImportError or isinstance(error, OSError):
        with pytest.raises(error if isinstance(error, type) else type(error)):
            cache[1]
    else:
        kind = error if isinstance(error, type) else type(error)
        refused(lambda: cache[1], f"sequence 1 of {tmp_path / 'x.safetensors'}", kind.__name__, cause=kind)


def test_arrays_may_be_listed_in_any_order(tmp_path):
    """Checks that the file's end is the end of the array with the largest offset, not of the last one listed."""
    path = tmp_path / "x.safetensors"
    sequences = write(path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    said = json.loads(data[8:8 + length])
    for names in (sorted(said), sorted(said, reverse=True), list(said)[::-1]):
        safetensors(path, {name: said[name] for name in names}, data[8 + length:])
        for sample, expected in zip(TeacherCache(path), sequences):
            assert_same(sample, *expected)


@pytest.mark.parametrize("field, value", [
    ("num_classes", 0), ("num_classes", 1.5), ("num_classes", "x"), ("num_classes", 2**31 + 1), ("num_classes", None),
    ("k", 0), ("k", True), ("k", V + 1), ("k", "x"), ("dtype", "float64"), ("dtype", ["float16"]), ("predicts", "last"),
    ("columns", 5), ("columns", ["ids", "log_probs", "text"]), ("columns", [["ids"]]), ("first", -1), ("first", "x"),
    ("metadata", "text"), ("sequences", -1), ("sequences", 5.0), ("sequences", None), ("sparse_ce", "1")])
def test_headers_with_a_checksum_whose_fields_no_writer_wrote(tmp_path, field, value):
    path = tmp_path / "x.safetensors"
    write(path)
    for change in (lambda said: said.update({field: value}), lambda said: said.pop(field)):
        def changed(text, change=change):
            said = json.loads(text)
            del said["crc32"]
            change(said)
            return json.dumps({**said, "crc32": zlib.crc32(json.dumps(said, sort_keys=True).encode())})
        change_header(path, changed)
        refused(lambda: TeacherCache(path), path)


def test_other_entries_in_a_rectangle_than_the_header_says(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path)
    change_header(path, lambda _: header_text(Header(V, 4, columns=("ids", "log_probs", "tokens", "log_tail")), 5))
    refused(lambda: TeacherCache(path), path, "ids must be (P, 4), as the header says, got [32, 5]")


def test_offsets_whose_differences_are_none_of_int64(tmp_path):
    said = {"sequences": array("I64", [2], 0, 16), "entries": array("I64", [3], 16, 40),
            "ids": array("U16", [2], 40, 44), "log_probs": array("F16", [2], 44, 48)}
    for entries in ([0, 2**63 - 1, -2], [0, -2, 2], [-2**63, 0, 2], [0, 2**63 - 1, 2]):
        path = safetensors(tmp_path / "x.safetensors", said, struct.pack("<5q2H2e", 0, 2, *entries, 3, 4, -1, -1))
        refused(lambda: TeacherCache(path, num_classes=V)[0], path, "entries must ascend from 0 to 2")


# --------------------------------------------------------------------------------------------- paths that are not files

@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
@pytest.mark.parametrize("name", [".complete", "shard-00000.safetensors", "shard-00000.parquet"])
def test_names_of_what_is_no_file(tmp_path, kind, name):
    if name.endswith("parquet"):
        needs("parquet")
    folder = tmp_path / "x"
    write(folder, **(dict(format="parquet") if name.endswith("parquet") else {}))
    file = folder / name
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    refused(lambda: TeacherCache(folder), file, *(["must be a file, got a"] if kind != "folder" else []))


@pytest.mark.parametrize("text", ["[" * 100000, "[]", "5", '{"shards": "' + "x" * 10**6 + '", "sequences": 1}',
                                  '{"shards": [' + "[1], " * 10**5 + '1], "sequences": {"a": 1}}', "1" * 5000])
def test_markers_that_say_too_much(tmp_path, text):
    write(tmp_path / "x")
    (tmp_path / "x" / ".complete").write_text(text)
    refused(lambda: TeacherCache(tmp_path / "x"), tmp_path / "x" / ".complete")


# ------------------------------------------------------------------------------------------------- Parquet, DistillKit

def parquet(path, **columns):
    needs("parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("at", ["footer", "length", "magic"])
def test_footers_of_parquet(tmp_path, at):
    path = parquet(tmp_path / "x.parquet", ids=[[[0]]], log_probs=[[[-1.0]]])
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[-8:-4], "little")
    for i in range(len(data) - 8 - length, len(data) - 8, 5) if at == "footer" else range(3):
        damaged = data.copy()
        damaged[{"footer": i, "length": len(data) - 8 + i, "magic": len(data) - 4 + i}[at]] ^= 0x5A
        path.write_bytes(damaged)
        try:
            list(TeacherCache(path, num_classes=V))
        except ValueError as error:
            assert str(error).startswith("sparse_ce: ") and str(path) in str(error), error


def test_a_forked_process_opens_parquet_anew(tmp_path):
    needs("parquet")
    write(tmp_path / "x.parquet")
    rows = ParquetRows(tmp_path / "x.parquet")
    ours, groups = rows._opened(), rows._groups
    assert rows._opened() is ours
    rows.row(0, ["ids"])
    child = os.fork()
    if child == 0:
        os._exit(0 if rows._opened() is not ours and not rows._groups and rows._opened() is rows._opened() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rows._opened() is ours and groups is not rows._groups


def capture(tmp_path, form):
    columns = {"compressed": ("compressed_logprobs", "bytepacked_indices"),
               "legacy": ("packed_indices", "exact_values", "coeffs")}[form]
    return parquet(tmp_path / "x.parquet", **{name: [[[1]]] for name in columns})


@pytest.mark.parametrize("form, config, words", [
    ("legacy", dict(vocab_size=MANY, k=MANY, exact_k=1, polynomial_degree=2), f"columns must have {MANY} ids, 1 exact"),
    ("legacy", dict(vocab_size=V, k=V + 1, exact_k=1, polynomial_degree=2), f"k must be an integer in [1, {V}], got"),
    ("legacy", dict(vocab_size=V, k=3, exact_k=1, polynomial_degree=MANY), "polynomial_degree must be an integer in "
                                                                           "[0, 255], got"),
    ("compressed", dict(d=MANY, k=MANY, exact_k=0, polynomial_terms=[1]), "must have 4 bytes at each position"),
    ("compressed", dict(d=MANY, k=MANY, exact_k=1), "must have 4 bytes at each position"),
    ("compressed", dict(d=V, k=V + 1, exact_k=1), f"k must be an integer in [1, {V}], got"),
    ("compressed", dict(d=V, k=9, exact_k=1, polynomial_terms=list(range(257))),
     "polynomial_terms must be at most 256, got 257"),
    ("compressed", dict(d=V, k=9, exact_k=0, polynomial_terms=[10**400]), "config must be one of DistillKit, got Ov")])
def test_configurations_that_ask_for_much(tmp_path, form, config, words):
    path = capture(tmp_path, form)
    refused(lambda: DistillKitCache(path, config)[0], path, words)


def test_no_coefficients_for_values_that_need_some(tmp_path):
    pa = pytest.importorskip("pyarrow")
    path = parquet(tmp_path / "x.parquet", packed_indices=[[[1]]], exact_values=[[[-1.0]]],
                   coeffs=pa.array([[[]]], pa.list_(pa.list_(pa.float32()))))
    config = dict(vocab_size=V, k=2, exact_k=1, polynomial_degree=0)
    refused(lambda: DistillKitCache(path, config)[0], path, "must have 2 ids, 1 exact values and 1 coeff", "and 0")
    assert len(DistillKitCache(path, {**config, "k": 1})[0]["target"]) == 1


ALIASES = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 7))  # no more levels, in case they are printed
MERGED = "a0: &a0 {" + ", ".join(f"k{i}: 1" for i in range(9)) + "}\n" + "".join(
    f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))


@pytest.mark.parametrize("text, words", [
    *((ALIASES + "".join(f"{name}: {'*a6' if name == wrong else value}\n" for name, value in dict(
        d=10, k=3, exact_k=0, polynomial_terms="[1]", residual_bins="[]", exact_dtype="float32",
        delta_encoding="true").items()), f"{wrong} must be") for wrong in (
            "d", "k", "exact_k", "polynomial_terms", "residual_bins", "exact_dtype", "delta_encoding")),
    (MERGED, "must"), ("[" * 5000, "config must be YAML, got RecursionError"),
    ("d: " + "9" * 5000, "config must be YAML, got ValueError"), ("\udcff", "config must be YAML, got UnicodeDecode"),
    ("d: 1\n" * 20000, "must have at most 65536 bytes, got"),
    ("!!python/name:os.system", "config must be YAML, got ConstructorError")],
    ids=lambda part: part if len(part) < 99 else "")
def test_configurations_in_yaml(tmp_path, text, words):
    pytest.importorskip("yaml")
    capture(tmp_path, "compressed")
    config = tmp_path / "compression_config.yaml"
    config.write_bytes(text.encode("utf8", "surrogateescape"))
    refused(lambda: DistillKitCache(tmp_path), config, words)


def test_mappings_that_multiply_when_they_are_merged(tmp_path, monkeypatch):
    """Simulates PyYAML before 6.0.4."""
    yaml = pytest.importorskip("yaml")
    capture(tmp_path, "compressed")
    monkeypatch.setattr(yaml.SafeLoader, "flatten_mapping", lambda self, node: node.value.extend(node.value * 9))
    (tmp_path / "compression_config.yaml").write_text("d: 8")
    refused(lambda: DistillKitCache(tmp_path), tmp_path, "mappings must have at most 4 keys")


# ---------------------------------------------------------------------------------------------------------------- vLLM

def nested(depth):
    inner = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize("given, words", [
    ([{1: nested(10**5)}], "logprob must be a number, got [[["), ([{2**70: -1.0}], "got ValueError: Overflow"),
    ([{"9" * 5000: -1.0}], "logprobs must be as vLLM returns them, got ValueError: Exceeds"),
    ([{"x" * 10**6: -1.0}], "token must be an id"), ([{1: -10**400}], "logprob must be a number, got -1000"),
    ({"content": 5}, "logprobs must be as vLLM returns them, got TypeError"),
    ({5: 1, "x": 2, **{f"y{i}": 0 for i in range(10**4)}}, "logprobs must have 'content', 'top_logprobs' or"),
    ({"top_logprobs": [{}], "tokens": 5}, "logprobs must be as vLLM returns them, got TypeError")],
    ids=lambda part: part if isinstance(part, str) else "")
def test_vllm(given, words):
    refused(lambda: from_vllm(given), "", words)


# ---------------------------------------------------------------------------------------------------------- other cases

def test_what_is_got_is_said_in_few_words():
    class Wrong:
        def __repr__(self):
            raise OSError

    class Counted:
        times = 0

        def __repr__(self):
            Counted.times += 1
            return "1"
    alike = [Counted()] * 9
    for _ in range(5):
        alike = [alike] * 9
    for value in ("x" * 10**6, b"x" * 10**6, list(range(10**5)), {i: i for i in range(10**5)}, alike, 10**9000, Wrong(),
                  nested(10**5), ValueError("x" * 10**6), (alike, {"a": alike}), {("x" * 999,)}, ["x" * 99] * 16):
        assert 0 < len(described(value)) < 250
    assert Counted.times < 5000
    assert described([0, "cubic", 1.5, None, (2,), {"a": 1}]) == "[0, 'cubic', 1.5, None, (2,), {'a': 1}]"
    assert described(KeyError("a")) == "KeyError: 'a'" and described(MemoryError()) == "MemoryError"
    assert described(torch.zeros(3)) == "a Tensor of shape [3]" and described("x" * 200).count("x") < 201


def test_lengths_of_a_batch_are_those_of_its_targets():
    """Checks that other fields of a sample may be longer, shorter, or have no length."""
    samples = []
    for length in (3, 5):
        target, tokens, _ = sequence(length)
        samples.append({"target": target, "tokens": tokens, "weights": torch.ones(2), "name": "abcd", "number": length})
    batch = collate_sequences(samples)
    assert batch["target"].shape == (2, 5) and batch["tokens"].shape == (2, 5) and batch["weights"].shape == (2, 2)
    assert batch["name"] == ["abcd", "abcd"] and batch["number"].tolist() == [3, 5]


@pytest.mark.parametrize("format", FORMATS)
def test_a_sequence_without_a_position_is_read(tmp_path, format):
    needs(format)
    path = tmp_path / f"x.{format}"
    target = sparse_ce.topk_log_probs(torch.randn(2, 4, V), 3)
    with CacheWriter(path, num_classes=V, k=3) as writer:
        writer.add(target, lengths=[0, 4])
    assert [len(sample["target"]) for sample in TeacherCache(path)] == [0, 4]
