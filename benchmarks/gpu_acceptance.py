"""Everything that needs a GPU, in one command of less than nine minutes: ``python benchmarks/gpu_acceptance.py``.

Needs an NVIDIA GPU, nvcc, a CUDA build of torch and pytest; no network. Stages, each under its own limit, none stopping
the next; a stage may also use up what those before it left over:

    environment  what the numbers were measured on
    build        the package for this GPU's architecture, into a folder of its own
    tests        pytest tests, all but those of builds and of the emulation
    emulation    the kernels' cases, compiled by nvcc, on the device
    sanitizer    the same cases (--small) under compute-sanitizer's four tools
    benchmarks   run.py --device cuda

Writes one file, <out>/acceptance.json: the environment, exit codes and the last lines of each step, the rows of the
benchmark; ``run.py --update-results <out>/acceptance.json`` keeps those. Exits with 1 if any step failed.
SPARSE_CE_CSRC_TREE names the sources (``git rev-parse HEAD:csrc``) where there is no git.
"""

import argparse
import datetime
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

STAGES = ("environment", "build", "tests", "emulation", "sanitizer", "benchmarks")
TAIL = 12000  # characters of a step's output that are kept
TIMED_OUT, NOT_FOUND = 124, 127

PROBE = """import json, torch
about, (major, minor) = torch.cuda.get_device_properties(0), torch.cuda.get_device_capability()
print(json.dumps({"device": about.name, "architecture": f"{major}.{minor}", "torch": torch.__version__,
                  "cuda": torch.version.cuda, "memory_gib": about.total_memory / 2**30}))"""


@dataclass(frozen=True)
class Step:
    stage: str
    name: str
    command: List[str]
    seconds: int


def steps(root: Path, work: Path) -> List[Step]:
    """In the order in which they run. The limits add up to 553 s, however many programs there are."""
    python = sys.executable
    programs = [str(root / "tests" / "emulation" / "build" / f"{path.stem}_device")
                for path in sorted((root / "tests" / "emulation").glob("*.cpp"))]
    # Compilers' reports and emulated kernels: minutes of compiling that prove nothing about this GPU.
    elsewhere = [f"--ignore={root / 'tests' / name}" for name in ("test_build.py", "test_emulation.py")]
    parallel = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    return [
        Step("environment", "driver", ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"], 5),
        Step("environment", "torch", [python, "-c", PROBE], 20),
        Step("environment", "nvcc", ["nvcc", "--version"], 5),
        Step("build", "build", [python, "-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps",
                                "--upgrade", "--target", str(work / "site"), str(root)], 130),
        # Steps run in `work`: in the repository its sources would hide the installed package.
        Step("tests", "tests", [python, "-m", "pytest", str(root / "tests"), "-c", str(root / "pyproject.toml"),
                                "--rootdir", str(root), "-p", "no:cacheprovider", *parallel, *elsewhere], 100),
        Step("emulation", "emulation build", [python, str(root / "tests" / "emulation" / "build.py"), "--device"], 40),
        *(Step("emulation", Path(program).name, [program, "--seeds", "1", "2000"], 32 // len(programs))
          for program in programs),
        *(Step("sanitizer", f"{tool} {Path(program).name}",
               [sanitizer(), "--tool", tool, "--error-exitcode", "1", program, "--small"], 24 // len(programs))
          for tool in ("memcheck", "racecheck", "initcheck", "synccheck") for program in programs),
        Step("benchmarks", "benchmarks", [python, str(root / "benchmarks" / "run.py"), "--device", "cuda", "--out",
                                          str(work / "benchmarks")], 125),
    ]


def sanitizer() -> str:
    """compute-sanitizer lies beside nvcc, but not always on the PATH."""
    beside = [Path(home) / "bin" / "compute-sanitizer" for home in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")]
    found = shutil.which("compute-sanitizer")
    return found or next((str(path) for path in beside if path.exists()), "compute-sanitizer")


def run(step: Step, seconds: float, work: Path, environment: Dict[str, str]) -> Dict[str, Any]:
    """One step in a process group of its own, ended with all its children when its time is up."""
    log = work / f"{step.name.replace(' ', '-')}.log"
    begin = time.monotonic()
    with log.open("w") as sink:
        try:
            process = subprocess.Popen(step.command, cwd=work, env=environment, stdout=sink, stderr=subprocess.STDOUT,
                                       start_new_session=True)
        except OSError as error:
            process, code = None, NOT_FOUND
            sink.write(f"{error}\n")
        if process is not None:
            try:
                code = process.wait(timeout=max(1.0, seconds))
            except subprocess.TimeoutExpired:
                code = TIMED_OUT
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    tail = log.read_text(errors="replace")[-TAIL:]
    return {"stage": step.stage, "name": step.name, "exit_code": code, "seconds": round(time.monotonic() - begin, 1),
            "limit": round(seconds, 1), "tail": tail}


def environment_of(root: Path, work: Path, torch_probe: Optional[Dict[str, Any]]) -> Dict[str, str]:
    """The package that this run builds, before any that is installed, and built for this GPU alone."""
    path = os.pathsep.join(filter(None, [str(work / "site"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "SPARSE_CE_CUDA": "1",
                   "SPARSE_CE_CSRC_TREE": csrc_tree(root)}
    if torch_probe:
        environment["TORCH_CUDA_ARCH_LIST"] = torch_probe["architecture"]
    return environment


def csrc_tree(root: Path) -> str:
    given = os.environ.get("SPARSE_CE_CSRC_TREE")
    if given:
        return given
    try:
        return subprocess.run(["git", "rev-parse", "HEAD:csrc"], cwd=root, capture_output=True, text=True,
                              check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def probe(result: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """What PROBE printed last, if it ran."""
    lines = result["tail"].strip().splitlines()
    return json.loads(lines[-1]) if result["exit_code"] == 0 and lines else None


def benchmark(work: Path) -> Optional[Dict[str, Any]]:
    """The newest record of run.py, which is there even if the run did not come to its end."""
    found = sorted((work / "benchmarks").glob("*.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(found[-1].read_text()) if found else None


def arguments() -> argparse.Namespace:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--out", type=Path, default=here / "out")
    parser.add_argument("--root", type=Path, default=here.parent, help="the repository")
    parser.add_argument("--dry-run", action="store_true", help="only say what would run")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    stages = args.stages.split(",")
    unknown = sorted(set(stages) - set(STAGES))
    if unknown:
        sys.exit(f"--stages must be of {', '.join(STAGES)}, got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="sparse_ce-") as work:
        chosen = [step for step in steps(args.root.resolve(), Path(work)) if step.stage in stages]
        if args.dry_run:
            for step in chosen:
                print(f"{step.stage:12} {step.seconds:4} s  {shlex.join(step.command)}")
            print(f"{sum(step.seconds for step in chosen)} s at most")
            return 0
        return run_all(chosen, args.root.resolve(), Path(work), args.out.resolve() / "acceptance.json")


def run_all(chosen: List[Step], root: Path, work: Path, path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    record: Dict[str, Any] = {"date": datetime.date.today().isoformat(), "csrc": csrc_tree(root), "driver": None,
                              "environment": None, "steps": [], "benchmark": None}
    environment = environment_of(root, work, None)
    deadline = time.monotonic()
    for step in chosen:
        deadline += step.seconds
        result = run(step, deadline - time.monotonic(), work, environment)
        if step.name == "driver" and result["exit_code"] == 0:
            record["driver"] = result["tail"].split(",")[0].strip()
        if step.name == "torch":
            record["environment"] = probe(result)
            environment = environment_of(root, work, record["environment"])
        if step.stage == "benchmarks":
            record["benchmark"] = benchmark(work)
        record["steps"].append(result)
        path.write_text(json.dumps(record, indent=1) + "\n")  # after each step: what is known is not lost
        verdict = "ok" if result["exit_code"] == 0 else f"FAILED ({result['exit_code']})"
        print(f"{step.stage:12} {step.name:16} {verdict:14} {result['seconds']:6.1f} of {result['limit']:.0f} s",
              flush=True)
        if result["exit_code"] or step.stage == "benchmarks":
            print("\n".join("    " + line for line in result["tail"].splitlines()[-40:]), flush=True)
    failed = [result["name"] for result in record["steps"] if result["exit_code"]]
    print(f"written: {path}; " + (f"failed: {', '.join(failed)}" if failed else "all passed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
