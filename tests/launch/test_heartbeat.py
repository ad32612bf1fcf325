"""A look at the main thread: what it holds, and what it takes for standing still."""

import gc
import threading
import weakref
from collections.abc import Generator

import pytest

from phalanx.launch import heartbeat
from phalanx.launch.heartbeat import Beat, Pulse


class Held:
    """What a function holds while it runs."""


def looked_at(one: Pulse) -> weakref.ref[Held]:
    held = Held()
    thread = threading.Thread(target=one.beat)
    thread.start()
    thread.join()
    return weakref.ref(held)


def test_a_look_keeps_nothing_that_the_main_thread_lets_go() -> None:
    gc.collect()
    gc.disable()
    try:
        assert looked_at(Pulse())() is None
    finally:
        gc.enable()


def test_a_script_that_steps_says_so_and_which_checkpoint_stands() -> None:
    one, told = Pulse(), list[Beat]()
    one.on_change = lambda: told.append(one.beat())
    with one.doing("the work"):
        assert not one.beat().is_stepping
        one.stepping(4)
        with one.doing("the checkpoint after step 4"):
            one.saved("step-4 stands")
        assert one.beat().doing == "step 5" and one.beat().is_stepping
    (beat,) = told
    assert beat.doing == "the checkpoint after step 4" and beat.resume_hint == one.advice()
    one.heed()
    one.heed()
    assert [beat.handles_stop for beat in told] == [False, True]


def two_places() -> Generator[None]:
    yield
    yield


def test_only_the_same_call_at_the_same_place_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    one, now_s, call = Pulse(), 0.0, two_places()
    thread = threading.main_thread().ident
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(heartbeat.sys, "_current_frames", lambda: {thread: call.gi_frame})

    def look() -> float:
        nonlocal now_s
        now_s += 2.0
        return one.beat().seconds_at_place

    next(call)
    assert [look(), look(), look()] == [0.0, 2.0, 4.0]
    assert "in two_places" in one.beat().place
    next(call)
    assert [look(), look()] == [0.0, 2.0]
    one.now("step 2")  # the same place, after another step
    assert [look(), look()] == [0.0, 2.0]
    for _ in range(9):  # other calls, whose frames lie where the last one lay
        call = two_places()
        next(call)
        next(call)
        assert look() == 0.0


def test_a_place_of_long_arithmetic_is_no_standing_still(monkeypatch: pytest.MonkeyPatch) -> None:
    one, now_s = Pulse(), 0.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now_s)

    def _engine_run_backward() -> list[float]:
        nonlocal now_s
        frame = heartbeat.sys._getframe()
        thread = threading.main_thread().ident
        monkeypatch.setattr(heartbeat.sys, "_current_frames", lambda: {thread: frame})
        stills = []
        for _ in range(3):
            now_s += 2.0
            stills.append(one.beat().seconds_at_place)
        return stills

    assert _engine_run_backward() == [0.0, 0.0, 0.0]
