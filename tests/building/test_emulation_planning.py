"""Tests how the CUDA kernels assign rows to blocks for a wide range of shapes: every row is processed, no block is
idle."""

import itertools
import math
import os
import random
import shutil
import struct

import pytest

import native_modules

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None and "CI" not in os.environ,
                                reason="needs the CUDA toolkit (headers and nvcc)")


@pytest.fixture(scope="module")
def planning():
    return native_modules.planning()


@pytest.fixture(scope="module")
def plan_of(planning):
    return planning.plan_of


def shapes():
    draw = random.Random(3)
    return [(int(2 ** draw.uniform(0, 24)), int(2 ** draw.uniform(0, 18)), draw.choice([2, 4, 4, 8]),
             draw.choice([1, 20, 132])) for _ in range(2000)]


def test_every_row_is_served_and_few_long_rows_fill_the_device(plan_of):
    seen = set()
    for rows, classes, size, multiprocessors in shapes():
        width, splits, blocks = plan_of(rows, classes, size, 0, multiprocessors)
        groups = rows * splits if width > 32 else rows
        per_block = 1 if width > 32 else 256 // 32
        assert blocks == -(-groups // per_block) and splits >= 1
        assert splits == 1 or width > 32, "a warp does not share its row"
        assert splits == 1 or rows * (splits - 1) < 8 * multiprocessors, "enough rows need no splitting"
        seen.add((width, splits > 1))
    assert seen == {(32, False), (256, False), (256, True)}


def test_parts_of_few_long_rows_are_smaller_where_some_multiprocessors_had_none(plan_of):
    assert [plan_of(rows, 1 << 20, 2, 0, 132)[1] for rows in (1, 2, 3)] == [256, 256, 64]
    assert [plan_of(1, classes, 2, 0, 132)[1] for classes in (30000, 32767, 32768)] == [1, 1, 8]


def test_a_limit_of_blocks_is_kept_and_changes_nothing_else(plan_of):
    for rows, classes, size, multiprocessors in shapes():
        free, limited = (plan_of(rows, classes, size, limit, multiprocessors) for limit in (0, 3))
        assert limited == (*free[:2], min(free[2], 3))


def test_rows_side_by_side_have_a_thread_each_or_are_shared_until_the_device_is_full(plan_of):
    seen = set()
    for rows, classes, size, multiprocessors in shapes():
        width, parts, blocks = plan_of(rows, classes, size, 0, multiprocessors, side_by_side=True)
        assert width == 1 and blocks == -(-rows * parts // 128)
        most = min(2048 * multiprocessors // rows, -(-classes // 64), 512)
        assert parts == (max(1, most) if classes >= 128 else 1), "each has classes to sum, and threads to do it"
        assert plan_of(rows, classes, size, 3, multiprocessors, side_by_side=True) == (1, parts, min(blocks, 3))
        seen.add(parts > 1)
    assert seen == {True, False}
    assert [plan_of(4096, classes, 2, 0, 132, side_by_side=True)[1] for classes in (127, 128, 32000)] == [1, 2, 66]
    assert [plan_of(rows, 150, 2, 0, 132, side_by_side=True)[1] for rows in (1 << 15, 1 << 17, 1 << 18)] == [3, 2, 1]
    assert plan_of(0, 150, 2, 0, 132, side_by_side=True) == (1, 1, 0)


# The maximum shared memory of a block: H100, A100, RTX 30 or 40, T4.
SM_90, SM_80, SM_86, SM_75 = (kib << 10 for kib in (227, 163, 99, 64))
NONE = (0, 0, 0)
WARP, BLOCK = 32, 256


def packs_of(shared):
    """Returns how many packs per thread fit in shared memory besides the kernel's own use."""
    return (shared - (4 << 10)) // (18 * 256)


def goes_to_a_thread(rows, classes):
    return classes <= 32 and rows >= 16384


def test_many_rows_of_few_classes_are_held_by_nobody(planning):
    """Checks that one thread per row handles such rows, for which a second read costs nothing."""
    for size in (2, 4):
        for rows, classes in ((16384, 32), (1 << 24, 1), (16383, 32), (16384, 33)):
            form = planning.one_pass_of(rows, classes, size, 0, True, SM_90)
            assert form == (NONE if goes_to_a_thread(rows, classes) else (WARP, 1, 1))


def test_a_row_that_is_read_once_is_held_by_the_fewest_that_can(planning):
    seen = set()
    for rows, classes, size, _ in (shape for shape in shapes() if not goes_to_a_thread(*shape[:2])):
        for offset, clusters, shared in itertools.product((0, 8), (True, False), (SM_90, SM_80, SM_86, SM_75)):
            width, packs, cluster = form = planning.one_pass_of(rows, classes, size, offset, clusters, shared)
            aligned = offset == 0 and (rows == 1 or classes * size % 16 == 0)
            needed = size * classes + (0 if aligned else 16 - size)
            by_warp = size * classes <= (24560 if rows >= 2048 else 8192)
            threads, room = 32 if by_warp else 256, packs_of(shared)
            most, blocks = (max(4, min(48, room)), 1) if by_warp else (min(16, room), 8 if clusters else 1)
            if form == NONE:
                assert size == 8 or needed > 16 * threads * most * blocks
                seen.add((by_warp, NONE, shared))
                continue
            assert size < 8 and width == threads and 1 <= packs <= most and cluster in (1, 2, 4, 8)[:blocks]
            assert 16 * threads * (packs - 1) * cluster < needed <= 16 * threads * packs * cluster
            assert cluster == 1 or needed > 16 * threads * most * cluster // 2, "half of them would do"
            in_registers = by_warp and packs <= 4
            assert in_registers or 18 * 256 * packs + (4 << 10) <= shared
            seen.add((by_warp, in_registers or cluster, shared))
    blocks = {(False, cluster, shared) for cluster in (1, 2, 4, 8) for shared in (SM_90, SM_80, SM_86, SM_75)}
    nobody = {(False, NONE, shared) for shared in (SM_90, SM_80, SM_86, SM_75)}
    assert seen == {(True, 1, shared) for shared in (SM_90, SM_80, SM_86, SM_75)} | blocks | nobody | {
        (True, NONE, shared) for shared in (SM_90, SM_80, SM_86, SM_75)}


def test_a_row_of_float64_or_of_none_is_held_by_nobody(planning):
    for clusters in (True, False):
        assert planning.one_pass_of(4096, 1000, 8, 0, clusters, SM_90) == NONE
        assert planning.one_pass_of(0, 1000, 2, 0, clusters, SM_90) == NONE


def test_without_shared_memory_there_are_registers(planning):
    """Simulates a device whose properties could not be queried."""
    for rows, classes, size, _ in shapes():
        for clusters in (True, False):
            needed = size * classes + (0 if rows == 1 or classes * size % 16 == 0 else 16 - size)
            held = size < 8 and needed <= 2048 and not goes_to_a_thread(rows, classes)
            packs = planning.one_pass_of(rows, classes, size, 0, clusters, 0)
            assert packs == ((WARP, packs[1], 1) if held else NONE) and packs[1] <= 4


@pytest.mark.parametrize("size,classes,few,many", [
    (2, 4096, (WARP, 16, 1), (WARP, 16, 1)), (2, 4097, (BLOCK, 3, 1), (WARP, 17, 1)),
    (2, 12280, (BLOCK, 6, 1), (WARP, 48, 1)), (2, 12281, (BLOCK, 6, 1), (BLOCK, 6, 1)),
    (4, 2048, (WARP, 16, 1), (WARP, 16, 1)), (4, 2049, (BLOCK, 3, 1), (WARP, 17, 1)),
    (4, 6140, (BLOCK, 6, 1), (WARP, 48, 1)), (4, 6141, (BLOCK, 6, 1), (BLOCK, 6, 1))])
def test_many_rows_of_a_few_thousand_classes_go_to_warps(size, classes, few, many, planning):
    """Checks that both kernels choose the same form, so that entries are summed in one order."""
    for rows, form in ((2, few), (2047, few), (2048, many), (65536, many)):
        assert planning.one_pass_of(rows, classes, size, 0, True, SM_90) == form
        assert planning.plan_of(rows, classes, size, 0, 132)[0] == form[0]


MODELS = [  # element size, classes, form for few rows, form for many
    (2, 1000, (WARP, 4, 1), (WARP, 4, 1)), (2, 4096, (WARP, 16, 1), (WARP, 16, 1)),
    (2, 5000, (BLOCK, 3, 1), (WARP, 20, 1)), (2, 12000, (BLOCK, 6, 1), (WARP, 47, 1)),
    (2, 16384, (BLOCK, 8, 1), (BLOCK, 8, 1)), (2, 32000, (BLOCK, 16, 1), (BLOCK, 16, 1)),
    (2, 50257, (BLOCK, 13, 2), (BLOCK, 13, 2)), (2, 128256, (BLOCK, 16, 4), (BLOCK, 16, 4)),
    (2, 151936, (BLOCK, 10, 8), (BLOCK, 10, 8)), (2, 201088, (BLOCK, 13, 8), (BLOCK, 13, 8)),
    (2, 262144, (BLOCK, 16, 8), (BLOCK, 16, 8)),
    (4, 1000, (WARP, 8, 1), (WARP, 8, 1)), (4, 4096, (BLOCK, 4, 1), (WARP, 32, 1)),
    (4, 5000, (BLOCK, 5, 1), (WARP, 40, 1)), (4, 12000, (BLOCK, 12, 1), (BLOCK, 12, 1)),
    (4, 16384, (BLOCK, 16, 1), (BLOCK, 16, 1)), (4, 32000, (BLOCK, 16, 2), (BLOCK, 16, 2)),
    (4, 50257, (BLOCK, 13, 4), (BLOCK, 13, 4)), (4, 128256, (BLOCK, 16, 8), (BLOCK, 16, 8)),
    (4, 151936, NONE, NONE), (4, 201088, NONE, NONE), (4, 262144, NONE, NONE)]


@pytest.mark.parametrize("size,classes,few,many", MODELS)
def test_models_have_the_smallest_form_that_holds_a_row(size, classes, few, many, planning):
    for rows, form in ((1, few), (2047, few), (2048, many), (4096, many), (65536, many)):
        assert planning.one_pass_of(rows, classes, size, 0, True, SM_90) == form
        for shared in (SM_90, SM_80, SM_86):  # without clusters, and with less for a warp
            held = form[2] == 1 and form[1] <= (48 if form[0] == WARP and shared == SM_90 else
                                                35 if form[0] == WARP and shared == SM_80 else
                                                21 if form[0] == WARP else 16)
            assert planning.one_pass_of(rows, classes, size, 0, False, shared) == (form if held else NONE)


@pytest.mark.parametrize("size,classes,form", [
    (2, 1000, (WARP, 4, 1)), (2, 1024, (WARP, 5, 1)), (2, 4096, (WARP, 17, 1)), (2, 12280, (WARP, 48, 1)),
    (2, 16384, (BLOCK, 9, 1)), (2, 32768, (BLOCK, 9, 2)), (2, 65536, (BLOCK, 9, 4)), (2, 131072, (BLOCK, 9, 8)),
    (2, 262144, NONE), (4, 6140, (WARP, 48, 1)), (4, 16384, (BLOCK, 9, 2)), (4, 65536, (BLOCK, 9, 8)),
    (4, 131072, NONE)])
def test_a_row_behind_a_boundary_that_would_fill_its_form_needs_the_next(size, classes, form, planning):
    for rows in (2048, 65536):
        assert planning.one_pass_of(rows, classes, size, size, True, SM_90) == form


@pytest.mark.parametrize("way", ["once", "equal", "halving"])
def test_every_row_is_dealt_once(way, planning):
    draw = random.Random(5)
    for rows, groups in [(1, 1), (8192, 99), (99, 99), (100, 99), (4096, 396), (7, 8),
                         *((int(2 ** draw.uniform(0, 14)), int(2 ** draw.uniform(0, 10))) for _ in range(200))]:
        distance, shares = planning.dealt(way, rows, groups)
        dealt = [first + distance * k for first, count in shares for k in range(count)]
        assert sorted(row for row in dealt if row < rows) == list(range(rows))
        # A group may be told of rows behind the last one, which do not exist, but no group has only these.
        assert all(first < rows and count > 0 for first, count in shares)
        if way == "equal":
            assert len(shares) == min(rows, groups)
        if way == "once":
            assert [count for _, count in shares] == [1] * rows


def test_groups_that_begin_late_have_few_rows(planning):
    """Checks that the device is busy until the end: a late group has at most half as many rows as are left for each."""
    for rows, groups in [(8192, 99), (8192, 396), (65536, 3168), (1000, 3)]:
        distance, shares = planning.dealt("halving", rows, groups)
        assert distance == (groups - 1 + groups % 2 if groups > 16 else groups)
        left = rows
        for begin in range(0, len(shares), distance):
            counts = {count for _, count in shares[begin:begin + distance]}
            assert counts == {max(1, left // (2 * distance))}
            left -= counts.pop() * distance
        assert left <= 0 and shares[-1][1] == 1
    assert [planning.dealt("halving", 10 ** 6, groups)[0] for groups in (1, 2, 16, 17, 18)] == [1, 2, 16, 17, 17]


def test_many_rows_of_a_masked_mean_go_to_warps_in_one_part(planning):
    plan_of = planning.masked_mean_plan_of
    assert plan_of(8192, 4096, 2) == (True, 1, 8) and plan_of(8192, 4096, 4) == (True, 1, 4)
    assert plan_of(4096, 16384, 2)[:2] == (True, 1) and plan_of(4096, 16385, 2)[:2] == (False, 1)
    assert plan_of(4095, 2048, 2)[:2] == (True, 1) and plan_of(4095, 2049, 2)[:2] == (False, 1)
    assert plan_of(1, 1 << 20, 2)[:2] == (False, 64)


def test_a_softcap_keeps_the_digits_of_small_logits(planning):
    draw = random.Random(3)
    numbers = [struct.unpack("f", struct.pack("f", draw.choice([-1, 1]) * 2 ** draw.uniform(-60, 5)))[0]
               for _ in range(20000)]
    for x in [*numbers, 0.56, 0.55999994]:
        assert abs(planning.tanh_of(x) - math.tanh(x)) <= 4e-7 * abs(math.tanh(x))
    assert [planning.tanh_of(x) for x in (0.0, -0.0, math.inf, -math.inf)] == [0, 0, 1, -1]
    assert math.isnan(planning.tanh_of(math.nan))


GIB = 1 << 30


@pytest.mark.parametrize("rows,width,classes,memory,expected", [
    (8192, 4096, 128256, 79, 8192), (8192, 4096, 128256, 40, 1024), (8192, 4096, 128256, 0, 1024),
    (4096, 2304, 256000, 79, 4096), (4096, 2304, 256000, 40, 1024),
    (16384, 8192, 128256, 79, 2048), (16384, 8192, 128256, 139, 16384),  # stored: more rows do not help unless all fit
    (16384, 4096, 128256, 79, 8192), (16384, 4096, 128256, 24, 4096),
    (65536, 4096, 128256, 79, 9472), (65536, 4096, 128256, 0, 4096),
    (1000, 4096, 128256, 0, 1000), (0, 8, 8, 79, 0)])
def test_chunks_of_a_head(planning, rows, width, classes, memory, expected):
    assert planning.head_chunk_rows(rows, width, classes, memory * GIB) == expected


def test_the_logits_of_a_chunk_take_little_of_the_devices_memory(planning):
    """Checks that ample memory never makes a chunk smaller, and that its chunks have a 32nd of the memory."""
    draw, larger = random.Random(4), 0
    for _ in range(2000):
        rows, width, classes = (int(2 ** draw.uniform(*limits)) for limits in ((0, 17), (6, 14), (4, 18)))
        memory = draw.randrange(8, 200) * GIB
        least, chunk = (planning.head_chunk_rows(rows, width, classes, of) for of in (0, memory))
        assert 1 <= least <= rows and 1 <= chunk <= rows
        assert chunk == rows or chunk >= least - 127, "chunks of equal size, in tiles of 128 rows"
        assert chunk <= least or 2 * chunk * classes <= memory // 32
        larger += chunk > least
    assert larger > 100
