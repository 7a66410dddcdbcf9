"""Defines the steps of each stage of gpu_acceptance.py, their time limits and their command lines."""

import importlib.util
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Collection, List, Mapping, Sequence, Tuple

STAGES = ("quick", "record", "record-rest")
STAGE_SECONDS = 540  # all steps of a stage end after this time, because a stage must end within ten minutes
LOSS_TESTS = "test_cross_entropy_"  # tests of the kernels that change most often
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
QUICK_SANITIZERS = ("memcheck", "racecheck", "synccheck")
# Kernels with clusters of blocks, and those that no GPU has run.
QUICK_OPS = ("cross_entropy", "dense_divergence", "binary_cross_entropy", "select")
# Parts of the record: problems, as --only selects them, and for its second stage the seconds of each step.
RECORD = ("measure ", "measure_linear ")
RECORD_REST = {
    "dense, binary": (110, ("measure_dense ", "measure_binary ")),
    "select, candidates": (85, ("measure_select", "measure_candidates")),
    "other heads": (105, ("measure_linear_select", "measure_dense_heads", "measure_binary_heads")),
    "small, images, others": (155, ("measure_small", "measure_images", "measure_variant", "measure_stock",
                                    "measure_cliffs", "measure_log_softmax", "measure_masked_mean")),
}
BENCH = "one_pass_bench"
ONE_PASS = "SPARSE_CE_ONE_PASS"  # see docs/errors.md
WHEEL_STEPS = ("kit's wheel", "load", "first loss")  # replaced by a build from source if one fails

# The most informative lines of a step's output, which are shown in its report.
VERDICT = r"^(FAILED|ERROR) |\d (passed|failed|error)|ERROR SUMMARY"
MEASURED = r"^\| \*\*|\| met \||\*\*missed\*\*|: not run|wrong result|^goals:|^[a-z0-9].* x .*(float|bfloat)\d+"
COUNTED = (r"Context \d+|Duration |DRAM Throughput|Memory Throughput|Compute \(SM\)|Achieved Occupancy|Registers Per|"
           r"Executed Ipc|Issue Slots|Active Threads Per Warp|stall")
# The kernels to profile, which gpu_probe.py's `profile` launches. one_pass_kernel computes a loss and its gradient in
# one pass, and forward alone too.
PROFILED_KERNELS = ("one_pass_kernel", "forward_kernel", "backward_kernel")
# Instructions per cycle, active threads per instruction, memory bandwidth utilization, and the stall reasons of warps.
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats", "LaunchStats", "Occupancy")
NO_COUNTERS = r"ERR_NVGPUCTRPERM|LibraryNotLoaded|Failed to initialize the profiler|No supported GPU"
NO_SANITIZER = "Device not supported"
TIMED = r"copies|differ|equal$|multiprocessors"
# Where a toolkit or a profiler has programs that are not on the PATH.
TOOL_FOLDERS = ("bin", "compute-sanitizer", "extras/compute-sanitizer", ".")
TOOLKITS = ("/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda", "/opt/nvidia/nsight-compute/*")


@dataclass(frozen=True)
class Step:
    name: str
    command: List[str]
    seconds: int
    instead_of: Tuple[str, ...] = ()  # runs only if one of these failed or is missing; its time is not planned
    skip_if: str = ""  # output of a failure which shows that this machine does not support the step
    optional: bool = False  # a machine that lacks the program does not fail
    show: str = VERDICT
    always: bool = False  # runs again on every machine: --skip-done does not skip it
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to that of the stage

    def is_kept(self, done: Collection[str]) -> bool:
        """Returns True if the result of an earlier run is kept."""
        return self.name in done and not self.always

    @property
    def line(self) -> str:
        """Returns the command line for a shell."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.environment.items()),
                         shlex.join(self.command)])


@dataclass(frozen=True)
class Group:
    """Groups steps that run at the same time, at most ``width`` of them. The next group waits for all."""

    name: str
    steps: Tuple[Step, ...]
    width: int = 1

    def seconds(self, done: Collection[str] = ()) -> int:
        """Returns the maximum duration if the steps start in order, each in the first free slot. Steps whose names are
        in ``done`` do not run again."""
        return max(ends(self, done), default=0)


def one_at_a_time(group: Group) -> Group:
    """Returns the group for a GPU in exclusive mode, which a single process can use: its steps run one after another,
    and tests in one process."""
    return replace(group, width=1, steps=tuple(
        replace(step, command=[word for word in step.command if not re.fullmatch(r"-n\d+", word)])
        for step in group.steps))


def ends(group: Group, done: Collection[str] = ()) -> List[int]:
    """Returns the latest end of each step, in seconds from the start of the group."""
    free = [0] * group.width
    found = []
    for step in group.steps:
        free.sort()
        free[0] += 0 if step.instead_of or step.is_kept(done) else step.seconds
        found.append(free[0])
    return found


@dataclass(frozen=True)
class Machine:
    """Describes the place where stages run: the repository, a kit or none, a folder for installed packages, and a GPU
    or a rehearsal on the CPU."""

    root: Path
    kit: Path
    work: Path
    rehearse: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    def script(self, name: str, *arguments: str) -> List[str]:
        return [sys.executable, str(self.root / "benchmarks" / f"{name}.py"), *arguments]

    def seeds(self, last: int) -> List[str]:
        return ["--seeds", "1", str(min(last, 10) if self.rehearse else last)]

    @property
    def peers(self) -> Path:
        """Returns the folder with the wheels of peers, beside the kit."""
        return self.kit.with_name("gpu-peers")

    @property
    def peers_site(self) -> str:
        """Returns the folder where peers are installed. QuACK's head fails in folders of other names."""
        return str(self.work / "peers" / "site-packages")

    @property
    def ops(self) -> List[str]:
        return sorted(path.stem for path in (self.root / "tests" / "emulation").glob("*.cpp"))

    @property
    def kit_has_programs(self) -> bool:
        return all((self.kit / f"{name}_device").exists() for name in [*self.ops, BENCH])

    def program(self, op: str) -> str:
        built_here = self.root / "tests" / "emulation" / "build"
        return str((self.kit if self.kit_has_programs else built_here) / f"{op}_device")


def plan(stage: str, machine: Machine) -> List[Group]:
    return prepare(machine) + {"quick": quick, "record": record, "record-rest": record_rest}[stage](machine)


# ---------------------------------------------------------------------------------------------- before every stage


def prepare(machine: Machine) -> List[Group]:
    """Returns the first groups: the environment, the kit's wheel (or a build from source if the wheel is missing or
    fails), and the first loss."""
    probe, device = machine.script("gpu/gpu_probe", "environment", "--device", machine.device), machine.device
    environment = Group("environment", (
        Step("driver", ["nvidia-smi", "--query-gpu=driver_version,name,mig.mode.current,compute_mode",
                        "--format=csv,noheader"], 20, show=".", always=True),
        Step("nvcc", ["nvcc", "--version"], 20, show="release", always=True, optional=machine.kit_has_programs),
        Step("environment", probe, 20, show=", torch ", always=True)), 3)
    wheels = sorted(map(str, machine.kit.glob("*.whl")))
    ours = [path for path in wheels if Path(path).name.startswith("sparse_ce-")]
    tools = [path for path in wheels if path not in ours]
    steps = [Step("kit's tools", install(machine, *tools), 5, always=True)] if tools else []
    if ours:
        steps.append(Step("kit's wheel", install(machine, *ours), 10, always=True))
    loading, first = [sys.executable, "-m", "sparse_ce"], machine.script("gpu/gpu_probe", "first", "--device", device)
    loads = (Step("load", loading, 25, show="kernels|gpu|torch", always=True),
             Step("first loss", first, 25, show="WRONG|, 0 wrong", always=True))
    building = (Step("build from source", install(machine, "--no-build-isolation", "--upgrade", str(machine.root)), 180,
                     instead_of=WHEEL_STEPS, always=True),
                *(replace(step, name=f"{step.name}, built here", instead_of=WHEEL_STEPS) for step in loads))
    return [environment, Group("install", tuple(steps)), Group("load", loads if ours else (), 2),
            Group("build", building)]


def install(machine: Machine, *what: str) -> List[str]:
    return [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target",
            str(machine.work / "site"), *what]


def programs(machine: Machine) -> List[Group]:
    """Compiles the device programs if the kit has none."""
    script = str(machine.root / "tests" / "emulation" / "build.py")
    steps = () if machine.kit_has_programs else (Step("build the programs", [sys.executable, script, "--device"], 55,
                                                    always=True),)
    return [Group("programs", steps)]


def peers(machine: Machine) -> List[Group]:
    """Installs the peers, for stages that measure them."""
    command = machine.script("gpu/gpu_peers", str(machine.peers), machine.peers_site)
    steps = (Step("peers", command, 25, show="", always=True),) if machine.peers.exists() else ()
    return [Group("peers", steps)]


# -------------------------------------------------------------------------------------------------------- the stages


def quick(machine: Machine) -> List[Group]:
    """Returns the groups that check correctness, speed and counters. The most important steps come first, because the
    stage is a single command and may be the only one."""
    losses = [path for path in gpu_test_files(machine.root / "tests") if path.name.startswith(LOSS_TESTS)]
    others = [path for path in gpu_test_files(machine.root / "tests") if path not in losses]
    checks = [Step("tests of the loss", pytest(machine, "not slow", losses), 95),
              *(Step(op, [machine.program(op), *machine.seeds(1500 if op == "cross_entropy" else 600)], 95)
                for op in machine.ops),
              *(sanitizer(name, machine, op, 95) for op in QUICK_OPS for name in QUICK_SANITIZERS)]
    counters = [tool("ncu"), "--clock-control", "none", *(word for name in SECTIONS for word in ("--section", name)),
                "-k", f"regex:{'|'.join(PROFILED_KERNELS)}", "-c", "12",
                *machine.script("gpu/gpu_probe", "profile", "--device", machine.device)]

    def ours(name: str, seconds: int, *only: str) -> Step:
        """Returns a benchmark step without peers, which are in the stages of the record."""
        return rows(machine, name, seconds, only, "--no-peers")

    largest = "measure 8192 x 128256"
    # Measure the way that is not planned.
    two_kernels = replace(ours("two kernels", 20, largest), environment={ONE_PASS: "0"})
    built = 0 if machine.kit_has_programs else 55  # seconds
    speed = (
        ours("8192 x 128256", 30, largest),
        two_kernels,
        Step("ways", machine.script("run", "--compare-ways", str(machine.work / "benchmarks")), 5, show=MEASURED),
        ours("teachers, many labels", 40, "measure_dense dense", "measure_binary binary"),
        ours("cliffs, images", 60, "measure_cliffs", "measure_images"),
        Step("counters", counters, 45, skip_if=NO_COUNTERS, show=COUNTED, optional=True),
        ours("linear head", 50, "measure_linear linear head, 8192 x 4096"),
        ours("other sizes", 50 - built // 2, "measure 16384", "measure 4096 x 128256",
             "measure_variant 65536 x 1000,"),
        ours("means, log_softmax, small", 40 - built // 2, "measure_masked_mean", "measure_log_softmax",
             "measure_small"),
    )
    return [*programs(machine), Group("one pass", (one_pass_bench(machine),)),
            Group("right", tuple(checks), len(checks)), Group("speed", speed),
            Group("rest", (Step("tests", pytest(machine, "not slow", others), 35),))]


def record(machine: Machine) -> List[Group]:
    """Returns the groups for the record: sanitizers, the largest sizes, and the benchmark of losses and heads."""
    checks = [Step("slow tests", pytest(machine, "slow", gpu_test_files(machine.root / "tests"), workers=4), 180),
              *(sanitizer(name, machine, op, 20) for name in SANITIZERS for op in machine.ops)]
    seconds = 255 if machine.kit_has_programs else 215
    return [*programs(machine), Group("checks", tuple(checks), 5), *peers(machine),
            Group("benchmark", (rows(machine, "losses, heads", seconds, RECORD),))]


def record_rest(machine: Machine) -> List[Group]:
    """Returns the groups for the rest of the benchmark. A step that is cut takes no time from the others."""
    return [*peers(machine), Group("benchmark", tuple(rows(machine, name, seconds, only)
                                                      for name, (seconds, only) in RECORD_REST.items()))]


def rows(machine: Machine, name: str, seconds: int, only: Sequence[str], *options: str) -> Step:
    """Returns a benchmark step for the problems that contain one of ``only``."""
    return benchmark(machine, name, seconds, *options, *(word for part in only for word in ("--only", part)))


def one_pass_bench(machine: Machine) -> Step:
    """Returns the step that measures each form of the one-pass kernel. A rehearsal measures a few rows."""
    sizes = ["3", "20000", "1"] if machine.rehearse else []
    return Step(BENCH, [machine.program(BENCH), *sizes], 10, show=TIMED)


def sanitizer(name: str, machine: Machine, op: str, seconds: int) -> Step:
    command = [tool("compute-sanitizer"), "--tool", name, "--error-exitcode", "1", machine.program(op), "--small",
               *machine.seeds(20)]
    return Step(f"{name} {op}", command, seconds, skip_if=NO_SANITIZER, optional=True)


def tool(name: str) -> str:
    """Returns the path of a program that is installed with CUDA, but not always on the PATH; or its name if it is not
    found."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), nvcc and str(Path(nvcc).resolve().parents[1]),
             *(path for pattern in TOOLKITS for path in sorted(glob(pattern), reverse=True))]
    beside = (Path(home, folder, name) for home in homes if home for folder in TOOL_FOLDERS)
    return shutil.which(name) or next((str(path) for path in beside if path.is_file()), name)


def benchmark(machine: Machine, name: str, seconds: int, *arguments: str) -> Step:
    """Returns a step that runs run.py. A rehearsal measures one small problem instead."""
    if machine.rehearse:
        peers = [each for each in arguments if each == "--no-peers"]
        arguments = ("--quick", "--repeats", "1", "--only", "mask of 64 x 512, dim=None, float32", *peers)
    if machine.peers.exists() and "--no-peers" not in arguments:
        arguments = (*arguments, "--peers", machine.peers_site)
    out = machine.work / "benchmarks" / re.sub(r"\W+", "-", name)
    arguments = ("--device", machine.device, "--out", str(out), "--no-plot", *arguments)
    return Step(name, machine.script("run", *arguments), seconds, show=MEASURED)


def pytest(machine: Machine, marked: str, files: List[Path], workers: int = 12) -> List[str]:
    """Returns the command for the GPU cases in these files. gpu_pytest.py in the working folder prints failures
    immediately."""
    tests = machine.root / "tests"
    selection = "cpu and labels" if machine.rehearse else "cuda or gpu"
    marked = "not slow" if machine.rehearse else marked
    parallel = [f"-n{workers}"] if importlib.util.find_spec("xdist") and not machine.rehearse else []
    limit = ["--timeout", "120"] if importlib.util.find_spec("pytest_timeout") else []
    files = [tests / "cross_entropy" / "test_cross_entropy_inplace.py"] if machine.rehearse else files
    return [sys.executable, "-m", "pytest", *map(str, files), "-c", str(machine.root / "pyproject.toml"), "--rootdir",
            str(machine.root), "-p", "no:cacheprovider", "-p", "gpu_pytest", *parallel, *limit, "-k", selection, "-m",
            marked, "--continue-on-collection-errors", "--tb", "short", "--durations", "10"]


def gpu_test_files(tests: Path) -> List[Path]:
    """Finds the files in which a test takes the fixture `device` or the parameter `gpu`. No other test has a GPU
    case."""
    case = re.compile(r"^\s*def \w+\([^)]*\b(device|gpu)\b", re.M)
    return [path for path in sorted(tests.glob("*/test_*.py")) if case.search(path.read_text())]
