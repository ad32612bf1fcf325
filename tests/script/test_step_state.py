"""The states of a step that a script drives: what each of them allows and refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phalanx.errors import ScriptError
from phalanx.script.step_state import State, StepState

FIRST, SECOND = object(), object()
"""Two optimizers."""


def accumulating(num_backwards: int = 1) -> StepState:
    at = StepState(accumulation=3)
    at.begin()
    at.num_backwards = num_backwards
    return at


def whole(*stepped: object) -> StepState:
    at = accumulating(3)
    at.complete()
    for optimizer in stepped:
        at.note_step(optimizer)
    return at


def step(at: StepState, *, has_gradients: bool = True) -> None:
    at.refuse_step(FIRST, has_gradients=has_gradients)


def save(at: StepState) -> None:
    at.refuse_save(is_skipped=False)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: step(accumulating(2)), r"after 2 of 3 calls of run\.backward.*accumulation=2"),
    (lambda: step(StepState(3)), r"with gradients of this rank alone: loss\.backward\(\)"),
    (lambda: step(StepState(3), has_gradients=False), r"without a run\.backward since its last"),
    (lambda: step(whole(FIRST)), r"without a run\.backward since its last step"),
    (lambda: step(whole(), has_gradients=False), r"without a gradient: zero_grad\(\) came between"),
    (lambda: StepState(3).refuse_clip(), "clip: there are no gradients of a complete step"),
    (lambda: accumulating().refuse_clip(), "clip: there are no gradients of a complete step"),
    (lambda: save(accumulating()), r"save: called between run\.backward and optimizer\.step\(\)"),
    (lambda: save(whole()), r"save: called between run\.backward and optimizer\.step\(\)"),
])  # fmt: skip
def test_a_call_out_of_its_state_is_refused(call: Callable[[], None], words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        call()


def test_two_optimizers_take_one_step_and_a_reset_begins_anew() -> None:
    at = whole()
    assert at.state is State.REDUCED and not at.is_used
    at.refuse_clip()
    at.refuse_save(is_skipped=True)  # a scaler has left the step out
    for optimizer in (FIRST, SECOND):
        at.refuse_step(optimizer, has_gradients=True)
        at.note_step(optimizer)
    save(at)
    assert at.steps_done == 1 and at.is_used
    at.begin()
    assert at.state is State.ACCUMULATING and not at.is_used
    at.num_backwards = 3
    assert at.is_full
    at.reset()
    assert at.state is State.IDLE and at.num_backwards == 0
    save(at)
