"""Limits the memory of this process, so that allocations fail."""

import gc
import re
import resource
from contextlib import contextmanager, suppress

import torch


@contextmanager
def little_memory(megabytes):
    """Sets a limit for the memory that the block can allocate."""
    gc.collect()  # memory freed later would be available to the test
    mapped = int(re.search(r"VmSize:\s+(\d+)", open("/proc/self/status").read())[1]) << 10
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = []  # occupies the memory that earlier tests have freed
    try:
        resource.setrlimit(resource.RLIMIT_AS, (mapped, before[1]))
        for size in (1 << 26, 1 << 24, 1 << 22, 1 << 20):
            with suppress(RuntimeError):
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8))
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (megabytes << 20), before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
