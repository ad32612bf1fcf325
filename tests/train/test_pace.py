"""Ranks that compare now and then stop and save after the same step, by rank 0's clock."""

import torch.distributed as dist

from phalanx.config.save_policy import SavePolicy
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import run_ranks
from phalanx.train.pace import StopAndSaveSync

STEP_S = 0.25


def decisions(num_steps: int, minutes: float, stop_at: int) -> list[tuple[int, bool, int]]:
    """Take steps of which each is a quarter of a second long, but on rank 1's clock an hour."""
    now_s = 0.0
    pace = StopAndSaveSync(SavePolicy(minutes=minutes), dist.get_rank() == 0, clock=lambda: now_s)
    made: list[tuple[int, bool, int]] = []
    for step in range(1, num_steps + 1):
        now_s += STEP_S if dist.get_rank() == 0 else 3600.0
        if step == stop_at and dist.get_rank() == 1:  # the signal comes to one host alone
            PULSE.stop_signal = 15
        pace.after_step(can_save=step != 41)
        if pace.is_save_due:
            pace.saved()
        made.append((step, pace.is_save_due, pace.stop_signal))
        if pace.stop_signal:
            break
    return made


def test_all_ranks_save_and_stop_after_the_same_step() -> None:
    first, second = run_ranks(decisions, 2, 100, 1 / 6, 60, threads=1)
    assert first == second
    saves = [step for step, is_save_due, _ in first if is_save_due]
    # Compared after steps 1, 5, 9, ...; 41, when it is first due, is while a save is under way.
    assert saves == [45]
    assert first[-1] == (61, False, 15)
    assert not any(is_save_due for _, is_save_due, _ in run_ranks(decisions, 1, 50, 0.0, 0)[0])
