"""`python -m bench.rank_killed SETUP RANKS`: some ranks, of which the last is killed at its work.

In a process of its own, for rank 0 may be ended too: what waits in NCCL cannot be woken. SETUP and
RANKS are `Setup` and `Ranks` as JSON. Says in JSON lines which processes there are, and when the
last of them was killed; then what the others say.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from bench.models import Setup
from bench.ranks import Ranks, opened
from bench.rows import BenchError
from nemotriton import LLM, SamplingParams
from nemotriton.errors import RankError, require

LIMIT, START = 30.0, 300.0  # seconds that the others may take, and that a start may


def until_gone(setup: Setup, ranks: Ranks) -> tuple[float, str]:
    """Seconds from the end of the last rank, killed, to that of all processes; and what was said.

    BenchError where some are left or no rank was killed."""
    words = [sys.executable, "-m", "bench.rank_killed"]
    words += [json.dumps(asdict(setup)), json.dumps(asdict(ranks))]
    done = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    facts: dict[str, Any] = {}
    said = ["nothing"]
    reader = threading.Thread(target=_read, args=(done, facts, said), daemon=True)
    reader.start()
    try:
        gone = _wait(done, facts)
    finally:  # what is left must not hold a GPU
        for pid in _left([done.pid, *facts.get("pids", [])]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    reader.join(5.0)
    require("killed" in facts, f"no rank was killed: {said[-1]}", BenchError)
    if gone is None:
        raise BenchError(f"a killed rank was outlived by {LIMIT:.0f} s")
    named = [line for line in said if "ended by signal" in line]
    return gone - facts["killed"], (named or said)[-1]


def _read(done: subprocess.Popen[str], facts: dict[str, Any], said: list[str]) -> None:
    """Take up what it says, for as long as anybody holds the pipe."""
    assert done.stdout is not None
    for line in done.stdout:
        if line.startswith("{"):
            facts |= json.loads(line)
        elif line.strip():
            said.append(line.strip())


def _wait(done: subprocess.Popen[str], facts: dict[str, Any]) -> float | None:
    """When all processes had ended; None where some outlive the killed one by LIMIT, or none was
    killed within START."""
    start = time.time()
    while done.poll() is None or _left(facts.get("pids", [])):
        since, most = (facts["killed"], LIMIT) if "killed" in facts else (start, START)
        if time.time() - since > most:
            return None
        time.sleep(0.05)
    return time.time()


def _left(pids: list[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def work(setup: Setup, ranks: Ranks) -> None:
    """Answer until somebody is missing."""
    size = {"requests": 1, "context": 512, "piece": 256}
    with opened(setup, ranks, **size, graphs=None) as llm:  # type: ignore[arg-type]
        pids = _pids(llm)
        print(json.dumps({"pids": [os.getpid(), *pids]}), flush=True)

        def kill() -> None:
            print(json.dumps({"killed": time.time()}), flush=True)
            os.kill(pids[-1], signal.SIGKILL)

        threading.Timer(0.5, kill).start()
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        while True:
            llm.generate([[5, 6, 7]], params)


def _pids(llm: LLM) -> list[int]:
    assert llm._team is not None
    return [child.pid for child in llm._team.children.values()]


if __name__ == "__main__":
    try:
        work(Setup(**json.loads(sys.argv[1])), Ranks(**json.loads(sys.argv[2])))
    except RankError as problem:
        sys.exit(f"error: {problem}")
