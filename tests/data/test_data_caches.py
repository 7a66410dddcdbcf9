"""Tests teacher caches: every format returns what was written, for this package and for other libraries."""

import os
import pickle
import shutil

import pytest
import torch
from torch.utils.data import DataLoader

import sparse_ce
from cache_cases import FORMATS, LENGTHS, K, V, assert_same, needs, sequence, write
from cases import slow
from sparse_ce import SparseTarget
from sparse_ce.data import CacheWriter, TeacherCache, collate_sequences, parquet, safetensors
from sparse_ce.integrations.teacher import TopKCollator

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(params=FORMATS)
def format(request):
    needs(request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
@pytest.mark.parametrize("vocab", [V, 2**16, 2**16 + 1, 200_000])
@pytest.mark.parametrize("parts", [True, False], ids=["all parts", "target alone"])
def test_a_round_trip_is_exact(tmp_path, format, dtype, ragged, vocab, parts):
    path = tmp_path / f"teacher.{format}"
    sequences = write(path, ragged=ragged, vocab=vocab, dtype=dtype, parts=parts, metadata={"model": "né", "n": [1]},
                      shard=2)  # a single file ignores it
    cache = TeacherCache(path)
    assert len(cache) == len(LENGTHS) and cache.num_classes == vocab and cache.k == (None if ragged else K)
    assert cache.metadata == {"model": "né", "n": [1]}
    for i in (3, 0, 4, 1, 2, -1):
        target, *rest = sequences[i]
        assert cache[i]["target"].values.dtype == dtype
        assert_same(cache[i], target, *(rest if parts else ()))
    with pytest.raises(IndexError, match=r"sparse_ce: index must be an integer in \[-5, 5\), got 5"):
        cache[5]


def test_a_folder_of_shards_is_one_cache(tmp_path, format):
    sequences = write(tmp_path / "teacher", format=format, shard=2)
    assert sorted(file.name for file in (tmp_path / "teacher").iterdir()) == [
        ".complete", *(f"shard-0000{i}.{format}" for i in range(3))]
    cache = TeacherCache(tmp_path / "teacher")
    assert len(cache) == 5
    for i, expected in enumerate(sequences):
        assert_same(cache[i], *expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probabilities_are_rounded_once(tmp_path, format, dtype):
    target, log_tail = sparse_ce.topk_log_probs(torch.randn(2, 6, V), K, return_log_tail=True)
    with CacheWriter(tmp_path / f"teacher.{format}", num_classes=V, k=K, dtype=dtype) as writer:
        writer.add(target, log_tail=log_tail)
    cache = TeacherCache(tmp_path / f"teacher.{format}")
    for i in range(2):
        read = cache[i]
        assert torch.equal(read["target"].values, target[i].values.to(dtype))
        assert torch.equal(read["target"].indices, target[i].indices)
        assert torch.equal(read["log_tail"], log_tail[i])
        logits = torch.randn(6, V)
        expected = SparseTarget.from_topk(target[i].indices, target[i].values.to(dtype), values_are="log_probs")
        assert torch.equal(sparse_ce.cross_entropy(logits, read["target"]), sparse_ce.cross_entropy(logits, expected))


@pytest.mark.parametrize("ragged", [False, True])
def test_any_target_of_log_probabilities_can_be_written(tmp_path, format, ragged):
    """Tests fewer entries than k, padding in the middle, and jagged targets in rectangular caches and vice versa."""
    rows = [[(3, -0.5), (999, -1.0)], None, [(7, -2.0)]]
    padded = SparseTarget.from_topk(torch.tensor([[3, -100, 999], [1, 2, 3], [0, 7, 0]]),
                                    torch.tensor([[-0.5, -1.0, -1.0], [-1.0, -1, -1], [-torch.inf, -2.0, -torch.inf]]),
                                    values_are="log_probs", row_mask=torch.tensor([True, False, True]))
    jagged = SparseTarget.from_jagged(torch.tensor([0, 3, 999, 5, 7]), torch.tensor([-1.0, -0.5, -1.0, -2.0, -2.0]),
                                      torch.tensor([[1, 3], [3, 4], [4, 5]]), values_are="log_probs",
                                      row_mask=torch.tensor([True, False, True]))
    narrow = SparseTarget.from_topk(torch.tensor([[3, 999], [1, 1], [7, 8]]),
                                    torch.tensor([[-0.5, -1.0], [-torch.inf, -torch.inf], [-2.0, -torch.inf]]),
                                    values_are="log_probs")
    exact = SparseTarget.from_topk(torch.tensor([[3, 999, -100, 0], [1, 1, 5, 5], [-100, -100, 7, 8]]),
                                   torch.tensor([[-0.5, -1.0, -1, -torch.inf], [-torch.inf] * 4,
                                                 [-1.0, -1, -2.0, -torch.inf]]), values_are="log_probs")
    batch = sparse_ce.collate([padded, padded])
    with CacheWriter(tmp_path / f"teacher.{format}", num_classes=V, k=None if ragged else 4) as writer:
        for target in (padded, jagged, narrow, exact, batch, batch.to(torch.device("cpu"))[:1]):
            writer.add(target)
    cache = TeacherCache(tmp_path / f"teacher.{format}")
    assert len(cache) == 7
    for sample in cache:
        assert sample["target"].tolist() == rows
        assert sample["target"].form == ("jagged" if ragged else "topk")


def test_what_float16_rounds_to_minus_infinity_is_padding(tmp_path, format):
    target = SparseTarget.from_topk(torch.tensor([[3, 4]]), torch.tensor([[-0.5, -1e6]]), values_are="log_probs")
    for k in (2, None):
        path = tmp_path / f"{k}.{format}"
        with CacheWriter(path, num_classes=V, k=k) as writer:
            writer.add(target)
        assert TeacherCache(path)[0]["target"].tolist() == [[(3, -0.5)]]
        assert TeacherCache(path)[0]["target"].indices.numel() == (k or 1)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of_autocast", [torch.bfloat16, torch.float16], ids=str)
def test_it_is_written_and_read_under_autocast(tmp_path, format, of_autocast, dtype, ragged):
    """Checks that the autocast dtype of a scoring teacher does not change the dtype of the cache."""
    path, plain = tmp_path / f"teacher.{format}", tmp_path / f"plain.{format}"
    write(plain, ragged=ragged, dtype=dtype)
    with torch.autocast("cpu", of_autocast):
        write(path, ragged=ragged, dtype=dtype)
        found = collate_sequences(list(TeacherCache(path)))
    expected = collate_sequences(list(TeacherCache(plain)))
    assert found["target"].equal(expected["target"]) and found["target"].values.dtype == dtype


def test_lengths_leave_padding_out(tmp_path, format):
    target = sparse_ce.topk_log_probs(torch.randn(3, 6, V), 2)
    with CacheWriter(tmp_path / f"teacher.{format}", num_classes=V, k=2) as writer:
        writer.add(target, tokens=torch.arange(18).reshape(3, 6), lengths=[6, 0, 2])
    cache = TeacherCache(tmp_path / f"teacher.{format}")
    assert [sample["target"].shape[0] for sample in cache] == [6, 0, 2]
    assert cache[2]["tokens"].tolist() == [12, 13]


# ------------------------------------------------------------------------------------------------------ lazy reading

def test_opening_reads_no_data_and_a_sequence_reads_itself(tmp_path, monkeypatch):
    for ragged in (False, True):
        path = tmp_path / f"{ragged}.safetensors"
        write(path, [100] * 50, ragged=ragged)
        read = []
        monkeypatch.setattr(safetensors, "tensor_of", lambda data, dtype, f=safetensors.tensor_of:
                            read.append(len(data)) or f(data, dtype))
        cache = TeacherCache(path)
        assert len(cache) == 50 and not read
        cache[17]
        monkeypatch.undo()
        assert sum(read) <= 100 * (K * 4 + 4 + 2 + 1) + 16 + 4 + ragged * 101 * 8


def test_a_sequence_of_parquet_decodes_its_row_group_alone(tmp_path, monkeypatch):
    needs("parquet")
    monkeypatch.setattr(parquet, "ENTRIES_OF_A_GROUP", 100 * K * 4)
    sequences = write(tmp_path / "teacher.parquet", [100] * 10)
    decoded = []
    monkeypatch.setattr(parquet.ParquetRows, "_decoded", lambda self, group, names, f=parquet.ParquetRows._decoded:
                        decoded.append(group) or f(self, group, names))
    cache = TeacherCache(tmp_path / "teacher.parquet")
    assert not decoded
    for i in (5, 6, 9, 4):
        assert_same(cache[i], *sequences[i])
    assert decoded == [1, 2, 1]


@pytest.mark.parametrize("start", ["fork", *slow("spawn")])
def test_workers_read_it(tmp_path, format, start):
    sequences = write(tmp_path / "teacher", format=format, shard=2)
    cache = TeacherCache(tmp_path / "teacher")
    cache[0]  # opened before the fork
    loader = DataLoader(cache, batch_size=2, num_workers=2, collate_fn=collate_sequences, multiprocessing_context=start)
    samples = [{name: part[b, :LENGTHS[2 * n + b]] for name, part in batch.items()} for n, batch in enumerate(loader)
               for b in range(len(batch["tokens"]))]
    assert len(samples) == 5
    for sample, expected in zip(samples, sequences):
        assert_same(sample, *expected)


@pytest.mark.parametrize("rows", [slice(1, 3), slice(None), slice(-2, None), slice(4, 0, -2), slice(7, 9),
                                  slice(1, 99)], ids=str)
def test_a_slice_is_a_cache_of_these_sequences(tmp_path, format, rows, monkeypatch):
    monkeypatch.setattr("sparse_ce.data.shards.MOST_OPEN", 1)
    expected = write(tmp_path / "teacher", format=format, shard=2)[rows]
    cache = TeacherCache(tmp_path / "teacher", predicts="next")
    part = cache[rows]
    assert len(part) == len(expected) and len(cache) == 5 and part.num_classes == V
    for read in (part, pickle.loads(pickle.dumps(part)), part[:]):
        for i, sample in enumerate(expected):
            assert_same(read[i], *sample)
            assert_same(read[i - len(expected)], *sample)
            assert_same(read[i:][0], *sample)
        with pytest.raises(IndexError, match=rf"sparse_ce: index must be an integer in \[-?{len(expected)}, "):
            read[len(expected)]
        with pytest.raises(IndexError):
            read[-len(expected) - 1]
        assert len(list(read)) == len(expected)
    for i in (0, 4, 0):
        cache[i], part[:1], list(cache[i:i + 1])
    maps = [shard._rows._file if format == "parquet" else shard._map for shard in cache.shards.all]
    assert sum(map(bool, maps)) == 1  # including files opened by slices


def test_a_repr_says_what_is_stored(tmp_path):
    path = tmp_path / "teacher"
    write(path, shard=2)
    assert repr(TeacherCache(path)) == (
        f"TeacherCache({str(path)!r}, sequences=5, num_classes={V}, k={K}, predicts='next')")
    assert repr(TeacherCache(path, predicts="token")[2:]) == (
        f"TeacherCache({str(path)!r}, sequences=3, num_classes={V}, k={K}, predicts='token')")
    path = tmp_path / "ranks"
    assert repr(CacheWriter(path, num_classes=9, dtype=torch.bfloat16, rank=1, world_size=4)) == (
        f"CacheWriter({str(path)!r}, sequences=0, num_classes=9, k=None, dtype=bfloat16, format='safetensors', "
        "rank=1, world_size=4)")
    with CacheWriter(tmp_path / "one.safetensors", num_classes=9, k=4) as writer:
        writer.add(sparse_ce.topk_log_probs(torch.randn(2, 3, 9), 4))
        assert repr(writer) == (f"CacheWriter({str(writer.path)!r}, sequences=2, num_classes=9, k=4, dtype=float16, "
                                "format='safetensors')")
    assert repr(TopKCollator()) == ("TopKCollator(indices='teacher_ids', values='teacher_log_probs', "
                                    "values_are='log_probs', predicts=None, k=None, num_classes=None)")
    assert repr(TopKCollator(len, predicts="next", k=3, label_weight=0.5, fill_with_labels=True, log_tail="tail",
                             padding_side="left")) == (
        "TopKCollator(indices='teacher_ids', values='teacher_log_probs', values_are='log_probs', predicts='next', k=3, "
        "num_classes=None, log_tail='tail', padding_side='left', fill_with_labels=True, label_weight=0.5)")


def test_a_pickled_cache_is_small_and_reads_on(tmp_path, format):
    sequences = write(tmp_path / f"teacher.{format}", [50] * 5)
    cache = TeacherCache(tmp_path / f"teacher.{format}")
    before = cache[2]
    pickled = pickle.dumps(cache)
    assert len(pickled) < 4000
    assert_same(pickle.loads(pickled)[2], *sequences[2])
    assert_same(before, *sequences[2])


def test_few_shards_are_open_at_a_time(tmp_path, format, monkeypatch):
    monkeypatch.setattr("sparse_ce.data.shards.MOST_OPEN", 2)
    sequences = write(tmp_path / "teacher", format=format, shard=1)
    cache = TeacherCache(tmp_path / "teacher")
    for _ in range(2):
        for i, expected in enumerate(sequences):
            assert_same(cache[i], *expected)
    for i in (0, 1, 0, 2):  # of 0 and 1, 1 is the least recently used
        cache[i]
    maps = [shard._rows._file if format == "parquet" else shard._map for shard in cache.shards.all]
    assert [bool(m) for m in maps] == [True, False, True, False, False]


# ------------------------------------------------------------------------------------------------------------ training

def test_batches(tmp_path, format):
    sequences = write(tmp_path / f"teacher.{format}", [6, 6, 6])
    batch = sparse_ce.collate(list(TeacherCache(tmp_path / f"teacher.{format}")))
    assert batch["tokens"].shape == (3, 6) and batch["target"].shape == (3, 6)
    assert_same({"target": batch["target"][1]}, sequences[1][0])


def test_rows_are_moved_to_the_tokens_that_they_predict(tmp_path, format):
    for written, ragged in (("next", False), ("token", False), ("next", True)):
        path = tmp_path / f"{written}-{ragged}.{format}"
        sequences = write(path, predicts=written, ragged=ragged)
        for wanted in (None, "next", "token"):
            names = {"tokens": "input_ids", "target": "soft"}
            assert TeacherCache(path, predicts=wanted).predicts == (wanted or written)
            for sample, (target, tokens, log_tail) in zip(TeacherCache(path, predicts=wanted, names=names), sequences):
                moved = 0 if wanted in (None, written) else 1 if wanted == "next" else -1
                expected = target.shift(moved)
                assert sample["soft"].tolist() == expected.tolist()
                assert torch.equal(sample["soft"].ne(-100), expected.ne(-100))
                if moved:
                    kept, gone = (slice(1, None), -1) if moved == 1 else (slice(None, -1), 0)
                    assert sample["log_tail"][gone] == 0 and torch.equal(
                        sample["log_tail"][:-1] if moved == 1 else sample["log_tail"][1:], log_tail[kept])
                assert torch.equal(sample["input_ids"], tokens)
    with pytest.raises(ValueError, match="sparse_ce: predicts must be 'next', 'token' or None, got 'last'"):
        TeacherCache(path, predicts="last")
    with pytest.raises(ValueError, match="sparse_ce: names must have keys among .*, got .*'ids'"):
        TeacherCache(path, names={"ids": "labels"})


def test_the_trainer_learns_from_a_cache(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.24")
    from sparse_ce.integrations.transformers import causal_lm_loss
    write(tmp_path / "teacher", [8, 5, 8, 6], shard=2)
    cache = TeacherCache(tmp_path / "teacher", predicts="token", names={"tokens": "input_ids", "target": "labels"})
    config = transformers.LlamaConfig(vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                      num_attention_heads=2)
    args = transformers.TrainingArguments(str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2,
                                          use_cpu=True, report_to="none", remove_unused_columns=False)

    def batch(samples):
        return {name: part for name, part in collate_sequences(samples).items() if name != "log_tail"}

    trained = transformers.Trainer(transformers.LlamaForCausalLM(config), args, train_dataset=cache,
                                   data_collator=batch, compute_loss_func=causal_lm_loss()).train()
    assert trained.training_loss > 0


def test_datasets_reads_parquet_and_the_collator_takes_it(tmp_path):
    needs("parquet")
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("transformers", minversion="5.24")
    from sparse_ce.integrations.transformers import TopKCollator
    for ragged in (False, True):
        sequences = write(tmp_path / f"{ragged}.parquet", ragged=ragged)
        read = datasets.load_dataset("parquet", data_files=str(tmp_path / f"{ragged}.parquet"), split="train",
                                     cache_dir=str(tmp_path / "cache"))
        assert read.column_names == ["input_ids", "ids", "log_probs", "log_tail", "predicts"]
        assert str(read.features["ids"]) == "List(List(Value('uint16')))"
        batch = TopKCollator(indices="ids", values="log_probs", num_classes=V)(
            list(read.remove_columns("log_tail")))
        for i, (target, tokens, _) in enumerate(sequences):
            labels = batch["labels"][i, :len(tokens)]
            assert labels.tolist() == target.shift(-1).tolist()
            assert batch["input_ids"][i, :len(tokens)].tolist() == tokens.tolist()


# ------------------------------------------------------------------------------------------- reading by other libraries

def test_the_library_of_safetensors_reads_the_file(tmp_path):
    library = pytest.importorskip("safetensors")
    sequences = write(tmp_path / "teacher.safetensors", ragged=True, dtype=torch.bfloat16)
    with library.safe_open(tmp_path / "teacher.safetensors", "pt") as file:
        t = {name: file.get_tensor(name) for name in file.keys()}
        assert set(file.metadata()) == {"cache"}
    assert int.from_bytes((tmp_path / "teacher.safetensors").read_bytes()[:8], "little") % 8 == 0  # tensors are aligned
    assert {name: x.dtype for name, x in t.items()} == {
        "ids": torch.uint16, "log_probs": torch.bfloat16, "entries": torch.int64, "sequences": torch.int64,
        "tokens": torch.uint16, "log_tail": torch.float32, "crc32": torch.uint32, "predicts": torch.uint8}
    begin, end = t["entries"][t["sequences"][2]], t["entries"][t["sequences"][3]]
    assert torch.equal(t["ids"][begin:end].long(), sequences[2][0].indices)
    assert torch.equal(t["log_probs"][begin:end].float(), sequences[2][0].values)


def test_arrow_reads_the_file(tmp_path):
    needs("parquet")
    import pyarrow.parquet as pq
    for dtype, column, kind in ((torch.float16, "log_probs", "halffloat"), (torch.float32, "log_probs", "float"),
                                (torch.bfloat16, "log_probs_bfloat16", "uint16")):
        path = tmp_path / f"{kind}.parquet"
        sequences = write(path, dtype=dtype, vocab=2**17, ragged=True)
        table = pq.read_table(path)
        assert {f.name: str(f.type) for f in table.schema} == {
            "input_ids": "list<element: uint32>", "ids": "list<element: list<element: uint32>>",
            column: f"list<element: list<element: {kind}>>", "log_tail": "list<element: float>",
            "predicts": "list<element: uint8>"}
        if column == "log_probs":
            pairs = [None if not ids else list(zip(ids, values)) for ids, values in
                     zip(table["ids"][0].as_py(), table[column][0].as_py())]
            assert pairs == sequences[0][0].tolist()


# ----------------------------------------------------------------------------------- reading files of other libraries

def test_rectangles_of_whole_sequences(tmp_path):
    """Reads ids (N, S, K) without a header."""
    library = pytest.importorskip("safetensors.torch")
    target, log_tail = sparse_ce.topk_log_probs(torch.randn(6, 8, V), 3, return_log_tail=True)
    tokens = torch.arange(48).reshape(6, 8)
    for i, rows in enumerate((slice(0, 4), slice(4, 6))):
        shard = {"tokens": tokens[rows].to(torch.uint16), "ids": target.indices[rows].to(torch.uint16),
                 "log_probs": target.values[rows].half(), "log_tail": log_tail[rows].contiguous()}
        library.save_file({name: t.contiguous() for name, t in shard.items()},
                          tmp_path / f"shard-0000{i}-of-00002.safetensors")
    cache = TeacherCache(tmp_path, num_classes=V)
    assert len(cache) == 6
    for i in range(6):
        expected = SparseTarget.from_topk(target[i].indices, target[i].values.half(),
                                          values_are="log_probs", num_classes=V)
        assert_same(cache[i], expected, tokens[i], log_tail[i])


def test_arrays_and_columns_without_a_header(tmp_path):
    (target, tokens, _), other = sequence(4), sequence(3, 1)
    path = tmp_path / "arrays.safetensors"
    pytest.importorskip("safetensors.torch").save_file({
        "ids": torch.cat((target.indices, other[0].indices)).to(torch.int32),
        "log_probs": torch.cat((target.values, other[0].values)), "sequences": torch.tensor([0, 4, 7])}, path)
    with pytest.raises(ValueError, match="sparse_ce: num_classes must be given if the files do not store it"):
        TeacherCache(path)
    cache = TeacherCache(path, num_classes=V)
    assert torch.equal(cache[1]["target"].indices, other[0].indices) and len(cache) == 2
    needs("parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq
    table = pa.table({"tokens": [tokens.tolist(), [1]], "ids": [target.indices.tolist(), [[5]]],
                      "log_probs": pa.array([target.values.tolist(), [[-0.5]]],
                                            pa.large_list(pa.list_(pa.float32())))})
    pq.write_table(table.slice(0, 2), tmp_path / "foreign.parquet")
    cache = TeacherCache(tmp_path / "foreign.parquet", num_classes=V)
    assert cache[1]["target"].tolist() == [[(5, -0.5)]] and cache[1]["tokens"].tolist() == [1]
    assert torch.equal(cache[0]["target"].indices.reshape(4, K), target.indices)


# -------------------------------------------------------------------------------------------------------------- writing

def test_an_error_leaves_whole_shards_and_nothing_else(tmp_path, format):
    for path, left in ((tmp_path / "teacher", [f"shard-00000.{format}"]), (tmp_path / f"one.{format}", None)):
        with pytest.raises(KeyError):
            with CacheWriter(path, num_classes=V, k=K, shard=2, format=format) as writer:
                for i in range(3):
                    writer.add(sequence(4, i)[0])
                raise KeyError
        assert (sorted(file.name for file in path.iterdir()) if path.exists() else None) == left


def test_a_file_that_cannot_be_written_has_no_name(tmp_path, format, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda number: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write(tmp_path / f"teacher.{format}")
    assert list(tmp_path.iterdir()) == []


def test_a_writer_goes_on_where_another_was_stopped(tmp_path, format):
    sequences = [sequence(n, i) for i, n in enumerate(LENGTHS)]
    options = dict(num_classes=V, k=K, shard=2, format=format, metadata={"model": "m"})
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / f".shard-00000.{format}.{'0' * 16}.tmp").touch()  # a writer was killed at the first shard
    stopped = CacheWriter(tmp_path / "teacher", **options, resume=True)
    for target, tokens, _ in sequences[:3]:
        stopped.add(target, tokens=tokens)
    del stopped
    killed = tmp_path / "teacher" / f".shard-00001.{format}.{'f' * 16}.tmp"  # a writer was killed at the second shard
    killed.write_bytes(b"half")
    with pytest.raises(ValueError, match="sparse_ce: path must not exist, got .*resume=True"):
        CacheWriter(tmp_path / "teacher", **options)
    with CacheWriter(tmp_path / "teacher", **options, resume=True) as writer:
        assert len(writer) == 2
        with pytest.raises(ValueError, match=r"sparse_ce: columns must be \(.*'tokens', 'predicts'\), as before"):
            writer.add(sequences[2][0])
        for target, tokens, _ in sequences[len(writer):]:
            writer.add(target, tokens=tokens)
    assert sorted(os.listdir(tmp_path / "teacher")) == [".complete", *(f"shard-0000{i}.{format}" for i in range(3))]
    cache = TeacherCache(tmp_path / "teacher")
    assert len(cache) == 5
    for i, (target, tokens, _) in enumerate(sequences):
        assert_same(cache[i], target, tokens)
    for other in (dict(k=4), dict(num_classes=V + 1), dict(dtype=torch.float32), dict(predicts="token"),
                  dict(metadata={"model": "n"})):
        with pytest.raises(ValueError, match="sparse_ce: .*shard-00000.* must have this writer's header, got "
                                             f"{next(iter(other))}"):
            CacheWriter(tmp_path / "teacher", **{**options, **other}, resume=True)


def test_what_was_written_stays(tmp_path, format):
    """Checks that a file is written once, and that a folder can be extended."""
    target = sequence(4)[0]
    one, two = (CacheWriter(tmp_path / f"{name}.{format}", num_classes=V, k=K) for name in ("teacher", "other"))
    for writer in (one, two):
        writer.add(target)
    one.close()
    shutil.copy(tmp_path / f"teacher.{format}", tmp_path / f"other.{format}")
    with pytest.raises(ValueError, match="writer must be open, got one that has written .*, which is one file"):
        one.add(target)
    one.close()  # nothing left to write
    with pytest.raises(ValueError, match="path must not exist, got .*, which another writer has written in"):
        two.close()
    assert len(TeacherCache(tmp_path / f"teacher.{format}")) == 1
    folder = CacheWriter(tmp_path / "folder", num_classes=V, k=K, format=format)
    for count in (1, 2):
        folder.add(target)
        folder.close()
        assert len(folder) == len(TeacherCache(tmp_path / "folder")) == count


def test_an_existing_file_is_not_overwritten(tmp_path, format):
    path = tmp_path / f"teacher.{format}"
    sequences = write(path)
    with pytest.raises(ValueError, match="sparse_ce: path must not exist"):
        write(path)
    with pytest.raises(ValueError, match="sparse_ce: path must be a folder of shards to be resumed"):
        write(path, resume=True)
    assert_same(TeacherCache(path)[0], *sequences[0])
