import json
import threading
import time

import pytest
import torch

from phalanx.measure import timer as timer_module
from phalanx.measure.summary import advice, summarize, summary_table
from phalanx.measure.timer import TERMS, StepTimer, StepTimes, Term
from phalanx.report.output import json_text, values_of
from phalanx.report.terminal import text_of

SLEEP_S = 0.05


class Clock:
    """Stands for the host's clock: time passes where it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timer_module, "time", clock)
    return clock


def step_times(**seconds: float) -> StepTimes:
    terms_s = {term: seconds.get(term, 0.0) for term in TERMS}
    return StepTimes(terms_s, sum(terms_s.values()))


@pytest.mark.parametrize("slow", TERMS[:-1])
def test_an_injected_sleep_lands_in_its_term(slow: Term, clock: Clock) -> None:
    timer = StepTimer()
    for name in TERMS[:-1]:
        with timer.phase(name):
            if name == slow:
                clock.sleep(SLEEP_S)
    times = timer.end_step()
    assert times.terms_s[slow] == pytest.approx(SLEEP_S)
    assert sum(times.terms_s[term] for term in TERMS if term != slow) == 0


def test_time_in_no_phase_is_other(clock: Clock) -> None:
    timer = StepTimer()
    with timer.phase("forward"):
        pass
    clock.sleep(SLEEP_S)
    assert timer.end_step().terms_s["other"] == pytest.approx(SLEEP_S)


def test_inner_phase_pauses_the_outer_one(clock: Clock) -> None:
    timer = StepTimer()
    with timer.phase("backward"):
        clock.sleep(SLEEP_S)
        with timer.phase("communication"):
            clock.sleep(2 * SLEEP_S)
        clock.sleep(SLEEP_S)
    times = timer.end_step()
    assert times.terms_s["backward"] == pytest.approx(2 * SLEEP_S)
    assert times.terms_s["communication"] == pytest.approx(2 * SLEEP_S)


def test_hook_inside_backward_counts_as_communication(clock: Clock) -> None:
    timer = StepTimer()
    x = torch.ones(4, requires_grad=True)

    def reduce(grad: torch.Tensor) -> None:
        with timer.phase("communication"):
            clock.sleep(SLEEP_S)

    x.register_hook(reduce)
    with timer.phase("backward"):
        x.sum().backward()
    times = timer.end_step()
    assert times.terms_s["communication"] == pytest.approx(SLEEP_S)
    assert times.terms_s["backward"] == 0


def test_terms_sum_to_the_wall_time(clock: Clock) -> None:
    timer = StepTimer()
    for _ in range(20):
        with timer.phase("data"):
            clock.sleep(0.0005)
        for _ in range(3):
            with timer.phase("forward"):
                clock.sleep(0.001)
            clock.sleep(0.0001)
            with timer.phase("backward"):
                for _ in range(4):
                    with timer.phase("communication"):
                        clock.sleep(0.002)
        with timer.phase("optimizer"):
            clock.sleep(0.0005)
        times = timer.end_step()
        assert sum(times.terms_s.values()) == pytest.approx(times.wall_s)
        assert times.wall_s == pytest.approx(2 * 0.0005 + 3 * (0.001 + 0.0001 + 4 * 0.002))


def test_steps_cover_every_instant_and_begin_step_leaves_out(clock: Clock) -> None:
    timer = StepTimer()
    begin_s = clock.perf_counter()
    timer.end_step()
    clock.sleep(SLEEP_S)
    timer.end_step()
    elapsed_s = clock.perf_counter() - begin_s
    assert sum(times.wall_s for times in timer.history) == pytest.approx(elapsed_s)
    clock.sleep(SLEEP_S)
    timer.begin_step()
    assert timer.end_step().wall_s == 0


def test_an_exception_leaves_the_phase(clock: Clock) -> None:
    timer = StepTimer()
    with pytest.raises(KeyError), timer.phase("forward"):
        raise KeyError
    clock.sleep(SLEEP_S)
    times = timer.end_step()
    assert (times.terms_s["other"], times.terms_s["forward"]) == (pytest.approx(SLEEP_S), 0)


def test_history_is_bounded() -> None:
    timer = StepTimer(history=3)
    times = [timer.end_step() for _ in range(5)]
    assert list(timer.history) == times[2:]


def test_a_phase_is_cheap() -> None:
    timer = StepTimer()
    begin_s = time.thread_time()
    for _ in range(1000):
        with timer.phase("forward"):
            pass
    assert time.thread_time() - begin_s < 0.2


def test_waits_are_bubble_in_a_schedule_and_exposed_by_axis_elsewhere(clock: Clock) -> None:
    timer = StepTimer()

    def wait(axis: str, seconds: float) -> None:
        with timer.wait(axis):
            clock.sleep(seconds)

    wait("pp", 1)  # the count of tokens, before the schedule
    with timer.phase("forward"):
        wait("pp", 2)
        wait("fsdp", 3)
    with timer.phase("backward"), timer.phase("communication"):  # the sizes of a message
        wait("pp", 4)
    with timer.phase("communication"):
        clock.sleep(10)
        wait("dp", 5)
        wait("pp", 6)  # the loss: other stages still compute
    with timer.phase("optimizer"):
        wait("pp", 7)
    wait("dp", 8)
    times = timer.end_step()
    assert times.terms_s["bubble"] == 2 + 4 + 6
    assert times.exposed_s == {"pp": 1 + 7, "fsdp": 3, "dp": 5 + 8}
    assert times.terms_s["communication"] == 10 + sum(times.exposed_s.values())
    assert sum(times.terms_s.values()) == times.wall_s


def test_phases_in_another_thread_count_while_the_caller_waits(clock: Clock) -> None:
    # Autograd runs the hooks of a GPU's graph in its own thread, while backward() blocks.
    timer = StepTimer()

    def hook() -> None:
        with timer.phase("communication"):
            clock.sleep(SLEEP_S)

    with timer.phase("backward"):
        thread = threading.Thread(target=hook)
        thread.start()
        thread.join()
    assert timer.end_step().terms_s["communication"] == pytest.approx(SLEEP_S)


def test_summary_medians_shares_and_table() -> None:
    steps = [step_times(data=4.0, forward=2.0, backward=4.0) for _ in range(3)]
    steps.append(step_times(data=1.0, forward=2.0, backward=4.0, optimizer=1.0))
    summary = summarize(steps)
    assert summary.num_steps == 4
    assert summary.medians_s["data"] == 4.0
    assert summary.shares["data"] == 13 / 38
    assert sum(summary.shares.values()) == pytest.approx(1.0)
    assert json.loads(json_text(values_of(summary)))["doubt"] is None
    text = text_of(summary_table(summary))
    assert "34.2" in text and "communication" in text and "100.0" in text


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (step_times(data=4, forward=2, backward=4), "Data takes 40 % of the step"),
        (
            step_times(communication=3, forward=3, backward=4),
            "Exposed communication takes 30 % of the step",
        ),
        (step_times(optimizer=2, forward=4, backward=4), "Optimizer takes 20 % of the step"),
        (step_times(other=2, forward=4, backward=4), "Other takes 20 % of the step"),
        (step_times(data=0.1, forward=4, backward=6), "Forward and backward take 99 % of the step"),
    ],
)
def test_advice_names_the_largest_avoidable_term(times: StepTimes, words: str) -> None:
    assert words in advice(summarize([times]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_terms_sum_to_the_wall_time() -> None:
    timer = StepTimer("cuda")
    a = torch.randn(2048, 2048, device="cuda")
    for _ in range(4):
        with timer.phase("forward"):
            for _ in range(20):
                a @ a
        with timer.phase("data"):
            time.sleep(SLEEP_S)
        timer.end_step()
    assert len(timer.history) == 4
    for times in timer.history:
        assert sum(times.terms_s.values()) == pytest.approx(times.wall_s, rel=0.02)
    assert timer.history[-1].terms_s["forward"] > 0


class HostEvent:
    """Stands for a CUDA event where there is no GPU: the host's clock, readable after a wait."""

    is_done = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.time_s = 0.0

    def record(self) -> None:
        self.time_s = timer_module.time.perf_counter()

    def synchronize(self) -> None:
        HostEvent.is_done = True

    def elapsed_time(self, later: "HostEvent") -> float:
        assert HostEvent.is_done, "an event was read before the device was waited for"
        return 1e3 * (later.time_s - self.time_s)


def test_the_events_of_a_step_are_read_once_the_device_is_done(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(HostEvent, "is_done", False)
    timer = StepTimer("cuda")
    with timer.phase("optimizer"):
        clock.sleep(0.01)
    with timer.phase("forward"):
        clock.sleep(SLEEP_S)
    assert not HostEvent.is_done
    times = timer.end_step()
    assert times.terms_s["forward"] == pytest.approx(SLEEP_S)
    assert times.terms_s["optimizer"] == pytest.approx(0.01)
    assert sum(times.terms_s.values()) == pytest.approx(times.wall_s)
