"""The estimates of all streams as gauges for Prometheus, computed when the metrics are read."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Streams = Callable[[], Iterable[Mapping[str, Any]]]


class QualityGauges(Collector):
    """Labels are names of streams and of the pool's classes."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        accuracy = _gauge("accuracy", "Estimated accuracy without labels; see docs/quality.md.", "stream", "estimator")
        mean = _gauge("mean_probability", "Mean probability of a class.", "stream", "class")
        declared = _gauge("declared_prevalence", "Share of a class that the site declared.", "stream", "class")
        far = _gauge("prevalence_far", "1 where the mean probability is far from the share.", "stream", "class")
        size = _gauge("prediction_set_size", "Mean number of classes in a prediction set.", "stream")
        for stream in self._streams():
            name, quality = stream["stream"], stream["quality"]
            if quality is None:
                continue
            for estimator, estimate in quality.accuracy or ():
                if estimate is not None:
                    accuracy.add_metric((name, estimator), estimate.value)
            for each in quality.classes:
                mean.add_metric((name, each.name), each.value)
                if each.declared is not None:
                    declared.add_metric((name, each.name), each.declared)
                    far.add_metric((name, each.name), float(each.far))
            if quality.prediction_sets is not None:
                size.add_metric((name,), quality.prediction_sets.mean_size)
        yield from (accuracy, mean, declared, far, size)


def _gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"mergestream_estimated_{name}", about, labels=labels)
