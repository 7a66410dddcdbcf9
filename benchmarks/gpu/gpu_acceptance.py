"""Runs all checks that need a GPU, in commands of at most nine minutes each, on a machine without a network:

    python3 benchmarks/gpu/gpu_acceptance.py --kit gpu-kit --out OUT --stage quick        correctness, speed, counters
    python3 benchmarks/gpu/gpu_acceptance.py --kit gpu-kit --out OUT --stage record       all sanitizers, losses, heads
    python3 benchmarks/gpu/gpu_acceptance.py --kit gpu-kit --out OUT --stage record-rest  the rest of the benchmark

It needs an NVIDIA GPU, a CUDA build of torch and pytest. It also needs the kit (``make gpu-kit``), or nvcc to build
without it.

gpu_steps.py defines the steps. A step that fails, is missing or takes too long does not stop the others. A step may use
the time that earlier steps left over. Two files are written:

- <stage>.json: environment, sources, exit codes, the last lines of each step and the rows of the benchmark. It is
  rewritten every few seconds, so a killed stage leaves its results so far.
- <stage>.log: all output.

--skip-done OUT/<stage>.json continues an earlier run: steps that were "ok" are kept and do not run again. Add --seconds
if less time is left. `--stage record-rest --skip-done OUT/record.json` joins the benchmarks of both stages, and
``run.py --update-results OUT/record-rest.json`` saves the result. The exit code is 1 if a step failed. --rehearse runs
the same steps on the CPU with few cases, to see that they run.
"""

import argparse
import ctypes
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu.gpu_report import (  # noqa: E402
    NOT_FOUND,
    STATUSES_OF_FAILURE,
    TIMED_OUT,
    log_of,
    print_step,
    print_table,
    tail_of,
    verdict,
)
from gpu.gpu_steps import ONE_PASS, STAGE_SECONDS, STAGES, Group, Machine, Step, ends, one_at_a_time, plan  # noqa: E402
from harness.sources import csrc_digest, csrc_tree  # noqa: E402

EXCLUSIVE, PROHIBITED = ("Exclusive_Process", "Exclusive_Thread"), "Prohibited"  # compute modes of nvidia-smi
REFRESH = 5.0  # seconds between two updates of the record while steps run


class Running:
    """Runs one step in its own process group, which is killed with all its children after the time limit."""

    def __init__(self, step: Step, result: Dict[str, Any], log: Path, work: Path, environment: Dict[str, str]):
        self.step, self.result, self.log, self.begin = step, result, log, time.monotonic()
        self.process: Optional[subprocess.Popen] = None
        with log.open("w") as sink:
            try:
                self.process = subprocess.Popen(
                    step.command, cwd=work, env={**environment, **step.environment}, stdout=sink,
                    stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_parent)
            except OSError as error:
                sink.write(f"{error}\n")

    def update(self, status: str = "running") -> None:
        self.result.update(status=status, seconds=round(time.monotonic() - self.begin, 1), tail=tail_of(self.log))

    def finished(self) -> bool:
        """Returns True if the step has ended. A step that exceeds its time limit is killed."""
        code = NOT_FOUND if self.process is None else self.process.poll()
        if code is None and time.monotonic() - self.begin >= self.result["limit"]:
            self.kill()
            code = TIMED_OUT
        if code is None:
            return False
        self.result["exit_code"] = code
        self.update(verdict(self.step, code, log_of(self.log)))
        return True

    def kill(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(timeout=3)
        except subprocess.TimeoutExpired:  # the process may hang in the driver
            pass


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Stage:
    """Runs the groups of a stage and writes its record."""

    def __init__(self, name: str, machine: Machine, out: Path, seconds: float = STAGE_SECONDS,
                 before: Optional[Dict[str, Any]] = None):
        self.machine, self.begin = machine, time.monotonic()
        self.end = self.begin + seconds
        self.path, self.log = out / f"{name}.json", out / f"{name}.log"
        tree, problem = sources(machine)
        self.record: Dict[str, Any] = {
            "stage": name, "date": datetime.date.today().isoformat(), "rehearsal": machine.rehearse, "csrc": tree,
            "sources_problem": problem, "driver": None, "compute_mode": None, "environment": None, "steps": [],
            "benchmark": None}
        before = before or {"csrc": tree, "steps": [], "benchmark": None}
        if before["csrc"] != tree:
            sys.exit(f"--skip-done must be a record of csrc {tree}, got one of {before['csrc']}: run all of it again")
        self.done = {result["name"]: result for result in before["steps"] if result["status"] == "ok"}
        if before["benchmark"]:
            (machine.work / "benchmarks" / "before").mkdir(parents=True)
            (machine.work / "benchmarks" / "before" / "record.json").write_text(json.dumps(before["benchmark"]))
        self.environment = {
            **os.environ, "PYTHONUNBUFFERED": "1", "SPARSE_CE_CSRC_TREE": tree,
            "PATH": os.pathsep.join([os.environ["PATH"], str(machine.work / "site" / "bin")]),  # the kit's ninja
            "PYTHONPATH": os.pathsep.join(filter(None, [str(machine.work / "site"), os.environ.get("PYTHONPATH")]))}
        self.environment.pop(ONE_PASS, None)  # only steps set it
        if not machine.rehearse:
            self.environment["SPARSE_CE_CUDA"] = "1"  # a build without CUDA kernels must fail
        out.mkdir(parents=True, exist_ok=True)
        if not self.done:
            self.log.write_text("")
        self.write()

    def run(self, groups: List[Group]) -> int:
        planned = self.begin
        for group in groups:
            if self.record["compute_mode"] == PROHIBITED:
                break
            if self.record["compute_mode"] in EXCLUSIVE:
                group = one_at_a_time(group)
            limits = [planned + end for end in ends(group, self.done)]
            planned += group.seconds(self.done)
            self.run_group(group, limits)
        failed = [result["name"] for result in self.record["steps"] if result["status"] in STATUSES_OF_FAILURE]
        if self.record["sources_problem"]:
            failed.append(f"sources: {self.record['sources_problem']}")
        if self.record["compute_mode"] == PROHIBITED:
            failed.append("compute mode: no process may use the GPU before `nvidia-smi -c DEFAULT`")
        self.record["finished"] = True
        self.write()
        print_table(self.record)
        print(f"written: {self.path}; " + (f"failed: {', '.join(failed)}" if failed else "all passed"), flush=True)
        return 1 if failed else 0

    def run_group(self, group: Group, planned_ends: List[float]) -> None:
        waiting: List[Tuple[Step, float]] = list(zip(group.steps, planned_ends))
        running: List[Running] = []
        written = time.monotonic()
        try:
            while waiting or running:
                while waiting and len(running) < group.width:
                    started = self.start(group, *waiting.pop(0))
                    running += [started] if started else []
                for each in [each for each in running if each.finished()]:
                    running.remove(each)
                    self.finish(each)
                if running and time.monotonic() - written > REFRESH:
                    for each in running:
                        each.update()
                    self.write()
                    written = time.monotonic()
                time.sleep(0.05)
        finally:
            for each in running:  # not empty if a signal or an error has ended the stage
                each.kill()
                each.update("cut short")
            self.write()

    def start(self, group: Group, step: Step, planned_end: float) -> Optional[Running]:
        """Starts a step. Returns None if the step is done or not needed, or if no time is left for it."""
        if step.is_kept(self.done):
            self.record["steps"].append(self.done[step.name])
            return None
        now = time.monotonic()
        limit = min(max(step.seconds, planned_end - now), self.end - now)
        result = {"group": group.name, "name": step.name, "command": step.line, "status": "running",
                  "exit_code": None, "seconds": 0.0, "limit": round(limit, 1), "tail": ""}
        self.record["steps"].append(result)
        status = {each["name"]: each["status"] for each in self.record["steps"]}
        if step.instead_of and not any(status.get(name, "missing") in STATUSES_OF_FAILURE for name in step.instead_of):
            result.update(status="not needed", limit=0.0)
        elif limit < 1:
            result.update(status="no time left", limit=0.0)
        else:
            log = self.machine.work / f"{len(self.record['steps'])}.log"
            return Running(step, result, log, self.machine.work, self.environment)
        return None

    def finish(self, done: Running) -> None:
        result = done.result
        if result["name"] == "driver" and result["exit_code"] == 0:
            fields = [field.strip() for field in result["tail"].splitlines()[0].split(",")]
            self.record.update(driver=fields[0], compute_mode=fields[-1])
        if result["name"] == "environment" and result["exit_code"] == 0:
            self.record["environment"] = json.loads(result["tail"].strip().splitlines()[-1])
            architecture = self.record["environment"].get("architecture")
            if architecture:  # a build from source supports this GPU only
                self.environment["TORCH_CUDA_ARCH_LIST"] = architecture
        with self.log.open("a") as sink:
            sink.write(f"\n===== {result['name']}: {result['status']} ({result['exit_code']}), {result['seconds']} s\n"
                       f"$ {result['command']}\n{log_of(done.log)}")
        self.write()
        print_step(result, done.step.show)
        if done.step.name == "driver" and self.record["compute_mode"] in EXCLUSIVE:
            print("    the GPU serves one process: steps run one at a time, and some may get no time. `nvidia-smi -c "
                  "DEFAULT` lets them run at once", flush=True)

    def write(self) -> None:
        """Replaces the record atomically, so that a reader never sees half of a file."""
        self.record["benchmark"] = benchmark(self.machine.work)
        beside = self.path.with_suffix(".json.new")
        beside.write_text(json.dumps(self.record, indent=1) + "\n")
        beside.replace(self.path)


def sources(machine: Machine) -> Tuple[str, Optional[str]]:
    """Returns the tree of csrc that runs, and the problem in identifying it, if any."""
    about = machine.kit / "sources.json"
    given = csrc_tree(machine.root)
    if "SPARSE_CE_CSRC_TREE" in os.environ or not about.exists():
        return given or "unknown", None if given else "neither a kit nor git says which they are"
    kit = json.loads(about.read_text())
    if kit["digest"] != csrc_digest(machine.root):
        return kit["csrc"], "the kit was made from another csrc than the one here: make gpu-kit"
    return kit["csrc"], None


def benchmark(work: Path) -> Optional[Dict[str, Any]]:
    """Returns the problems of all records of run.py. They exist even if a run did not finish."""
    found = sorted((work / "benchmarks").glob("*/*.json"), key=lambda path: path.stat().st_mtime)
    records = []
    for path in found:
        try:
            records.append(json.loads(path.read_text()))
        except ValueError:  # the file is being written
            pass
    if not records:
        return None
    return {**records[-1], "problems": [problem for one in records for problem in one["problems"]],
            "failed": {title: error for one in records for title, error in one["failed"].items()}}


def arguments() -> argparse.Namespace:
    root = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=STAGES, default=STAGES[0])
    parser.add_argument("--kit", type=Path, default=root / "gpu-kit")
    parser.add_argument("--out", type=Path, default=root / "benchmarks" / "out")
    parser.add_argument("--skip-done", type=Path, metavar="RECORD", help="record of this stage whose steps that are ok "
                        "do not run again, or of another one whose benchmark is joined")
    parser.add_argument("--seconds", type=int, default=STAGE_SECONDS, help="end all steps after this time; the default "
                        "is %(default)s")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, with few cases")
    parser.add_argument("--dry-run", action="store_true", help="only print the steps")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory(prefix="sparse_ce-", ignore_cleanup_errors=True) as work:
        machine = Machine(root, args.kit.resolve(), Path(work), args.rehearse)
        groups = plan(args.stage, machine)
        if args.dry_run:
            for group in groups:
                print(f"{group.name}: {group.seconds()} s at most, {group.width} at once")
                for step in group.steps:
                    print(f"    {step.name:24} {step.seconds:4} s  {step.line}")
            print(f"{sum(group.seconds() for group in groups)} s at most")
            return 0
        # Steps run in `work`, because the sources of the repository would hide the installed package.
        shutil.copy(root / "benchmarks" / "gpu" / "gpu_pytest.py", work)
        for program in machine.kit.glob("*_device"):
            if not os.access(program, os.X_OK):  # a copy over a network may drop the permission
                os.chmod(program, 0o755)
        before = json.loads(args.skip_done.read_text()) if args.skip_done else None
        return Stage(args.stage, machine, args.out.resolve(), args.seconds, before).run(groups)


if __name__ == "__main__":
    sys.exit(main())
