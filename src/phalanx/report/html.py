"""A report as one HTML file that needs no network and no script.

A page shows values of a JSON document alone: `keyed` gives each number and text its place in the
document, and the page writes the place beside the number, as `data-key="/runs/0/ledger/step_s"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final, cast

from phalanx.report.inline_svg import Chart, SpanLanes
from phalanx.report.tabular import Line, Number, Part, Table


class Quantity(float):
    """A number with its place in a JSON document (a JSON pointer)."""

    key = ""


class Text(str):
    """A text with its place in a JSON document."""

    key = ""


class Points(list[Any]):
    """A list with its place in a JSON document."""

    key = ""


def keyed(value: Any, key: str = "") -> Any:
    """Return a JSON document whose numbers, texts and lists know their place."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {name: keyed(inner, f"{key}/{name}") for name, inner in items}
    if isinstance(value, list):
        inner = cast("list[Any]", value)
        if inner and isinstance(inner[0], list):
            placed = Points(inner)  # a curve: its points are drawn, not written
        else:
            placed = Points(keyed(each, f"{key}/{at}") for at, each in enumerate(inner))
    elif isinstance(value, str):
        placed = Text(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        placed = Quantity(value)
    else:
        return value
    placed.key = key
    return placed


@dataclass(frozen=True)
class Section:
    """A part of a report with a title.

    Attributes:
        title: the title; none if empty.
        parts: lines, tables and charts; a terminal leaves charts out.
        is_detail: whether the page shows it only on a click, and a terminal not at all.
    """

    title: str
    parts: Sequence[Part | Chart | SpanLanes]
    is_detail: bool = False


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the HTML of a report."""
    body = list[str]()
    for section in sections:
        inner = "\n".join(map(_part, section.parts))
        head = escape(section.title)
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


def _part(part: Part | Chart | SpanLanes) -> str:
    if isinstance(part, Chart | SpanLanes):
        return part.svg()
    if isinstance(part, Table):
        return "".join(_table(part))
    text, style, wraps = part if isinstance(part, Line) else (part, "", True)
    if not text:
        return ""
    tag = "p" if wraps else "pre"
    return f'<{tag} class="{style}"{_key(text)}>{escape(text)}</{tag}>'


def _table(table: Table) -> Iterator[str]:
    yield _part(Line(table.title, "bold"))
    yield f'<div class="scroll"><table aria-label="{escape(table.title)}">'
    if any(name for name, _ in table.columns):
        cells = (
            f"<th{_side(right)}{_key(name)}>{escape(name)}</th>" for name, right in table.columns
        )
        yield f"<thead><tr>{''.join(cells)}</tr></thead>"
    yield "<tbody>"
    for row, printed in zip(table.rows, table.lines(), strict=True):
        yield "<tr>"
        for cell, line, head, (_, right) in zip(
            row, printed, table.heads, table.columns, strict=True
        ):
            unit = f' data-unit="{head.unit:g}"' if isinstance(head, Number) else ""
            yield f"<td{_side(right)}{_key(cell)}{unit}>{escape(line.text)}</td>"
        yield "</tr>"
    yield f"</tbody></table></div>{_part(table.note)}"


def _side(is_right: bool) -> str:
    return ' class="n"' if is_right else ""


def _key(value: object) -> str:
    value = value.text if isinstance(value, Line) else value
    key = value.key if isinstance(value, Quantity | Text) else ""
    return f' data-key="{escape(key)}"' if key else ""


_STYLE: Final = """
:root{--ink:#1d2430;--dim:#5b6675;--page:#fff;--box:#f5f7f9;--rule:#d9dfe6;--c0:#1f5a99;
--c1:#c2572f;--c2:#3b7d4f;--c3:#8a5aa8;--c4:#b8901c;--c5:#2a8c95;--c6:#b04a7a;--c7:#7b8794}
@media(prefers-color-scheme:dark){:root{--ink:#e3e8ee;--dim:#9aa6b4;--page:#14181d;--box:#1d2329;
--rule:#343c46;--c0:#6ea8e6;--c1:#ee8b62;--c2:#74bd88;--c3:#bd94da;--c4:#dfba52;--c5:#62c3cc;
--c6:#e388b1;--c7:#95a1ae}}
*{box-sizing:border-box}
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
""" + "".join(
    f".line.c{n}{{stroke:var(--c{n})}}.area.c{n},.box.c{n}{{fill:var(--c{n})}}"
    f".legend .c{n}{{background:var(--c{n})}}"
    for n in range(8)
)
