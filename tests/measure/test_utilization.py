import dataclasses
import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.account.flops import Flops
from phalanx.measure.peaks import DATA_SHEETS, Arithmetic, Peak, peak_of
from phalanx.measure.utilization import Utilization
from phalanx.report.units import percent

CAUSAL = Flops(linear_forward=100, attention_forward=10, recompute=30)
FULL = Flops(linear_forward=100, attention_forward=20, recompute=40)
SHEET = Peak(flops_per_s=1000.0, source="a data sheet")


def utilization(
    time_s: float = 1.0,
    num_devices: int = 1,
    peak: Peak | None = SHEET,
    ceiling: float | None = 500.0,
    full: Flops | None = FULL,
) -> Utilization:
    return Utilization(
        causal=CAUSAL,
        full=full,
        time_s=time_s,
        num_devices=num_devices,
        peak=peak,
        ceiling_flops_per_s=ceiling,
    )


@pytest.mark.parametrize("number, words", [(1, "1 device)"), (2, "2 devices)")])
def test_in_brief_it_says_of_how_many_devices(number: int, words: str) -> None:
    brief = utilization(time_s=2.0, num_devices=number).brief()
    assert brief is not None and f" TFLOP/s for {words}" in brief


def test_shares_by_hand() -> None:
    found = utilization(time_s=2.0, num_devices=2)
    assert found.mfu("data sheet") == 330 / 2 / 2000
    assert found.hfu("data sheet") == 360 / 2 / 2000
    assert found.mfu("ceiling", "full") == 360 / 2 / 1000
    assert found.hfu("ceiling", "full") == 400 / 2 / 1000
    assert found.warnings() == []


def test_unknown_peaks_give_no_share() -> None:
    found = utilization(peak=None, ceiling=None)
    assert found.mfu("data sheet") is found.mfu("ceiling") is found.hfu("ceiling") is None
    assert "no MFU" in found.text()
    assert utilization(full=None).mfu("ceiling", "full") is None
    assert "full attention" not in utilization(full=None).text()


def test_text_names_formula_peaks_and_both_counts() -> None:
    text = utilization().text()
    assert "MFU = model FLOPs / (time x devices x peak)" in text
    assert "T (T + 1) / 2" in text
    assert "MFU 33.0 %, HFU 36.0 % (causal)" in text
    assert "MFU 36.0 %, HFU 40.0 % (full attention)" in text
    assert "a data sheet" in text and "ceiling" in text
    assert "WARNING" not in text


def test_shares_of_a_model_with_experts_say_of_which_flops() -> None:
    sparse = dataclasses.replace(CAUSAL, is_of_active=True)
    found = dataclasses.replace(utilization(), causal=sparse)
    assert "by active FLOPs of the data sheet" in found.text()
    assert "6 x matmul parameters that a token visits" in found.formula
    assert found.as_dict()["is_of_active"] and not utilization().as_dict()["is_of_active"]
    brief = found.brief()
    assert brief is not None and "of the data sheet by active FLOPs" in brief


def test_stale_ceiling_is_named() -> None:
    found = utilization(ceiling=300.0)
    assert found.mfu("ceiling") is None
    assert found.mfu("data sheet") == 0.33
    assert "the ceiling is stale" in found.text()


def test_share_above_the_data_sheet_is_named() -> None:
    found = utilization(time_s=0.1, ceiling=None)
    assert found.mfu("data sheet") is None
    assert "the time or the number of devices is wrong" in found.warnings()[0]


def test_full_attention_above_the_peak_is_explained() -> None:
    # The causal count is possible and the full one is not.
    found = utilization(ceiling=380.0, peak=None)
    assert found.mfu("ceiling") == 330 / 380
    assert found.hfu("ceiling", "full") is None
    assert "counted with full attention" in found.warnings()[0]


@given(
    time_s=st.floats(1e-6, 1e6),
    num_devices=st.integers(1, 4096),
    ceiling=st.floats(1e-3, 1e18),
    peak=st.floats(1e-3, 1e18),
)
def test_no_share_is_ever_above_one(
    time_s: float, num_devices: int, ceiling: float, peak: float
) -> None:
    found = utilization(time_s, num_devices, Peak(flops_per_s=peak, source="x"), ceiling)
    is_any_hidden = False
    for share in (found.mfu, found.hfu):
        for of in ("data sheet", "ceiling"):
            for attention in ("causal", "full"):
                value = share(of, attention)
                is_any_hidden |= value is None
                assert value is None or 0 < value <= 1
    assert is_any_hidden == bool(found.warnings())
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("name", "arithmetic", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA A100-SXM4-80GB", "float16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla T4", "float32", 8.1),
    ],
)
def test_data_sheet_by_name(name: str, arithmetic: str, tera: float) -> None:
    peak = peak_of(name, arithmetic)  # type: ignore[arg-type]
    assert peak is not None
    assert peak.flops_per_s == tera * 1e12
    assert "NVIDIA" in peak.source


@pytest.mark.parametrize(
    ("name", "arithmetic"),
    [
        ("AMD EPYC", "bfloat16"),
        ("Intel(R) Xeon(R) Platinum 8481C", "float32"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("NVIDIA A10G", "bfloat16"),
        ("Tesla V100-SXM2-16GB", "bfloat16"),
        ("", "float32"),
    ],
)
def test_unknown_device_or_arithmetic_is_no_guess(name: str, arithmetic: str) -> None:
    assert peak_of(name, arithmetic) is None  # type: ignore[arg-type]


def test_every_row_names_its_source_and_falls_with_precision() -> None:
    for sheet in DATA_SHEETS:
        assert sheet.source and sheet.tera.keys() <= {*get_args(Arithmetic), "fp8"}
        rates = [sheet.tera[name] for name in ("bfloat16", "tf32", "float32") if name in sheet.tera]
        assert rates == sorted(rates, reverse=True)


def test_percent() -> None:
    assert percent(0.4127) == "41.3 %"
    assert percent(None) == "unknown"
