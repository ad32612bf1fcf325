"""A report as one HTML file that needs no network and no script.

A page shows values of the JSON document alone: each number and text has its place in the document
beside it (a JSON pointer), as `data-key="/runs/0/Memory/1/rows/2/3"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from phalanx.report.inline_svg import COLORS, Chart, HeatMap, SpanLanes
from phalanx.report.output import values_of
from phalanx.report.tabular import Line, Number, Part, Table

Drawn = Part | Chart | HeatMap | SpanLanes
"""A part of a page; a terminal leaves charts out."""


@dataclass(frozen=True)
class Section:
    """A section of a report.

    Attributes:
        title: its title, and its name in the JSON document.
        parts: lines, tables and charts.
        is_detail: whether the page shows it only on a click, and a terminal not at all.
    """

    title: str
    parts: Sequence[Drawn]
    is_detail: bool = False

    def values(self) -> list[Any]:
        """Return the parts for JSON."""
        return [part.text if isinstance(part, Line) else values_of(part) for part in self.parts]


def page(title: str, sections: Sequence[Section], place: str) -> str:
    """Return the HTML of a report, whose sections are at `place` in the JSON document."""
    body = list[str]()
    for section in sections:
        parts = (
            "".join(_part(part, f"{place}/{section.title}/{number}"))
            for number, part in enumerate(section.parts)
        )
        inner, head = "\n".join(parts), escape(section.title)
        if section.is_detail:
            body.append(f"<details><summary>{head}</summary>\n{inner}\n</details>")
        else:
            body.append(f"<section><h2>{head}</h2>\n{inner}\n</section>")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{''.join(body)}\n</body></html>\n"
    )


def _part(part: Drawn, place: str) -> Iterator[str]:
    key = f' data-key="{escape(place)}'
    if isinstance(part, Chart | HeatMap | SpanLanes):
        yield part.svg(place)
    elif isinstance(part, Table):
        if part.title:
            yield f'<p class="bold">{escape(part.title)}</p>'
        yield f'<div class="scroll"><table aria-label="{escape(part.title)}">'
        sides = [' class="n"' if is_right else "" for _, is_right in part.columns]
        if any(name for name, _ in part.columns):
            heads = (
                f'<th{side}{key}/heads/{number}">{escape(name)}</th>'
                for number, ((name, _), side) in enumerate(zip(part.columns, sides, strict=True))
            )
            yield f"<thead><tr>{''.join(heads)}</tr></thead>"
        yield "<tbody>"
        for number, row in enumerate(part.lines()):
            yield "<tr>"
            for at, (cell, head, side) in enumerate(zip(row, part.heads, sides, strict=True)):
                unit = f' data-unit="{head.unit:g}"' if isinstance(head, Number) else ""
                yield f'<td{side}{key}/rows/{number}/{at}"{unit}>{escape(cell.text)}</td>'
            yield "</tr>"
        yield "</tbody></table></div>"
        if part.note:
            yield f'<p{key}/note">{escape(part.note)}</p>'
    elif (line := part if isinstance(part, Line) else Line(part)).text:
        tag = "p" if line.wraps else "pre"
        yield f'<{tag} class="{line.style}"{key}">{escape(line.text)}</{tag}>'


_LIGHT, _DARK = (
    "".join(f"--c{number}:{each};" for number, each in enumerate(colors))
    for colors in zip(*COLORS, strict=True)
)

_STYLE: Final = (
    f"""
:root{{{_LIGHT}--ink:#1d2430;--dim:#5b6675;--page:#fff;--box:#f5f7f9;--rule:#d9dfe6}}
@media(prefers-color-scheme:dark){{:root{{{_DARK}
--ink:#e3e8ee;--dim:#9aa6b4;--page:#14181d;--box:#1d2329;--rule:#343c46}}}}
"""
    + """*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:1000px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
h1{font-size:22px;line-height:1.3;overflow-wrap:anywhere;margin:8px 0}
h2{font-size:18px;margin:32px 0 8px;border-top:1px solid var(--rule);padding-top:16px}
p{margin:8px 0;overflow-wrap:anywhere;max-width:75ch;white-space:pre-line}
.bold{font-weight:600}.dim{color:var(--dim)}
pre{background:var(--box);padding:8px 12px;border-radius:6px;overflow-x:auto;font-size:13px}
.scroll{overflow-x:auto;margin:8px 0}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:3px 18px 3px 0;text-align:left;vertical-align:top;white-space:nowrap}
td:last-child:not(.n){white-space:normal;min-width:210px;overflow-wrap:anywhere}
th{border-bottom:1px solid var(--rule);color:var(--dim);font-weight:600}
.n{text-align:right}
details{margin:24px 0}summary{cursor:pointer;font-size:18px;font-weight:600}
figure{margin:16px 0;max-width:800px}figcaption{font-weight:600}
svg{display:block;width:100%;min-width:560px;height:auto}
svg text{font-size:12px;fill:var(--ink)}svg .tick{fill:var(--dim);font-size:11px}
.axis,.grid,.mark{fill:none;stroke:var(--dim)}.grid{stroke:var(--rule)}
.mark{stroke:var(--ink);stroke-dasharray:3 3}
.over{paint-order:stroke;stroke:var(--page);stroke-width:4px}
.line{fill:none;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;padding:0;margin:4px 0;
font-size:13px}.legend i{display:inline-block;width:10px;height:10px;margin-right:6px}
"""
    + "".join(
        f".line.c{n}{{stroke:var(--c{n})}}.area.c{n},.box.c{n}{{fill:var(--c{n})}}"
        f".legend .c{n}{{background:var(--c{n})}}"
        for n in range(len(COLORS))
    )
)
