"""Counters and latencies of a server, for Prometheus and for the server's web page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from phalanx.infer.engine import Engine, Piece

SECONDS: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0),
)
"""Bucket bounds of the latency histograms, seconds."""


class ServerMetrics(Collector):
    """Prometheus collector that reads the engine's counters, and latency histograms of tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)

        def histogram(name: str, about: str) -> Histogram:
            return Histogram(f"phalanx_{name}", about, buckets=SECONDS, registry=self._registry)

        self._first = histogram(
            "first_token_seconds", "From a request's arrival to its first token."
        )
        self._between = histogram("between_tokens_seconds", "Between two tokens of a request.")
        self._whole = histogram("request_seconds", "From a request's arrival to its end.")

    def observe(self, piece: Piece, now_s: float) -> None:
        """Record the latency of a new token at `now_s`, and of the request if it has finished."""
        completion = piece.completion
        if completion.last_s is None:
            self._first.observe(now_s - completion.arrival_s)
        else:
            self._between.observe(now_s - completion.last_s)
        completion.last_s = now_s
        if piece.finish_reason is not None:
            self._whole.observe(now_s - completion.arrival_s)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def values(self) -> dict[str, float]:
        """Return gauges and counters of the engine: name -> value."""
        scheduler, counts = self._engine.scheduler, self._engine.counts
        pool = scheduler.pool
        return {
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "cache_used_ratio": pool.num_held / pool.num_blocks,
            "prompt_tokens_total": scheduler.num_prompt_tokens,
            "prefix_hit_tokens_total": scheduler.num_cached_tokens,
            "computed_tokens_total": counts.computed_tokens,
            "generated_tokens_total": counts.generated_tokens,
            "guessed_tokens_total": counts.guessed_tokens,
            "accepted_tokens_total": counts.accepted_tokens,
            "steps_total": counts.steps,
            "preemptions_total": scheduler.num_preemptions,
            "evicted_blocks_total": pool.num_evicted,
        }

    def collect(self) -> Iterator[Metric]:
        """Yield gauges and counters of the engine as Prometheus metrics."""
        for name, value in self.values().items():
            about = name.removesuffix("_total").replace("_", " ")
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(f"phalanx_{name.removesuffix('_total')}", about, value=value)
