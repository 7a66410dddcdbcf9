"""Damages cache files at random, reads each, and reports results that are neither the same numbers nor an error.

    PYTHONPATH=tests/support python tests/support/processes/damaged_files.py FORMAT,... [COUNT] [SEED] [FIRST]

It runs in a separate process with limits on memory and time. A case depends only on its format, the seed and its
number: ``FIRST`` replays one. Prints a line of JSON for each format: the numbers of cases that raised an error and that
were read, and any other outcomes by case.
"""

import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import zlib
from pathlib import Path

import torch

import distillkit_cases
from cache_cases import V, assert_same, write
from sparse_ce.data import DistillKitCache, TeacherCache, from_vllm

MEMORY, SECONDS = 2**30, 20  # bytes beyond the current usage; seconds per read
GROWTH = 2**28  # bytes by which all reads together may grow the process
LENGTHS = (3, 1, 4)
SIZES = (0, 1, 2, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**33, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
WORDS = (*map(str, SIZES), "-1", "-9223372036854775808", "18446744073709551616", "1" * 5000, "1.5", "1e999", "NaN",
         "null", "true", '"x"', "[]", "{}", "[" * 3000, '[[1, [2]], {"a": []}]', "0x" + "f" * 300, "", " ", "1, 1",
         "{}{}")
VALUES = (*SIZES, -1, 1.5, None, True, "x", [], {}, [[[]]], "float32", "token", 10**400)


class TooSlow(BaseException):
    """Passes every handler of errors, because it is a BaseException."""


# ---------------------------------------------------------------------------------------------------------- the formats

def cache(suffix, **options):
    def make(folder):
        path = folder / f"teacher{suffix}"
        sequences = write(path, lengths=LENGTHS, **options)

        def read():
            samples = list(TeacherCache(path))
            assert len(samples) == len(sequences), f"{len(samples)} sequences"
            for sample, expected in zip(samples, sequences):
                assert_same(sample, *expected)
        return path, read
    return make


def foreign(folder):
    """Makes a file without header and checksums, from which any valid number may be read."""
    path = folder / "teacher.safetensors"
    write(path, lengths=LENGTHS)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    said = json.loads(data[8:8 + length])
    del said["__metadata__"]
    path.write_bytes(with_length(json.dumps(said).encode()) + data[8 + length:])
    return path, lambda: list(TeacherCache(path, num_classes=V))


def distillkit(form):
    def make(folder):
        import pyarrow as pa
        import pyarrow.parquet as pq
        file, config = folder / "data_0.parquet", dict(d=8)
        if form == "compressed":
            config = distillkit_cases.CONFIGS["residuals"]
            distillkit_cases.capture(file, config, LENGTHS)
        elif form == "plain":
            pq.write_table(pa.table({"input_ids": [[5, 7]], "token_ids": [[[3, 5], [7, 1]]],
                                     "top_values": [[[-0.5, -1.5], [-0.25, -2.0]]]}), file)
        else:
            config = dict(vocab_size=300, k=3, exact_k=1, polynomial_degree=2)
            pq.write_table(pa.table({"input_ids": [[5]], "packed_indices": [[[3 + (5 << 9) + (7 << 18)]]],
                                     "exact_values": [[[-0.5]]], "coeffs": [[[-0.1, -0.2, -0.3]]]}), file)
        (folder / "compression_config.yaml").write_text(json.dumps(config, indent=1))
        return folder, lambda: list(DistillKitCache(folder))
    return make


def vllm(folder):
    path = folder / "vllm.json"
    said = {"content": [{"token": "token_id:7", "logprob": -0.5, "top_logprobs": [
        {"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:9", "logprob": -1.5}]}] * 3,
        "top_logprobs": None}
    path.write_text(json.dumps([None, {"7": {"logprob": -0.1, "rank": 1}}, said]))

    def read():
        try:
            given = json.loads(path.read_bytes() if path.is_file() else "")
        except (ValueError, RecursionError):
            raise ValueError(f"sparse_ce: {path} is no JSON") from None
        for one in (given, given[-1] if isinstance(given, list) and given else None):
            try:
                from_vllm(one, num_classes=10)
            except (ValueError, TypeError) as error:
                assert str(error).startswith("sparse_ce: "), repr(error)
    return path, read


FORMATS = {
    **{f"{name}{' ragged' * ragged}": cache(f".{name}", ragged=ragged)
       for name in ("safetensors", "parquet") for ragged in (False, True)},
    "folder": cache("", shard=2), "safetensors of others": foreign,
    **{f"distillkit {form}": distillkit(form) for form in ("compressed", "plain", "legacy")}, "vllm": vllm}


# ----------------------------------------------------------------------------------------------------------- the damage

def with_length(text):
    return len(text).to_bytes(8, "little") + text


def flipped(data, draw):
    data = bytearray(data)
    begin = draw.choice((0, max(0, len(data) - 600)))  # in a footer, or anywhere
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        data[draw.randrange(begin, len(data))] ^= 1 << draw.randrange(8)
    return data


def cut(data, draw):
    return data[:draw.randrange(len(data))]


def moved(data, draw):
    """Copies a piece of the data, or of zeros or ones, to another place: over the data there, or before it."""
    size = draw.choice((1, 4, 8, 30, 200))
    begin, to = draw.randrange(len(data)), draw.randrange(len(data))
    piece = draw.choice((data[begin:begin + size], bytes(size), b"\xff" * size, b""))
    return data[:to] + piece + data[to + (size if draw.random() < 0.7 else 0):]


def overwritten(data, draw):
    size, data = draw.choice((4, 8)), bytearray(data)
    at = draw.randrange(max(1, len(data) - size))
    data[at:at + size] = (draw.choice(SIZES) % 2 ** (8 * size)).to_bytes(size, "little")
    return data


def edited(data, draw):
    """Replaces a number in a header's text by another value, valid or not, without changing the header's length."""
    length, begin = len(data), 0
    if data[8:9] == b"{":
        begin, length = 8, 8 + int.from_bytes(data[:8], "little")
    text = bytes(data[begin:length])
    found = list(re.finditer(rb"-?[0-9.]+|true|null|\"[a-z_0-9]*\"|\{[^{}]*\}|\[[^][]*\]", text))
    if not found:
        return flipped(data, draw)
    old = draw.choice(found)
    text = text[:old.start()] + draw.choice(WORDS).encode() + text[old.end():]
    return (with_length(text) if begin else text) + data[length:]


def said_otherwise(data, draw):
    """Changes a value in this package's header, with a matching checksum, or in the safetensors header."""
    begin = 8 if data[8:9] == b"{" else 0
    length = begin + int.from_bytes(data[:8], "little") if begin else len(data)
    try:
        said = json.loads(data[begin:length])
        ours = json.loads(said["__metadata__"]["cache"]) if begin else said
        name = draw.choice(sorted({*ours, *(said if begin else ())} - {"crc32", "__metadata__"}))
        if begin and name in said:
            said[name][draw.choice(["dtype", "shape", "data_offsets"])] = draw.choice(
                (*VALUES, *([n] for n in VALUES), *([n, 0] for n in VALUES), *([0, n] for n in VALUES)))
        else:
            ours[name] = draw.choice(VALUES)
            if draw.random() < 0.2:
                del ours[name]
        ours.pop("crc32", None)
        ours["crc32"] = zlib.crc32(json.dumps(ours, sort_keys=True).encode())
        if begin:
            said["__metadata__"]["cache"] = json.dumps(ours, sort_keys=True)
    except (ValueError, KeyError, TypeError):
        return edited(data, draw)
    text = json.dumps(said).encode()
    return (with_length(text) if begin else text) + data[length:]


DAMAGES = (flipped, flipped, cut, moved, overwritten, edited, edited, said_otherwise)


def damage(path, draw):
    """Damages one of the files and returns how, and a function that restores it."""
    files = sorted(file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    file, how = draw.choice(files), draw.choice(DAMAGES)
    data = file.read_bytes()
    if draw.random() < 0.02:
        file.unlink()
        if draw.random() < 0.5:
            file.mkdir()
        else:
            os.mkfifo(file)
    else:
        file.write_bytes(how(data, draw) if data else b"\0")

    def undo():
        file.rmdir() if file.is_dir() else file.unlink()
        file.write_bytes(data)
    return f"{file.name} {how.__name__}", undo


def asks_for_memory(error):
    while error is not None:
        if isinstance(error, MemoryError) or "alloc" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


# ------------------------------------------------------------------------------------------------------------ the reads

def too_slow(*_):
    raise TooSlow


def reads(format, count, seed, first=0):
    folder = Path(tempfile.mkdtemp())
    path, read = FORMATS[format](folder)
    read()  # imports its dependencies
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGALRM, too_slow)
    refused, read_well, others = 0, 0, []
    for case in range(first, first + count):
        print(format, case, file=sys.stderr, flush=True)  # the last line if the process dies
        how, undo = damage(path, random.Random(f"{format} {seed} {case}"))
        exact = "said_otherwise" not in how
        try:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            read()
            read_well += 1
        except (ValueError, FileNotFoundError) as error:
            refused += 1
            if not (str(error).startswith("sparse_ce: ") and str(folder) in str(error) and len(str(error)) < 2000):
                others.append((case, how, f"{type(error).__name__}: {str(error)[:500]}"))
            elif asks_for_memory(error):
                others.append((case, how, f"asks for memory: {error}"))
        except AssertionError as error:
            read_well += 1
            if exact:
                others.append((case, how, f"other numbers: {str(error)[:500]}"))
        except BaseException as error:
            others.append((case, how, f"{type(error).__name__}: {str(error)[:500]}"))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        undo()
    read()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > GROWTH:
        others.append((first, "all", f"grew by {grown} bytes"))
    shutil.rmtree(folder)
    return {"format": format, "refused": refused, "read": read_well, "others": others}


if __name__ == "__main__":
    torch.set_num_threads(1)
    numbers = [int(n) for n in sys.argv[2:]]
    for format in sys.argv[1].split(","):
        print(json.dumps(reads(format, *[*numbers, *(300, 0, 0)[len(numbers):]])), flush=True)
