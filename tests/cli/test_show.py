"""`phalanx show`: the catalogue as tables, JSON and a picture; one message for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phalanx.cli.main import main
from phalanx.planner.hardware import DEVICES
from phalanx.show.devices import predecessor, si
from phalanx.show.topics import CATALOGUE, RUN


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["show", *words]) == 0
    return capsys.readouterr().out


def test_the_cluster_of_llama_3(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "cluster", "h100-llama3")
    for total in ("24.3 EFLOP/s", "415 M FP32 cores", "13 M tensor cores", "1.97 PB"):
        assert total in text
    rows = [line.split() for line in text.splitlines()]
    assert ["pod", "3,072", "192", "racks"] in [row[:4] for row in rows]
    assert ["cluster", "24,576", "8", "pods"] in [row[:4] for row in rows]
    assert "7.14 GB/s" in text and "section 3.3.1" in text


def test_the_chain_from_sm_to_peak(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(shown(capsys, "device", "h100").split())
    assert "144 built, 132 enabled" in text
    assert "16,896 FP32 cores, 528 tensor cores, 33 MiB of registers" in text
    assert "132 SMs x 4,096 FLOPs a clock x 1.83 GHz = 989 TFLOP/s" in text
    assert "A100 SXM 40GB to NVIDIA H100 SXM 80GB: 3.2x the FLOP/s, 2.2x the memory" in text
    assert "the MFU of one model falls" in text
    # Twice the bandwidth at the same peak.
    assert "the MFU can rise" in shown(capsys, "device", "h200")


def test_the_device_before() -> None:
    before = {name: predecessor(one) for name, one in DEVICES.items()}
    names = {name: one.name if one else None for name, one in before.items()}
    assert names["v100"] is None and names["a100"] == "v100" and names["trainium2"] is None
    assert names["mi325x"] == "mi300x" and names["tpu-v6e"] == "tpu-v5e"


@pytest.mark.slow
def test_the_machine_at_hand_can_be_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "this" in shown(capsys, "device", "this")


def test_json_holds_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, "cluster", "h100-llama3:16", "--json").splitlines()[-1])
    assert found["num_devices"] == 16 and found["totals"]["memory_bytes"] == 16 * 80e9
    assert [level["name"] for level in found["levels"]] == ["server", "rack"]
    one = json.loads(shown(capsys, "device", "a100", "--json").splitlines()[-1])
    assert one["chip"]["sms"] == 108 and one["peak_flops"]["tf32"] == 156e12
    every = json.loads(shown(capsys, "devices", "--json").splitlines()[-1])
    assert list(every) == list(DEVICES)


def test_the_picture_names_every_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "devices.svg"
    assert str(path) in shown(capsys, "devices", "--svg", str(path))
    words = " ".join(ElementTree.parse(path).getroot().itertext()).replace(",", " ").split()
    # One label in each of the three panels.
    assert all(words.count(name) == 3 for name in DEVICES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster", "h100-lama3"], "did you mean 'h100-llama3'"),
        (["cluster", "h100-llama3:99999"], "the nearest is h100-llama3:24576"),
        (["cluster"], "the name of a cluster is missing; expected: phalanx show cluster NAME"),
        (["device", "h10"], "did you mean 'h100'"),
        (["device"], "such as h100"),
        (["devises"], "did you mean 'devices'"),
        (["zero4"], "did you mean 'zero3'"),
        (["ring", "--ranks", "9"], "ranks is 9; expected"),
        (["ring", "--svg", "a.png"], "the nearest is a.svg"),
        (["all-to-all", "--algorithm", "tree"], "all-to-all is implemented by ring"),
        (["tp-2d", "--ranks", "3"], "the nearest"),
        (["p2p", "--ranks", "1"], "a message needs 2"),
        (["devices", "--svg", "a.png"], "the nearest is a.svg"),
        (["devices", "--svg", "no/such/folder/a.svg"], "there is no folder no/such/folder"),
        (["ring", "--svg", "."], ". is not the name of an SVG file; the nearest is picture.svg"),
        (["ring", "--svg", "no/a.svg"], "cannot write no/a.svg: there is no folder no"),
        (["devices", "--svg", "/"], "/ is not the name of an SVG file; the nearest is picture.svg"),
        (["devices", "h100"], "'h100' on the command line belongs to no option"),
    ],
)
def test_what_is_wrong_gets_one_message(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.startswith("phalanx: ")
    assert not captured.out


def test_no_topic_lists_them_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys)
    rows = [line.split("  ")[0] for line in text.splitlines()]
    assert [row for row in rows if row in RUN] == [*RUN]
    assert {*CATALOGUE} < {*rows} and "h100-llama3" in text
    assert shown(capsys, "--help") == text
    assert "--svg" in shown(capsys, "devices", "help")
    assert "--algorithm" in shown(capsys, "ring", "help")


def test_a_topic_is_run_printed_and_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "ring.svg"
    *lines, last = shown(capsys, "ring", "--svg", str(path), "--json").splitlines()
    assert all(len(line) <= 100 for line in lines if not line.endswith("."))
    assert "   0      1  c" not in lines and lines[0] == "all-reduce by ring, 4 ranks"
    assert sum("reduce-scatter" in line and line.startswith("step") for line in lines) == 3
    assert sum("all-gather" in line and line.startswith("step") for line in lines) == 3
    assert "torch.distributed.all_reduce gave the same on every rank." in lines
    frames = json.loads(last)["parts"][0]["frames"]
    assert frames[-1]["cells"] == [["1111", "2222", "3333", "4444"]] * 4
    root = ElementTree.parse(path).getroot()
    turns = [each for each in root.iter() if each.get("attributeName") == "opacity"]
    assert len(turns) == len(frames) == 7
    values = [each.get("values", "").split(";") for each in turns]
    assert [value.index("1") for value in values] == [*range(7)]
    assert all(value.count("1") == 1 for value in values)
    assert sum(each.tag.endswith("animateMotion") for each in root.iter()) == 6 * 4


def test_prefixes_of_units() -> None:
    assert [si(x, "B") for x in (0.5, 999, 999.6, 1e12, 1.97e15)] == [
        "0.5 B", "999 B", "1 kB", "1 TB", "1.97 PB",
    ]  # fmt: skip
    assert si(415236096, "FP32 cores") == "415 M FP32 cores" and si(3, "x y") == "3 x y"
