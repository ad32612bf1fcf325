"""The picture of a record of memory: every height and width is that of a value of the record."""

import re
from xml.etree import ElementTree

import pytest

from phalanx.report.curves import COLOURS, memory_pixels, memory_svg, memory_text

MIB = 2**20
RECORD = {
    "step": 3,
    "rank": 1,
    "stage": 0,
    "curve": {
        "at_s": [0.0, 0.25, 0.5, 1.0],
        "phase": ["before", "forward", "backward", "after"],
        "bytes": {
            "parameters": [10 * MIB] * 4,
            "gathered": [0] * 4,
            "activations": [0, 20 * MIB, 30 * MIB, 0],
        },
    },
    "peak": 2,
    "predicted": {"at_peak": {"parameters": 10 * MIB, "activations": 40 * MIB}},
}
SVG = "{http://www.w3.org/2000/svg}"


def heights_of(path: str) -> list[float]:
    return [float(y) for y in re.findall(r"[V ]([\d.]+)", path)]


def test_the_area_of_a_kind_is_its_bytes_on_top_of_the_kinds_before() -> None:
    svg = ElementTree.fromstring(memory_svg(RECORD))
    areas = {path.get("fill"): path.get("d") for path in svg.iter(f"{SVG}path")}
    assert COLOURS["gathered"] not in areas  # nothing is gathered
    paths = [path.attrib for path in svg.iter(f"{SVG}path")]
    grid = [heights_of(path["d"])[0] for path in paths if path.get("class") == "faint"]
    zero, ten = grid[0], grid[1]
    pixels = (zero - ten) / (10 * MIB)
    parameters, activations = areas[COLOURS["parameters"]], areas[COLOURS["activations"]]
    assert parameters is not None and activations is not None
    held = [round((zero - y) / pixels / MIB) for y in heights_of(activations)[1:]]
    # There along the top, back along the parameters.
    assert held == [10, 30, 40, 10, 10, 10]
    begins = [float(x) for x in re.findall(r"H([\d.]+)", parameters)][:3]
    assert begins == pytest.approx([46 + 426 * at for at in (0.25, 0.5, 1)], abs=0.01)
    (peak,) = svg.iter(f"{SVG}circle")
    assert round((zero - float(peak.get("cy", ""))) / pixels / MIB) == 40
    (predicted,) = (heights_of(p["d"])[0] for p in paths if p.get("class") == "line dash")
    assert round((zero - predicted) / pixels / MIB) == 50
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert "peak 40.00 MiB in backward, predicted 50.00 MiB" in texts
    assert {"forward", "backward", "400", "1000", "parameters"} <= set(texts)


def test_a_record_without_a_prediction_or_of_nothing_is_drawn() -> None:
    nothing = {"at_s": [0.0, 0.0], "phase": ["before", "after"], "bytes": {"other": [0, 0]}}
    for record in ({**RECORD, "predicted": None}, {**RECORD, "curve": nothing, "peak": 0}):
        svg = ElementTree.fromstring(memory_svg(record))
        assert "nan" not in ElementTree.tostring(svg, "unicode")
    assert memory_text({**RECORD, "predicted": None}) == (
        "peak 40.00 MiB in backward: parameters 10.00 MiB, activations 30.00 MiB"
    )


def test_the_same_areas_as_pixels() -> None:
    image = memory_pixels(RECORD, 100, 102).tolist()
    colours = {tuple(bytes.fromhex(colour[1:])): kind for kind, colour in COLOURS.items()}
    for column, kinds in {10: 0, 35: 20, 75: 30}.items():  # MiB of activations at that time
        names = [colours.get(tuple(row[column]), "") for row in image]
        assert abs(names.count("parameters") - 20) <= 1  # 102 pixels are 51 MiB
        assert abs(names.count("activations") - 2 * kinds) <= 1
        assert names[-1] == "parameters" and names[0] == ""
    (predicted,) = [at for at, row in enumerate(image) if row[0] == [0, 0, 0]]
    assert abs(102 - predicted - 100) <= 1
