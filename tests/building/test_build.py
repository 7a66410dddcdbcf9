"""Tests the compiled kernels, the libraries' dependencies, and the other ways to build."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, NamedTuple, Tuple

import pytest
import torch

import sparse_ce
from cases import slow
from occupancy import MULTIPROCESSORS, resident_blocks
from sass import (
    MEETS,
    count,
    functions_of,
    instructions,
    loop_of_exponentials,
    loops,
    shortest,
    splits_before,
    ways_through,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "emulation"))
from build import NVCC, OPS, ROUNDING  # noqa: E402

LIBRARIES = sorted(Path(sparse_ce.__file__).parent.glob("_C*.so"))
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None and "CI" not in os.environ, reason="needs nvcc")


SOURCES = sorted(path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu"))


def load_setup():
    spec = importlib.util.spec_from_file_location("setup_of_sparse_ce", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETUP = load_setup()
RELEASE = SETUP.shared_ptx_flags(SETUP.RELEASE_ARCHITECTURES)
ARCHITECTURES = [found for flag in RELEASE for found in re.findall(r"code=sm_(\d+)", flag)]


def nvcc(source, out, *flags):
    """Compiles a source file with the flags of setup.py, and returns what the compilers print."""
    done = subprocess.run(["nvcc", "-std=c++17", "-O3", *ROUNDING, "--expt-relaxed-constexpr", "--threads=2", *flags,
                           str(source), "-o", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


class Compiled(NamedTuple):
    name: str
    object: Path
    architecture: str  # for which the machine code is checked
    report: Dict[Tuple[str, str], Tuple[int, int, int]]  # (spilled, registers, shared) by architecture and kernel

    def code(self, architecture=None):
        """Returns (name, machine code) of the kernels."""
        return functions_of(self.object, architecture or self.architecture)


def compile_for(name, architecture, flags, folder):
    out = folder / f"{name}.o"
    printed = nvcc(ROOT / f"csrc/cuda/{name}.cu", out, *flags, "-Xptxas", "-v", "-c")
    pattern = (r"entry function '(\S+)' for '(\S+)'\n.*\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, "
               r"(\d+) bytes spill loads\n.*Used (\d+) registers(?:.*, (\d+) bytes smem)?")
    report = {}
    for symbol, of, *numbers in re.findall(pattern, printed):
        kernel = re.search(r"(\w+_kernel(?:<.*>)?)\(", subprocess.run(["c++filt", symbol], capture_output=True,
                                                                     text=True).stdout)[1]
        stack, stores, loads, registers, shared = (int(number or 0) for number in numbers)
        report[of.removeprefix("sm_"), kernel] = (stack + stores + loads, registers, shared)
    return Compiled(name, out, architecture, report)


@pytest.fixture(scope="module", ids="-".join,
                params=[*((name, "90") for name in SOURCES), *slow(*(((name, "release"),) for name in SOURCES))])
def compiled(request, tmp_path_factory):
    """Compiles a source file for 9.0, or for a release, of which the machine code for 8.0 is checked.

    A release takes 20 minutes of two cores, but less than each architecture by itself.
    """
    name, wanted = request.param
    folder = tmp_path_factory.mktemp("cuda")
    return (compile_for(name, "80", RELEASE, folder) if wanted == "release" else
            compile_for(name, "90", ["-gencode=arch=compute_90,code=sm_90"], folder))


@needs_nvcc
def test_device_headers_compile_for_every_gpu_of_a_release(tmp_path):
    """Checks in seconds what a release needs minutes for, with each header and each feature of an architecture."""
    source = ROOT / "tests" / "building" / "device_headers.cu"
    included = re.findall(r'#include "(device/\S+)"', source.read_text())
    assert included == [f"device/{path.name}" for path in sorted((ROOT / "csrc" / "cuda" / "device").iterdir())]
    nvcc(source, tmp_path / "device_headers.fatbin", *RELEASE, "-I", str(ROOT / "csrc" / "cuda"), "-fatbin")


# Bytes of stack, spill stores and spill loads that a kernel may have. More registers would leave a multiprocessor fewer
# blocks.
SPILLS = {("75", "80"): {r"binary_cross_entropy_kernel<__half, .*\)0, true>": 28},
          ("86", "89"): {r"one_pass_kernel<.*InSharedMemory<32> *>, false, true>": 20,
                         r"select_backward_kernel<__half, 256, false>": 148,
                         r"spans_kernel<.*Backward<__half, .*LogSoftmaxSums> *>": 28},
          ("90",): {r"select_backward_kernel<__half, 256, false>": 20},
          ("100",): {r"select_backward_kernel<.*, 256, false>": 16,
                     r"spans_kernel<.*Backward<__(half|nv_bfloat16), .*LogSoftmaxSums> *>": 80},
          ("100", "120"): {r"sum_kernel<double, 256, 1>": 40},
          ("120",): {r"input_kernel<__(half|nv_bfloat16), __.*": 48, r"one_pass_kernel<.*InSharedMemory<.*": 48}}


def may_spill(architecture, kernel):
    return max((most for architectures, kernels in SPILLS.items() if architecture in architectures
                for pattern, most in kernels.items() if re.fullmatch(pattern, kernel)), default=0)


@needs_nvcc
def test_no_kernel_spills_registers(compiled):
    report = compiled.report
    kernels = {"binary_cross_entropy": 4 * 2 * 3 * 2, "candidates": 3 * (4 + 2),
               "cross_entropy": 4 * (2 + 2 + 1 + 1 + 3 + 3),
               "dense_divergence": 4 * 2 * 2, "linear": 10 + 4, "loss_mean": 2 * (2 + 2),
               "masked_mean": 4 * (2 + 2 + 1) + 3 * (2 + 1 + 2),
               "one_pass": 0,
               **dict.fromkeys(("one_pass_bfloat16", "one_pass_float", "one_pass_half"), 3 * 2 * 2), "select": 2,
               **dict.fromkeys(("select_bfloat16", "select_double", "select_float", "select_half"), 2 + 2 * 2 + 1),
               "sparse_softmax": 4 * 3 * (2 + 1), "topk": 4}
    assert len(report) == kernels[compiled.name] * (len(ARCHITECTURES) if compiled.architecture == "80" else 1)
    assert {key: bytes_ for key, (bytes_, *_) in report.items() if bytes_ > may_spill(*key)} == {}


@needs_nvcc
def test_blocks_fit_three_to_a_multiprocessor(compiled):
    # These kernels keep a pack's sums of columns and their weights in registers, so two blocks fit, with more loads in
    # flight. The same holds for the gradient of the scale beside that of the logits, for transformed rows in registers,
    # for the rows of two models, for exponents or weights in binary cross entropy, and for float64.
    two = (r"<double|dense_divergence|binary_cross_entropy_kernel<.*([12], (true|false)|false)>|"
           r"select_backward_kernel<.*true>|sum_kernel<.*, [248]>|"
           r"one_pass_kernel<.*InRegisters<4> *>, false|^100 input_kernel<__")
    four = r"forward_kernel<"  # latency of logits is hidden by other blocks
    for (architecture, kernel), (_, registers, _) in compiled.report.items():
        blocks = 2 if re.search(two, f"{architecture} {kernel}") else 4 if re.match(four, kernel) else 3
        # Rows of two models in float64; a mean runs in one block or cluster.
        blocks = 1 if re.match(r"dense_divergence_kernel<double|loss_mean_kernel", kernel) else blocks
        assert registers * (128 if "strided" in kernel else 256) * blocks <= 65536, (architecture, kernel)


@needs_nvcc
def test_a_row_finds_room_in_shared_memory_beside_what_the_kernel_has(compiled):
    if not compiled.name.startswith("one_pass_"):
        return
    for (_, kernel), (*_, shared) in compiled.report.items():
        assert shared <= 4 << 10  # kOtherBytes
        # An H100 has 228 KiB, of which each block uses one more KiB; three of the longest parts of a row fit.
        assert "256" not in kernel or 3 * (shared + LONGEST_PART + 1024) <= 228 << 10


LONGEST_PART = 16 * 18 * 256  # kSharedPacks of each thread of a block, with marks of their entries
# Warps per multiprocessor. docs/kernels.md predicts times from them.
RESIDENT_WARPS = {
    r"forward_kernel<(?!double)": dict.fromkeys(MULTIPROCESSORS, 32),
    r"backward_kernel<(?!double)": dict.fromkeys(MULTIPROCESSORS, 24),
    r"select_kernel<(?!double)": dict.fromkeys(MULTIPROCESSORS, 24),
    r"one_pass_kernel<.*, 256, .*true>$": {"80": 16, "86": 8, "89": 8, "90": 24, "100": 24, "120": 8}}


def resident_warps(report, architecture, capability):
    """Returns the warps of the kernels in RESIDENT_WARPS, {(pattern, kernel): warps}."""
    found = {}
    for (of, kernel), (_, registers, shared) in report.items():
        for pattern in RESIDENT_WARPS:
            if of == architecture and re.match(pattern, kernel):
                dynamic = LONGEST_PART if kernel.startswith("one_pass") else 0
                blocks = resident_blocks(MULTIPROCESSORS[capability], 256, registers, shared + dynamic)
                found[pattern, kernel] = blocks * 8
    return found


def test_occupancy_is_that_of_the_programming_guide():
    # 80 registers leave each scheduler 6 warps, and 72 leave 7, of which a block of 8 warps needs 2 of each scheduler.
    assert [resident_blocks(MULTIPROCESSORS["90"], 256, n, 0) for n in (32, 64, 72, 80, 84, 128)] == [8, 4, 3, 3, 2, 2]
    assert [resident_blocks(MULTIPROCESSORS[capability], 256, 80, 0) for capability in MULTIPROCESSORS] == [3] * 6
    assert resident_blocks(MULTIPROCESSORS["86"], 256, 32, 0) == 6  # 1536 threads
    assert resident_blocks(MULTIPROCESSORS["86"], 32, 32, 0) == 16
    # 1 KiB of each block is the system's.
    for capability, fitting in (("89", {24: 3, 32: 3, 33: 2, 49: 2, 50: 1, 99: 1, 100: 0}),
                         ("90", {75: 3, 76: 2, 113: 2, 227: 1, 228: 0})):
        assert {kib: resident_blocks(MULTIPROCESSORS[capability], 256, 80, kib << 10) for kib in fitting} == fitting


@needs_nvcc
def test_kernels_keep_a_multiprocessor_busy(compiled):
    """Checks every GPU, with the registers of 9.0 if only this is compiled. Launch bounds limit them alike for all."""
    for capability in MULTIPROCESSORS:
        architecture = "90" if compiled.architecture == "90" else capability
        for (pattern, kernel), warps in resident_warps(compiled.report, architecture, capability).items():
            assert warps >= RESIDENT_WARPS[pattern][capability], (capability, kernel)


@needs_nvcc
def test_logits_are_read_and_gradients_written_by_16_bytes(compiled):
    if compiled.name in ("select", "loss_mean", "one_pass"):
        return  # a few numbers per row
    found = compiled.code()
    if compiled.name != "candidates":
        found = [(name, body) for name, body in found
                 if not re.search(r"_kernelI(NS\d_\d\w*I)?d", name)]  # float64 has no packs
    if compiled.name == "masked_mean":
        packs = [(name, body) for name, body in found if re.search(r"_kernelI\w*Li[248]EEE", name)]
        loads = [body.count("LDG.E.128") for name, body in packs if re.search(r"\dsum_kernel", name)]
        assert len(loads) == 3 * 2 and min(loads) >= 2  # dtypes, kernels; loads in flight per thread
        stores = [body.count("STG.E.128") for name, body in packs if re.search(r"\dgradient_kernel", name)]
        assert len(stores) == 3 and min(stores) >= 1
        return
    if compiled.name == "candidates":
        for kernel, loads, stores in (("logits", 4 + 1, 0), ("input", 4, 1), ("weight", 4, 1)):
            bodies = [body for name, body in found if f"{kernel}_kernel" in name]
            assert len(bodies) == 4 + 2  # dtypes
            # A pack of a 16-bit input with a 32-bit weight has 8 bytes.
            assert min(body.count("LDG.E.128") for body in bodies) >= min(loads, 4)
            assert min(body.count("STG.E.128") + body.count("STG.E.64") for body in bodies) >= stores
        return
    if compiled.name == "dense_divergence":
        for name, body in found:
            # The statistics, and sums, gradient, or (with forward KL) both, from a pack of each model.
            both = "ELb1E" in name
            assert body.count("LDG.E.128") >= 4 + 4 + (2 + both) * 2, name
            assert body.count("STG.E.128") >= 1 + both, name
        return
    if compiled.name == "binary_cross_entropy":
        for name, body in found:
            assert body.count("LDG.E.128") >= 1 and body.count("STG.E.128") >= 1, name
        return
    if compiled.name.startswith("one_pass_"):
        assert len(found) == 3 * 2 * 2  # storage of a row, plain, gradient
        for name, body in found:
            gradient = re.search(r"ELb[01]ELb([01])E", name)[1] == "1"
            before = re.split(r"MUFU\.EX2", body)[0]  # all are loaded before the first exponential
            if "InRegisters" in name:
                assert before.count("LDG.E.128") == 4 and "LDGSTS" not in body, name
            else:  # four at once, and up to three singly; none passes through a register; then the next row
                loads = [len(re.findall(r"LDGSTS\S*\.128\b", code)) for code in (before, body[len(before):])]
                assert loads == [4 + 3, 4 + 3], name
            assert not gradient or body.count("STG.E.128") >= 4, name
        return
    if compiled.name == "topk" or compiled.name.startswith("select_"):
        for name, body in found:
            if not re.search(r"\dselect_merge_kernel", name):
                assert body.count("LDG.E.128") >= 4, name
                assert "backward" not in name or body.count("STG.E.128") >= 4, name
        return
    streams = r"\d(forward|backward|rows|spans|scale|accumulate)_kernel"
    dense = {name: body for name, body in found if re.search(streams, name)}
    assert len(dense) >= 4
    for name, body in dense.items():
        # Loads in flight per thread, and one more at the end of a row. Other threads read what rows share.
        loads = 1 if re.search(r"\d(scale|accumulate)_kernel", name) else 3 if re.search(r"\dspans_kernel", name) else 4
        # A row needs four loads and up to four for its end; with options two and two.
        steps = 3 if re.search(r"\d(forward|backward)_kernel", name) else 1
        assert body.count("LDG.E.128") >= loads * steps, name
        assert re.search(r"\dforward_kernel", name) or body.count("STG.E.128") >= loads, name
        # A store may overlap the next load, so loads cannot move before it.
        assert not re.search(r"\d(rows|spans)_kernel", name) or body.split("STG.E.128")[0].count("LDG.E.128") >= 2


@needs_nvcc
def test_forward_spends_less_than_seven_instructions_on_a_logit(compiled):
    """Checks the loop with the instructions for a new maximum, which are a tenth."""
    if compiled.name != "cross_entropy":
        return
    loops = [(name, loop_of_exponentials(body)) for name, body in compiled.code()
             if re.search(r"\dforward_kernelI(f|13__nv_bfloat16|6__half)Li256E", name)]
    assert len(loops) == 3  # dtypes
    for name, loop in loops:
        exponentials = [i for i, text in enumerate(loop) if "MUFU.EX2" in text]
        loads = [i for i, text in enumerate(loop) if "LDG.E.128" in text]
        assert 4 < len(loop) / len(exponentials) < (6.6 if "kernelIf" in name else 6.8), name
        assert len(loads) == 4 and max(loads) < min(exponentials), name


@needs_nvcc
def test_binary_cross_entropy_spends_few_instructions_on_a_class(compiled):
    """Checks the plain loss. On compute capability 9.0, a thread loads the next pack before it evaluates one."""
    if compiled.name != "binary_cross_entropy":
        return
    for storage, size in (("f", 4), ("13__nv_bfloat16", 8), ("6__half", 8)):
        found = [instructions(body) for name, body in compiled.code()
                 if re.search(rf"_kernelI{storage}Li\d+ELN\w*BinaryKindE0ELb1E", name)]
        assert len(found) == 2  # groups
        for code in found:
            step, = ways_through(code, {"MUFU": 2 * size, "LDG.E.128": 1, "STG.E.128": 1})
            assert 15 * size < len(step) < (38 if size == 4 else 29) * size, (storage, len(step))
            if compiled.architecture == "90":
                at, loaded = next((i, text) for i, (_, text) in enumerate(step) if "LDG.E.128" in text)
                register = int(re.search(r" R(\d+), desc", loaded)[1])
                used = rf"\bR({'|'.join(str(register + i) for i in range(4))})\b"
                assert at < len(step) / 2 and not any(re.search(used, text) for _, text in step[at + 1:]), storage


@needs_nvcc
def test_a_rank_spends_ten_instructions_on_a_logit(compiled):
    if compiled.name not in ("select_bfloat16", "select_float", "select_half"):
        return
    logits = 16 if compiled.name == "select_float" else 32  # in four packs
    found = [instructions(body) for name, body in compiled.code() if re.search(r"\dselect_kernel", name)]
    assert len(found) == 2  # groups
    for code in found:
        # A comparison for each logit, and one for the maximum.
        step, = ways_through(code, {"LDG.E.128": 4, "MUFU.EX2": logits, "FSETP": logits + 1, "STG": 0})
        assert 7 < len(step) / logits < 10.5, len(step)


@needs_nvcc
def test_forward_kl_spends_forty_instructions_on_a_class(compiled):
    """Checks the statistics of both rows, and the pass for the sums and the gradient."""
    if compiled.name != "dense_divergence":
        return
    for storage, size, most in (("f", 4, 45), ("13__nv_bfloat16", 8, 40), ("6__half", 8, 40)):
        found = [instructions(body) for name, body in compiled.code()
                 if re.search(rf"dense_divergence_kernelI{storage}Li\d+ELb1E", name)]
        assert len(found) == 2  # groups
        for code in found:
            of_row, = ways_through(code, {"LDG.E.128": 4, "MUFU": 4 * size, "MUFU.EX2": 4 * size, "STG": 0})
            # Another loop computes the gradient alone.
            of_both = max(ways_through(code, {"LDG.E.128": 2, "MUFU": 2 * size, "MUFU.EX2": 2 * size, "STG.E.128": 1}),
                          key=len)
            spent = 2 * len(of_row) / (4 * size) + len(of_both) / size
            assert 25 < spent < most, (storage, spent)


def one_pass_kernels(compiled, architecture=None):
    """Returns (name, code) of the kernels that keep logits in shared memory and compute a gradient."""
    return [(name, instructions(body)) for name, body in compiled.code(architecture)
            if re.search(r"InSharedMemory.*ELb[01]ELb1E", name)]


def check_instructions_of_one_pass(compiled, architecture):
    """Checks the count because instructions, not memory, limit the kernel. Branches in its loops raised it above 18."""
    found = [(name, loops(code)) for name, code in one_pass_kernels(compiled, architecture) if "ELb1ELb1E" in name]
    assert len(found) == 2  # groups
    for name, of_kernel in found:
        logits, most = (16, 13) if "RowSliceIf" in name else (32, 12)  # in four packs
        passes = [shortest(of_kernel, {"LDGSTS": 4}),
                  shortest([loop for loop in of_kernel if count(loop, "MNMX")], {"LDS.128": 4, "MUFU": 0, "STG": 0}),
                  shortest(of_kernel, {"MUFU.EX2": logits, "LDS.128": 4, "STG": 0}),
                  shortest(of_kernel, {"MUFU.EX2": logits, "LDS.128": 4, "STG.E.128": 4})]
        spent = [len(loop) / logits for loop in passes]
        assert 9 < sum(spent) < most, (name, spent)
    for name, code in one_pass_kernels(compiled, architecture):  # of scaled logits, the sums
        logits = 8 if "RowSliceIf" in name else 16  # in two packs
        if "ELb0ELb1E" in name:
            loop = shortest(loops(code), {"MUFU.EX2": logits, "LDS.128": 2, "STG": 0})
            assert len(loop) < 7.5 * logits, (name, len(loop) / logits)


@needs_nvcc
def test_one_pass_spends_twelve_instructions_on_a_logit_and_its_gradient(compiled):
    if compiled.name.startswith("one_pass_"):
        # Compute capability 7.5 has no maxima of pairs.
        for architecture in ARCHITECTURES[1:] if compiled.architecture == "80" else ["90"]:
            check_instructions_of_one_pass(compiled, architecture)


@needs_nvcc
def test_many_entries_of_one_pass_take_few_instructions(compiled):
    """Checks the two loops over all entries: sums with marks, and gradients. Both include every dtype of a target."""
    if not compiled.name.startswith("one_pass_"):
        return
    for name, code in one_pass_kernels(compiled):
        if "Li256E" not in name or "ELb1ELb1E" not in name:
            continue
        single = [loop for loop in loops(code) if not any(MEETS.match(text) for _, text in loop)]
        marks = min((loop for loop in single if count(loop, "ATOMS.OR") == 2 and count(loop, "MUFU.EX2")), key=len)
        writes = [loop for loop in single if count(loop, "STG.E") == 1 and count(loop, "MUFU.EX2") and
                  count(loop, "LDS") in (2, 4) and not count(loop, "ATOMS")]
        assert len(marks) < 170 and len(min(writes, key=len)) < 150, name


@needs_nvcc
def test_a_warp_writes_its_gradient_once(compiled):
    """Checks that lanes with an entry converge with the others before the loop that writes the packs."""
    if not compiled.name.startswith("one_pass_"):
        return
    found = one_pass_kernels(compiled)
    assert len(found) == 2 * 2  # groups, plain
    for name, code in found:
        writing = [loop for loop in loops(code) if count(loop, "STG.E.128") and count(loop, "MUFU.EX2") >= 8
                   and not any(MEETS.match(text) for _, text in loop)]
        assert writing, name
        assert [splits_before(code, loop) for loop in writing] == [[]] * len(writing), name


def nvcc_of_setup(monkeypatch):
    """Returns the nvcc flags of setup.py."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(SETUP, "why_no_cuda", lambda torch, home: None)
    monkeypatch.setattr(SETUP, "static_runtime", lambda home: home)
    return SETUP.extensions(torch, "/nowhere")[1].extra_compile_args["nvcc"]


def test_products_and_sums_are_made_one_nowhere_but_where_the_source_says(monkeypatch):
    """Checks every build for -fmad=false, because a compiler may fuse an operation in one kernel and not in another."""
    assert set(ROUNDING) <= set(nvcc_of_setup(monkeypatch)) and set(ROUNDING) <= set(NVCC)
    given = re.search(r"\$<\$<COMPILE_LANGUAGE:CUDA>:(.*?)>", (ROOT / "CMakeLists.txt").read_text(), re.S)
    assert set(ROUNDING) <= set(given[1].split())


@needs_nvcc
def test_cmake_compiles_kernels_as_setup_does(monkeypatch, tmp_path):
    """Runs CMake with a stand-in for torch, which may be a CPU build here; nvcc only parses the sources."""
    if shutil.which("cmake") is None and "CI" not in os.environ:
        pytest.skip("needs cmake")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'torch' in sys.orig_argv[-1]:\n    import torch\n    torch.version.cuda = 'another'\n")
    subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path / "build", f"-DPython_EXECUTABLE={sys.executable}",
                    "-DCMAKE_CUDA_ARCHITECTURES=90-virtual"], check=True, capture_output=True,
                   env={**os.environ, "PYTHONPATH": str(tmp_path)})
    commands = {Path(each["file"]).name: shlex.split(each["command"])
                for each in json.loads((tmp_path / "build" / "compile_commands.json").read_text())}
    command = commands["one_pass_bfloat16.cu"]
    wanted = {flag for flag in nvcc_of_setup(monkeypatch)
              if not flag.startswith(("--threads", "-gencode", "-Xcompiler"))}
    assert wanted <= set(command)
    command[command.index("-c"):command.index("-c") + 1] = ["-Xcicc", "-O0", "-ptx"]  # seconds
    done = subprocess.run(command, cwd=tmp_path / "build", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_libraries_use_nothing_but_the_stable_abi():
    assert LIBRARIES
    for library in LIBRARIES:
        symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True).stdout
        assert "torch_library_impl" in symbols
        assert re.findall(r"_ZN?K?(?:2at|3c10|5torch)\w*|\bPy\w+", symbols) == []


def test_module_run_prints_what_a_bug_report_needs(tmp_path):
    done = subprocess.run([sys.executable, "-m", "sparse_ce"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in (sparse_ce.__version__, torch.__version__, sparse_ce.ops.instruction_set(), "cuda kernels",
                 "op forward", "op backward_"):
        assert part in done.stdout


@pytest.mark.slow
def test_cmake_builds_the_same_ops(tmp_path):
    if shutil.which("cmake") is None and "CI" not in os.environ:
        pytest.skip("needs cmake")
    subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, f"-DPython_EXECUTABLE={sys.executable}",
                    "-DCMAKE_CXX_FLAGS_RELEASE=-O1"], check=True, capture_output=True)  # -O3 takes three times as long
    subprocess.run(["cmake", "--build", tmp_path, "-j2", "--target", "sparse_ce_C"], check=True, capture_output=True)
    program = (f"import torch; torch.ops.load_library({str(tmp_path / 'libsparse_ce_C.so')!r}); "
               "print(*torch.ops.sparse_ce.forward(torch.zeros(1, 4), torch.tensor([2])))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["tensor([1.3863])", "tensor([1.3863])"], done.stderr


@needs_nvcc
@pytest.mark.parametrize("source", [*(f"tests/emulation/{op}.cpp" for op in OPS), "benchmarks/gpu/one_pass_bench.cu"])
def test_nvcc_takes_the_programs_for_a_gpu(source, tmp_path):
    done = subprocess.run(["nvcc", *NVCC, "-arch=sm_90", "-Xcicc", "-O0", "-x", "cu", "-ptx", str(ROOT / source), "-o",
                           str(tmp_path / "program.ptx")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_nvcc
def test_a_masked_mean_spends_four_instructions_on_an_element_of_a_bool_mask(compiled):
    """Checks the loop over whole packs. A loop that supported every mask took 12 to 30, and 118 registers."""
    if compiled.name != "masked_mean":
        return
    found = [(name, loops(instructions(body))) for name, body in compiled.code() if "selected_kernel" in name]
    assert len(found) == 3 * 2  # dtypes, groups
    for name, of_kernel in found:
        size, most = (4, 4.7) if "kernelIf" in name else (8, 4.1)
        loop = shortest(of_kernel, {"LDG.E.128": 4})  # four packs in flight
        assert count(loop, "LDG") == 2 * 4 and count(loop, "FADD") == 4 * size, name
        assert 2 < len(loop) / (4 * size) < most, (name, len(loop))
    for (_, kernel), (_, registers, _) in compiled.report.items():
        assert "selected_kernel" not in kernel or registers <= 64, kernel  # four blocks on a multiprocessor
