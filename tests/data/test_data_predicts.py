"""Tests ``predicts``: row i holds the prediction for token i or for the next token, and each position of a cache keeps
that information."""

import pytest
import torch

import sparse_ce
from cache_cases import FORMATS, V, needs, sequence, write
from sparse_ce.data import CacheWriter, TeacherCache, from_vllm

BOTH = r"'next' means that row i is the teacher's prediction for token i \+ 1, .*; 'token' means that row i is its"


@pytest.fixture(params=FORMATS)
def format(request):
    needs(request.param)
    return request.param


def without_header(path, **changes):
    """Saves a cache again as libraries do that keep only its arrays or columns, with some changes."""
    again = path.with_name("again-" + path.name)
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq
        table = pq.read_table(path).replace_schema_metadata(None)
        for name, column in changes.items():
            table = table.drop_columns(name) if column is None else table.set_column(
                table.column_names.index(name), name, [column])
        pq.write_table(table, again)
        return again
    library = pytest.importorskip("safetensors.torch")
    library.save_file({name: t for name, t in {**library.load_file(path), **changes}.items() if t is not None}, again)
    return again


@pytest.mark.parametrize("written", ["next", "token"])
def test_files_say_it_without_their_header(tmp_path, format, written):
    sequences = write(tmp_path / f"teacher.{format}", (7, 1, 3), predicts=written)
    path = without_header(tmp_path / f"teacher.{format}")
    for wanted, moved in ((None, 0), (written, 0), ("next", 1), ("token", -1)):
        cache = TeacherCache(path, predicts=wanted, num_classes=V)
        assert cache.predicts == (wanted or written)
        for sample, (target, *_) in zip(cache, sequences, strict=True):
            assert sample["target"].tolist() == target.shift(0 if wanted in (None, written) else moved).tolist()
    other = "token" if written == "next" else "next"
    with pytest.raises(ValueError, match=f"sparse_ce: written must be '{written}', as .*again.* says, got '{other}'"):
        TeacherCache(path, written=other, num_classes=V)
    bare = without_header(tmp_path / f"teacher.{format}", predicts=None)
    with pytest.raises(ValueError, match=f"sparse_ce: written must be 'next' or 'token' if .*; {BOTH}"):
        TeacherCache(bare, predicts="token", num_classes=V)
    assert TeacherCache(bare, num_classes=V).predicts is None


def test_a_first_sequence_without_positions_says_nothing(tmp_path, format):
    target, path = sequence(4)[0], tmp_path / f"teacher.{format}"
    with CacheWriter(path, num_classes=V, k=5, predicts="token") as writer:
        for part in (target[:0], target):
            writer.add(part)
    cache = TeacherCache(without_header(path), predicts="next", num_classes=V)
    assert cache[0]["target"].tolist() == [] and cache[1]["target"].tolist() == target.shift(1).tolist()


def test_rows_of_both_kinds_are_not_one_cache(tmp_path, format):
    path = tmp_path / f"teacher.{format}"
    write(path, (4, 4))
    if format == "parquet":
        changes = {"predicts": [[1] * 4, [0] * 4]}
    else:
        changes = {"predicts": torch.tensor([1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.uint8)}
    cache = TeacherCache(without_header(path, **changes), num_classes=V, verify=False)
    assert cache[0]["target"].tolist() == sequence(4)[0].tolist()
    with pytest.raises(ValueError, match="predicts must be 'next', as the file says, got 'token' at sequence 1 "):
        cache[1]
    with pytest.raises(ValueError, match="sparse_ce: predicts must be 'next', as in .*0000.*, got 'token' in .*0001"):
        TeacherCache(merged(tmp_path, format), num_classes=V)


def merged(tmp_path, format):
    """Returns a folder with shards of two caches, as libraries save them again."""
    for i, predicts in enumerate(("next", "token")):
        write(tmp_path / predicts, (4,), predicts=predicts, format=format)
        (tmp_path / "merged").mkdir(exist_ok=True)
        path = without_header(tmp_path / predicts / f"shard-00000.{format}")
        path.rename(tmp_path / "merged" / f"{i:04}.{format}")
    return tmp_path / "merged"


def test_labels_need_it(tmp_path):
    write(tmp_path / "teacher")
    with pytest.raises(ValueError, match=f"sparse_ce: predicts must be .* the target 'labels', got None; {BOTH}"):
        TeacherCache(tmp_path / "teacher", names={"target": "labels"})


# ---------------------------------------------------------------------------------------------------------- the writer

def vllm(tokens, classes):
    """Returns prompt log-probabilities: the token itself first, then the likeliest ones; None for the first token."""
    return [None, *({t: -3.0, (t + 1) % classes: -0.5, (t + 2) % classes: -1.5} for t in tokens[1:].tolist())]


@pytest.mark.parametrize("k", [None, 3])
def test_a_writer_of_vllms_rows_must_say_it(tmp_path, format, k):
    tokens = torch.randint(1000, (12,), generator=torch.Generator().manual_seed(0))
    target = from_vllm(vllm(tokens, 1000), num_classes=1000)
    with pytest.raises(ValueError, match=f"predicts must be given if rows contain the token .*; {BOTH}"):
        CacheWriter(tmp_path / f"x.{format}", num_classes=1000, k=k).add(target, tokens=tokens)
    for text in ("next", "token"):
        with CacheWriter(tmp_path / f"{text}.{format}", num_classes=1000, k=k, predicts=text) as writer:
            writer.add(target, tokens=tokens)
        assert TeacherCache(tmp_path / f"{text}.{format}").predicts == text


def test_rows_that_do_not_tell_are_those_of_logits(tmp_path):
    """Tests all classes, few positions, a text of one token, and tokens that are not among the entries."""
    tokens = torch.randint(1000, (12,), generator=torch.Generator().manual_seed(0))
    constant = torch.full((12,), 7)
    everything = sparse_ce.topk_log_probs(torch.randn(12, 8), 7)
    wrong = vllm(tokens, 1000)
    wrong[5] = {999: -0.5}
    with CacheWriter(tmp_path / "x", num_classes=1000) as writer:
        writer.add(from_vllm(vllm(tokens, 1000)[:3]), tokens=tokens[:3])
        writer.add(from_vllm(vllm(constant, 1000)), tokens=constant)
        writer.add(from_vllm(wrong), tokens=tokens)
    with CacheWriter(tmp_path / "y", num_classes=8) as writer:
        writer.add(everything, tokens=everything.indices[:, 0])


# ----------------------------------------------------------------------------------- rows on their way to the collator

def self_distillation(tmp_path, written):
    """Returns a teacher's logits (B, S, V), and the rows of their cache as read by ``datasets``."""
    datasets = pytest.importorskip("datasets")
    needs("parquet")
    logits = 5 * torch.randn(4, 9, V, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(V, (4, 9), generator=torch.Generator().manual_seed(1))
    target, log_tail = sparse_ce.topk_log_probs(logits, 50, return_log_tail=True)
    if written == "token":
        target, log_tail = target.shift(-1), torch.nn.functional.pad(log_tail, (1, -1))
    path = tmp_path / f"{written}.parquet"
    text = {} if written == "next" else {"predicts": "token"}
    with CacheWriter(path, num_classes=V, k=50, dtype=torch.float32, **text) as writer:
        writer.add(target, tokens=tokens, log_tail=log_tail)
    return logits, datasets.load_dataset("parquet", data_files=str(path), split="train",
                                         cache_dir=str(tmp_path / "cache"))


def kl_to_itself(logits, batch):
    return sparse_ce.divergence(logits[:, :-1], batch["labels"][:, 1:], tail="bucket",
                                teacher_log_tail=batch["teacher_log_tail"][:, 1:]).item()


def collator(**options):
    pytest.importorskip("transformers", minversion="5.24")
    from sparse_ce.integrations.transformers import TopKCollator
    return TopKCollator(indices="ids", values="log_probs", log_tail="log_tail", num_classes=V, **options)


def through_pandas(rows):
    import datasets
    return datasets.Dataset.from_pandas(rows.to_pandas())


def through_a_file(rows, tmp_path):
    import datasets
    rows.to_parquet(tmp_path / "again.parquet")
    return datasets.Dataset.from_parquet(str(tmp_path / "again.parquet"), cache_dir=str(tmp_path / "cache"))


WAYS = {
    "as they are": lambda rows, _: rows, "select": lambda rows, _: rows.select(range(4)),
    "map": lambda rows, _: rows.map(lambda row: {"length": len(row["input_ids"])}).remove_columns("length"),
    "pandas": lambda rows, _: through_pandas(rows), "a file": through_a_file,
    "arrow": lambda rows, _: type(rows)(rows.with_format("arrow")[:]),
    "NumPy": lambda rows, _: rows.with_format("numpy"),
    "torch": lambda rows, _: rows.with_format("torch"), "records": lambda rows, _: rows.to_pandas().to_dict("records"),
}


@pytest.mark.parametrize("written", ["next", "token"])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_has_learned_all_of_itself(tmp_path, written, way):
    logits, rows = self_distillation(tmp_path, written)
    for text in ({}, {"predicts": written}):
        batch = collator(**text)(list(WAYS[way](rows, tmp_path)))
        assert abs(kl_to_itself(logits, batch)) < 1e-5 and "predicts" not in batch
    other = "token" if written == "next" else "next"
    with pytest.raises(ValueError, match=f"must match the samples, '{written}', got '{other}'; .*{BOTH}"):
        collator(predicts=other)(list(WAYS[way](rows, tmp_path)))


def test_rows_that_lost_it_need_the_argument(tmp_path):
    logits, rows = self_distillation(tmp_path, "next")
    bare = rows.remove_columns("predicts")
    with pytest.raises(ValueError, match=f"sparse_ce: predicts must be 'next' or 'token', got None and .*{BOTH}"):
        collator()(list(bare))
    assert abs(kl_to_itself(logits, collator(predicts="next")(list(bare)))) < 1e-5
    assert kl_to_itself(logits, collator(predicts="token")(list(bare))) > 1


def test_batches_of_both_kinds(tmp_path):
    datasets = pytest.importorskip("datasets")
    logits, rows = self_distillation(tmp_path, "next")
    both = datasets.concatenate_datasets([rows, self_distillation(tmp_path, "token")[1]]).select([4, 1, 2, 7])
    assert abs(kl_to_itself(logits, collator()(list(both)))) < 1e-5
    for text in ("next", "token"):
        with pytest.raises(ValueError, match="predicts must match the samples"):
            collator(predicts=text)(list(both))
    mixed = datasets.concatenate_datasets([rows, rows.remove_columns("predicts")])  # None in its place
    with pytest.raises(ValueError, match="predicts must be 'next' or 'token', got None"):
        collator()(list(mixed))
    assert abs(kl_to_itself(logits, collator(predicts="next")(list(mixed.select([0, 5, 6, 3]))))) < 1e-5


def test_packed_rows_of_both_kinds(tmp_path):
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl", minversion="1.16")
    logits, rows = self_distillation(tmp_path, "next")
    both = datasets.concatenate_datasets([rows, self_distillation(tmp_path, "token")[1]]).select([4, 1, 2, 7])
    packed = trl.pack_dataset(both, 18, "bfd")
    assert len(packed) == 2
    collate = collator()
    for begin, row in zip((0, 2), packed):
        order = [next(i for i in range(4) if both[i]["input_ids"] == row["input_ids"][at:at + 9]) for at in (0, 9)]
        collate.collator = lambda samples: {"input_ids": torch.tensor([samples[0]["input_ids"]]),
                                            "position_ids": torch.arange(9).repeat(2)[None]}
        batch = collate([row])
        assert batch["labels"].ne(-100).tolist() == [([False] + [True] * 8) * 2]
        assert abs(kl_to_itself(logits[order].flatten(0, 1)[None], batch)) < 1e-5
    sample = {**both[0], "predicts": [1] * 4 + [0] * 5}
    for wrong, words in ((sample, r"same at all positions, got \[0, 1\] in a sequence of a sample"),
                         ({**sample, "predicts": [1] * 8}, r"an element for each of the 9 input_ids, got shape \[8\]"),
                         ({**sample, "predicts": [0.5] * 9}, r"1, for 'next', or 0, .*, got \[0.5\]"),
                         ({**sample, "predicts": [2] * 9}, r"1, for 'next', or 0, .*, got \[2\]")):
        with pytest.raises(ValueError, match="sparse_ce: predicts must (be|have) .*" + words):
            collator()([wrong])


def test_vllms_objects_say_it_themselves():
    pytest.importorskip("transformers", minversion="5.24")
    from sparse_ce.integrations.transformers import TopKCollator
    sample = {"input_ids": [5, 6], "teacher_log_probs": [None, {6: -0.1, 9: -2.4}]}
    for text in (None, "token"):
        assert TopKCollator(predicts=text)([sample])["labels"].tolist() == [[None, [(6, -0.10000000149011612),
                                                                                   (9, -2.4000000953674316)]]]
    with pytest.raises(ValueError, match=f"predicts must be 'token' for vLLM's log-prob.*, got 'next'; .*{BOTH}"):
        TopKCollator(predicts="next")([sample])
    with pytest.raises(ValueError, match="predicts must match the samples, 'next', got 'token'"):
        TopKCollator()([{**sample, "predicts": [1, 1]}])
