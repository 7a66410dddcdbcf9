"""Times several calls alternately in one process, with medians and spreads, and measures the memory of each call.

Time. Every round runs each call once, in a new random order. A slow minute of the machine then affects all calls, and
no call always follows the same one. Before a call its inputs are restored. For large problems the last cache is then
emptied by *reading* a buffer several times its size. A written buffer would leave dirty lines, whose write-back falls
into the timed call. Results are released after the clock has stopped.

- CPU: ``time.perf_counter`` around the call. Small problems stay in the cache, as they do after the preceding layer.
- CUDA: an event before and after the call, read at the end, without synchronization in between. A small problem starts
  on an idle GPU instead, so that the launch time counts, as it does for a caller that waits.

Memory counts all memory beyond that in use before the call, including the result.

- CUDA: ``torch.cuda.max_memory_allocated``.
- CPU (Linux): free heap memory is returned to the system (``malloc_trim``). So are pages that a library keeps mapped
  but has released (MADV_FREE); otherwise a gradient kept for the next step would cost nothing. Then writing 5 to
  ``/proc/self/clear_refs`` resets the kernel's high-water mark of resident memory. After the call it is read as VmHWM
  of ``/proc/self/status``. It counts memory of any origin once it is touched. Measured with blocks of 0.4 to 252 MiB it
  is accurate to 0.3 MiB.
"""

import ctypes
import gc
import random
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch

Samples = List[float]  # seconds, one for each round


@dataclass(frozen=True)
class Call:
    """Holds the timed function, and a function that runs before each repeat without being timed."""

    run: Callable[[], Any]
    prepare: Optional[Callable[[], None]] = None


@dataclass(frozen=True)
class Spread:
    """Holds the median and the 20th and 80th percentile."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples: Samples) -> "Spread":
        if len(samples) == 1:
            return cls(*samples * 3)
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(statistics.median(samples), fifths[0], fifths[3])


def ratio(numerator: Samples, denominator: Samples) -> Spread:
    """Returns the spread of the ratios of each round. Slow rounds cancel out."""
    return Spread.of([a / b for a, b in zip(numerator, denominator)])


def total(*parts: Samples) -> Samples:
    """Returns the sum of several calls in each round."""
    return [sum(round_) for round_ in zip(*parts)]


def time_by_turns(calls: Dict[str, Call], device: torch.device, repeats: int, warm_up: int,
                  small: bool) -> Dict[str, Samples]:
    """Measures the seconds of each call in each of ``repeats`` rounds, after ``warm_up`` rounds that do not count."""
    empty_cache = (lambda: None) if small and device.type == "cpu" else _CacheReader(device)
    order = random.Random(0)
    readings: Dict[str, List[Callable[[], float]]] = {name: [] for name in calls}
    names = list(calls)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for round_ in range(warm_up + repeats):
            order.shuffle(names)
            for name in names:
                if calls[name].prepare is not None:
                    calls[name].prepare()
                empty_cache()
                reading = _time_cuda(calls[name].run, small) if device.type == "cuda" else _time_cpu(calls[name].run)
                if round_ >= warm_up:
                    readings[name].append(reading)
        if device.type == "cuda":
            torch.cuda.synchronize()
    finally:
        if collecting:
            gc.enable()
    return {name: [reading() for reading in readings[name]] for name in calls}


def _time_cpu(run: Callable[[], Any]) -> Callable[[], float]:
    begin = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - begin
    del result
    return lambda: seconds


def _time_cuda(run: Callable[[], Any], from_idle: bool) -> Callable[[], float]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if from_idle:
        torch.cuda.synchronize()
    begin.record()
    result = run()
    end.record()
    del result
    return lambda: begin.elapsed_time(end) / 1e3


class _CacheReader:
    """Reads several times the size of the last cache (L2 of a GPU, L3 of a CPU), which evicts all other data.

    On a GPU it reads at least 1 GiB. This takes a third of a millisecond, in which the host runs ahead, so that the
    next timed call does not wait for its launch.
    """

    def __init__(self, device: torch.device):
        size = 4 * last_cache_bytes(device)
        if device.type == "cuda":
            size = max(size, 1 << 30)
        self.buffer = torch.zeros(size // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        self.buffer.sum(dtype=torch.int32)


def last_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().strip().rstrip("K")) * 1024 for size in sizes), default=64 << 20)


def extra_bytes(call: Call, device: torch.device) -> Optional[int]:
    """Measures the peak memory of one call beyond the memory in use before it. Returns None if the system does not
    report it."""
    if call.prepare is not None:
        call.prepare()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call.run()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _drop_given_up_pages()
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
    except (OSError, AttributeError):
        return None
    result = call.run()  # outside the try block, so that errors of the call propagate
    peak = _resident("VmHWM")
    del result
    return max(0, peak - before)


def _drop_given_up_pages() -> None:
    """Drops pages under MADV_FREE, by MADV_PAGEOUT on their mappings. Other pages keep their contents."""
    madv_pageout = 21
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M):
        if re.search(r"^LazyFree: +[1-9]", mapping, re.M):
            begin, end = (int(address, 16) for address in mapping.split()[0].split("-"))
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), madv_pageout)


def _resident(field: str) -> int:
    """Returns a field of /proc/self/status in bytes. The file has KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
