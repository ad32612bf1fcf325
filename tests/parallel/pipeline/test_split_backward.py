"""Backward in two passes against autograd's own in one."""

import copy

import pytest
import torch
from torch import Tensor, nn

from phalanx.parallel.pipeline.split_backward import backward_input, backward_weights


class Net(nn.Module):
    """A chain with a branch, a weight that is used twice and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x * self.scale).tanh()
        return self.second(y) + self.first(y) * self.scale + x


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("form", ["plain", "view", "loss"])
def test_both_passes_make_what_one_backward_makes(is_first: bool, form: str) -> None:
    torch.manual_seed(0)
    is_loss = form == "loss"
    ours = Net().double()
    theirs = copy.deepcopy(ours)
    calls: list[str] = []
    ours.scale.register_post_accumulate_grad_hook(lambda _: calls.append("scale"))
    for _ in range(2):  # gradients add up
        x, gradient = torch.rand(3, 4).double(), torch.rand(3, 4).double()
        inputs = [x.clone().requires_grad_(not is_first) for _ in range(2)]
        outputs = [net(each) for net, each in zip((ours, theirs), inputs, strict=True)]
        if is_loss:
            outputs = [output.square().sum() for output in outputs]
        if form == "view":
            outputs = [output.view_as(output) for output in outputs]
        outputs[1].backward(None if is_loss else gradient)
        weights = [p for name, p in ours.named_parameters() if not name.startswith("unused")]
        received = None if is_first else inputs[0]
        before = [None if p.grad is None else p.grad.clone() for p in weights]
        groups = backward_input(outputs[0], None if is_loss else gradient, received, weights)
        for p, grad in zip(weights, before, strict=True):  # nothing yet
            assert (p.grad is None) if grad is None else torch.equal(p.grad, grad)
        if not is_first:
            torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-14, atol=1e-14)
        backward_weights(groups, weights)
    assert len(calls) >= 2
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if name.startswith("unused"):
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-14, atol=1e-14)
