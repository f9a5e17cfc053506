"""The table of several GPUs, of the latest rows of `bench.parallel` and `bench.scaling`.

<!-- figures: scaling -->
(the table)
<!-- end of figures -->
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench import rows
from bench.rows import Row

WAYS = {(1, 1): "one", (2, 1): "two", (4, 1): "four", (2, 2): "four, experts in two groups"}


@dataclass(frozen=True, slots=True)
class Line:
    """What is measured on several GPUs. kernel: "step" of so many sequences, or "prompt"."""

    name: str
    model: str
    quant: str
    kernel: str
    tokens: int
    drafts: int = 0
    asked: str = ""

    def rows(self, found: Sequence[Row]) -> dict[tuple[int, int], Row]:
        """The latest row of each way to cut the model."""
        wanted = {"model": self.model, "quant": self.quant, "drafts": self.drafts}
        mine = [
            r
            for r in found
            if (r["suite"], r["kernel"], r["tokens"]) == ("parallel", self.kernel, self.tokens)
            and {k: r["case"][k] for k in wanted} == wanted
        ]
        return {(r["case"]["tp"], r["case"]["ep"]): r for r in mine}


SUPER = ("super-120b", "release")
LINES = (
    Line("Super, a step, 1 sequence", *SUPER, "step", 1, asked="two >= 1.35 x, four >= 1.8 x"),
    Line("Super, a step, 64 sequences", *SUPER, "step", 64, asked="four >= 2.5 x"),
    Line(
        *("Super, a prompt of 65,536", *SUPER, "prompt", 65536),
        asked="two >= 1.6 x, four >= 2.8 x",
    ),
    Line(
        *("Super in BF16, a step, 1 sequence", "super-120b", "bf16", "step", 1),
        asked="two >= 60 %, four >= 55 %",
    ),
    Line(
        *("Super in BF16, a step, 64 sequences", "super-120b", "bf16", "step", 64),
        asked="two >= 60 %, four >= 55 %",
    ),
    *(
        Line(
            f"Ultra 550B, a step, {count} sequence{'s' * (count > 1)}, {drafts} drafts",
            *("ultra-550b", "release", "step", count, drafts, "four >= 50 %"),
        )
        for drafts in (0, 3)
        for count in (1, 16)
    ),
)


def scaling_table(found: Sequence[Row]) -> str:
    """Milliseconds, share of the floor of all GPUs, and how many times one GPU's speed."""
    lines = ["| | " + " | ".join(WAYS.values()) + " | asked for |"]
    lines.append("|---|" + "--:|" * len(WAYS) + "---|")
    used = []
    for line in LINES:
        mine = line.rows(found)
        cells = [_cell(mine.get(way), mine.get((1, 1))) for way in WAYS]
        lines.append(f"| {line.name} | " + " | ".join(cells) + f" | {line.asked} |")
        used += [r for way, r in mine.items() if way in WAYS]
    if used:
        lines += ["", f"Synthetic weights. {rows.origin(used)}."]
    return "\n".join(lines) + "\n"


def _cell(row: Row | None, one: Row | None) -> str:
    if row is None:
        return ""
    ms = row["us"] / 1e3
    told = [f"{ms:,.{2 if ms < 1000 else 0}f} ms"]
    if row["roofline_pct"]:
        told.append(f"{row['roofline_pct']:.0f} %")
    if one is not None and one is not row:
        told.append(f"{one['us'] / row['us']:.2f} x")
    return ", ".join(told)
