"""Draw the speed of training beside loops written by hand, from the results under benchmarks.

python benchmarks/speed.py docs/speed.svg     # also prints the table of README.md
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent


@dataclass(frozen=True)
class Comparison:
    """Two programs that a result has beside each other: a strategy, and a loop by hand."""

    model: str
    strategy: str
    against: str
    result: str
    row: str
    baseline: str

    def ratios(self) -> list[float]:
        """Return how many times as fast as the loop by hand each round was."""
        rows = json.loads((ROOT / self.result).read_text())["rows"]
        ours, theirs = (rows[name]["tokens_per_s"] for name in (self.row, self.baseline))
        return [a / b for a, b in zip(ours, theirs, strict=True)]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios())

    @property
    def date(self) -> str:
        return json.loads((ROOT / self.result).read_text())["date"][:10]


BY_HAND: Final = "transformers, by hand"
STAGES: Final = "by hand, 4 and 4 layers"
PIPELINING: Final = "`torch.distributed.pipelining`"
COMPARISONS: Final = (
    Comparison(
        "BERT-base, float32", "dp2", "DDP", "any_model/results/bert-cpu.json", "phalanx dp2", "DDP"
    ),
    Comparison(
        "ResNet-50, float32",
        "dp2",
        "DDP",
        "any_model/results/resnet50-cpu.json",
        "phalanx dp2",
        "DDP",
    ),
    Comparison(
        "34 M Llama, bfloat16",
        "dp2",
        "DDP",
        "data_parallel/results/cpu-2x1-bfloat16.json",
        "phalanx dp2",
        "DDP + transformers",
    ),
    Comparison(
        "34 M Llama, bfloat16",
        "fsdp2",
        "FSDP2",
        "data_parallel/results/fsdp-cpu-2x1-bfloat16.json",
        "phalanx fsdp2",
        BY_HAND,
    ),
    Comparison(
        "34 M Llama, float32",
        "fsdp2",
        "FSDP2",
        "data_parallel/results/fsdp-cpu-2x1-float32.json",
        "phalanx fsdp2",
        BY_HAND,
    ),
    Comparison(
        "8 experts, 34 of 86 M, bfloat16",
        "ep2",
        "DDP",
        "experts/results/cpu-2x1-bfloat16.json",
        "phalanx ep2",
        "DDP + transformers, eager",
    ),
    Comparison(
        "34 M Llama, bfloat16",
        "pp2",
        PIPELINING,
        "pipeline/results/2026-11-22-bfloat16.json",
        "phalanx pp2",
        STAGES,
    ),
    Comparison(
        "34 M Llama, float32",
        "pp2",
        PIPELINING,
        "pipeline/results/2026-11-22-float32.json",
        "phalanx pp2",
        STAGES,
    ),
)


def table() -> str:
    """Return the table of README.md."""
    rows = ["| model | strategy | against | speed | rounds | date |", "|---|---|---|---:|---:|---|"]
    for each in COMPARISONS:
        page = each.result.partition("/")[0]
        cells = (
            each.model,
            f"`{each.strategy}`",
            each.against,
            f"{each.median:.2f}x",
            str(len(each.ratios())),
            f"[{each.date}](benchmarks/{page}/README.md)",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def draw(path: Path) -> None:
    """Draw a bar for each median and a dot for each round."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "phalanx", "font.size": 10}):
        figure = Figure(figsize=(9.0, 3.9))
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        rows = list(reversed(COMPARISONS))
        for y, each in enumerate(rows):
            axes.barh(y, each.median, height=0.6, color="#3b6fb6")
            axes.plot(each.ratios(), [y] * len(each.ratios()), "o", ms=4, color="#1d2430")
            axes.text(0.03, y, f"{each.median:.2f}x", va="center", color="white", weight="bold")
        axes.axvline(1.0, color="#c8642d", lw=1.5)
        axes.set_yticks(
            range(len(rows)),
            [f"{each.model}\n{each.strategy} against {each.against.strip('`')}" for each in rows],
            fontsize=8.5,
        )
        axes.set_xlabel(
            "speed beside the loop by hand (1 = equal): bar, median of the rounds; dots, each round"
        )
        axes.set_title("Two processes of one thread on two CPU cores, torch 2.13.0", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw(Path(name))
    sys.stdout.write(f"{table()}\n")
