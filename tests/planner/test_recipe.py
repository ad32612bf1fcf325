"""The rules beside a golden table, and beside what each of them says of sizes."""

from __future__ import annotations

import dataclasses
import re

import pytest

from phalanx.models.registry import shape_of
from phalanx.planner import recipe
from phalanx.planner.hardware import CLUSTERS, cluster
from phalanx.planner.recipe import JobSizes, by_fit, held, inequality, of_thumb, sizes_of
from phalanx.strategy import Strategy

MODELS = {0.124: "gpt2-124m", 1.24: "llama3-1b", 8.03: "llama3-8b", 70.6: "llama3-70b",
          406: "llama3-405b"}  # fmt: skip
"""Billions of parameters -> preset."""

TABLE = """
params devices sequence  rule of thumb                            choice                   rule by fit                         choice
 0.124       1     8192  one device                               dp1                      one device holds the model          dp1
 0.124       1   131072  one device                               dp1                      one device holds the model          dp1
 0.124       8     8192  data parallelism                         dp8                      one device holds the model          dp8
 0.124       8   131072  context parallelism                      cp8                      one device holds the model          dp8
 0.124     256     8192  FSDP                                     fsdp256                  one device holds the model          dp256
 0.124     256   131072  context parallelism                      fsdp16,cp16              fewer sequences than devices        fsdp128,tp2
 0.124     512     8192  HSDP                                     dp64,fsdp8               one device holds the model          dp512
 0.124     512   131072  context parallelism                      fsdp32,cp16              fewer sequences than devices        dp64,fsdp2,tp4
 0.124    2048     8192  context, pipeline and tensor parallelism  dp256,fsdp2,tp4          one device holds the model          dp2048
 0.124    2048   131072  context, pipeline and tensor parallelism  fsdp32,cp16,tp4          fewer sequences than devices        pp4,dp64,fsdp2,tp4
 0.124   16384     8192  context, pipeline and tensor parallelism  dp2048,fsdp2,tp4         fewer sequences than devices        pp2,dp1024,fsdp2,tp4
 0.124   16384   131072  context, pipeline and tensor parallelism  dp16,fsdp16,cp16,tp4     nothing fits                        pp8,dp256,fsdp2,tp4
  1.24       1     8192  one device                               dp1                      one device holds the model          dp1
  1.24       1   131072  one device                               dp1                      one device holds the model          dp1
  1.24       8     8192  FSDP                                     fsdp8                    one device holds the model          dp8
  1.24       8   131072  context parallelism                      cp8                      one device holds the model          dp8
  1.24     256     8192  FSDP                                     fsdp256                  one device holds the model          dp256
  1.24     256   131072  context parallelism                      fsdp16,cp16              fewer sequences than devices        fsdp128,tp2
  1.24     512     8192  HSDP                                     dp64,fsdp8               one device holds the model          dp512
  1.24     512   131072  context parallelism                      fsdp32,cp16              fewer sequences than devices        dp64,fsdp2,tp4
  1.24    2048     8192  context, pipeline and tensor parallelism  fsdp256,tp8              one device holds the model          dp2048
  1.24    2048   131072  context, pipeline and tensor parallelism  fsdp16,cp16,tp8          fewer sequences than devices        pp2,fsdp128,tp8
  1.24   16384     8192  context, pipeline and tensor parallelism  dp16,fsdp128,tp8         fewer sequences than devices        dp16,fsdp128,tp8
  1.24   16384   131072  context, pipeline and tensor parallelism  dp16,fsdp8,cp16,tp8      fewer sequences than devices        pp16,fsdp128,tp8
  8.03       1     8192  one device                               dp1                      nothing fits                        dp1
  8.03       1   131072  one device                               dp1                      nothing fits                        dp1
  8.03       8     8192  FSDP                                     fsdp8                    one device holds the largest layer  fsdp8
  8.03       8   131072  context parallelism                      cp8                      one device holds the largest layer  fsdp8
  8.03     256     8192  FSDP                                     fsdp256                  one device holds the largest layer  fsdp256
  8.03     256   131072  context parallelism                      fsdp16,cp16              fewer sequences than devices        fsdp128,tp2
  8.03     512     8192  HSDP                                     dp64,fsdp8               one device holds the largest layer  dp64,fsdp8
  8.03     512   131072  context parallelism                      fsdp32,cp16              fewer sequences than devices        dp64,fsdp2,tp4
  8.03    2048     8192  context, pipeline and tensor parallelism  fsdp256,tp8              one device holds the largest layer  dp256,fsdp8
  8.03    2048   131072  context, pipeline and tensor parallelism  fsdp16,cp16,tp8          fewer sequences than devices        pp2,fsdp128,tp8
  8.03   16384     8192  context, pipeline and tensor parallelism  dp16,fsdp128,tp8         fewer sequences than devices        dp16,fsdp128,tp8
  8.03   16384   131072  context, pipeline and tensor parallelism  dp16,fsdp8,cp16,tp8      fewer sequences than devices        pp16,fsdp128,tp8
  70.6       1     8192  one device                               dp1                      nothing fits                        dp1
  70.6       1   131072  one device                               dp1                      nothing fits                        dp1
  70.6       8     8192  context, pipeline and tensor parallelism  tp8                      nothing fits                        tp8
  70.6       8   131072  context, pipeline and tensor parallelism  tp8                      nothing fits                        tp8
  70.6     256     8192  context, pipeline and tensor parallelism  pp4,fsdp8,tp8            one device holds the largest layer  fsdp256
  70.6     256   131072  context, pipeline and tensor parallelism  pp2,cp16,tp8             no device holds a sequence          fsdp64,cp4
  70.6     512     8192  context, pipeline and tensor parallelism  pp4,fsdp16,tp8           one device holds the largest layer  fsdp512
  70.6     512   131072  context, pipeline and tensor parallelism  pp4,cp16,tp8             no device holds a sequence          fsdp128,cp4
  70.6    2048     8192  context, pipeline and tensor parallelism  pp4,fsdp64,tp8           one device holds the largest layer  fsdp2048
  70.6    2048   131072  context, pipeline and tensor parallelism  pp4,fsdp4,cp16,tp8       no device holds a sequence          fsdp128,cp16
  70.6   16384     8192  context, pipeline and tensor parallelism  pp4,dp4,fsdp128,tp8      fewer sequences than devices        dp16,fsdp128,tp8
  70.6   16384   131072  context, pipeline and tensor parallelism  pp4,dp4,fsdp8,cp16,tp8   no device holds a sequence          dp16,fsdp8,cp16,tp8
   406       1     8192  one device                               dp1                      nothing fits                        dp1
   406       1   131072  one device                               dp1                      nothing fits                        dp1
   406       8     8192  context, pipeline and tensor parallelism  tp8                      nothing fits                        tp8
   406       8   131072  context, pipeline and tensor parallelism  tp8                      nothing fits                        tp8
   406     256     8192  context, pipeline and tensor parallelism  pp16,fsdp2,tp8           one device holds the largest layer  fsdp256
   406     256   131072  context, pipeline and tensor parallelism  pp2,cp16,tp8             no device holds a sequence          fsdp16,cp16
   406     512     8192  context, pipeline and tensor parallelism  pp16,fsdp4,tp8           one device holds the largest layer  fsdp512
   406     512   131072  context, pipeline and tensor parallelism  pp4,cp16,tp8             no device holds a sequence          fsdp32,cp16
   406    2048     8192  context, pipeline and tensor parallelism  pp16,fsdp16,tp8          one device holds the largest layer  fsdp2048
   406    2048   131072  context, pipeline and tensor parallelism  pp16,cp16,tp8            no device holds a sequence          fsdp128,cp16
   406   16384     8192  context, pipeline and tensor parallelism  pp16,fsdp128,tp8         fewer sequences than devices        dp16,fsdp128,tp8
   406   16384   131072  context, pipeline and tensor parallelism  pp16,fsdp8,cp16,tp8      no device holds a sequence          dp16,fsdp8,cp16,tp8
"""  # noqa: E501


def sizes(model: str, num_devices: int, seq_len: int) -> JobSizes:
    """Return a job of 16.8 million tokens a step, or fewer, on the cluster of Llama 3."""
    of = cluster(f"h100-llama3:{num_devices}")
    return sizes_of(shape_of(model), of, seq_len, 2048 * 8192 // seq_len)


def table() -> list[list[str]]:
    """Return the rules over the grid, a row of cells each."""
    rows: list[list[str]] = []
    for billions, model in MODELS.items():
        for num_devices in (1, 8, 256, 512, 2048, 16384):
            for seq_len in (8192, 131072):
                of = sizes(model, num_devices, seq_len)
                thumb, fit = of_thumb(of), by_fit(of)
                cells = [f"{billions:g}", f"{num_devices}", f"{seq_len}"]
                cells += [thumb.name, str(thumb.strategy), fit.name, str(fit.strategy)]
                rows.append(cells)
    return rows


def aligned(rows: list[list[str]]) -> str:
    form = "{:>6} {:>7} {:>8}  {:<39}  {:<23}  {:<34}  {}"
    return "\n".join(form.format(*row).rstrip() for row in rows)


def test_the_rules_over_a_grid() -> None:
    heads = ["params", "devices", "sequence", "rule of thumb", "choice", "rule by fit", "choice"]
    assert aligned([heads, *table()]) == TABLE.strip("\n")


@pytest.mark.parametrize("rule", [of_thumb, by_fit])
def test_a_choice_uses_all_devices(rule: recipe.Rule) -> None:
    for num_devices in (1, 6, 8, 24, 100, 128, 384, 3072, 6144, 16384, 24576):
        for model in MODELS.values():
            of = sizes(model, num_devices, 131072)
            assert rule(of).strategy.num_ranks == num_devices


def test_two_layers_of_8_gb_on_devices_of_10_gb() -> None:
    """8 GB are half a billion parameters in weights, gradients and moments of 32 bits."""
    of = JobSizes(
        layers=(500_000_000, 500_000_000),
        activation_bytes=0.0,
        heads=1,
        num_sequences=2,
        seq_len=1024,
        num_devices=2,
        device_bytes=10e9,
        host=8,
        units=(),
    )
    said = [inequality(of, Strategy.parse(text)) for text in ("dp1", "pp2", "fsdp2")]
    assert said == [
        "one device 14.9 GiB > 9.3 GiB",
        "pp2 7.5 GiB <= 9.3 GiB",
        "fsdp2 8.4 GiB <= 9.3 GiB",  # with the other layer's weights gathered in 16 bits
    ]
    assert by_fit(of).strategy == Strategy.parse("fsdp2")
    alone = dataclasses.replace(of, num_devices=1)
    assert by_fit(alone).name == "nothing fits" and by_fit(alone).why == said[0]


def test_a_model_that_fits_one_device_with_its_batch_is_replicated() -> None:
    of = sizes("llama3-1b", 64, 8192)
    assert by_fit(of).strategy == Strategy.parse("dp64")
    small = dataclasses.replace(of, device_bytes=held(of, Strategy()) - 1)
    assert by_fit(small).strategy.fsdp.degree > 1


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b", "llama3-405b"])
def test_shards_of_hsdp_lie_in_a_server_or_a_pod(model: str) -> None:
    pod = next(one.devices for one in CLUSTERS["h100-llama3"].levels if one.name == "pod")
    for num_devices in (512, 2048, 3072, 6144, 16384, 24576):
        for rule in (of_thumb, by_fit):
            strategy = rule(sizes(model, num_devices, 8192)).strategy
            group = strategy.fsdp.degree * strategy.sample_shards * strategy.tp.degree
            if strategy.dp.degree > 1 and strategy.fsdp.degree > 1:
                assert group == 8 or pod % group == 0, (num_devices, strategy)


def test_the_choices_of_llama_3() -> None:
    """The Llama 3 Herd of Models, table 4: tp 8, pp 16, and cp 16 at 131,072 tokens."""
    for seq_len, text in ((8192, "pp16,fsdp128,tp8"), (131072, "pp16,fsdp8,cp16,tp8")):
        assert str(of_thumb(sizes("llama3-405b", 16384, seq_len)).strategy) == text


def test_each_inequality_is_true() -> None:
    seen = 0
    for model in MODELS.values():
        for num_devices in (1, 8, 256, 2048):
            for seq_len in (8192, 131072):
                of = sizes(model, num_devices, seq_len)
                for left, sign, right in re.findall(
                    r"([\d.]+) GiB (<=|>) ([\d.]+) GiB", by_fit(of).why
                ):
                    seen += 1
                    assert (float(left) > float(right)) == (sign == ">"), by_fit(of).why
    assert seen > 20
