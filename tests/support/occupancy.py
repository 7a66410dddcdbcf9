"""Computes how many blocks of a kernel a multiprocessor holds, for each compute capability of a release."""

from typing import Dict, NamedTuple

KIB = 1 << 10
REGISTERS = 64 * KIB
PARTS = 4  # a multiprocessor has four schedulers, each with a quarter of the registers
RESERVED = KIB  # shared memory per block that the system uses


class Multiprocessor(NamedTuple):
    """Holds the limits of a multiprocessor, and of the shared memory of a block."""

    threads: int
    blocks: int
    shared: int
    shared_of_block: int


# "Compute Capabilities" in the CUDA Programming Guide.
MULTIPROCESSORS: Dict[str, Multiprocessor] = {
    "80": Multiprocessor(2048, 32, 164 * KIB, 163 * KIB),
    "86": Multiprocessor(1536, 16, 100 * KIB, 99 * KIB),
    "89": Multiprocessor(1536, 24, 100 * KIB, 99 * KIB),
    "90": Multiprocessor(2048, 32, 228 * KIB, 227 * KIB),
    "100": Multiprocessor(2048, 32, 228 * KIB, 227 * KIB),
    "120": Multiprocessor(1536, 24, 100 * KIB, 99 * KIB)}


def rounded_up(number: int, unit: int) -> int:
    return (number + unit - 1) // unit * unit


def resident_blocks(of: Multiprocessor, threads: int, registers: int, shared: int) -> int:
    """Returns the blocks of ``threads`` that fit, with ``registers`` per thread and ``shared`` bytes per block."""
    if shared > of.shared_of_block:
        return 0
    warps = rounded_up(threads, 32) // 32
    by_registers = REGISTERS // PARTS // rounded_up(32 * registers, 256) * PARTS // warps
    by_shared = of.shared // (rounded_up(shared, 128) + RESERVED)
    return min(of.blocks, of.threads // threads, by_registers, by_shared)
