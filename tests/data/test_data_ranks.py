"""Tests a corpus that several writers score into one folder, which equals the folder of one writer."""

import itertools
import multiprocessing
import pickle
import re
import threading
import time

import pytest
import torch

import forked
import sparse_ce
from rank_writer import SHARD, TOTAL, VOCAB, K, corpus, score, writer
from sparse_ce.data import CacheWriter, TeacherCache, lock

ANOTHER = "sparse_ce: path must have (one writer|ranks of one job) at a time, got "


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.startswith(".lock")}


@pytest.fixture
def one(tmp_path):
    """Returns the files of one writer."""
    folder = tmp_path / "one"
    with writer(folder) as made:
        assert score(made) == [slice(i, min(i + SHARD, TOTAL)) for i in range(0, TOTAL, SHARD)]
    return files(folder)


@pytest.mark.parametrize("ranks", [(0,), (1, 0), (0, 2, 1), range(8), range(7, -1, -1)], ids=str)
def test_the_folder_is_that_of_one_writer(ranks, one, tmp_path):
    """Checks the marker too, in any order of ranks: the shard that is missing last may be any of them."""
    expected, folder, world = one, tmp_path / "several", len(ranks)
    for rank in ranks:
        with writer(folder, rank=rank, world_size=world) as made:
            slices = score(made)
        assert [part.start // SHARD for part in slices] == list(range(rank, 6, world))
        assert len(made) == sum(part.stop - part.start for part in slices)
        assert (folder / ".complete").exists() == (len(list(folder.glob("shard-*"))) == 6)
    assert files(folder) == expected
    cache = TeacherCache(folder)
    assert torch.equal(torch.stack([cache[i]["tokens"] for i in range(TOTAL)]), corpus()[1])


@pytest.mark.parametrize("later", [1, 2, 3, 5])
def test_a_stopped_rank_is_resumed_by_any_number_of_ranks(later, one, tmp_path):
    expected, folder = one, tmp_path / "several"
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
    expected, folder = one, tmp_path / "several"
    with writer(folder, rank=0, world_size=2) as first, writer(folder, rank=1, world_size=2) as second:
        with pytest.raises(ValueError, match="path must have one writer at a time"):
            writer(folder, rank=1, world_size=2)
        leftover = folder / f".shard-00001.safetensors.{'1' * 16}.tmp"
        leftover.write_text("of the second")
        score(first)
        with pytest.raises(ValueError, match="delete it, or use resume=True"):
            first._release()
            writer(folder, rank=0, world_size=2)
        assert leftover.exists()  # the first does not remove it
        leftover.unlink()
        score(second)
    assert files(folder) == expected


def test_one_writer_loops_over_what_is_missing(tmp_path, one):
    expected, folder = one, tmp_path / "resumed"
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
        writer(tmp_path / "a.safetensors", rank=0, world_size=2)
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
    expected, folder = one, tmp_path / "several"
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
    expected, folder = one, tmp_path / "several"
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


# ------------------------------------------------------------------------------------------------- at the same time

TRIALS = 50


def together(run, several):
    """Calls ``run`` with each of ``several``, in threads that start at the same time."""
    barrier = threading.Barrier(len(several))
    threads = [threading.Thread(target=lambda each=each: (barrier.wait(), run(each))) for each in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def ends(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("shard-"))


def test_ranks_close_at_the_same_time(tmp_path):
    errors = []

    def close(made):
        try:
            made.close()
        except BaseException as error:
            errors.append(error)

    for trial in range(TRIALS):
        folder = tmp_path / f"several-{trial}"
        writers = [writer(folder, rank=rank, world_size=4) for rank in range(4)]
        for made in writers:
            score(made, total=SHARD)  # a single shard, so that every rank completes the folder
        together(close, writers)
        assert not errors and ends(folder) == [".complete"] and len(TeacherCache(folder)) == SHARD


@pytest.mark.parametrize("marker", ["another number", "a link to nothing", "no JSON"])
def test_ranks_do_not_replace_the_marker_of_others(tmp_path, marker):
    folder = tmp_path / "several"
    with writer(folder, rank=0, world_size=1) as made:
        score(made)
    path = folder / ".complete"
    content = path.read_text().replace("23", "24" if marker == "another number" else "")
    path.unlink()
    path.symlink_to(tmp_path / "nothing") if marker == "a link to nothing" else path.write_text(content)
    with pytest.raises((ValueError, FileExistsError), match=r"\.complete (exists already|says, got|must be whole)"):
        with writer(folder, rank=0, world_size=1, resume=True) as made:
            score(made)
    assert path.is_symlink() or path.read_text() == content


def test_jobs_and_writers_at_the_same_time(tmp_path, monkeypatch):
    """Checks that writers which have the lock are not disturbed by other jobs or by a writer without a rank."""
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    total, errors, refused, written = 3 * SHARD, [], [], []
    with writer(tmp_path / "one") as made:
        score(made, total=total)

    def work(named):
        try:
            made = writer(folder, resume=True, **named)
        except ValueError as error:
            gap = not named and "a shard is missing" in str(error)
            (refused if gap or re.match(ANOTHER, str(error)) else errors).append(error)
            return
        try:
            with made:
                written.append(score(made, total=total))
        except BaseException as error:
            errors.append(error)

    ranks = [dict(rank=rank, world_size=world) for world in (2, 3) for rank in range(world)]
    for trial in range(TRIALS):
        folder = tmp_path / f"several-{trial}"
        together(work, [*ranks, {}] if trial % 2 else [{}, *ranks[::-1]])
        with writer(folder, rank=0, world_size=1, resume=True) as made:
            score(made, total=total)
        assert not errors and files(folder) == files(tmp_path / "one") and ends(folder) == [".complete"]
    assert len(refused) + len(written) == TRIALS * 6


def test_ranks_of_one_job_must_agree(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    monkeypatch.setattr("sparse_ce.data.writer.pyarrow_parquet", lambda: None)
    folder = tmp_path / "several"
    first = writer(folder, rank=0, world_size=3, resume=True)
    second = writer(folder, rank=1, world_size=3, resume=True)
    with pytest.raises(ValueError, match=ANOTHER + ".*which another job of ranks, process .* has locked by .*; close"):
        writer(folder, resume=True)
    for named, words in ((dict(world_size=4), "world_size 4 instead of 3"), (dict(k=2), "k 2 instead of 3"),
                         (dict(shard=5, metadata={}), r"shard 5 instead of 4, metadata \{\} instead of"),
                         (dict(format="parquet"), "format 'parquet' instead of 'safetensors'")):
        with pytest.raises(ValueError, match=ANOTHER + words + ".* for .*several, which another job of ranks, process "
                                             ".* has locked by .*; pass the same .* stop it and use resume=True"):
            CacheWriter(folder, **{**dict(num_classes=VOCAB, k=K, shard=SHARD, metadata={"teacher": 1}, rank=2,
                                          world_size=3, resume=True), **named})
    score(first)
    first.close()
    assert ends(folder) == [".lock", ".lock-1"]  # the second rank still holds the lock
    with pytest.raises(ValueError, match="world_size 2 instead of 3"):
        writer(folder, rank=0, world_size=2, resume=True)
    copied = pickle.loads(pickle.dumps(second))
    assert [held.agreed for held in copied._locks] == [held.agreed for held in second._locks]
    (folder / ".lock").write_text("")  # as on a full disk
    writer(folder, rank=2, world_size=3, resume=True)._release()
    for held in second._locks:  # as if its process had died
        held.forget()
    for rank in range(2):
        with writer(folder, rank=rank, world_size=2, resume=True) as made:
            score(made)
    assert len(TeacherCache(folder)) == TOTAL and ends(folder) == [".complete"]


def test_ranks_wait_for_a_job_that_ends(tmp_path):
    folder = tmp_path / "several"
    for named, later in itertools.permutations([{}, dict(rank=0, world_size=1), dict(rank=0, world_size=2)], 2):
        if later:
            held = writer(folder, resume=True, **named)
            threading.Timer(0.1, held._release).start()
            writer(folder, resume=True, **later)._release()


def test_a_forked_process_holds_no_lock_of_a_rank(tmp_path):
    context, folder = multiprocessing.get_context("fork"), tmp_path / "several"
    first = writer(folder, rank=0, world_size=2)
    go = context.Event()
    child = context.Process(target=go.wait, args=(60,))  # like a DataLoader worker
    child.start()
    try:
        for held in first._locks:
            held.forget()
        with writer(folder, resume=True) as made:
            score(made)
    finally:
        go.set()
        child.join(60)
    assert len(TeacherCache(folder)) == TOTAL
