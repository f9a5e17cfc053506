"""`python -m bench.peers`: the same work by what else is installed, beside ours in one process.

Peers are raced against our op on the same inputs, each after a check of its result; one that is not
installed, or cannot do a case, has a row that says so. Nothing of them belongs to the project.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import typer

from bench import rows
from bench.cli import (
    MODELS,
    Dtypes,
    Kernels,
    Models,
    Out,
    Tokens,
    application,
    command,
    need_gpu,
    points,
    run,
)
from bench.peer_calls import PEERS, one_sequence
from bench.rows import Row
from nemotriton.autotune import parity
from nemotriton.autotune.child import ChildRunner, MeasuringFailed
from nemotriton.autotune.timing import CudaStopwatch, Replay, Timing, race
from nemotriton.autotune.trial import (
    GATE_TOKENS,
    Facts,
    Gate,
    Point,
    TileRunner,
    input_sets,
)
from nemotriton.kernels.op import Args

app = application(__doc__)
# Peers round in other places than our twins; a wrong result is far beyond this share of the norm.
FAR = {"bf16": 2e-2, "fp16": 5e-3, "fp32": 1e-3}


class PeerRunner(TileRunner):
    """Checks and times peers on the inputs of our own ops."""

    def peer(self, point: Point, peer: int) -> tuple[str, str]:
        """Status of a peer at a point and why: "ok", "unsupported" or "red"."""
        p = PEERS[peer]
        try:
            gate = self._peer_gate(point, p.alone)
            args = parity.copy(gate.args)
            work = p.build(args)
            if work is None:
                return "unsupported", "not for these arguments"
            got = p.result(work(), args).double()
            want = gate.oracle[p.output].double()
            if got.shape != want.shape:
                return "red", f"{p.output} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
            far = float((got - want).norm() / want.norm().clamp_min(1e-30))
        except Exception as error:  # whatever a peer raises is its own result
            return "unsupported", self._reason(error)
        right = far <= FAR[point.dtype]
        return ("ok", "") if right else ("red", f"{far:.1e} from the oracle")

    def peer_race(self, point: Point, peers: Sequence[int]) -> list[tuple[Timing, bool]]:
        """Our op first, then the peers, in turn; with whether a CUDA graph could be made of it."""
        alone = any(PEERS[i].alone for i in peers)
        self.close()
        sets, repeat = input_sets(point, self.where, make_alone(point) if alone else None)
        ours = [lambda args=args: point.spec.op.triton(**args) for args in sets]  # type: ignore[misc]
        works = [ours, *([PEERS[i].build(args) for args in sets] for i in peers)]
        prepared = [self._prepare(calls, repeat) for calls in works]
        timed = race([replay for replay, _ in prepared])
        return [(t, graph) for t, (_, graph) in zip(timed, prepared, strict=True)]

    def _prepare(self, calls: Sequence[Callable[[], Any]], repeat: bool) -> tuple[Replay, bool]:
        try:
            return self.watch.capture(calls, repeat), True
        except RuntimeError:  # it waits for the device somewhere, which a capture forbids
            return self.watch.single(calls), False

    def _peer_gate(self, point: Point, alone: bool) -> Gate:
        if not alone:
            return self._enter(point)
        return Gate(point, self.where, min(point.tokens, GATE_TOKENS), make_alone(point))


def make_alone(point: Point) -> Callable[..., Args]:
    return lambda *args: one_sequence(point.spec.make(*args))


def peer_runner() -> PeerRunner:
    """The PeerRunner of the first CUDA device, for a child process."""
    where = torch.device("cuda", 0)
    torch.cuda.set_device(where)
    return PeerRunner(where, CudaStopwatch(where))


# ----------------------------------------------------------------------------------------- the rows
def measure(wanted: dict[Point, str], runner: Any) -> Iterator[Row]:
    """Rows of our op and its peers at every point that has any."""
    facts = runner.facts()
    common = rows.environment(facts)
    for point, model in wanted.items():
        for alone in (False, True):
            mine = [i for i, p in enumerate(PEERS) if p.op == point.op and p.alone == alone]
            if not mine:
                continue
            line = command("peers", point, model)
            for row in together(point, mine, runner, facts, line):
                case = row["case"] | ({"S": 1} if alone else {})
                yield row | common | {"case": case}


def together(point: Point, peers: Sequence[int], runner: Any, facts: Facts, line: str) -> list[Row]:
    """Check every peer, then race those that stand against our op."""
    found = {-1: rows.empty("peers", point, "nemotriton", "nemotriton", line)}
    wrong = runner.trial(point, None).failed
    found[-1] |= {"status": "red", "note": wrong} if wrong else {}
    for i in peers:
        p = PEERS[i]
        found[i] = rows.empty("peers", point, p.name, p.package, line)
        status, note = ask(runner, point, i) if p.installed else ("not installed", "")
        found[i] |= {"status": status, "note": note}
    ready = [i for i in peers if found[i]["status"] == "ok"]
    if not wrong:
        try:
            timed = runner.call("peer_race", point, ready)
        except MeasuringFailed as error:
            for i in (-1, *ready):
                found[i] |= {"status": "red", "note": str(error)}
        else:
            for i, (timing, graph) in zip((-1, *ready), timed, strict=True):
                found[i] |= rows.figures(point, timing, facts)
                found[i]["note"] = "" if graph else "single launches: no graph could be captured"
    return list(found.values())


def ask(runner: Any, point: Point, peer: int) -> tuple[str, str]:
    try:
        status, note = runner.call("peer", point, peer)
    except MeasuringFailed as error:
        return "red", str(error)
    return status, note


@app.command()
def main(
    kernel: Kernels = None,
    model: Models = MODELS,
    dtype: Dtypes = "bf16",
    tokens: Tokens = "",
    out: Out = None,
) -> None:
    """Measure our kernels and their peers; exits 1 when one of ours is wrong."""
    wanted = points(kernel or [], model, dtype, tokens)
    need_gpu()
    found: list[Row] = []
    with contextlib.closing(ChildRunner(peer_runner)) as runner:
        for row in measure(wanted, runner):
            found.append(row)
            rows.append(row, out)
            said = rows.number(row["us"], ".2f") or rows.said(row)
            print(f"{row['kernel']} T={row['tokens']} {row['provider']}: {said}", file=sys.stderr)
    print(rows.markdown(found), end="")
    ours = [r for r in found if r["provider"] == "nemotriton"]
    raise typer.Exit(1 if any(r["status"] == "red" for r in ours) else 0)


if __name__ == "__main__":
    run(app)
