"""The tables of whole-model figures: floor, reached, asked for, and the best other figure known.

    <!-- figures: all -->               or areas: decode, drafts, prompt, load, transformers, start
    <!-- figures: short -->             the most telling ones, as far as they are measured
    <!-- figures: layers decode 1 -->   by kind of layer, of a step of so many sequences
    <!-- figures: layers prefill 8192 -->
    <!-- figures: kernels -->           and `kernels short`: see `bench.kernel_figures`
    <!-- figures: scaling -->           several GPUs: `bench.scaling_figures`
    <!-- figures: predictions -->       `bench.model`, for GPUs that were not there
    <!-- figures: commands -->          what measured the figures
    (the table)
    <!-- end of figures -->

Nothing between the lines is written by hand. All weights are synthetic; others' figures are what
they published for trained weights, or what `bench.transformers` measured beside us. A figure that
has no row says "not measured".
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import model, rows
from bench.kernel_figures import kernel_table
from bench.rows import BenchError, Row
from bench.scaling_figures import scaling_table
from nemotriton.engine.loading import random_weights
from nemotriton.errors import require

MARKED = re.compile(r"(<!-- figures: (.*?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
HEAD = "| | floor | reached | of the floor | asked for | others |\n|---|--:|--:|--:|--:|---|"
SUPER = {"model": "super-120b", "quant": "release", "state": "float32"}
UNSAID = {"activations": "bf16"}  # what a case means that says nothing


def holds(case: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a row's case is the one wanted; what only one of them says is not looked at."""
    wanted = UNSAID | wanted
    return all(case.get(k, UNSAID.get(k, v)) == v for k, v in wanted.items())


def is_plain(row: Row) -> bool:
    """A decode step of Super without drafts, behind 1,024 tokens a sequence."""
    wanted = SUPER | {"context": 1024, "drafts": 0}
    return row["provider"] == "nemotriton" and holds(row["case"], wanted)


def ms(us: float) -> str:
    return f"{us / 1e3:,.{2 if us < 1e5 else 0}f} ms"


@dataclass(frozen=True, slots=True)
class Figure:
    """A line: which row it is (suite, tokens, what its case must hold), what of it is told.

    floor, told: texts from a row. share: of the floor, None where there is none.
    """

    area: str
    name: str
    suite: str
    tokens: int
    case: dict[str, Any]
    asked: str
    others: str = ""
    told: Callable[[Row], str] = lambda r: ms(r["us"])
    floor: Callable[[Row], str] = lambda r: ms(r["floor_us"])
    share: Callable[[Row], float | None] = lambda r: r["roofline_pct"]
    provider: str = field(default="nemotriton")

    def row(self, found: Sequence[Row]) -> Row | None:
        """The latest measured row of this figure."""
        mine = [
            r
            for r in found
            if (r["suite"], r["tokens"], r["provider"]) == (self.suite, self.tokens, self.provider)
            and r["us"] is not None
            and holds(r["case"], self.case)
        ]
        return mine[-1] if mine else None

    def line(self, found: Sequence[Row]) -> str:
        row = self.row(found)
        if row is None:
            return f"| {self.name} | | not measured | | {self.asked} | {self.others} |"
        share = self.share(row)
        of = "" if share is None else f"{share:.0f} %"
        name = self.name + strategy(row)
        cells = [name, self.floor(row), self.told(row), of, self.asked, self.others]
        return "| " + " | ".join(cells) + " |"


def rate(row: Row) -> str:
    return f"{row['tokens_per_s']:,.0f} tok/s"


def step(row: Row) -> str:
    return f"{ms(row['us'])}, {rate(row)}"


def share_of(row: Row, key: str) -> str:
    """A part of a step as a share of it."""
    part = row.get(key)
    return "not measured" if part is None else f"{100 * part / row['us']:.1f} %"


def strategy(row: Row) -> str:
    """How the row's states were kept and rolled back."""
    named = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    state, rollback = row["case"].get("state"), row["case"].get("rollback")
    told = state and rollback and row["provider"] == "nemotriton"
    return f" ({named.get(state, state)} states, {rollback})" if told else ""


def decoding() -> list[Figure]:
    plain = SUPER | {"context": 1024, "drafts": 0}
    asked = {1: ">= 70 %", 16: ">= 70 %", 64: ">= 70 %", 256: ">= 65 %"}
    few = plain | {"rollback": "lanes"}
    found = [
        Figure("decode", "a step, 1 x 1,024 tokens", "decode", 1, few, asked[1], told=step),
        Figure(
            *("decode", "the same, where 16 requests or more may come", "decode", 1),
            *(plain | {"rollback": "replay"}, asked[1]),
            told=step,
        ),
        *(
            Figure("decode", f"a step, {n} x 1,024 tokens", "decode", n, plain, want, told=step)
            for n, want in asked.items()
            if n > 1
        ),
    ]
    forced = SUPER | {"context": 1024, "drafts": 3, "acceptance": 0.73}
    found.append(
        Figure(
            *("drafts", "a step, 1 x 1,024 tokens, 3 drafts, each accepted at 0.73"),
            *("decode", 1, forced, ">= 330 tok/s at 2.7 a step"),
            told=lambda r: f"{step(r)} at {r['tokens_per_step']:.1f} a step",
        )
    )
    for name, key, asked in (
        ("the device waits for the host", "idle_us", "< 3 % of the step"),
        ("the host works, most of it beside the device", "host_us", ""),
    ):
        found.append(
            Figure(
                *("decode", f"of a step of 1 sequence {name}", "decode", 1, plain, asked),
                told=lambda r, key=key: share_of(r, key),  # type: ignore[misc]
                floor=lambda r: "",
                share=lambda r: None,
            )
        )
    launches = ("decode", "launches a layer, mean, 1 sequence")
    found.append(
        Figure(
            *(*launches, "decode", 1, plain, "<= 6.5"),
            told=lambda r: f"{r['launches'] / 88:.1f}",
            floor=lambda r: "",
            share=lambda r: None,
        )
    )
    return found


# how FP8 matrices multiply, and what a case says of it
KINDS = {"": SUPER, ", FP8 matrices as w8a8": SUPER | {"activations": "fp8"}}


def prompts() -> list[Figure]:
    return [
        Figure("prompt", f"a prompt of {n:,} tokens{how}", "prefill", n, case, ">= 65 %", told=step)
        for n in (8192, 65536, 262144)
        for how, case in KINDS.items()
    ]


def loads() -> list[Figure]:
    def seconds(row: Row) -> str:
        return f"{row['floor_us'] / 1e6:.0f} s"

    def told(row: Row) -> str:
        first = f"first token {row['first_token_ms'] / 1e3:.1f} s"
        count = row["case"]["prompts"]
        return f"{rate(row)} over {count} prompt{'s' * (count > 1)}, {first}"

    published = "vLLM, published: B200 1,517, two H100 1,116 tok/s"
    drafts = {"drafts": 3, "acceptance": 0.73}
    given = [
        (8192, 32, {"drafts": 0}, ">= 1,000 tok/s", published),
        (8192, 32, drafts, ">= 1,350 tok/s", published),
        *((1024, n, {"drafts": 0}, ">= 65 %", "") for n in (1, 16, 64)),
    ]
    return [
        Figure(
            *("load", f"{length:,} in, 1,024 out, {n} at a time, K = {more['drafts']}{how}"),
            *("load", n, case | more | {"in": length, "out": 1024}, asked, others),
            told=told,
            floor=seconds,
        )
        for length, n, more, asked, others in given
        for how, case in KINDS.items()
    ]


def beside_transformers() -> list[Figure]:
    found = []
    for name in ("nano-30b", "h-8b"):
        case = {"model": name, "quant": "bf16", "context": 1024, "drafts": 0}
        what = f"{name} bf16, a step, 1 sequence"
        found.append(Figure("transformers", what, "decode", 1, case, ">= 70 %, 10 x", told=step))
        found.append(
            Figure(
                *("transformers", "the same by transformers", "decode", 1, case, ""),
                floor=lambda r: "",
                share=lambda r: None,
                provider="transformers",
            )
        )
    return found


def starts() -> list[Figure]:
    return [
        Figure(
            *("start", f"{name} start to the first token, beyond making the weights"),
            *("start", 1, {"model": "super-120b", "start": name}, asked),
            told=lambda r: f"{r['us'] / 1e6:.1f} s",
            floor=lambda r: "",
            share=lambda r: None,
        )
        for name, asked in (("first", ""), ("second", "< 20 s"))
    ]


def figures() -> list[Figure]:
    return [*decoding(), *prompts(), *loads(), *beside_transformers(), *starts()]


def short(found: Sequence[Row]) -> list[Figure]:
    """Those of a front page that are measured: steps, prompts, long loads, transformers."""
    left_out = (262144, "1,024 in", "of a step", "launches a", "first start")
    wanted = [f for f in figures() if not any(str(x) in f"{f.tokens} {f.name}" for x in left_out)]
    return [f for f in wanted if f.row(found) is not None]


def table(areas: str, found: Sequence[Row]) -> str:
    """The figures of these areas, then when and by which commands their rows were measured."""
    wanted = [f for f in figures() if areas == "all" or f.area in areas.split(", ")]
    if areas == "short":
        wanted = short(found)
    require(bool(wanted), f"no figure is in {areas!r}", BenchError)
    lines = [HEAD, *(f.line(found) for f in wanted)]
    used = [row for f in wanted if (row := f.row(found)) is not None]
    if used:
        lines += ["", f"Synthetic weights. One {rows.origin(used)}."]
    return "\n".join(lines) + "\n"


def commands(found: Sequence[Row]) -> list[str]:
    """What measured the figures, each once."""
    used = (f.row(found) for f in figures())
    return list(dict.fromkeys(row["command"] for row in used if row is not None))


def by_layer(suite: str, tokens: int, found: Sequence[Row]) -> str:
    """Launches, bytes, floor and time by kind of layer of Super's step or prompt."""
    case = SUPER | ({"context": 1024, "drafts": 0} if suite == "decode" else {})
    row = Figure("", "", suite, tokens, case, "").row([r for r in found if r.get("kinds")])
    if row is None:
        return "Not measured.\n"
    lines = ["| layers | launches | GB | floor ms | ms in kernels |", "|---|--:|--:|--:|--:|"]
    for kind, sums in row["kinds"].items():
        us = sums.get("us")
        cells = [kind, f"{sums.get('launches', 0):.0f}", f"{sums.get('bytes', 0) / 1e9:.3f}"]
        cells += [f"{sums.get('floor_us', 0) / 1e3:.3f}", "" if us is None else f"{us / 1e3:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(f"| step | {row['launches'] or ''} | | {row['floor_us'] / 1e3:.3f} | ")
    lines[-1] += f"{row['us'] / 1e3:.3f} by the host's clock |"
    return "\n".join(lines) + "\n"


def predictions(found: Sequence[Row]) -> str:
    """What `bench.model` makes of the rows: the fit against them, and Super's steps elsewhere."""
    steps = model.known(found)
    by = model.fit(steps)
    weights = random_weights("super-120b", 0, quant="release")
    loads = [
        model.load_of({"context": 1024, "kv": "float8_e4m3fn"}, n) for n in (1, 4, 16, 64, 256)
    ]
    text = (
        f"Fitted: {by.streaming:.0%} of the copy rate, {by.launch_us:.2f} us a launch, "
        f"{by.computing:.0%} of the matmul rate.\n\n"
    )
    there = model.table(model.predicted(weights, "release", loads, steps, by, steps[0].rates))
    return f"{text}{model.held_against(steps, by)}\n\n{there}\n"


def block(what: str, found: Sequence[Row]) -> str:
    """The table that a marker asks for."""
    if what == "predictions":
        return predictions(found)
    if what in ("kernels", "kernels short"):
        return kernel_table(found, what != "kernels")
    if what == "scaling":
        return scaling_table(found)
    if what == "commands":
        return "".join(f"\n    {line}" for line in commands(found)) + "\n\n"
    if what.startswith("layers "):
        _, suite, tokens = what.split()
        return by_layer(suite, int(tokens), found)
    return table(what, found)


def written(text: str, found: Sequence[Row]) -> str:
    """A page's text with its tables made from `found`."""
    return MARKED.sub(lambda m: m[1] + block(m[2], found) + m[3], text)


def write(page: Path, found: Sequence[Row]) -> None:
    """Write a page's tables anew; BenchError where it has none."""
    text = page.read_text()
    require(bool(MARKED.search(text)), f"{page} has no line <!-- figures: all -->", BenchError)
    page.write_text(written(text, found))
