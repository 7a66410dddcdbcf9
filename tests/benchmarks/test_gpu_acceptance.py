"""Tests the commands for a machine with a GPU without one: the real stages, and stand-ins for NVIDIA's programs."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
sys.path[:0] = [str(TESTS / "emulation"), str(ROOT / "benchmarks")]
import build  # noqa: E402
import run  # noqa: E402
from gpu import gpu_acceptance, gpu_kit, gpu_probe, gpu_steps  # noqa: E402
from gpu.gpu_report import verdict  # noqa: E402
from gpu.gpu_steps import (  # noqa: E402
    BENCH,
    PROFILED_KERNELS,
    QUICK_OPS,
    QUICK_SANITIZERS,
    SANITIZERS,
    STAGE_SECONDS,
    STAGES,
    Group,
    Machine,
    Step,
    gpu_test_files,
    plan,
)
from harness.sources import csrc_digest, csrc_tree  # noqa: E402
from problems import linear_problems  # noqa: E402

TREE = "0123456789abcdef0123456789abcdef01234567"
STAND_INS = {
    "nvidia-smi": "echo 580.1, Stand-in GPU, Disabled, Default",
    "nvcc": "echo Cuda compilation tools, release 13.0, V13.0.88",
    # Runs the program, then reports the kernels of this repository that -k would have counted.
    "ncu": f"""while [ $# -gt 0 ]; do
        case "$1" in -k) kernels="${{2#regex:}}"; shift;; */python*) break;; esac; shift
    done
    "$@" && grep -rhoE '[a-z_]+_kernel\\(' {ROOT}/csrc/cuda | tr -d '(' | sort -u | grep -E "$kernels" |
    sed 's/$/ Context 1/'""",
    "compute-sanitizer": 'while [ "${1%_device}" = "$1" ]; do shift; done; "$@" && echo "ERROR SUMMARY: 0 errors"',
}


def put_stand_ins(folder, **changes):
    folder.mkdir()
    for name, script in {**STAND_INS, **changes}.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def make_wheel(folder, name, tag, called=None):
    """Builds a wheel from the package that these tests import, under its name or another one."""
    package = Path(importlib.util.find_spec(name).origin).parent
    version = importlib.metadata.version(name)
    called = called or name
    about = f"{called}-{version}.dist-info"
    files = {f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {called}\nVersion: {version}\n",
             f"{about}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n"}
    for path in package.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            files[path.relative_to(package.parent).as_posix()] = path.read_bytes()
    with zipfile.ZipFile(folder / f"{called}-{version}-{tag}.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{about}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"]))


def copy_tracked(root, to):
    """Copies what a clone contains: the files that git tracks, in their current state, without untracked ones."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, to / name)


def make_fresh_python(folder):
    """Creates an environment with all installed packages but those of the kit. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    to, = folder.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not re.match("sparse_ce|expecttest|ninja|__pycache__", path.name):
            (to / path.name).symlink_to(path)
    return folder / "bin" / "python"


# Stand-ins for what gpu_kit.py runs: nvcc, which gives an emulated program, and pip, which builds the wheel.
NVCC_OF_KIT = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
case "$2" in *_device) cp "{programs}/$(basename "${{2%_device}}")_plain" "$2";; esac"""
PIP_OF_KIT = """#!/bin/sh
[ "$*" = "-m pip wheel -q --no-deps --no-build-isolation -w {kit} {root}" ] && cp {wheels}/sparse_ce-*.whl {kit}"""


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Returns a copy of the repository without git, with a kit made there, whose programs are emulated. `python` is an
    interpreter without the packages of the kit."""
    if shutil.which("nvcc") is None and "CI" not in os.environ:
        pytest.skip("needs the CUDA toolkit (headers and nvcc)")
    if not (ROOT / ".git").exists():
        pytest.skip("needs a clone of the repository")
    folder = tmp_path_factory.mktemp("there")
    root, wheels, bin = folder / "tree", folder / "wheels", folder / "bin"
    copy_tracked(ROOT, root)
    kit = root / "gpu-kit"
    for each in (wheels, bin):
        each.mkdir()
    make_wheel(wheels, "sparse_ce", "cp310-abi3-linux_x86_64")
    make_wheel(wheels, "expecttest", "py3-none-any")
    make_wheel(wheels, "setuptools", "py3-none-any")
    make_wheel(wheels, "ninja", "py3-none-any")
    make_wheel(wheels, "expecttest", "py3-none-any", called="quack_kernels")
    build.build_programs(["plain"])
    build.build_bench()
    for name, script in (("nvcc", NVCC_OF_KIT), ("pip", PIP_OF_KIT)):
        (bin / name).write_text(script.format(programs=build.BUILD, kit=kit, root=root, wheels=wheels))
        (bin / name).chmod(0o755)
    subprocess.run([sys.executable, root / "benchmarks" / "gpu" / "gpu_kit.py"], check=True, cwd=folder, env={
        **environment(bin), "SPARSE_CE_CSRC_TREE": TREE, "PYTHON_WITH_TORCH": str(bin / "pip"),
        "PIP_FIND_LINKS": str(wheels), "PIP_NO_INDEX": "1"})
    make_fresh_python(root / "python")
    return root


def environment(bin):
    """Returns an environment without the package, except for the kit's, and without a network."""
    kept = {name: value for name, value in os.environ.items() if name not in ("SPARSE_CE_CSRC_TREE", "PYTHONPATH")}
    nowhere = "http://127.0.0.1:9"
    return {**kept, "PATH": f"{bin}{os.pathsep}{kept['PATH']}", "OMP_NUM_THREADS": "1", "http_proxy": nowhere,
            "https_proxy": nowhere, "PIP_INDEX_URL": nowhere, "PIP_RETRIES": "0"}


def command(root, stage, out, *options):
    return [str(root / "python" / "bin" / "python"), str(root / "benchmarks" / "gpu" / "gpu_acceptance.py"), "--stage",
            stage, "--kit", str(root / "gpu-kit"), "--out", str(out), "--rehearse", *options]


def rehearse(root, stage, tmp_path, *options, **stand_ins):
    bin = put_stand_ins(tmp_path / f"bin{len(options)}", **stand_ins)
    out = tmp_path / "out"
    done = subprocess.run(command(root, stage, out, *options), capture_output=True, text=True, cwd=root,
                          env=environment(bin))
    print(done.stdout, done.stderr)
    record = json.loads((out / f"{stage}.json").read_text())
    assert sorted(path.name for path in out.iterdir()) == [f"{stage}.json", f"{stage}.log"]
    groups = plan(stage, Machine(root, root / "gpu-kit", tmp_path, True))
    planned = [step.name for group in groups for step in group.steps]
    assert sorted(step["name"] for step in record["steps"]) == sorted(planned)
    log = (out / f"{stage}.log").read_text()
    assert all(step["name"] in done.stdout and (step["status"] == "not needed" or f"===== {step['name']}:" in log)
               for step in record["steps"])
    assert record["finished"] and record["rehearsal"] and record["csrc"] == TREE and not record["sources_problem"]
    assert record["environment"]["device"] == "cpu"
    return done, {step["name"]: step for step in record["steps"]}, record


@pytest.mark.parametrize("stage", STAGES)
def test_every_step_of_a_stage_runs(stage, there, tmp_path):
    done, steps, record = rehearse(there, stage, tmp_path)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("all passed"), done.stdout[-3000:]
    assert {step["status"] for step in steps.values()} == {"ok", "not needed"}
    assert record["driver"] == "580.1" and record["compute_mode"] == "Default"
    assert "/site/sparse_ce" in steps["load"]["tail"]  # the kit's package, not the one that these tests import
    assert record["benchmark"]["csrc"] == TREE and record["benchmark"]["problems"]
    packages = record["environment"]["packages"]
    assert packages["torch"] and packages["expecttest"] is None  # only the kit has it
    assert steps["kit's tools"]["status"] == "ok"
    assert steps["first loss"]["says"] == "20 ok, 0 wrong"
    if stage == "quick":
        assert "10 passed, 0 failed" in steps["masked_mean"]["tail"]
        assert " passed" in steps["tests of the loss"]["tail"] and " passed" in steps["tests"]["tail"]
        assert all("ERROR SUMMARY: 0 errors" in steps[f"{tool} {op}"]["tail"] for tool in QUICK_SANITIZERS
                   for op in QUICK_OPS)
        assert steps[BENCH]["says"] == "all results are equal"
        # A copy, two forms of one pass and two kernels, each also forward alone except the copy, for three targets.
        assert steps[BENCH]["tail"].count(" copies\n") == 3 * (1 + 2 * 3)
        assert "one_pass_kernel Context 1\n" in steps["counters"]["tail"]
        assert steps["ways"]["says"] == "goals: 0 met, 0 missed; no problem was measured in two ways"
        measured = sum(step["name"] not in ("counters", "ways") and step["group"] == "speed" for step in steps.values())
        assert len(record["benchmark"]["problems"]) == measured
        kept = {row["side"] for problem in record["benchmark"]["problems"] for row in problem["rows"]}
        assert kept == {"floor", "ours"}
        return
    assert re.fullmatch(r"installed: quack_kernels-.*\.whl\n", steps["peers"]["tail"])
    measured = [step for step in steps.values() if step["group"] == "benchmark"]
    assert all("--peers" in step["command"] and step["says"].startswith("goals: ") for step in measured)
    assert len(record["benchmark"]["problems"]) == len(measured)
    if stage == "record":
        assert all("ERROR SUMMARY: 0 errors" in steps[f"{tool} {op}"]["tail"] for tool in SANITIZERS
                   for op in build.OPS)
        assert " passed" in steps["slow tests"]["tail"]


def test_what_fails_is_reported_and_does_not_stop_the_rest(there, tmp_path):
    done, steps, record = rehearse(there, "record", tmp_path, **{
        "nvidia-smi": "exit 9",
        "compute-sanitizer": 'case "$2" in racecheck) echo a race; exit 1;; synccheck) kill -9 $$;; esac; '
                             + STAND_INS["compute-sanitizer"]})
    assert done.returncode == 1 and f"failed: driver, racecheck {build.OPS[0]}" in done.stdout
    status = {name: step["status"] for name, step in steps.items()}
    assert status["driver"] == "failed" and steps["driver"]["exit_code"] == 9
    for op in build.OPS:
        assert [status[f"{tool} {op}"] for tool in ("memcheck", "racecheck", "initcheck", "synccheck")] == [
            "ok", "failed", "ok", "crashed"]
    assert "a race" in steps["racecheck linear"]["tail"] and "    a race" in done.stdout
    assert status["losses, heads"] == "ok" and record["benchmark"]["problems"]
    assert " passed" in steps["slow tests"]["tail"]


def test_what_is_done_is_skipped_and_kept(there, tmp_path):
    """Checks that the second command resumes after the first on a machine without its files."""
    first, _, before = rehearse(there, "quick", tmp_path, ncu="exit 3")
    assert first.returncode == 1 and "failed: counters" in first.stdout
    second, steps, record = rehearse(there, "quick", tmp_path, "--skip-done", str(tmp_path / "out" / "quick.json"))
    assert second.returncode == 0 and second.stdout.rstrip().endswith("all passed"), second.stdout[-3000:]
    log = (tmp_path / "out" / "quick.log").read_text()
    runs = {name: log.count(f"===== {name}:") for name in steps if steps[name]["status"] == "ok"}
    again = {"driver", "nvcc", "environment", "kit's tools", "kit's wheel", "load", "first loss", "counters"}
    assert runs == {name: 2 if name in again else 1 for name in runs}
    assert record["benchmark"]["problems"] == before["benchmark"]["problems"]


def test_a_stage_that_is_killed_has_said_what_it_knew(there, tmp_path):
    """Checks a stage killed by SIGKILL; its running step ends with it."""
    bin = put_stand_ins(tmp_path / "bin", nvcc=f"echo compiling; echo $$ > {tmp_path}/pid; exec sleep 600")
    process = subprocess.Popen(command(there, "quick", tmp_path), env=environment(bin), cwd=there,
                               stdout=subprocess.DEVNULL)
    path, steps = tmp_path / "quick.json", {}
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and steps.get("nvcc", {}).get("tail", "") != "compiling\n":
        time.sleep(0.1)
        steps = {step["name"]: step for step in json.loads(path.read_text())["steps"]} if path.exists() else {}
    process.send_signal(signal.SIGKILL)
    process.wait()
    record = json.loads(path.read_text())
    steps = {step["name"]: step for step in record["steps"]}
    assert "finished" not in record and record["driver"] == "580.1"
    assert steps["driver"]["status"] == "ok" and steps["nvcc"]["status"] == "running"
    child = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}")
    while child.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not child.exists()


def run_stage(tmp_path, steps, width=1, seconds=30.0, before=None):
    machine = Machine(ROOT, tmp_path / "no kit", tmp_path)
    stage = gpu_acceptance.Stage("quick", machine, tmp_path / "out", seconds, before)
    code = stage.run([Group("group", tuple(steps), width)])
    record = json.loads((tmp_path / "out" / "quick.json").read_text())
    return code, {step["name"]: step for step in record["steps"]}


def test_verdicts(tmp_path, capsys):
    code, steps = run_stage(tmp_path, [
        Step("good", ["sh", "-c", "echo fine"], 5),
        Step("bad", ["sh", "-c", "echo broken; exit 3"], 5),
        Step("killed", ["sh", "-c", "kill -11 $$"], 5),
        Step("absent", ["no-such-program"], 5),
        Step("cannot", ["sh", "-c", "echo ERR_NVGPUCTRPERM; exit 1"], 5, skip_if="ERR_NVGPUCTRPERM"),
        Step("not needed", ["false"], 5, instead_of=("good",)),
        Step("needed", ["true"], 5, instead_of=("good", "bad")),
        Step("after", ["true"], 5)])
    assert code == 1
    assert {name: (step["status"], step["exit_code"]) for name, step in steps.items()} == {
        "good": ("ok", 0), "bad": ("failed", 3), "killed": ("crashed", -11), "absent": ("missing", 127),
        "cannot": ("skipped", 1), "not needed": ("not needed", None), "needed": ("ok", 0), "after": ("ok", 0)}
    assert steps["bad"]["tail"] == "broken\n"
    assert capsys.readouterr().out.rstrip().endswith("failed: bad, killed, absent")


def test_a_step_whose_time_is_up_is_ended_with_its_children(tmp_path):
    begin = time.monotonic()
    code, steps = run_stage(tmp_path, [
        Step("quick", ["true"], 1),
        Step("hangs", ["sh", "-c", f"echo so far; sleep 60 & echo $! > {tmp_path}/child; wait"], 1),
        Step("after", ["true"], 1)])
    assert code == 1 and time.monotonic() - begin < 10
    assert [steps[name]["status"] for name in ("quick", "hangs", "after")] == ["ok", "timeout", "ok"]
    assert steps["hangs"]["tail"] == "so far\n" and 1 < steps["hangs"]["limit"] <= 2  # and `quick`'s unused time
    state = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_stage_ends_in_time_and_says_what_was_left(tmp_path):
    sleeping = [Step(f"sleep {i}", ["sleep", "20"], 20) for i in range(3)]
    begin = time.monotonic()
    code, steps = run_stage(tmp_path, sleeping, width=2, seconds=3)
    assert code == 1 and time.monotonic() - begin < 8
    assert [steps[f"sleep {i}"]["status"] for i in range(3)] == ["timeout", "timeout", "no time left"]


def run_in_mode(tmp_path, mode, steps):
    """Runs a stage whose driver reports this compute mode. Each step fails while another one runs."""
    machine = Machine(ROOT, tmp_path / "no kit", tmp_path)
    alone = f"mkdir {tmp_path}/gpu && sleep 0.3 && rmdir {tmp_path}/gpu && echo $@"
    driver = Step("driver", ["echo", f"580.1, A GPU, Disabled, {mode}"], 5)
    group = tuple(Step(name, ["sh", "-c", alone, "sh", *words], 5) for name, words in steps.items())
    code = gpu_acceptance.Stage("quick", machine, tmp_path / "out", 30.0).run([
        Group("environment", (driver,)), Group("group", group, 3)])
    record = json.loads((tmp_path / "out" / "quick.json").read_text())
    assert record["driver"] == "580.1" and record["compute_mode"] == mode and record["finished"]
    return code, {step["name"]: step for step in record["steps"]}


@pytest.mark.parametrize("mode", ["Default", "Exclusive_Process", "Prohibited"])
def test_a_gpu_in_exclusive_mode_gets_one_process_at_a_time(mode, tmp_path, capsys):
    workers, = [word for word in gpu_steps.pytest(Machine(ROOT, ROOT, ROOT), "slow", []) if word.startswith("-n")]
    code, steps = run_in_mode(tmp_path, mode, {"tests": ["-c", workers, "-name"], "one": [], "two": []})
    shown = capsys.readouterr().out
    assert ("one process: steps run one at a time" in shown) == (mode == "Exclusive_Process")
    if mode == "Prohibited":
        assert code == 1 and list(steps) == ["driver"]
        assert "failed: compute mode: no process may use the GPU before `nvidia-smi -c DEFAULT`" in shown
    elif mode == "Default":
        assert code == 1 and {"ok", "failed"} == {step["status"] for step in steps.values()}
    else:
        assert code == 0 and steps["tests"]["tail"] == "-c -name\n"
    driver, = [step for step in plan("quick", Machine(ROOT, ROOT, ROOT))[0].steps if step.name == "driver"]
    assert driver.command[1].endswith(",compute_mode")


def test_what_is_done_is_known_by_its_name(tmp_path):
    before = {"csrc": csrc_tree(ROOT), "benchmark": {"problems": [{"title": "kept"}], "failed": {}}, "steps": [
        {"name": name, "status": status, "exit_code": code, "seconds": 1.0, "limit": 5.0, "tail": "", "group": "group"}
        for name, status, code in (("good", "ok", 0), ("bad", "failed", 3), ("anew", "ok", 0))]}
    code, steps = run_stage(tmp_path, [Step("good", ["false"], 5), Step("bad", ["true"], 5),
                                       Step("anew", ["true"], 5, always=True)], before=before)
    assert code == 0 and steps["good"] == before["steps"][0]
    assert steps["bad"]["status"] == "ok" and steps["anew"]["command"] == "true"
    record = json.loads((tmp_path / "out" / "quick.json").read_text())
    assert record["benchmark"]["problems"] == [{"title": "kept"}]
    with pytest.raises(SystemExit, match=f"--skip-done must be a record of csrc .*, got one of {TREE}"):
        run_stage(tmp_path, [], before={**before, "csrc": TREE})


@pytest.mark.parametrize("with_kit", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_the_limits_of_a_stage_add_up_to_less_than_ten_minutes(stage, with_kit, tmp_path):
    kit = tmp_path / "kit"
    for path in (kit, tmp_path / "gpu-peers") if with_kit else ():
        path.mkdir()
    for name in [*(f"{op}_device" for op in [*build.OPS, BENCH]), "sparse_ce-1.whl", "expecttest-1.whl"]:
        if with_kit:
            (kit / name).touch()
    groups = plan(stage, Machine(ROOT, kit, tmp_path))
    assert 300 < sum(group.seconds() for group in groups) <= STAGE_SECONDS == 540
    steps = [step for group in groups for step in group.steps]
    assert all(0 < step.seconds <= STAGE_SECONDS for step in steps)
    names = [step.name for step in steps]
    assert len(names) == len(set(names))
    assert ("build the programs" in names, "kit's wheel" in names) == (
        not with_kit and stage != "record-rest", with_kit)
    assert ("peers" in names) == (with_kit and stage != "quick")


def test_the_most_important_steps_of_the_quick_stage_come_first(tmp_path):
    names = [step.name for group in plan("quick", Machine(ROOT, tmp_path, tmp_path)) for step in group.steps]
    order = ("environment", "first loss, built here", BENCH, "tests of the loss", "8192 x 128256", "cliffs, images",
             "counters", "linear head", "other sizes", "means, log_softmax, small", "tests")
    assert [name for name in names if name in order] == list(order)


def test_what_is_kept_takes_no_time_from_the_rest(tmp_path):
    """Checks that a stage that continues gives a step its own time, not that of the steps before it."""
    before = {"csrc": csrc_tree(ROOT), "benchmark": None, "steps": [{
        "name": "long", "status": "ok", "exit_code": 0, "seconds": 20.0, "limit": 20.0, "tail": "", "group": "group"}]}
    steps = [Step("long", ["false"], 20), Step("hangs", ["sleep", "20"], 1), Step("after", ["true"], 1)]
    code, steps = run_stage(tmp_path, steps, seconds=10, before=before)
    assert code == 1 and {name: step["status"] for name, step in steps.items()} == {
        "long": "ok", "hangs": "timeout", "after": "ok"}
    assert steps["hangs"]["limit"] <= 1


def test_a_stage_may_get_less_time(there, tmp_path):
    options = "--seconds", "3"
    bin = put_stand_ins(tmp_path / "bin", nvcc="sleep 60")
    begin = time.monotonic()
    done = subprocess.run(command(there, "quick", tmp_path, *options), capture_output=True, text=True, cwd=there,
                          env=environment(bin))
    assert done.returncode == 1 and time.monotonic() - begin < 15, done.stdout
    status = {step["name"]: step["status"] for step in json.loads((tmp_path / "quick.json").read_text())["steps"]}
    assert status["nvcc"] == "timeout" and status["tests of the loss"] == "no time left"


def test_a_machine_may_lack_the_sanitizer_and_the_profiler(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_steps, "tool", lambda name: f"no-{name}")
    machine = Machine(ROOT, tmp_path, tmp_path)
    steps = {step.name: step for group in plan("quick", machine) for step in group.steps}
    names = [*(f"{tool} {op}" for op in QUICK_OPS for tool in QUICK_SANITIZERS), "counters"]
    assert {name for name in steps if steps[name].command[0].startswith("no-")} == set(names)
    code, found = run_stage(tmp_path, [*(steps[name] for name in names), Step("after", ["true"], 5)])
    assert code == 0 and found.pop("after")["status"] == "ok"
    assert {(step["status"], step["exit_code"]) for step in found.values()} == {("not found", 127)}
    shown = capsys.readouterr().out
    assert "No such file or directory: 'no-compute-sanitizer'" in shown and shown.rstrip().endswith("all passed")


def test_a_sanitizer_that_does_not_support_the_machine_is_skipped():
    step = gpu_steps.sanitizer("racecheck", Machine(ROOT, ROOT, ROOT), "cross_entropy", 5)
    assert verdict(step, 1, "Error: Device not supported. Please refer to ...") == "skipped"
    assert verdict(step, 1, "ERROR SUMMARY: 1 error") == "failed" and verdict(step, 0, "") == "ok"


@pytest.mark.parametrize("below", ["bin", "compute-sanitizer", "extras/compute-sanitizer"])
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_tool_is_found_where_cuda_installs_it(variable, below, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_steps, "TOOLKITS", ())
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_steps.tool("compute-sanitizer") == "compute-sanitizer"
    monkeypatch.setenv(variable, str(tmp_path / "cuda"))
    found = tmp_path / "cuda" / below / "compute-sanitizer"
    found.parent.mkdir(parents=True)
    found.touch()
    assert gpu_steps.tool("compute-sanitizer") == str(found)
    monkeypatch.delenv(variable)
    monkeypatch.setattr(gpu_steps, "TOOLKITS", (str(tmp_path / "cu*"),))
    assert gpu_steps.tool("compute-sanitizer") == str(found)


def test_a_kit_and_the_repository_fit_into_64_mib(tmp_path, monkeypatch, capsys):
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = sum((ROOT / name).stat().st_size for name in filter(None, names.split("\0")) if (ROOT / name).exists())
    assert gpu_kit.LIMIT + tracked <= 64 << 20
    monkeypatch.setattr(gpu_kit, "LIMIT", 3 << 20)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(3 << 19))
    gpu_kit.check_size(tmp_path)
    assert capsys.readouterr().out.endswith("   3.0 MiB of at most 3\n")
    (tmp_path / "c").write_bytes(b"0")
    with pytest.raises(SystemExit, match="must be at most 3 MiB, got 3.0"):
        gpu_kit.check_size(tmp_path)


def test_a_kit_has_what_the_stages_need(there):
    kit = there / "gpu-kit"
    names = sorted(re.sub(r"-.*", "", path.name) for path in kit.iterdir())
    assert names == sorted([*(f"{name}_device" for name in [*build.OPS, BENCH]), "expecttest", "ninja",
                            "setuptools", "sources.json", "sparse_ce"])
    peer, = (there / "gpu-peers").glob("*/*")
    assert peer.parent.name == "1" and re.fullmatch(r"quack_kernels-.*\.whl\.1", peer.name)
    about = json.loads((kit / "sources.json").read_text())
    assert about == {"csrc": TREE, "digest": csrc_digest(there), "architectures": ["9.0"]}


def test_a_kit_can_build_from_source(tmp_path):
    """Checks that the kit has the build requirements, because pip builds without an index and without isolation. The
    programs of the kit's tools are on the PATH."""
    required = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M).group(1)
    assert set(re.findall(r'"(.+?)"', required)) <= set(gpu_kit.TOOLS)
    (tmp_path / "site" / "bin").mkdir(parents=True)
    (tmp_path / "site" / "bin" / "tool-of-kit").write_text("#!/bin/sh\necho found")
    (tmp_path / "site" / "bin" / "tool-of-kit").chmod(0o755)
    code, steps = run_stage(tmp_path, [Step("uses it", ["sh", "-c", "tool-of-kit"], 5)])
    assert code == 0 and steps["uses it"]["tail"] == "found\n"


def test_a_clone_has_what_git_knows(tmp_path):
    """Checks that a clone has the current state of tracked files, without untracked and removed ones."""
    root, to = tmp_path / "root", tmp_path / "to"
    (root / "sub").mkdir(parents=True)
    for name in ("sub/changed.py", "removed.py", "new.py"):
        (root / name).write_text("as added")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "sub", "removed.py"], cwd=root, check=True)
    (root / "sub" / "changed.py").write_text("as it is now")
    (root / "removed.py").unlink()
    copy_tracked(root, to)
    assert [path.relative_to(to).as_posix() for path in to.rglob("*.py")] == ["sub/changed.py"]
    assert (to / "sub" / "changed.py").read_text() == "as it is now"


def test_the_profiler_counts_the_kernels_of_the_loss():
    """Checks that each name is a kernel, and that every kernel that computes a loss or gradient by rows is listed."""
    text = "".join(path.read_text() for path in (ROOT / "csrc" / "cuda").rglob("*.cu*"))
    kernels = set(re.findall(r"__global__ void(?: __launch_bounds__\([^{]*?\))?\s+(\w+)\(", text))
    assert len(kernels) == text.count("__global__ void") and set(PROFILED_KERNELS) <= kernels
    assert {"one_pass_kernel", "forward_kernel", "backward_kernel"} <= set(PROFILED_KERNELS)
    counters, = [step.command for group in plan("quick", Machine(ROOT, ROOT, ROOT)) for step in group.steps
                 if step.name == "counters"]
    given = counters[counters.index("-k") + 1]
    assert given.startswith("regex:")
    assert set(PROFILED_KERNELS) <= {name for name in kernels if re.search(given[len("regex:"):], name)}


def test_what_is_profiled_makes_the_gradient_in_backward_and_in_forward(monkeypatch):
    """Checks for every target that the second step knows the expected ``grad_output`` and that the next target starts
    anew."""
    called = []

    class Ops:
        def __getattr__(self, name):
            if name in ("forward_with_residual", "forward_with_gradient"):
                called.append(name)
            return getattr(right, name)
    module = sys.modules["sparse_ce.ops.logits.cross_entropy"]
    right = module.ops
    monkeypatch.setattr(module, "ops", Ops())
    monkeypatch.setattr(module, "_small", lambda *args: None)
    assert gpu_probe.profile("cpu") == 0
    assert called == ["forward_with_residual", "forward_with_gradient"] * 2


def test_the_ways_of_one_pass_are_measured(tmp_path):
    """Checks that each way runs in a separate process with its own environment, and that the record shows the
    command."""
    steps = {step.name: step for group in plan("quick", Machine(ROOT, tmp_path, tmp_path)) for step in group.steps}
    given = {name: step.environment.get("SPARSE_CE_ONE_PASS") for name, step in steps.items()}
    assert given == {**dict.fromkeys(steps), "two kernels": "0"}
    names = list(steps)
    assert names.index("8192 x 128256") < names.index("two kernels") < names.index("ways")
    assert steps["two kernels"].line.startswith("SPARSE_CE_ONE_PASS=0 ")
    assert "SPARSE_CE_ONE_PASS" not in steps["8192 x 128256"].line


def test_every_choice_of_rows_in_a_chunk_is_measured():
    problem = SimpleNamespace(device=torch.device("cuda"), shape=linear_problems.LINEAR_SHAPES["cuda"][0], indices=None,
                              values=None, labels=None)
    assert {name.partition(", chunk_rows=")[2] for name in linear_problems._ours(problem)} == {"", "2048", "8192"}


def test_a_step_has_its_own_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_CE_ONE_PASS", "of somebody")
    say = ["sh", "-c", "echo way ${SPARSE_CE_ONE_PASS-as planned}"]
    _, steps = run_stage(tmp_path, [Step("apart", say, 5, environment={"SPARSE_CE_ONE_PASS": "0"}),
                                    Step("planned", say, 5)])
    assert {name: step["tail"] for name, step in steps.items()} == {"apart": "way 0\n", "planned": "way as planned\n"}
    assert steps["apart"]["command"].startswith("SPARSE_CE_ONE_PASS=0 sh -c ")


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_to_be_measured_is_there(stage, tmp_path, monkeypatch):
    """Checks that each step of the benchmark selects something, which otherwise only a GPU would reveal."""
    selected = [(step.name, step.command[2:]) for group in plan(stage, Machine(ROOT, tmp_path, tmp_path))
                for step in group.steps if "--only" in step.command and step.command[1].endswith("run.py")]
    assert len(selected) == {"quick": 7, "record": 1, "record-rest": 4}[stage]
    assert {"--no-peers" in command for _, command in selected} == {stage == "quick"}
    for name, command in selected:
        monkeypatch.setattr(sys, "argv", ["run.py", *command])
        args = run.arguments()
        for part in args.only:
            assert any(part in f"{measure.__name__} {shape}" for shape, measure in run.problems(
                args.device, args.quick)), (name, part)


def test_both_parts_of_the_record_have_the_whole_benchmark(tmp_path):
    """Checks that each problem for a GPU is measured once, in one of the two stages."""
    steps = [[words[i + 1] for i, word in enumerate(words) if word == "--only"] for stage in ("record", "record-rest")
             for group in plan(stage, Machine(ROOT, tmp_path, tmp_path)) if group.name == "benchmark"
             for words in [step.command for step in group.steps]]
    for shape, measure in run.problems("cuda", False):
        title = f"{measure.__name__} {shape}"
        assert sum(any(part in title for part in only) for only in steps) == 1, title


def test_kernels_of_other_sources_than_these_are_not_recorded_silently(tmp_path):
    machine = Machine(ROOT, tmp_path, tmp_path)
    (tmp_path / "sources.json").write_text(json.dumps({"csrc": TREE, "digest": "of other files"}))
    problem = "the kit was made from another csrc than the one here: make gpu-kit"
    assert gpu_acceptance.sources(machine) == (TREE, problem)
    (tmp_path / "sources.json").write_text(json.dumps({"csrc": TREE, "digest": csrc_digest(ROOT)}))
    assert gpu_acceptance.sources(machine) == (TREE, None)


def test_the_files_with_cases_for_a_gpu():
    names = {path.name for path in gpu_test_files(TESTS)}
    assert {"test_cross_entropy_values.py", "test_linear_values.py", "test_cross_entropy_compile.py",
            "test_cross_entropy_limits.py", "test_training_loops.py", "test_dense_divergence.py",
            "test_every_loss.py", "test_linear_dense_divergence.py", "test_row_teachers.py"} <= names
    assert not names & {"test_build.py", "test_emulation.py", "test_examples.py", "test_training_distributed.py",
                        "test_trainer_steps.py", Path(__file__).name}


def test_without_a_wheel_the_package_is_built_from_source(tmp_path):
    """Checks that building is a step of its own; with a wheel it only runs if the wheel's steps fail."""
    groups = plan("quick", Machine(ROOT, tmp_path, tmp_path))
    names = [step.name for group in groups for step in group.steps]
    assert "build from source" in names and not {"kit's wheel", "load", "first loss"} & set(names)
    assert names.index("build from source") < names.index("first loss, built here") < names.index("tests of the loss")
    _, steps = run_stage(tmp_path, [Step("build", ["true"], 5, instead_of=("kit's wheel",))])
    assert steps["build"]["status"] == "ok"
