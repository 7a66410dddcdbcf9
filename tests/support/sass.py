"""Analyzes the machine code of a kernel: its loops, their instructions, and whether a warp enters them converged."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Set, Tuple

Code = List[Tuple[int, str]]  # addresses and instructions

BACK = re.compile(r"\bBRA\b.* 0x([0-9a-f]+)$")
# After these instructions all lanes of a warp are converged. BRA.DIV and BRA.CONV lead to code that waits for the
# others.
MEETS = re.compile(r"(@\S+ )?(BAR\.SYNC|WARPSYNC|BRA\.DIV|BRA\.CONV)")
ENDS = ("EXIT", "RET", "BRX", "JMP", "JMX", "KILL")


@functools.lru_cache(maxsize=1)  # the tests of a file run one after the other
def functions_of(object_file: Path, architecture: str) -> List[Tuple[str, str]]:
    """Returns (name, code) of the kernels of an object file that are compiled for one architecture, e.g. "90"."""
    cuobjdump = shutil.which("cuobjdump") or next(iter(
        str(p) for path in sys.path for p in Path(path).glob("nvidia/cu13/bin/cuobjdump")), None)
    assert cuobjdump, "cuobjdump must be installed (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)"
    path = os.path.dirname(cuobjdump) + os.pathsep + os.environ["PATH"]
    sass = subprocess.run([cuobjdump, "-sass", "-arch", f"sm_{architecture}", str(object_file)], capture_output=True,
                          text=True, env={**os.environ, "PATH": path}).stdout
    return re.findall(r"Function : (\S+)\n(.*?)(?=\n\s*Function :|\Z)", sass, re.S)


def instructions(body: str) -> Code:
    return [(int(at, 16), text.strip()) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", body)]


def loops(code: Code) -> List[Code]:
    """Returns the code between each backward branch and its target."""
    ends = [(int(back[1], 16), at) for at, text in code if (back := BACK.search(text))]
    return [[line for line in code if first <= line[0] <= last] for first, last in ends if first <= last]


def count(code: Code, part: str) -> int:
    """Returns the number of instructions that contain ``part``."""
    return sum(part in text for _, text in code)


def shortest(found: List[Code], parts: Dict[str, int]) -> Code:
    """Returns the shortest loop with exactly the given number of instructions for each part."""
    fitting = [loop for loop in found if all(count(loop, part) == n for part, n in parts.items())]
    assert fitting, f"no loop has {parts}"
    return min(fitting, key=len)


def ways_through(code: Code, parts: Dict[str, int]) -> List[Code]:
    """Returns the shortest way through one step of each innermost loop that executes exactly the given number of
    instructions for each part. A way leaves out the branches that a plain call does not take."""
    after, _ = _flow(code)
    place = {at: i for i, (at, _) in enumerate(code)}
    steps = [tuple(part in text for part in parts) for _, text in code]
    most = tuple(parts.values())
    every = [(place[loop[0][0]], place[loop[-1][0]]) for loop in loops(code)]
    found: List[Code] = []
    for first, last in every:
        if any(first <= a and b <= last and (a, b) != (first, last) for a, b in every):
            continue
        start = (first, steps[first])
        came: Dict[Tuple[int, Tuple[int, ...]], Tuple[int, Tuple[int, ...]]] = {start: start}
        waiting = [start]  # an instruction and what was executed up to it, by the length of the way
        for i, had in waiting:
            for to in after[i]:
                having = tuple(a + b for a, b in zip(had, steps[to]))
                if first < to <= last and (to, having) not in came and all(a <= b for a, b in zip(having, most)):
                    came[to, having] = (i, had)
                    waiting.append((to, having))
        at = (last, most)
        if at in came:
            way = [at]
            while way[-1] != start:
                way.append(came[way[-1]])
            found.append([code[i] for i, _ in reversed(way)])
    assert found, f"no way through a loop has {parts}"
    return found


def loop_of_exponentials(body: str) -> List[str]:
    """Returns the innermost loop with the most exponentials per instruction."""
    wide = [loop for loop in loops(instructions(body)) if count(loop, "MUFU.EX2") >= 16]
    return [text for _, text in min(wide, key=lambda loop: len(loop) / count(loop, "MUFU.EX2"))]


def _flow(code: Code) -> Tuple[List[List[int]], List[List[int]]]:
    """Returns the possible successors of each instruction, and its possible predecessors."""
    place = {at: i for i, (at, _) in enumerate(code)}
    after: List[List[int]] = []
    for i, (_, text) in enumerate(code):
        plain = re.sub(r"^@\S+ ", "", text)
        always = plain == text
        to = re.search(r" 0x([0-9a-f]+)$", plain) if plain.startswith("BRA") else None
        found = [place[int(to[1], 16)]] if to and int(to[1], 16) in place else []
        leaves = always and (plain.startswith(ENDS) or re.match(r"BRA 0x", plain))
        after.append(found + ([] if leaves or i + 1 == len(code) else [i + 1]))
    before: List[List[int]] = [[] for _ in code]
    for i, following in enumerate(after):
        for to_one in following:
            before[to_one].append(i)
    return after, before


def splits_before(code: Code, loop: Code) -> List[str]:
    """Returns the branches of which either side reaches a loop without a point at which the warp converges.

    A warp that diverges at such a branch executes the loop twice. Uniform branches are listed as well, because machine
    code does not mark them.
    """
    after, before = _flow(code)
    # BSYNC converges the lanes that have diverged since its BSSY, whose operand is the instruction after it.
    opens: Dict[int, int] = {int(to[1], 16): i for i, (_, text) in enumerate(code)
                             if (to := re.match(r"BSSY.* 0x([0-9a-f]+)$", text))}
    first, last = (next(i for i, line in enumerate(code) if line == of_loop) for of_loop in (loop[0], loop[-1]))
    reached: Set[int] = {first}
    waiting = [i for i in before[first] if not first <= i <= last]
    while waiting:
        i = waiting.pop()
        if i in reached or MEETS.match(code[i][1]):
            continue
        reached.add(i)
        begin = opens.get(code[i + 1][0]) if "BSYNC" in code[i][1] else None
        if begin is not None:
            reached.add(begin)
        waiting += before[i if begin is None else begin]
    return [code[i][1] for i in sorted(reached) if not first <= i <= last and len(after[i]) == 2
            and all(to in reached for to in after[i])]
