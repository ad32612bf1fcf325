"""Ranks that compare now and then stop and save after the same step, by rank 0's clock."""

import torch.distributed as dist

from phalanx.launch.local import run_ranks
from phalanx.launch.pulse import PULSE
from phalanx.train.pace import Decision, Pace

STEP_S = 0.25


def steps_of_a_run(num_steps: int, save_every_s: float, stop_at: int) -> list[tuple[int, Decision]]:
    """Take steps of which each is a quarter of a second long, but on rank 1's clock an hour."""
    now_s = 0.0
    pace = Pace(save_every_s, dist.get_rank() == 0, clock=lambda: now_s)
    decisions: list[tuple[int, Decision]] = []
    for step in range(1, num_steps + 1):
        now_s += STEP_S if dist.get_rank() == 0 else 3600.0
        if step == stop_at and dist.get_rank() == 1:  # the signal comes to one host alone
            PULSE.stop_signal = 15
        decision = pace.after_step(can_save=step != 41)
        if decision.is_save_due:
            pace.saved()
        decisions.append((step, decision))
        if decision.stop_signal:
            break
    return decisions


def test_all_ranks_save_and_stop_after_the_same_step() -> None:
    first, second = run_ranks(steps_of_a_run, 2, 100, 10.0, 60, threads=1)
    assert first == second
    saves = [step for step, decision in first if decision.is_save_due]
    # Compared after steps 1, 5, 9, ...; 41, when it is first due, is while a save is under way.
    assert saves == [45]
    assert first[-1] == (61, Decision(stop_signal=15))
    assert not any(
        decision.is_save_due for _, decision in run_ranks(steps_of_a_run, 1, 50, 0.0, 0)[0]
    )
