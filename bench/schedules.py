"""`python -m bench.schedules`: routed experts by token or by expert, and what sorting is worth.

Router and NVFP4 experts of one layer together, three ways of making blocks of (token, expert)
pairs: `token` takes each pair by itself, so that two tokens with the same expert read it twice;
`expert` finds an expert's pairs by comparing ids, without a sort; `sorted` has the router sort the
pairs. Rows are times at 1 to 256 tokens and three skews of the router: expert i is drawn in
proportion to (i + 1)^-skew, without replacement. Cold weights, CUDA graphs, behind a parity gate.

Without a GPU, or with --overlap MODEL, it tells how many experts neighbouring rows share: drawn
with those skews and, of a model, in the layers that a text really takes, as it stands and with its
rows shuffled. The text (overlap_text.txt) is Python written for this, so nobody has learnt it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench import rows
from bench.cli import Out, application, run
from bench.report import BenchError, plotting
from bench.rows import Row
from nemotriton import LLM, SamplingParams
from nemotriton.autotune.parity import generator
from nemotriton.autotune.provenance import commit, today, version
from nemotriton.autotune.timing import CudaStopwatch, race
from nemotriton.autotune.trial import Facts, Gate, Point, TileRunner
from nemotriton.errors import require
from nemotriton.kernels import route_experts, run_experts_packed
from nemotriton.kernels.moe_experts_packed import RUN_EXPERTS_PACKED, UNSORTED_PAIRS
from nemotriton.kernels.op import Case, Tile, cdiv, use_tile
from nemotriton.model.config import ModelConfig
from nemotriton.model.layers import Experts

app = application(__doc__)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SKEWS = (0.0, 0.5, 1.0)
SCHEDULES = ("token", "expert", "sorted")
GATED = 8  # tokens of the parity gate
WEIGHT_BYTES = 400e6  # the routings of a round reach so many: several times an L2
TEXT = (Path(__file__).parent / "overlap_text.txt").read_text()


def draw(T: int, E: int, skew: float, where: torch.device, rng: torch.Generator) -> torch.Tensor:
    """Router logits [T, E] whose top K are K draws without replacement (Gumbel-top-k)."""
    places = torch.arange(1, E + 1, device=where, dtype=torch.float32)
    noise = torch.rand(T, E, device=where, generator=rng).clamp_min(1e-20).log().neg().log().neg()
    return 0.2 * (noise - skew * places.log())  # a sigmoid keeps the order if it does not saturate


def tile_of(case: Case, schedule: str, tokens: int) -> Tile:
    """The tile that the engine would take, with its blocks made in this way."""
    tile = RUN_EXPERTS_PACKED.default(case, tokens)
    if schedule == "token":
        return RUN_EXPERTS_PACKED.default(case, 1).but(SPLIT=3 if tokens * case.K <= 192 else 1)
    if schedule == "expert":
        return tile.but(BLOCKS=1 if tokens <= 8 else 2)
    return tile.but(BLOCKS=2)


def shared_experts(ids: torch.Tensor) -> float:
    """Mean share of a row's experts that the row before it has too; ids [T, K]."""
    both = ids[1:, :, None] == ids[:-1, None, :]
    return float(both.any(-1).float().mean())


# ------------------------------------------------------------------------------------------ timing
def applies(schedule: str, tokens: int, case: Case) -> bool:
    return schedule != "expert" or tokens * case.K <= UNSORTED_PAIRS


def measure(case: Case, watch: CudaStopwatch, facts: Facts) -> Iterator[Row]:
    """A row for every skew, number of tokens and schedule."""
    where = watch.where
    common = rows.environment(facts)
    point = Point("run_experts_packed", case, GATED, "bf16")
    weights = RUN_EXPERTS_PACKED.make(case, 1, where, torch.bfloat16, generator(0, where))
    gate = Gate(point, where, GATED)
    verdicts = {s: gate.verdict(tile_of(case, s, GATED)) for s in SCHEDULES}
    del gate
    for skew in SKEWS:
        for T in TOKENS:
            ways = [s for s in SCHEDULES if applies(s, T, case)]
            inputs = [pair(case, T, skew, where, i) for i in range(sets(T, case))]
            reached = [len(route(case, logits, True).ids.unique()) for logits, _ in inputs]
            calls = [[step(case, s, T, weights, *pair_) for pair_ in inputs] for s in ways]
            timed = race([watch.capture(each, True) for each in calls])
            for schedule, timing in zip(ways, timed, strict=True):
                at = Point("run_experts_packed", case, T, "bf16")
                row = rows.empty("schedules", at, schedule, "nemotriton", "")
                row |= common | {"command": "python -m bench.schedules", "label": f"skew {skew}"}
                row |= {"skew": skew, "experts": round(sum(reached) / len(reached), 1)}
                verdict = verdicts[schedule]
                if not verdict.ok:
                    yield row | {"status": "red", "note": verdict.detail}
                    continue
                yield row | rows.figures(at, timing, facts)


def pair(
    case: Case, T: int, skew: float, where: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits and x of one step."""
    rng = generator(seed, where)
    logits = draw(T, case.E, skew, where, rng)
    return logits, torch.randn(T, case.L, device=where, generator=rng).bfloat16()


def sets(T: int, case: Case) -> int:
    """How many routings take turns."""
    expert = 2 * case.F * case.L * 9 / 16
    return min(16, cdiv(int(WEIGHT_BYTES), int(T * case.K * expert)))


def route(case: Case, logits: torch.Tensor, sort: bool) -> Any:
    return route_experts(logits, None, case.K, 1, 1, True, 2.5, sort=sort)


def step(
    case: Case, schedule: str, T: int, weights: dict[str, Any], logits: torch.Tensor, x: Any
) -> Any:
    """Router and experts, as one call."""
    tile = tile_of(case, schedule, T)

    def call() -> torch.Tensor:
        with use_tile("run_experts_packed", tile):
            routing = route(case, logits, schedule == "sorted")
            return run_experts_packed(**weights | {"x": x, "routing": routing})

    return call


# ----------------------------------------------------------------------------------------- picture
def table(found: Sequence[Row]) -> str:
    """Microseconds: a line a skew and number of tokens, a column a schedule."""
    head = "| skew | tokens | experts | " + " | ".join(f"{s} us" for s in SCHEDULES) + " |"
    lines = [head, "|--:|--:|--:|" + "--:|" * len(SCHEDULES)]
    by: dict[tuple[float, int], dict[str, Row]] = {}
    for row in found:
        by.setdefault((row["skew"], row["tokens"]), {})[row["provider"]] = row
    for (skew, tokens), ways in by.items():
        cells = [rows.number(ways[s]["us"], ".1f") if s in ways else "" for s in SCHEDULES]
        experts = next(iter(ways.values()))["experts"]
        lines.append(f"| {skew} | {tokens} | {experts:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw_picture(found: Sequence[Row], file: Path) -> None:
    """Time over tokens: a panel a skew, a line a schedule."""
    pyplot = plotting()
    good = [r for r in found if r["us"] is not None]
    require(bool(good), "no row has numbers to draw", BenchError)
    figure, panels = pyplot.subplots(1, len(SKEWS), figsize=(12, 4), sharey=True)
    for skew, axes in zip(SKEWS, panels, strict=True):
        for schedule in SCHEDULES:
            mine = [r for r in good if r["skew"] == skew and r["provider"] == schedule]
            xs, ys = [r["tokens"] for r in mine], [r["us"] for r in mine]
            axes.plot(xs, ys, marker="o", ms=3, label=schedule)
        axes.set(xscale="log", yscale="log", xlabel="tokens", title=f"skew {skew}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("router and experts, us")
    panels[0].legend()
    figure.suptitle(good[0]["gpu"])
    figure.savefig(file, dpi=80, bbox_inches="tight")
    pyplot.close(figure)


# ----------------------------------------------------------------------------------------- overlap
def drawn_overlap(E: int, K: int) -> Iterator[tuple[str, float]]:
    """Of random routings, by skew."""
    for skew in SKEWS:
        logits = draw(512, E, skew, torch.device("cpu"), generator(0, torch.device("cpu")))
        yield f"drawn, skew {skew}", shared_experts(logits.topk(K).indices)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of `rows` rows in `layers` MoE layers, each of K of E experts: the mean share of its experts
    that a row has in common with the row before it, and with any other row of the text."""

    E: int
    K: int
    layers: int
    rows: int
    neighbours: float
    shuffled: float


def model_overlap(name: str) -> Overlap:
    """Of a model's MoE layers over TEXT."""
    seen: dict[str, list[torch.Tensor]] = {}

    def keep(layer: str) -> Callable[..., None]:
        return lambda _, given: seen.setdefault(layer, []).append(given[1].ids.cpu())

    with LLM(name, max_requests=1, max_context=1024, graphs=None) as llm:
        model: Any = llm.runner.model
        hooks = [
            module.register_forward_pre_hook(keep(layer))
            for layer, module in model.named_modules()
            if isinstance(module, Experts)
        ]
        require(bool(hooks), f"{name} has no experts", BenchError)
        seen.clear()
        llm.generate([TEXT], SamplingParams(max_tokens=1, temperature=0))
        for hook in hooks:
            hook.remove()
        moe = llm.config.moe
    assert moe is not None
    prompts = [torch.cat(pieces) for pieces in seen.values()]
    rng = generator(0, torch.device("cpu"))
    mixed = [ids[torch.randperm(len(ids), generator=rng)] for ids in prompts for _ in range(8)]
    shares = [sum(map(shared_experts, ids)) / len(ids) for ids in (prompts, mixed)]
    return Overlap(moe.experts, moe.top_k, len(prompts), len(prompts[0]), *shares)


def overlap_row(name: str, found: Overlap) -> Row:
    """A row without times; a CPU's twins route as kernels do."""
    case = Case(E=found.E, K=found.K)
    row = rows.empty("overlap", Point("route_experts", case, found.rows, "fp32"), name, "torch", "")
    head, dirty = commit()
    where = {"gpu": "CPU", "commit": head, "dirty": dirty, "date": today()}
    where |= {"torch": version("torch"), "triton": version("triton")}
    shares = {k: rows.digits(v) for k, v in asdict(found).items() if k not in ("E", "K", "rows")}
    told = {"label": "experts that neighbours share", "chance": rows.digits(found.K / found.E)}
    return row | where | shares | told | {"command": f"python -m bench.schedules --overlap {name}"}


def tell_overlap(E: int, K: int, told: Sequence[tuple[str, float]]) -> None:
    print(f"\nExperts that a row shares with the row before it, of its {K} of {E}:")
    for name, share in told:
        print(f"* {name}: {100 * share:.1f} %")


@app.command()
def main(
    model: Annotated[str, typer.Option(help="A preset with NVFP4 experts.")] = "super-120b",
    overlap: Annotated[str | None, typer.Option(help="A model; no timing.")] = None,
    picture: Annotated[Path | None, typer.Option(help="A PNG of the times.")] = None,
    out: Out = None,
) -> None:
    """Times, and experts that neighbours share."""
    if overlap is not None:
        found_in = model_overlap(overlap)
        E, K = found_in.E, found_in.K
        own = [(overlap, found_in.neighbours), ("its rows shuffled", found_in.shuffled)]
        tell_overlap(E, K, [*drawn_overlap(E, K), *own])
        rows.append(overlap_row(overlap, found_in), out)
        return
    case = RUN_EXPERTS_PACKED.cases(ModelConfig.preset(model))[0]
    found: list[Row] = []
    if torch.cuda.is_available():
        watch = CudaStopwatch(torch.device("cuda", torch.cuda.current_device()))
        for row in measure(case, watch, TileRunner(watch.where, watch).facts()):
            found.append(row)
            rows.append(row, out)
            said = rows.number(row["us"], ".1f") or rows.said(row)
            print(row["label"], row["tokens"], row["provider"], said, file=sys.stderr, flush=True)
        print(table(found), end="")
        if picture is not None:
            draw_picture(found, picture)
    tell_overlap(case.E, case.K, list(drawn_overlap(case.E, case.K)))


if __name__ == "__main__":
    run(app)
