"""Runs Python programs in separate processes without the seconds that importing torch takes.

Each process is a fork of one that has imported torch and its compiler, but neither sparse_ce nor a training library,
and uses one thread. Commands are written as after ``python``: a file, ``-m`` or ``-c``, and arguments. A successful
``-c`` program exits immediately, because tearing down torch takes Python a second.
"""

import atexit
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

SUPPORT = Path(__file__).resolve().parent
PROCESSES = SUPPORT / "processes"  # programs, which import modules in SUPPORT
_server: Optional[subprocess.Popen] = None


def server() -> subprocess.Popen:
    global _server
    if _server is None:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        _server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                   env={**clean, "OMP_NUM_THREADS": "1"}, start_new_session=True)
        atexit.register(_server.communicate)  # closes the server's input, which ends it
    return _server


class Program:
    """Represents a running program."""

    def __init__(self, *command: Any, cwd: Any, env: Optional[Mapping[str, str]] = None):
        self.command = [str(part) for part in command]
        self._code: Optional[int] = None
        self._server, self._folder = server(), tempfile.TemporaryDirectory()
        given = dict(os.environ if env is None else env)
        if Path(self.command[0]).parent == PROCESSES:
            given["PYTHONPATH"] = os.pathsep.join(filter(None, [given.get("PYTHONPATH"), str(SUPPORT)]))
        self.pid = self._ask(command=self.command, cwd=str(cwd), env=given, folder=self._folder.name)

    def _ask(self, **request: Any) -> int:
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def wait(self, timeout: float = 300) -> int:
        """Returns the exit code, which is negative after a signal. Kills the program and its children after ``timeout``
        seconds."""
        if self._code is None:
            print(json.dumps({"wait": self.pid}), file=self._server.stdin, flush=True)
            ready: list = []
            try:
                ready, _, _ = select.select([self._server.stdout], [], [], timeout)
            finally:
                if not ready:
                    os.killpg(self.pid, signal.SIGKILL)
                self._code = int(self._server.stdout.readline())
            if not ready:
                raise subprocess.TimeoutExpired(self.command, timeout, self.text("stdout"), self.text("stderr"))
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    def text(self, stream: str) -> str:
        return Path(self._folder.name, stream).read_text()


def ranks(count: int, *command: Any, cwd: Any, **environment: str) -> List[Program]:
    """Starts processes with one thread each that connect as torchrun's do, with a shared environment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    package = importlib.util.find_spec("sparse_ce").origin
    shared = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              "PYTHONPATH": str(Path(package).parent.parent), "OMP_NUM_THREADS": "1", **environment}
    return [Program(*command, cwd=cwd, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(count)]


def two(*command: Any, cwd: Any, **environment: str) -> List[Program]:
    return ranks(2, *command, cwd=cwd, **environment)


def all_codes(started: Sequence[Program], timeout: float = 300) -> List[int]:
    """Returns the exit codes of programs that wait for each other, and kills the remaining ones on failure."""
    try:
        return [program.wait(timeout) for program in started]
    finally:
        for program in started:
            program.kill()


def saved_by_two(program: Path, folder: Path) -> Any:
    """Runs a program in two processes with a folder as its argument. Returns what rank 0 saves there as saved.pt."""
    import torch

    started = two(program, folder, cwd=folder)
    codes = all_codes(started)
    assert codes == [0, 0], "".join(process.text("stderr")[-3000:] for process in started)
    return torch.load(folder / "saved.pt", weights_only=False)


def run(*command: Any, cwd: Any, env: Optional[Mapping[str, str]] = None,
        timeout: float = 300) -> subprocess.CompletedProcess:
    program = Program(*command, cwd=cwd, env=env)
    code = program.wait(timeout)
    return subprocess.CompletedProcess(program.command, code, program.text("stdout"), program.text("stderr"))


# ----------------------------------------------------------------------------------------------- the process that forks


def serve() -> Dict[str, Any]:
    """Returns the request in each forked program; the server exits when its input closes."""
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            os.setpgid(answer, answer)  # set in both processes, because either may run first
            if answer == 0:
                return request
        print(answer, flush=True)
    os._exit(0)


def become(command: list, cwd: str, env: Dict[str, str], folder: str) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for descriptor, path in ((0, os.devnull), (1, f"{folder}/stdout"), (2, f"{folder}/stderr")):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    if command[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *command[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(command[1], main.__dict__)
        atexit._run_exitfuncs()
        print(end="", flush=True)
        os._exit(0)
    elif command[0] == "-m":
        sys.path[0], sys.argv = cwd, command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(command[0])), command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    import torch
    import torch._dynamo  # noqa: F401  optimizers import it
    torch.set_num_threads(1)
    gc.freeze()  # a fork does not copy what the collector does not touch
    become(**serve())
