"""The commands for a machine with a GPU, rehearsed without one: the real stages, stand-ins for NVIDIA's programs."""

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path[:0] = [str(TESTS / "emulation"), str(ROOT / "benchmarks")]
import build  # noqa: E402
import gpu_acceptance  # noqa: E402
from gpu_steps import STAGE_SECONDS, STAGES, Group, Machine, Step, gpu_test_files, plan  # noqa: E402
from sources import csrc_digest  # noqa: E402

TREE = "0123456789abcdef0123456789abcdef01234567"
STAND_INS = {
    "nvidia-smi": "echo 580.1, Stand-in GPU, Disabled",
    "nvcc": "echo Cuda compilation tools, release 13.0, V13.0.88",
    "ncu": 'while [ "${1##*/}" = "${1%python*}" ]; do shift; done; "$@" && echo "  forward_kernel Context 1"',
    "compute-sanitizer": 'while [ "${1%_device}" = "$1" ]; do shift; done; "$@" && echo "ERROR SUMMARY: 0 errors"',
}


def put_stand_ins(folder, **changes):
    folder.mkdir()
    for name, script in {**STAND_INS, **changes}.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def make_wheel(folder, name, tag):
    """The installed package as a wheel again."""
    distribution = importlib.metadata.distribution(name)
    folders = name, f"{name}-{distribution.version}.dist-info"
    files = [path for path in distribution.files if path.parts[0] in folders and path.suffix != ".pyc"
             and path.name not in ("INSTALLER", "direct_url.json", "REQUESTED")]
    wheel = folder / f"{name}-{distribution.version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in files:
            archive.write(distribution.locate_file(path), str(path))


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A copy of the repository without git, with a kit whose programs are the emulated ones."""
    if shutil.which("nvcc") is None and "CI" not in os.environ:
        pytest.skip("needs the CUDA toolkit (headers and nvcc)")
    root = tmp_path_factory.mktemp("there") / "tree"
    for name in ("benchmarks", "csrc", "sparse_ce", "tests", "third_party"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "build", "out"))
    shutil.copy(ROOT / "pyproject.toml", root)
    kit = root / "gpu-kit"
    kit.mkdir()
    make_wheel(kit, "sparse_ce", "cp310-abi3-linux_x86_64")
    make_wheel(kit, "expecttest", "py3-none-any")
    build.build_programs(["plain"])
    for op in build.OPS:
        shutil.copy(build.program(op, "plain"), kit / f"{op}_device")
    (kit / "sources.json").write_text(json.dumps({"csrc": TREE, "digest": csrc_digest(root)}))
    return root


def environment(bin):
    """Where the package is not installed, but for what the kit brings."""
    kept = {name: value for name, value in os.environ.items() if name not in ("SPARSE_CE_CSRC_TREE", "PYTHONPATH")}
    return {**kept, "PATH": f"{bin}{os.pathsep}{kept['PATH']}", "OMP_NUM_THREADS": "1"}


def command(root, stage, out):
    return [sys.executable, str(root / "benchmarks" / "gpu_acceptance.py"), "--stage", stage, "--kit",
            str(root / "gpu-kit"), "--out", str(out), "--rehearse"]


def rehearse(root, stage, tmp_path, **stand_ins):
    bin = put_stand_ins(tmp_path / "bin", **stand_ins)
    out = tmp_path / "out"
    done = subprocess.run(command(root, stage, out), capture_output=True, text=True, cwd=root, env=environment(bin))
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


@pytest.mark.parametrize("stage", ["right", "speed"])
def test_every_step_of_a_stage_runs(stage, there, tmp_path):
    done, steps, record = rehearse(there, stage, tmp_path)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("all passed"), done.stdout[-3000:]
    assert {step["status"] for step in steps.values()} == {"ok", "not needed"}
    assert record["driver"] == "580.1"
    assert "/site/sparse_ce" in steps["load"]["tail"]  # the kit's, not the one that these tests import
    assert record["benchmark"]["csrc"] == TREE and record["benchmark"]["problems"]
    assert "packages" in record["environment"] and steps["kit's tools"]["status"] == "ok"
    if stage == "right":
        assert "10 passed, 0 failed" in steps["masked_mean"]["tail"] and " passed" in steps["tests"]["tail"]
        assert steps["first loss"]["says"] == "20 ok, 0 wrong"
    else:
        assert "forward_kernel" in steps["counters"]["tail"]
        measured = sum(step["name"] not in ("counters",) and step["group"] == "speed" for step in steps.values())
        assert len(record["benchmark"]["problems"]) == measured


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
    assert status["benchmark"] == "ok" and record["benchmark"]["problems"] and " passed" in steps["slow tests"]["tail"]


def test_a_stage_that_is_killed_has_said_what_it_knew(there, tmp_path):
    """By the signal that nothing can catch; and the step that ran ends with it."""
    bin = put_stand_ins(tmp_path / "bin", nvcc=f"echo compiling; echo $$ > {tmp_path}/pid; exec sleep 600")
    process = subprocess.Popen(command(there, "right", tmp_path), env=environment(bin), cwd=there,
                               stdout=subprocess.DEVNULL)
    path, steps = tmp_path / "right.json", {}
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


def run_stage(tmp_path, steps, width=1, seconds=30.0):
    machine = Machine(ROOT, tmp_path / "no kit", tmp_path)
    stage = gpu_acceptance.Stage("right", machine, tmp_path / "out", seconds)
    code = stage.run([Group("group", tuple(steps), width)])
    record = json.loads((tmp_path / "out" / "right.json").read_text())
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
    assert steps["hangs"]["tail"] == "so far\n" and 1 < steps["hangs"]["limit"] <= 2  # and what `quick` left over
    state = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_stage_ends_in_time_and_says_what_was_left(tmp_path):
    sleeping = [Step(f"sleep {i}", ["sleep", "20"], 20) for i in range(3)]
    begin = time.monotonic()
    code, steps = run_stage(tmp_path, sleeping, width=2, seconds=3)
    assert code == 1 and time.monotonic() - begin < 8
    assert [steps[f"sleep {i}"]["status"] for i in range(3)] == ["timeout", "timeout", "no time left"]


@pytest.mark.parametrize("with_kit", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_the_limits_of_a_stage_add_up_to_less_than_ten_minutes(stage, with_kit, tmp_path):
    for op in build.OPS if with_kit else []:
        (tmp_path / f"{op}_device").touch()
    groups = plan(stage, Machine(ROOT, tmp_path, tmp_path))
    assert 300 < sum(group.seconds() for group in groups) <= STAGE_SECONDS < 570
    names = [step.name for group in groups for step in group.steps]
    assert len(names) == len(set(names))
    assert ("build the programs" in names) == (not with_kit and stage != "speed")


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
            "test_cross_entropy_limits.py", "test_training_loops.py"} <= names
    assert not names & {"test_build.py", "test_emulation.py", "test_examples.py", "test_training_distributed.py",
                        "test_trainer_steps.py", Path(__file__).name}


def test_without_a_wheel_the_package_is_built_from_source(tmp_path):
    """As a step of its own; with one it only runs where the wheel's steps fail."""
    groups = plan("right", Machine(ROOT, tmp_path, tmp_path))
    names = [step.name for group in groups for step in group.steps]
    assert "build from source" in names and not {"kit's wheel", "load", "first loss"} & set(names)
    assert names.index("build from source") < names.index("first loss, built here") < names.index("tests")
    _, steps = run_stage(tmp_path, [Step("build", ["true"], 5, instead_of=("kit's wheel",))])
    assert steps["build"]["status"] == "ok"
