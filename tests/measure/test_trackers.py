import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from measure.test_logs import lines_of, plain_console, record
from phalanx.measure import logs
from phalanx.measure.expert_load import Routing
from phalanx.measure.logs import RunLog
from phalanx.measure.trackers import TensorBoard, memory_pixels
from phalanx.report.inline_svg import COLORS

MIB = 2**20
MEMORY: dict[str, Any] = {
    "step": 3,
    "stage": 0,
    "curve": {
        "at_s": [0.0, 0.25, 0.5, 1.0],
        "bytes": {
            "parameters": [10 * MIB] * 4,
            "gathered": [0] * 4,
            "activations": [0, 20 * MIB, 30 * MIB, 0],
        },
    },
    "peak": 2,
    "predicted": {"at_peak": {"parameters": 10 * MIB, "activations": 40 * MIB}},
}

FORECAST = {"predicted": 2.0, "measured": 1.0, "error": 1.0}

RANKS = {
    "steps": [1, 2],
    "spread": {"forward": [[0.1, 0.2, 0.4], [0.1, 0.25, 0.5]]},
    "exposed": {"dp": [0.01, 0.03]},
}


ROUTING = Routing(
    layers=[3, 4], counts=[[4, 2, 2, 0], [2, 2, 2, 2]], entropy=[0.75, 1.0], expert_load=[2.0, 1.0],
    rank_load=[1.5, 1.0], dropped=[0.25, 0.0], aux_loss=0.25, z_loss=0.0,
)  # fmt: skip


def curves_of(run: Path) -> EventAccumulator:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return events


def points(events: EventAccumulator, curve: str) -> list[tuple[int, float]]:
    return [(event.step, pytest.approx(event.value)) for event in events.Scalars(curve)]


def test_tensorboard_gets_every_record(tmp_path: Path) -> None:
    console, _ = plain_console()
    with RunLog(tmp_path, console, 2) as log:
        log.note("config", {"strategy": "dp2", "shape": {"hidden": 64, "ffn": None}})
        log.step(record(1, loss=float("inf")))
        log.step(record(2, loss=2.0, mfu=None))
        log.note("step", {"step": 3, "loss": 1.5})  # of a process that was lost
        log.evaluation(2, 2.25, {"bits_per_byte": 1.5})
        log.routing(2, 2.0, ROUTING)
        log.note("ranks", RANKS)
        for rank in range(2):  # of one stage
            log.note("memory", {**MEMORY, "rank": rank})
        sent = [{"axis": "dp", "sent_bytes": 40}, {"axis": "dp", "sent_bytes": 2}]
        predicted = {"time_s": {"step": FORECAST}, "bytes": {"peak": FORECAST}}
        log.note("summary", {"steps_done": 2, "sent": sent, "predicted": predicted})
    events = curves_of(tmp_path)
    assert points(events, "train/loss") == [(1, float("inf")), (2, 2.0), (3, 1.5)]
    assert [step for step, _ in points(events, "train/mfu")] == [1]
    assert points(events, "train/tokens_per_s")[0] == (1, 12345.6)
    assert points(events, "time/backward_s")[0] == (1, 0.375)
    assert points(events, "validation/bits_per_byte") == [(2, 1.5)]
    assert points(events, "routing/token_loss") == [(2, 1.75)]
    assert points(events, "routing/rank_load") == [(2, 1.25)]
    assert points(events, "routing_load/layer3") == [(2, 2.0)]
    assert points(events, "routing_entropy/layer4") == [(2, 1.0)]
    assert points(events, "time_ranks/forward_median") == [(2, 0.225)]
    assert points(events, "time_ranks/forward_max") == [(2, 0.45)]
    assert points(events, "exposed/dp") == [(2, 0.02)]
    assert points(events, "memory/stage0/peak") == [(3, 40 * 2**20)]
    assert points(events, "memory/stage0/predicted") == [(3, 50 * 2**20)]
    (image,) = events.Images("memory/stage0/step")
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.width == 800
    assert points(events, "sent/dp") == [(2, 42)]
    assert points(events, "predicted/step_s") == [(2, 2.0)]
    assert points(events, "measured/peak_bytes") == [(2, 1.0)]


def hyperparameters(run: Path) -> dict[str, plugin_data_pb2.HParamsPluginData]:
    metadata = curves_of(run).summary_metadata
    return {
        tag: plugin_data_pb2.HParamsPluginData.FromString(of_tag.plugin_data.content)
        for tag, of_tag in metadata.items()
        if of_tag.plugin_data.plugin_name == "hparams"
    }


def test_settings_are_hyperparameters_even_of_a_run_that_is_killed(tmp_path: Path) -> None:
    console, _ = plain_console()
    log = RunLog(tmp_path, console, 2)
    log.note("config", {"strategy": "dp2", "lr": 0.5, "shape": {"hidden": 64, "ffn": None}})
    log.close()  # without a summary
    written = hyperparameters(tmp_path)
    settings = written["_hparams_/session_start_info"].session_start_info.hparams
    assert settings["strategy"].string_value == "dp2" and settings["lr"].number_value == 0.5
    assert settings["shape.hidden"].number_value == 64
    assert "shape.ffn" not in settings
    metrics = written["_hparams_/experiment"].experiment.metric_infos
    assert "train/loss" in [metric.name.tag for metric in metrics]
    assert "_hparams_/session_end_info" not in written


def test_a_tracker_that_raises_is_left_out_in_one_line(tmp_path: Path) -> None:
    console, shown = plain_console()
    told: list[Any] = []

    def broken(kind: str, values: Any) -> None:
        told.append(kind)
        values["step"] = 0  # of its own copy
        raise KeyError("no such run")

    with RunLog(tmp_path, console, 3, [broken, lambda _, values: told.append(values)]) as log:
        log.note("config", {"step": 3})
        log.note("config", {"step": 4})
    assert told == ["config", {"step": 3}, {"step": 4}]
    assert [line["step"] for line in lines_of(tmp_path)] == [3, 4]
    assert " ".join(shown.getvalue().split()).count("raised KeyError: 'no such run'; metrics") == 1


def test_a_disk_that_fills_up_under_the_curves_ends_only_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard writes in a thread of its own, which ends where the disk is full."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    console, shown = plain_console()
    before = threading.excepthook
    with RunLog(tmp_path, console, 1) as log:
        monkeypatch.setattr(RecordWriter, "write", full)
        while "TensorBoard gets no more records" not in shown.getvalue():
            log.evaluation(1, 2.0, {"bits_per_byte": 1.0})
        log.note("summary", {})
    assert lines_of(tmp_path)[-1]["kind"] == "summary"
    assert capsys.readouterr().err == ""
    assert threading.excepthook is before


def test_tensorboard_opens_no_second_run(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    tracker("config", {"seed": 1})
    tracker.close()
    assert [path.parent.name for path in tmp_path.rglob("events*")] == ["tensorboard"]


def test_without_tensorboard_the_first_run_of_a_folder_says_where_the_records_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "has_tensorboard", lambda: False)
    console, shown = plain_console()
    words = "metrics.jsonl has all records; for curves, pip install 'phalanx-train[tensorboard]'"
    for name in ("first", "second"):
        with RunLog(tmp_path / name, console, 1) as log:
            log.note("summary", {})
    assert " ".join(shown.getvalue().split()).count(words) == 1
    assert [path.name for path in (tmp_path / "second").iterdir()] == ["metrics.jsonl"]
    (tmp_path / "second/tensorboard").mkdir()  # a resumed run had curves
    RunLog(tmp_path / "second", console, 1).close()
    assert " ".join(shown.getvalue().split()).count(words) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_lines_of_the_docs_log_to_other_trackers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {
        "WANDB_MODE": "offline",
        "WANDB_DIR": tmp_path,
        "TRACKIO_DIR": tmp_path,
    }.items():
        monkeypatch.setenv(variable, str(value))
    page = (Path(__file__).parents[2] / "docs/your_model.md").read_text()
    names: dict[str, Any] = {"wandb": pytest.importorskip(name)}
    exec(page.split("needs wandb or trackio\n")[1].split("```")[0], names)
    console, shown = plain_console()
    with RunLog(tmp_path, console, 1, [names["record"]]) as log:
        log.note("config", {"lr": 0.5, "shape": {"ffn": None}})
        log.step(record(1))
        log.note("summary", {"steps_done": 1})
    assert "gets no more records" not in shown.getvalue()


def test_pixels_of_memory_are_its_bytes() -> None:
    at_s, num_bytes = MEMORY["curve"].values()
    held = {"peak": 40 * MIB, "predicted": 50 * MIB}  # so 102 pixels are 51 MiB
    image = memory_pixels(at_s, num_bytes, held, 100, 102).tolist()
    parameters, activations = ([*bytes.fromhex(COLORS[at][0][1:])] for at in (0, 2))
    for column, mib in {10: 0, 35: 20, 75: 30}.items():
        pixels = [row[column] for row in image]
        assert abs(pixels.count(parameters) - 20) <= 1
        assert abs(pixels.count(activations) - 2 * mib) <= 1
        assert pixels[-1] == parameters and pixels[0] == [255, 255, 255]
    (predicted,) = [at for at, row in enumerate(image) if row[0] == [0, 0, 0]]
    assert abs(102 - predicted - 100) <= 1
    nothing = memory_pixels([0.0, 0.0], {"other": [0, 0]}, {"peak": 0}, 8, 8)
    assert (nothing == 255).all()
