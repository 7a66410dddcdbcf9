"""Measures sparse_ce, other implementations (peers) and floors:
``python benchmarks/run.py [--quick] [--device cpu|cuda]``.

Every result is checked against float64 before it is timed. The program writes <date>-<device>.json, .md and two plots
to --out.

--update-results also saves the record in benchmarks/records, replacing the device's last record, and regenerates the
pages of benchmarks/results and the plots from the records. With a file, a record of this program or of
gpu_acceptance.py, it saves that record and measures nothing. With --only, problems that were not measured are kept from
the device's last record. --compare-ways also measures nothing: it compares the settings of SPARSE_CE_ONE_PASS in
existing records.
"""

import argparse
import dataclasses
import gc
import json
import site
import sys
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import torch

from harness import record as records
from harness.bench import Call, extra_bytes, time_by_turns
from harness.check import WrongResult, check, exact
from harness.goals import between_ways, chosen_way, judge
from harness.peers import Problem, Shape
from harness.work import Work, work_on
from problems.binary_problems import BINARY_HEAD_SHAPES, BINARY_SHAPES, measure_binary, measure_binary_heads
from problems.candidate_problems import CANDIDATE_SHAPES, measure_candidates
from problems.cliff_problems import CLIFF_SHAPES, measure_cliffs
from problems.dense_problems import DENSE_HEAD_SHAPES, DENSE_SHAPES, measure_dense, measure_dense_heads
from problems.image_problems import IMAGE_SHAPES, measure_images
from problems.linear_problems import LINEAR_SHAPES, measure_linear
from problems.linear_select_problems import LINEAR_SELECT_SHAPES, measure_linear_select
from problems.mean_problems import MEAN_SHAPES, measure_masked_mean
from problems.select_problems import SELECT_SHAPES, measure_select
from problems.small_problems import SMALL_SHAPES, measure_small
from problems.sparse_problems import SPARSE_SHAPES, STOCK_SHAPES, measure_log_softmax, measure_stock
from problems.variant_problems import VARIANTS, measure_variant

HERE = Path(__file__).parent

SHAPES = {
    "cpu": [
        Shape(256, 128256, 64, torch.float32),
        Shape(256, 128256, 64, torch.bfloat16),
        Shape(512, 32000, 64, torch.float32),
        Shape(512, 32000, 64, torch.bfloat16),
        Shape(1024, 1000, 2, torch.float32, small=True),  # MixUp
    ],
    "cuda": [
        Shape(8192, 128256, 64, torch.bfloat16),
        Shape(16384, 32000, 64, torch.bfloat16),
        Shape(4096, 128256, 64, torch.float32),
        Shape(1024, 1000, 2, torch.float32, small=True),  # MixUp
    ],
}
REPEATS = {"cpu": 31, "cuda": 101}
MEASURED = "what was just measured"
MOST = 1.02  # the time of the planned way over that of another
SMALL_REPEATS = 10  # the factor for repeats if a call takes about a millisecond

INTRODUCTION = """# Results

Each device has a page with its newest record and a table of its goals. `python benchmarks/run.py --update-results`
generates the pages from `benchmarks/records`. Older records are in the history of the repository.

{devices}

[bench.py](../harness/bench.py) measures, [work.py](../harness/work.py) has the work that is measured, and
[peers.py](../harness/peers.py) has the peers. Rows of `sparse_ce` are bold. If a peer does not support soft targets, it
gets class indices, and its row says so.

- MB and GB/s count the bytes that any implementation must read and write.
- "Time / floor" divides by the time of a floor that moves the same bytes: reading the logits once (forward), copying
  them once (backward), or both. "/ ours" divides by the time of our forward + backward.
- For the linear head ([linear_problems.py](../problems/linear_problems.py)), the floor is its three GEMMs. Extra memory
  is the memory held beyond inputs and gradients.
- Ratios are medians over rounds.

## Goals

Each goal is a ratio that users notice. Limits are minimums for "/ ours", and maximums otherwise.

{goals}
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="an eighth of the rows and 5 rounds, to see that it runs")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--repeats", type=int, help="rounds of each problem (31 on CPU, 101 on CUDA)")
    parser.add_argument("--only", action="append", default=[], help="only problems whose measurement and title "
                        "contain this, e.g. bfloat16, measure_stock; may be given several times")
    parser.add_argument("--no-peers", action="store_true", help="measure only sparse_ce and the floors")
    parser.add_argument("--peers", metavar="DIR", help="a folder with packages of peers, see gpu/gpu_peers.py")
    parser.add_argument("--compare-ways", type=Path, metavar="DIR", help="check, for the records in folders of DIR, "
                        "that the planned way of computing a loss and its gradient is the fastest")
    parser.add_argument("--no-plot", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument("--update-results", nargs="?", const=MEASURED, metavar="RECORD", help="see above")
    return parser.parse_args()


def run(work: Work) -> Tuple[Any, Any]:
    """Runs a call and returns (loss, gradient); None stands for a part that the call does not return."""
    if work.call.prepare is not None:
        work.call.prepare()
    result = work.call.run()
    return {"loss": lambda: (result, None), "grad": lambda: (None, result), "both": lambda: result}[work.yields]()


def check_all(problem: Problem, works: List[Work]) -> Tuple[Dict[str, float], Dict[str, str]]:
    """Returns gradient errors by row, and the reasons why peers are not run. A wrong result of sparse_ce ends the
    problem."""
    errors: Dict[str, float] = {}
    not_run: Dict[str, str] = {}
    for soft in (True, False):
        truth = exact(problem, soft)
        for work in works:
            if work.side == "floor" or work.soft != soft:
                continue
            try:
                errors[work.name] = check(work.name, *run(work), truth, strict=work.side == "ours")
            except Exception as error:  # a failure of a peer must not end the run
                if work.side == "ours":
                    raise
                not_run[work.name] = str(error).strip().split("\n")[0] or type(error).__name__
            gc.collect()
    return errors, not_run


def measure(shape: Shape, device: torch.device, repeats: int, with_peers: bool = True) -> Dict[str, Any]:
    """Measures one problem, and returns its record for JSON."""
    problem, way = Problem(shape, device), chosen_way(device.type)
    works = [work for work in work_on(problem) if with_peers or work.side != "peer"]
    errors, not_run = check_all(problem, works)
    works = [work for work in works if work.name not in not_run]
    calls: Dict[str, Call] = {work.name: work.call for work in works}
    rounds = repeats * SMALL_REPEATS if shape.small else repeats
    seconds = time_by_turns(calls, device, rounds, max(2, rounds // 10), shape.small)
    extra = {work.name: None if work.side == "floor" else extra_bytes(work.call, device) for work in works}
    return {
        "title": ", ".join(filter(None, [str(shape), way])),
        "logits_bytes": shape.logits_bytes,
        "rows": [records.row(shape, work, seconds, extra[work.name], errors.get(work.name)) for work in works],
        "not_run": not_run,
    }


def problems(device_type: str, quick: bool) -> List[Tuple[Any, Callable[..., Dict[str, Any]]]]:
    """Returns every shape with the function that measures it, in the order of measurement."""
    def fewer(shape: Any) -> Any:
        return dataclasses.replace(shape, rows=shape.rows // 8) if quick else shape

    def fewer_of_mean(shape: Any) -> Any:
        return dataclasses.replace(shape, shape=(shape.shape[0] // 8, *shape.shape[1:]),
                                   mask=(shape.mask[0] // 8, *shape.mask[1:])) if quick else shape

    return [*((fewer(shape), measure) for shape in SHAPES[device_type]),
            *((fewer(shape), measure_cliffs) for shape in CLIFF_SHAPES[device_type]),
            *((fewer_of_mean(shape), measure_masked_mean) for shape in MEAN_SHAPES),
            *((fewer(shape), measure_log_softmax) for shape in SPARSE_SHAPES),
            *((fewer(shape), measure_linear) for shape in LINEAR_SHAPES[device_type]),
            *((fewer(shape), measure_linear_select) for shape in LINEAR_SELECT_SHAPES[device_type]),
            *((fewer(shape), measure_dense) for shape in DENSE_SHAPES[device_type]),
            *((fewer(shape), measure_dense_heads) for shape in DENSE_HEAD_SHAPES[device_type]),
            *((fewer(shape), measure_binary) for shape in BINARY_SHAPES[device_type]),
            *((fewer(shape), measure_binary_heads) for shape in BINARY_HEAD_SHAPES[device_type]),
            *((fewer(shape), measure_candidates) for shape in CANDIDATE_SHAPES[device_type]),
            *((fewer(shape), measure_select) for shape in SELECT_SHAPES[device_type]),
            *((fewer(shape), measure_stock) for shape in STOCK_SHAPES),
            *((fewer(shape), measure_variant) for shape in VARIANTS[device_type]),
            *((shape, measure_images) for shape in IMAGE_SHAPES),
            *((shape, measure_small) for shape in SMALL_SHAPES)]


def compare_ways(folder: Path) -> None:
    """Prints the result of ``between_ways`` for all records in the folder. A way that was not measured is not a
    failure."""
    kept = [json.loads(path.read_text()) for path in sorted(folder.glob("*/*.json"))]
    found = between_ways([problem for record in kept for problem in record["problems"]])
    met = 0
    for text, over in found:
        met += over <= MOST
        print(f"| {text} | at most {MOST:.3g} | {over:.3g} | {'met' if over <= MOST else '**missed**'} |")
    print(f"goals: {met} met, {len(found) - met} missed" + ("" if found else "; no problem was measured in two ways"))


def update_results(found: records.Record, whole: bool = True) -> None:
    """Saves the record in place of the device's last one. Writes a page per device, and plots of the latest record of
    each device type. If the record is not ``whole``, its missing problems are taken from the device's last record."""
    from harness.plot import plot_memory, plot_time
    path = HERE / "records" / f"{records.slug(found)}.json"
    if not whole and path.exists():
        found = records.joined(json.loads(path.read_text()), found)
    records.save(found, path)
    latest = [json.loads(path.read_text()) for path in sorted((HERE / "records").glob("*.json"))]
    latest.sort(key=lambda kept: kept["date"])
    pictures: Dict[str, Tuple[str, str]] = {}  # file: the last device of its type with such problems, and alt text
    for kept in latest:
        for name, text, draw in (("time", "time of a step's loss by method", plot_time),
                                 ("memory", "memory of a step's loss by method", plot_memory)):
            picture = f"{name}-{kept['device_type']}.png"
            if draw(kept, HERE / picture):
                pictures[picture] = records.where(kept), text
    (HERE / "results").mkdir(exist_ok=True)
    for kept in latest:
        drawn = "".join(f"\n![{text}](../{picture})\n" for picture, (where, text) in pictures.items()
                        if where == records.where(kept))
        page = records.markdown(kept, len(problems(kept["device_type"], False))) + drawn
        (HERE / "results" / f"{records.slug(kept)}.md").write_text(page)
    (HERE / "results" / "README.md").write_text(INTRODUCTION.format(
        devices=records.devices_table(latest[::-1]), goals=records.reasons_table()))


def draw(found: records.Record, out: Path) -> None:
    try:
        from harness.plot import plot_memory, plot_time
    except ImportError as error:
        print(f"no plot: {error}")
        return
    plot_time(found, out.with_name(out.stem + "-time.png"))
    plot_memory(found, out.with_name(out.stem + "-memory.png"))


def main() -> int:
    args = arguments()
    if args.compare_ways:
        compare_ways(args.compare_ways)
        return 0
    if args.update_results not in (None, MEASURED):
        kept = json.loads(Path(args.update_results).read_text())
        found = kept.get("benchmark", kept)
        if not found or kept.get("rehearsal"):
            sys.exit(f"--update-results must be the record of a benchmark, got {args.update_results}, which "
                     + ("is a rehearsal" if found else "has none"))
        update_results(found, whole=not args.only)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--device cuda needs a GPU and a CUDA build of torch, got torch {torch.__version__} without CUDA")
    if args.peers:
        site.addsitedir(args.peers)  # CuTe DSL is in a folder that its .pth file names
        sys.path.insert(0, args.peers)
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    repeats = args.repeats or (5 if args.quick else REPEATS[args.device])
    found = {**records.machine(device), "quick": args.quick, "repeats": repeats, "problems": [], "failed": {}}
    out = args.out / f"{found['date']}-{records.slug(found)}.json"
    print(f"{found['device']}, torch {found['torch']}, {found['threads']} threads, {found['instruction_set']}, "
          f"csrc {found['csrc']}", flush=True)
    for shape, measure_one in problems(args.device, args.quick):
        if args.only and not any(part in f"{measure_one.__name__} {shape}" for part in args.only):
            continue
        try:
            problem = measure_one(shape, device, repeats, with_peers=not args.no_peers)
        except Exception as error:  # a problem that does not fit or is wrong must not end the others
            found["failed"][f"{measure_one.__name__} {shape}"] = f"{type(error).__name__}: {error}"[:1000]
            records.save(found, out)
            print(f"\n{shape}: {'wrong result' if isinstance(error, WrongResult) else 'failed'}, nothing timed")
            traceback.print_exc(file=sys.stdout)
            continue
        found["problems"].append(problem)
        records.save(found, out)  # saved after each problem, so that no measurement is lost
        print(f"\n{problem['title']}\n\n{records.rows_table(problem)}", flush=True)
        gc.collect()
    if not found["problems"] and not found["failed"]:
        sys.exit(f"--only must be part of a problem's measurement and title, got {' and '.join(args.only)}")
    out.with_suffix(".md").write_text(records.markdown(found))
    if not args.no_plot:
        draw(found, out)
    print(f"\nwrote {out}" + "".join(f"\nfailed: {title}: {error}" for title, error in found["failed"].items()))
    met, missed = records.goals_of(found)
    print(f"\n{records.goals_table(judge(found))}\n\ngoals: {met} met, {missed} missed; "
          f"{len(found['problems'])} problems measured, {len(found['failed'])} failed")
    if found["failed"]:
        return 1
    if args.update_results:
        update_results(found, whole=not args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
