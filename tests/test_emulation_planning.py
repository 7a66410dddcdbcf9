"""How the CUDA kernels share out rows, over a wide range of shapes: every row is served, no block without work."""

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


def test_rows_that_are_read_once_fit_into_registers(planning):
    seen = set()
    for rows, classes, size, multiprocessors in shapes():
        for offset in (0, 4):
            for clusters in (True, False):
                *form, _ = planning.one_pass_of(rows, classes, size, offset, multiprocessors, 50 << 20, clusters)
                width, packs, cluster = form
                aligned = offset == 0 and (rows == 1 or classes * size % 16 == 0)
                needed, held = size * classes + (0 if aligned else 16 - size), 16 * width * packs * cluster
                most = (512 if clusters else 32) << 10
                if held == 0:
                    assert size == 8 or needed > most or 8192 < needed <= 8192 + 16 - size
                    continue
                assert size < 8 and needed <= held <= most and (held == 8192 or needed > held // 4)
                seen.add((*form, clusters))
    few = {(32, 16, 1), (256, 8, 1)}
    many = few | {(256, 8, 2), (256, 8, 4), (256, 8, 8), (256, 16, 8)}
    assert seen == {(*form, True) for form in many} | {(*form, False) for form in few}


CACHE, NONE = (512, 0, 8), (0, 0, 0)


def form_of(planning, rows, size, classes, offset=0, clusters=True):
    """On an H100."""
    return planning.one_pass_of(rows, classes, size, offset, 132, 50 << 20, clusters)[:3]


@pytest.mark.parametrize("size,classes,form", [
    (2, 1000, (32, 16, 1)), (2, 4096, (32, 16, 1)), (2, 16384, (256, 8, 1)), (2, 32000, (256, 8, 2)),
    (2, 50257, (256, 8, 4)), (2, 128256, (256, 8, 8)), (2, 151936, (256, 16, 8)), (2, 201088, (256, 16, 8)),
    (2, 262144, (256, 16, 8)), (4, 1000, (32, 16, 1)), (4, 32000, (256, 8, 4)), (4, 128256, (256, 16, 8)),
    (4, 262144, CACHE)])
def test_models_have_the_smallest_form_that_holds_a_row(size, classes, form, planning):
    for rows in (1, 4096, 65536):
        few = rows == 1  # for which the cache would be of no use
        assert form_of(planning, rows, size, classes) == (NONE if few and form == CACHE else form)
        alone = form if form[2] == 1 else NONE if few else (512, 0, 1)
        assert form_of(planning, rows, size, classes, clusters=False) == alone


@pytest.mark.parametrize("size,classes,form", [
    (2, 1000, (32, 16, 1)), (2, 4096, NONE), (2, 16384, (256, 8, 2)), (2, 128256, (256, 8, 8)),
    (2, 131072, (256, 16, 8)), (2, 262144, CACHE), (4, 131072, CACHE)])
def test_a_row_behind_a_boundary_that_would_fill_its_form_needs_the_next(size, classes, form, planning):
    for rows in (1, 4096, 65536):
        assert form_of(planning, rows, size, classes, size) == (NONE if rows == 1 and form == CACHE else form)


def test_many_rows_of_a_masked_mean_go_to_warps_in_one_part(planning):
    plan_of = planning.masked_mean_plan_of
    assert plan_of(8192, 4096, 2) == (True, 1, 8) and plan_of(8192, 4096, 4) == (True, 1, 4)
    assert plan_of(4096, 16384, 2)[:2] == (True, 1) and plan_of(4096, 16385, 2)[:2] == (False, 1)
    assert plan_of(4095, 2048, 2)[:2] == (True, 1) and plan_of(4095, 2049, 2)[:2] == (False, 1)
    assert plan_of(1, 1 << 20, 2)[:2] == (False, 64)


@pytest.mark.parametrize("clusters", [True, False])
def test_rows_that_registers_do_not_hold_wait_in_a_cache_that_does(clusters, planning):
    """As many at a time as there are blocks for, or as the cache has room for, if these keep up with memory."""
    cluster, seen = 8 if clusters else 1, set()
    for rows, classes, size, multiprocessors in shapes():
        for cache in (0, 4 << 20, 50 << 20):
            form = planning.one_pass_of(rows, classes, size, 0, multiprocessors, cache, clusters)
            if form[0] and form[1]:
                assert form[3] == 0
                continue  # registers
            blocks = max(1, multiprocessors // cluster)
            needed = size * classes + (0 if rows == 1 or classes * size % 16 == 0 else 16 - size)
            at_a_time = min(blocks, cache // 4 * 3 // needed)
            waits = size < 8 and rows >= at_a_time >= blocks / size and size * classes > 8192
            assert form == ((512, 0, cluster, at_a_time) if waits else (0, 0, 0, 0))
            assert needed * form[3] <= cache // 4 * 3
            seen.add((form[0], blocks > form[3]))
    assert seen == {(0, True), (512, True), (512, False)}


def test_a_softcap_keeps_the_digits_of_small_logits(planning):
    draw = random.Random(3)
    numbers = [struct.unpack("f", struct.pack("f", draw.choice([-1, 1]) * 2 ** draw.uniform(-60, 5)))[0]
               for _ in range(20000)]
    for x in [*numbers, 0.56, 0.55999994]:
        assert abs(planning.hyperbolic_tangent(x) - math.tanh(x)) <= 4e-7 * abs(math.tanh(x))
    assert [planning.hyperbolic_tangent(x) for x in (0.0, -0.0, math.inf, -math.inf)] == [0, 0, 1, -1]
    assert math.isnan(planning.hyperbolic_tangent(math.nan))
