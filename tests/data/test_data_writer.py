"""Tests writers that are disturbed by another writer, a signal, a full disk or a symbolic link."""

import errno
import json
import multiprocessing
import os
import pickle
import random
import re
import resource
import signal
import socket
import time

import pytest
import torch

import sparse_ce
from cache_cases import FORMATS, K, V, assert_same, needs, sequence
from sparse_ce.data import CacheWriter, TeacherCache, atomic_files

MARKER, LOCK = ".complete", ".lock"
SEQUENCES = {(writer, i): sequence(3, 100 * writer + i) for writer in range(2) for i in range(12)}
ANOTHER = (r"sparse_ce: path must have one writer at a time, got .*teacher.*, which another writer, process \d+ on .* "
           r"since \d{4}-\d\d-\d\d .* has locked by .*; close that writer first. With DDP write on rank 0 only")
context = multiprocessing.get_context("fork")


@pytest.fixture(params=FORMATS)
def format(request):
    needs(request.param)
    return request.param


def make(path, format="safetensors", **options):
    return CacheWriter(path, num_classes=V, k=K, format=format, **{"shard": 2, **options})


def add(writer, end, number=0):
    for i in range(len(writer), end):
        target, tokens, _ = SEQUENCES[number, i]
        writer.add(target, tokens=tokens)


def assert_whole(folder, count, number=0):
    """Checks that the folder holds one writer's sequences in properly named shards, and nothing else."""
    shards = sorted(file.name for file in folder.iterdir() if file.name != MARKER)
    assert (folder / MARKER).exists() and all(re.fullmatch(r"shard-\d{5}\.\w+", name) for name in shards), shards
    cache = TeacherCache(folder)
    assert len(cache) == count
    for i, sample in enumerate(cache):
        assert_same(sample, *SEQUENCES[number, i][:2])


def in_a_process(f, *args):
    """Returns the exit status of a forked process, 0 if ``f`` returned."""
    process = context.Process(target=f, args=args)
    process.start()
    process.join(60)
    return process.exitcode


# --------------------------------------------------------------------------------------------------------- two writers

@pytest.mark.parametrize("one", [False, True], ids=["folder", "file"])
def test_a_path_has_one_writer_at_a_time(tmp_path, format, one):
    path, options = tmp_path / ("teacher" + (f".{format}" if one else "")), dict(format=format)
    resume = {} if one else {"resume": True}
    first = make(path, **options)
    add(first, 1)

    def refused():
        for more in ({}, resume):
            with pytest.raises(ValueError, match=ANOTHER) as caught:
                make(path, **options, **more)
            assert f"process {os.getppid()} on {socket.gethostname()}" in str(caught.value) or os.getppid() != parent

    parent = os.getpid()
    refused()
    assert in_a_process(refused) == 0
    add(first, 3)
    first.close()
    assert sorted(os.listdir(tmp_path)) == [path.name]  # no lock file remains
    if one:
        with pytest.raises(ValueError, match="path must not exist"):
            make(path, **options)
        assert len(TeacherCache(path)) == 3
    else:
        with make(path, **options, resume=True) as second:
            with pytest.raises(ValueError, match=ANOTHER):  # a writer that continues after close() locks again
                add(first, 5)
            add(second, 4)
        assert_whole(path, 4)


@pytest.mark.parametrize("how", ["del", "error", "refused"])
def test_a_writer_that_is_given_up_leaves_no_lock(tmp_path, how):
    folder = tmp_path / "teacher"
    if how == "del":
        writer = make(folder)
        del writer
    elif how == "error":
        with pytest.raises(KeyError):
            with make(folder):
                raise KeyError
    else:
        with make(folder) as writer:
            add(writer, 2)
        with pytest.raises(ValueError, match="must have this writer's header, got dtype") as caught:
            make(folder, resume=True, dtype=torch.float32)
        with make(folder, resume=True) as writer:  # while the traceback still holds the other writer
            add(writer, 4)
        assert caught and sorted(os.listdir(folder)) == [MARKER, "shard-00000.safetensors", "shard-00001.safetensors"]
        return
    assert os.listdir(tmp_path) == []
    make(folder).close  # noqa: B018


def race(folder, number, format, resume, barrier, text):
    barrier.wait()
    try:
        with make(folder, format, resume=resume) as writer:
            first = len(writer)
            for i in range(12):
                writer.add(*SEQUENCES[number, i][:1], tokens=SEQUENCES[number, i][1])
        text.put((number, first))
    except BaseException as error:
        text.put((number, f"{type(error).__name__}: {error}"))


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_of_two_processes_one_writes(tmp_path, format, locks, monkeypatch):
    """Checks that a name is taken once even without locks, which some file systems do not support."""
    if not locks:
        monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, "no locks")))
    for attempt in range(6):
        folder = tmp_path / f"teacher-{attempt}"
        barrier, text = context.Barrier(2), context.Queue()
        processes = [context.Process(target=race, args=(folder, number, format, attempt % 2 == 1, barrier, text))
                     for number in range(2)]
        for process in processes:
            process.start()
        ends = dict(text.get(timeout=60) for _ in processes)
        for process in processes:
            process.join(60)
        done = [number for number, end in ends.items() if isinstance(end, int)]
        assert done, ends
        for end in ends.values():
            assert isinstance(end, int) or re.match(ANOTHER.replace("sparse_ce", "ValueError: sparse_ce", 1), end) or (
                end.startswith("ValueError: sparse_ce: path must not exist, got")), end
        last = max(done, key=lambda number: ends[number])
        samples = list(TeacherCache(folder))[ends[last]:]  # one may have continued after the other's end
        assert len(samples) == 12
        for i, sample in enumerate(samples):
            assert_same(sample, *SEQUENCES[last, i][:2])
        if locks:
            assert sorted(os.listdir(folder))[0] == MARKER and LOCK not in os.listdir(folder)


def test_a_name_that_is_given_is_not_given_again(tmp_path, format, monkeypatch):
    """Checks that an existing file is not replaced, if it appears during the write and without hard links too."""
    def other(temporary, path, f=atomic_files._publish):
        path.write_bytes(b"other")
        f(temporary, path)

    monkeypatch.setattr(atomic_files, "_publish", other)
    for links in (True, False):
        if not links:
            monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
        for name in (f"{links}", f"{links}.{format}"):
            with pytest.raises(ValueError, match="sparse_ce: path must not exist, got .*, which another writer has"):
                with make(tmp_path / name, format) as writer:
                    add(writer, 2)
            there = tmp_path / name if "." in name else tmp_path / name / f"shard-00000.{format}"
            assert there.read_bytes() == b"other"
            assert sorted(os.listdir(there.parent)) == sorted({there.name, *os.listdir(tmp_path)} if "." in name else
                                                              [there.name])
    monkeypatch.setattr(atomic_files, "_publish", other.__defaults__[0])
    with make(tmp_path / "teacher", format) as writer:  # without hard links
        add(writer, 5)
    assert_whole(tmp_path / "teacher", 5)


def test_a_link_that_was_made_though_it_failed(tmp_path, monkeypatch):
    """Simulates NFS, where a request is repeated if its answer is lost."""
    def link(source, target, f=os.link):
        f(source, target)
        f(source, target)

    monkeypatch.setattr("os.link", link)
    with make(tmp_path / "teacher") as writer:
        add(writer, 5)
    assert_whole(tmp_path / "teacher", 5)


def test_a_writer_that_goes_on_behind_another_does_not_say_that_it_is_whole(tmp_path):
    first = make(tmp_path / "teacher")
    add(first, 2)
    first.close()
    with make(tmp_path / "teacher", resume=True) as second:
        add(second, 6)
    with pytest.raises(ValueError, match="sparse_ce: path must not exist, got .*shard-00001.*, which another writer"):
        first.close()
    del first
    assert_whole(tmp_path / "teacher", 6)


def test_a_lock_that_was_deleted_is_taken_again_or_is_an_error(tmp_path):
    folder = tmp_path / "teacher"
    first = make(folder)
    add(first, 2)
    (folder / LOCK).unlink()
    add(first, 4)
    assert (folder / LOCK).exists()
    (folder / LOCK).unlink()
    second = make(folder, resume=True)
    with pytest.raises(ValueError, match=ANOTHER):
        add(first, 6)
    del first
    assert (folder / LOCK).exists()  # it belongs to the other writer
    add(second, 6)
    second.close()
    assert_whole(folder, 6)


# -------------------------------------------------------------------------------------------------- killed processes

def test_a_killed_writer_leaves_no_lock(tmp_path, format):
    for path in (tmp_path / "teacher", tmp_path / f"teacher.{format}"):
        def killed():
            writer = make(path, format)
            add(writer, 3)
            os.kill(os.getpid(), signal.SIGKILL)

        assert in_a_process(killed) == -signal.SIGKILL
        with make(path, format, resume=path.suffix == "") as writer:
            add(writer, 5)
        assert len(TeacherCache(path)) == 5
    assert_whole(tmp_path / "teacher", 5)
    assert sorted(os.listdir(tmp_path)) == ["teacher", f"teacher.{format}"]


def test_writers_that_are_killed_anywhere_are_resumed(tmp_path, format):
    draw = random.Random(3)

    def work():
        with make(tmp_path / "teacher", format, resume=True) as writer:
            add(writer, 12)

    for _ in range(12):
        process = context.Process(target=work)
        process.start()
        time.sleep(draw.random() * 0.05)
        process.kill()
        process.join(60)
    work()
    assert_whole(tmp_path / "teacher", 12)


def test_what_killed_writers_leave_is_removed_and_nothing_else(tmp_path, format):
    folder, ours = tmp_path / "teacher", "0123456789abcdef.tmp"
    others = ["notes.tmp", ".shard-00000.tmp", f".nfs{'0' * 16}", f".0{ours}.txt"]
    folder.mkdir()
    for name in (f".shard-00000.{format}.{ours}", f".{MARKER}.{ours}", *others):
        (folder / name).write_bytes(b"x")
    with make(folder, format) as writer:
        assert sorted(os.listdir(folder)) == sorted([*others, LOCK])
        add(writer, 2)
    one = tmp_path / f"one.{format}"
    for name in (f".one.{format}.{ours}", f".one.{format}.more.{ours}", f".other.{format}.{ours}"):
        (tmp_path / name).write_bytes(b"x")
    with make(one) as writer:
        add(writer, 2)
    assert sorted(os.listdir(tmp_path)) == sorted([f".one.{format}.more.{ours}", f".other.{format}.{ours}", one.name,
                                                   folder.name])


def test_a_forked_process_neither_holds_the_lock_nor_writes(tmp_path):
    folder = tmp_path / "teacher"
    first = make(folder)
    add(first, 2)
    pickled = pickle.dumps(first)
    add(first, 3)
    go, started = context.Event(), context.Event()

    def use():
        for use_it in (lambda: add(first, 4), first.close):
            with pytest.raises(ValueError, match=ANOTHER):
                use_it()
        with pytest.raises(ValueError, match=ANOTHER):
            add(pickle.loads(pickled), 4)
        assert (folder / LOCK).exists()

    assert in_a_process(use) == 0
    child = context.Process(target=lambda: (started.set(), go.wait(60)))  # like a DataLoader worker
    child.start()
    assert started.wait(60)
    first._locks[0].forget()  # as if this process had died
    with make(folder, resume=True) as second:
        assert len(second) == 2
        add(second, 4)
    go.set()
    child.join(60)
    assert_whole(folder, 4)


# ----------------------------------------------------------------------------------------------------- failed writes

@pytest.mark.parametrize("batch", [1, 3, 10])
@pytest.mark.parametrize("failing", [{3}, {1, 2, 3, 4}, {6, 9}], ids=str)
def test_after_an_error_of_the_disk_shards_are_written_again(tmp_path, format, batch, failing, monkeypatch):
    """Checks that nothing is lost or written twice, and that memory holds less than a shard."""
    folder, calls, failing = tmp_path / "teacher", [0], set(failing)

    def publish(temporary, path, f=atomic_files._publish):
        calls[0] += 1
        if calls[0] in failing:
            raise OSError(errno.ENOSPC, "full")
        f(temporary, path)

    monkeypatch.setattr(atomic_files, "_publish", publish)
    writer, numbers = make(folder, format, shard=4), [i % 12 for i in range(60)]
    for begin in range(0, 60, batch):
        part, before = [SEQUENCES[0, i] for i in numbers[begin:begin + batch]], calls[0]
        try:
            writer.add(sparse_ce.collate([s[0] for s in part]), tokens=torch.stack([s[1] for s in part]))
        except OSError as error:
            assert error.errno == errno.ENOSPC and calls[0] in failing
        else:
            assert len(os.listdir(folder)) == len(writer) // 4 + 1, "shards and the lock"
        assert len(writer) == begin + len(part) and calls[0] <= before + 1 + len(writer) // 4
    assert calls[0] == 15 + len(failing)
    writer.add(*SEQUENCES[0, 0][:1], tokens=SEQUENCES[0, 0][1])
    for later in (1, 2):  # the shard, then its marker
        failing.add(calls[0] + later)
        with pytest.raises(OSError, match="full"):
            writer.close()
        assert not (folder / MARKER).exists()
    writer.close()
    cache = TeacherCache(folder)
    assert [len(shard) for shard in cache.shards.all] == [4] * 15 + [1] and (folder / MARKER).exists()
    for sample, i in zip(cache, [*numbers, 0]):
        assert_same(sample, *SEQUENCES[0, i][:2])


def test_a_disk_that_is_full(tmp_path, format):
    """Runs in a process with a limit on file sizes."""
    def work():
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        for path in (tmp_path / "teacher", tmp_path / f"teacher.{format}"):
            writer = make(path, format)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
            with pytest.raises(OSError) as caught:
                add(writer, 12)
                writer.close()
            assert caught.value.errno == errno.EFBIG and not path.is_file()
            assert set(os.listdir(tmp_path)) <= {path.name, "teacher", f".{path.name}.lock"}
            assert path.suffix or os.listdir(path) == [LOCK]
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            add(writer, 12)
            writer.close()
            assert len(TeacherCache(path)) == 12

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    assert in_a_process(work) == 0
    assert_whole(tmp_path / "teacher", 12)


@pytest.mark.parametrize("catch", [False, True], ids=["with", "caught"])
def test_an_interrupt_while_a_shard_is_written(tmp_path, format, catch, monkeypatch, request):
    folder, left = tmp_path / "teacher", [3]

    def interrupted(number, f=os.fsync):
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)
        return f(number)

    monkeypatch.setattr("os.fsync", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    if catch:
        with make(folder, format) as writer:
            while len(writer) < 12:
                try:
                    add(writer, 12)
                except KeyboardInterrupt:
                    pass
    else:
        with pytest.raises(KeyboardInterrupt):
            with make(folder, format) as writer:
                add(writer, 12)
        there = [f"shard-0000{i}.{format}" for i in range(2)]
        assert (sorted(os.listdir(folder)) if folder.exists() else []) == there
        with make(folder, format, resume=True) as writer:
            add(writer, 12)
    assert left[0] < 1
    assert_whole(folder, 12)


@pytest.mark.parametrize("when", ["in the body", "at the end"])
def test_a_writer_that_an_error_has_stopped_never_says_that_it_is_whole(tmp_path, when, monkeypatch):
    folder = tmp_path / "teacher"
    with pytest.raises((KeyError, OSError)):
        with make(folder) as writer:
            add(writer, 5)
            if when == "in the body":
                raise KeyError
            monkeypatch.setattr("os.fsync", lambda number: (_ for _ in ()).throw(OSError("full")))
    monkeypatch.undo()
    for use in (writer.close, lambda: add(writer, 6), lambda: writer.__exit__(None, None, None)):
        with pytest.raises(ValueError, match="sparse_ce: writer must be open, got one that an error has stopped, of "
                                             ".*; create another with resume=True, which continues after its last"):
            use()
    assert sorted(os.listdir(folder)) == ["shard-00000.safetensors", "shard-00001.safetensors"]
    with make(folder, resume=True) as writer:
        assert len(writer) == 4
        add(writer, 6)
    assert_whole(folder, 6)


# -------------------------------------------------------------------------------------------------- symbolic links

@pytest.fixture
def victim(tmp_path):
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_bytes(b"precious")
    yield folder
    assert os.listdir(folder) == ["file"] and (folder / "file").read_bytes() == b"precious"


@pytest.mark.parametrize("to", ["folder", "file", "nothing"])
def test_symbolic_links_are_not_followed(tmp_path, format, to, victim):
    """Checks links whose names equal the writer's temporary files, and links at the final names."""
    folder = tmp_path / "teacher"
    folder.mkdir()
    target = {"folder": victim, "file": victim / "file", "nothing": victim / "new"}[to]
    links = [f"{prefix}{name}{suffix}" for name in (f"shard-00000.{format}", MARKER)
             for prefix, suffix in (("", ".tmp"), (".", ".tmp"), (".", ".0123456789abcdef.tmp"))]
    for name in links:
        (folder / name).symlink_to(target)
    with make(folder, format) as writer:
        add(writer, 5)
    assert sorted(os.listdir(folder)) == sorted([MARKER, *(f"shard-0000{i}.{format}" for i in range(3)), *links])
    for name in links:
        (folder / name).unlink()
    assert_whole(folder, 5)

    (folder / MARKER).unlink()
    (folder / MARKER).symlink_to(target)
    if to == "folder":
        with pytest.raises(ValueError, match=r"sparse_ce: .*\.complete must be a file, got a folder; delete it"):
            make(folder, format, resume=True)
        (folder / MARKER).unlink()
    with make(folder, format, resume=True) as writer:
        assert len(writer) == 5
    assert not (folder / MARKER).is_symlink()
    assert_whole(folder, 5)

    (folder / f"shard-00003.{format}").symlink_to(victim / "new")
    for path in (folder / LOCK, tmp_path / f".one.{format}.lock", tmp_path / f"two.{format}"):
        path.symlink_to(target)
    for path, words in ((folder, LOCK), (tmp_path / f"one.{format}", f"one.{format}.lock"),
                        (tmp_path / f"two.{format}", "path must not exist")):
        with pytest.raises((ValueError, OSError), match=f"sparse_ce: .*{re.escape(words)}"):
            make(path, format, **({} if path.suffix else {"resume": True}))
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="sparse_ce: path must not exist, got .*dangling; delete it"):
        make(dangling, format)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")  # set by the user, who chooses the location
    with make(tmp_path / "linked", format) as writer:
        add(writer, 5)
    assert_whole(tmp_path / "elsewhere", 5)


@pytest.mark.parametrize("to", ["file", "new"])
def test_a_link_that_has_the_very_name_of_a_temporary_file(tmp_path, format, to, victim, monkeypatch):
    writer = make(tmp_path / "teacher", format)
    monkeypatch.setattr("secrets.token_hex", lambda size: "name")
    (tmp_path / "teacher" / f".shard-00000.{format}.name.tmp").symlink_to(victim / to)
    with pytest.raises(FileExistsError):
        add(writer, 2)
    monkeypatch.undo()
    add(writer, 4)
    writer.close()
    assert_whole(tmp_path / "teacher", 4)


def test_a_shard_whose_name_is_a_link_is_not_written_through_it(tmp_path, format, victim):
    writer = make(tmp_path / "teacher", format)
    add(writer, 1)
    for target in (victim / "new", victim / "file", victim):
        (tmp_path / "teacher" / f"shard-00000.{format}").symlink_to(target)
        with pytest.raises(ValueError, match="sparse_ce: path must not exist, got .*shard-00000"):
            writer.close()
        (tmp_path / "teacher" / f"shard-00000.{format}").unlink()
    writer.close()
    assert_whole(tmp_path / "teacher", 1)


def test_a_cache_that_is_whole_may_be_read_only(tmp_path, monkeypatch):
    folder = tmp_path / "teacher"
    with make(folder) as writer:
        add(writer, 5)
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setattr("os.open", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
    with make(folder, resume=True) as writer:
        assert len(writer) == 5


def test_the_lock_says_who_holds_it(tmp_path):
    with make(tmp_path / "teacher") as writer:
        text = json.loads((tmp_path / "teacher" / LOCK).read_text())
        assert text["pid"] == os.getpid() and text["host"] == socket.gethostname()
        assert abs(time.mktime(time.strptime(text["since"][:19], "%Y-%m-%d %H:%M:%S")) - time.time()) < 60
        (tmp_path / "teacher" / LOCK).write_text("")  # as before it is written
        with pytest.raises(ValueError, match="got .*teacher, which another writer has locked by"):
            make(tmp_path / "teacher")
        add(writer, 1)
