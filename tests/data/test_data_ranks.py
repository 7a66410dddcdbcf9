"""Tests a corpus that several writers score into one folder, which equals the folder of one writer."""

import time

import pytest
import torch

import forked
import sparse_ce
from rank_writer import SHARD, TOTAL, VOCAB, K, corpus, score, writer
from sparse_ce.data import CacheWriter, TeacherCache


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.startswith(".lock")}


@pytest.fixture
def one(tmp_path):
    """Returns the files of one writer, and their format."""
    def written(**named):
        folder = tmp_path / "one"
        with writer(folder, **named) as made:
            assert score(made) == [slice(i, min(i + SHARD, TOTAL)) for i in range(0, TOTAL, SHARD)]
        return files(folder)
    return written


@pytest.mark.parametrize("format", ["safetensors", "npy"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_the_folder_is_that_of_one_writer(world, format, one, tmp_path):
    expected, folder = one(format=format), tmp_path / "several"
    for rank in reversed(range(world)):
        with writer(folder, rank=rank, world_size=world, format=format) as made:
            slices = score(made)
        assert [part.start // SHARD for part in slices] == list(range(rank, 6, world))
        assert len(made) == sum(part.stop - part.start for part in slices)
        assert (folder / ".complete").exists() == (rank == 0)
    assert files(folder) == expected
    cache = TeacherCache(folder)
    assert torch.equal(torch.stack([cache[i]["tokens"] for i in range(TOTAL)]), corpus()[1])


@pytest.mark.parametrize("later", [1, 2, 3, 5])
def test_a_stopped_rank_is_resumed_by_any_number_of_ranks(later, one, tmp_path):
    expected, folder = one(), tmp_path / "several"
    for rank, shards in (0, None), (1, 1), (2, None):
        try:
            with writer(folder, rank=rank, world_size=3) as made:
                score(made, shards)
        except KeyboardInterrupt:
            assert rank == 1
    (folder / f".shard-00004.safetensors.{'0' * 16}.tmp").write_text("a killed writer's")
    assert not (folder / ".complete").exists()
    with pytest.raises(ValueError, match="a shard is missing"):
        TeacherCache(folder)
    with pytest.raises(ValueError, match="a shard is missing"):  # without a rank, a writer continues at the end
        writer(folder, resume=True)
    scored = []
    for rank in range(later):
        with writer(folder, rank=rank, world_size=later, resume=True) as made:
            scored += score(made)
    assert [part.start // SHARD for part in scored] == [4] and files(folder) == expected


def test_both_write_at_the_same_time(tmp_path, one):
    expected, folder = one(), tmp_path / "several"
    with writer(folder, rank=0, world_size=2) as first, writer(folder, rank=1, world_size=2) as second:
        with pytest.raises(ValueError, match="path must have one writer at a time"):
            writer(folder, rank=1, world_size=2)
        leftover = folder / f".shard-00001.safetensors.{'1' * 16}.tmp"
        leftover.write_text("of the second")
        score(first)
        with pytest.raises(ValueError, match="delete it, or use resume=True"):
            first._lock.release()
            writer(folder, rank=0, world_size=2)
        assert leftover.exists()  # the first does not remove it
        leftover.unlink()
        score(second)
    assert files(folder) == expected


def test_one_writer_loops_over_what_is_missing(tmp_path, one):
    expected, folder = one(), tmp_path / "resumed"
    with pytest.raises(KeyboardInterrupt):
        with writer(folder) as made:
            score(made, 2)
    with writer(folder, resume=True) as made:
        assert [part.start for part in score(made)] == [8, 12, 16, 20]
    assert files(folder) == expected
    with writer(folder, resume=True) as made:
        assert score(made) == []


def test_what_does_not_fit_is_refused(tmp_path):
    for rank, world in (2, 2), (-1, 2), (0, 0), (1.0, 2), (True, 1), (None, 2), (0, "2"):
        with pytest.raises(ValueError, match=r"sparse_ce: rank must be in \[0, world_size\)"):
            writer(tmp_path / "a", rank=rank, world_size=world)
    with pytest.raises(ValueError, match="sparse_ce: path must be a folder of shards for several writers"):
        writer(tmp_path / "a.npy", rank=0, world_size=2)
    target = sparse_ce.topk_log_probs(corpus()[0], K)
    made = writer(tmp_path / "b", rank=0, world_size=2)
    with pytest.raises(ValueError, match="sparse_ce: sequences must be a positive integer"):
        next(made.missing(0))
    with pytest.raises(ValueError, match=r"sparse_ce: add must be called in a loop over missing\(\)"):
        made.add(target[:2])
    with pytest.raises(ValueError, match="sparse_ce: writer must get all sequences of missing"):
        writer(tmp_path / "c", rank=0, world_size=2).close()
    parts = made.missing(TOTAL)
    next(parts)
    with pytest.raises(ValueError, match="sparse_ce: add must get sequences 0 to 4, got 5"):
        made.add(target[:5])
    made.add(target[:3])
    for end in lambda: next(parts), made.close:
        with pytest.raises(ValueError, match="sparse_ce: (add must get sequences 0 to 4|writer must get all).*, got 3"):
            end()
    one = writer(tmp_path / "d")
    parts = one.missing(TOTAL)
    next(parts)
    with pytest.raises(ValueError, match="sparse_ce: add must get sequences 0 to 4, got 0"):
        next(parts)
    with writer(tmp_path / "e", rank=0, world_size=2) as made:
        score(made)
    with pytest.raises(ValueError, match="must hold 4 sequences from 16 on, got 4 from 16 on|must have this writer's"):
        with CacheWriter(tmp_path / "e", num_classes=VOCAB, k=K, shard=SHARD, rank=0, world_size=2,
                         resume=True) as made:
            score(made)
    with pytest.raises(ValueError, match="must hold 1 sequences from 16 on, got 4 from 16 on; the corpus or the shard"):
        with writer(tmp_path / "e", rank=0, world_size=2, resume=True) as made:
            score(made, total=17)


def test_a_killed_process(tmp_path, one):
    """Kills one of three processes in the middle of its shards, and starts all again."""
    expected, folder = one(), tmp_path / "several"
    program = forked.PROCESSES / "rank_writer.py"

    processes = forked.ranks(3, program, folder, 1, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (folder / "shard-00001.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    processes[1].kill()
    codes = forked.all_codes(processes)
    assert codes[0] == codes[2] == 0 and codes[1] != 0
    assert not (folder / ".complete").exists() and not (folder / "shard-00004.safetensors").exists()
    assert forked.all_codes(forked.ranks(3, program, folder, -1, cwd=tmp_path)) == [0, 0, 0]
    assert files(folder) == expected


@pytest.mark.parametrize("later", ["missing", "close"])
def test_a_full_disk_loses_no_sequence(later, one, tmp_path, monkeypatch):
    expected, folder = one(), tmp_path / "several"
    formats = sparse_ce.data.writer.FORMATS
    made, (logits, tokens) = writer(folder, rank=0, world_size=1), corpus()
    parts = made.missing(TOTAL)
    fails = range(0, TOTAL, SHARD)[0 if later == "missing" else -1]
    for part in parts:
        target, log_tail = sparse_ce.topk_log_probs(logits[part], K, return_log_tail=True)
        if part.start != fails:
            made.add(target, tokens=tokens[part], log_tail=log_tail)
            continue
        with monkeypatch.context() as full, pytest.raises(OSError, match="No space"):
            full.setitem(formats, "safetensors", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
            made.add(target, tokens=tokens[part], log_tail=log_tail)
        if later == "close":
            break
    made.close()
    assert files(folder) == expected
