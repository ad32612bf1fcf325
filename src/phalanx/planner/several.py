"""The best strategy of a job on several clusters, or on several numbers of devices."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.account.planned import STATE_BYTES
from phalanx.errors import ConfigError
from phalanx.planner.explain import Figures, figures
from phalanx.planner.hardware import CLUSTERS
from phalanx.planner.machine import Cluster
from phalanx.planner.search import OfDecoder, search

_MOST_LARGER: Final = 1 << 10
"""Largest multiple of the devices that is tried where nothing fits."""

MOST_NUMBERS: Final = 100
"""Most numbers of devices in one list."""

_NUMBER: Final = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, kw_only=True)
class BestPlan:
    """The best strategy on a cluster, or why there is none.

    Attributes:
        speed_up: speed-up relative to the smallest number of devices that has a strategy.
        efficiency: `speed_up` / ratio of the numbers of devices.
    """

    cluster: str
    num_devices: int
    figures: Figures | None = None
    why_not: str = ""
    speed_up: float | None = None
    efficiency: float | None = None


def best_on(question: OfDecoder, cluster: Cluster) -> BestPlan:
    """Return the best strategy of a question on another cluster, or why there is none."""
    asked = dataclasses.replace(question, cluster=cluster)
    plan = BestPlan(cluster=cluster.name, num_devices=cluster.num_devices)
    try:
        result = search(asked, wanted=1)
    except ConfigError as error:
        return dataclasses.replace(plan, why_not=str(error))
    if not result.candidates:
        least = min(result.rejected, key=lambda each: each.left, default=None)
        why = (
            "no strategy splits the model"
            if least is None
            else f"no strategy fits; the smallest is {least}"
        )
        return dataclasses.replace(plan, why_not=why)
    return dataclasses.replace(plan, figures=figures(asked, result.candidates[0]))


def scaled(question: OfDecoder, numbers: Iterable[int]) -> Iterator[BestPlan]:
    """Yield the best strategy for each number of devices, with the global batch fixed."""
    first: tuple[int, float] | None = None
    for number in numbers:
        best = best_on(question, question.cluster.of(number))
        if best.figures is not None:
            first = first or (number, best.figures.step_time_s)
            speed_up = first[1] / best.figures.step_time_s
            efficiency = speed_up * first[0] / number
            best = dataclasses.replace(best, speed_up=speed_up, efficiency=efficiency)
        yield best


def fits_on(question: OfDecoder) -> BestPlan | None:
    """Return the best plan on the first multiple of the devices, by doubling, on which one fits."""
    whole = CLUSTERS.get(question.cluster.name, question.cluster)
    state_bytes = STATE_BYTES * question.model.num_parameters
    number = question.cluster.num_devices
    while (number := 2 * number) <= min(
        whole.num_devices, _MOST_LARGER * question.cluster.num_devices
    ):
        if state_bytes <= number * whole.device.usable_bytes:
            best = best_on(question, whole.of(number))
            if best.figures is not None:
                return best
    return None


def numbers_of(text: str) -> Sequence[int]:
    """Parse rising numbers of devices: `8,16,64`, or `8,16,...,128` with a constant ratio.

    Raises:
        ConfigError: the text is no such list, or has more than MOST_NUMBERS numbers.
    """
    numbers: list[int] = []
    words = text.split(",")
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == "..." and len(numbers) > 1 and _NUMBER.fullmatch(after):
            ratio = numbers[-1] / numbers[-2]
            while numbers[-1] * ratio < int(after) and len(numbers) <= MOST_NUMBERS:
                numbers.append(round(numbers[-1] * ratio))
        elif _NUMBER.fullmatch(word) and int(word) > (numbers[-1] if numbers else 0):
            numbers.append(int(word))
        else:
            raise ConfigError(
                f"--scale is {text!r}; expected rising numbers of devices, such as 8,16,64 or "
                "8,16,...,128"
            )
    if len(numbers) > MOST_NUMBERS:
        raise ConfigError(
            f"--scale is {text!r}, which has more than {MOST_NUMBERS} numbers; give fewer numbers, "
            "such as 8,16,...,128"
        )
    return numbers
