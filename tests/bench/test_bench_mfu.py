import json
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from phalanx.bench import mfu
from phalanx.bench.mfu import MfuConfig, measure_mlp
from phalanx.errors import ConfigError
from phalanx.report.output import values_of

ON_CPU: Any = {"device": "cpu", "dtype": "float32"}


def test_mlp_share_of_the_ceiling_is_a_share() -> None:
    found = measure_mlp(MfuConfig(**ON_CPU, layers=2, width=256, budget_s=0.2))
    assert found.width == 256 and "as given by --width" in found.choice
    assert found.utilization.causal.model == 6 * 2 * 256**2 * 256
    share = found.utilization.mfu("ceiling")
    assert share is not None and 0 < share <= 1
    assert found.utilization.mfu("data sheet") is None
    assert found.num_steps >= 3
    json.dumps(values_of(found), allow_nan=False)


def test_mlp_flops_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        found = measure_mlp(MfuConfig(**ON_CPU, layers=3, width=64, budget_s=0.01))
    counts = counter.get_flop_counts()["Global"]
    backward_and_forward = found.utilization.causal.model * (1 + found.num_steps)
    # The products that measure the ceiling are counted too, and are no part of the steps.
    linear = sum(count for operation, count in counts.items() if "mm" in str(operation))
    assert linear > backward_and_forward
    assert (linear - backward_and_forward) % (2 * 64**3) == 0


def test_mlp_chooses_a_width_for_the_time() -> None:
    found = measure_mlp(MfuConfig(**ON_CPU, layers=2, budget_s=0.01))
    assert found.width == 256
    assert "power of two below 8192" in found.choice


def test_mlp_refuses_what_memory_does_not_hold() -> None:
    with pytest.raises(ConfigError, match="GiB"):
        measure_mlp(MfuConfig(**ON_CPU, width=10**6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_lectures_perceptron_is_the_lectures(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make_loss, optimizer = mfu._lecture(torch.device("cpu"), dtype, 3, 16, False)
    weights = optimizer.param_groups[0]["params"]
    assert [tuple(p.shape) for p in weights] == [(16, 16), (16,)] * 3
    assert {p.dtype for p in weights} == {torch.float32}
    assert type(optimizer) is torch.optim.Adam and optimizer.defaults["lr"] == 1e-4
    found: set[torch.dtype] = set()
    with register_module_forward_hook(lambda _m, _i, output: found.add(output.dtype)):
        losses = [make_loss() for _ in range(2)]
    assert losses[0].item() != losses[1].item(), "each step has its own input"
    assert found == {dtype}, "autocast does the products"
