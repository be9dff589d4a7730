"""An estimate of the hours that a reproduction takes: the work that is left, times the speed of this machine."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from mergestream.bench.engine.plan import PLANS
from mergestream.bench.reproduction.dataset_search import DatasetPlace
from mergestream.bench.reproduction.measurement import training_plan
from mergestream.bench.reproduction.reproduction_plan import PRESETS, ReproductionRequest, rows_of_preset
from mergestream.networks.architecture import create_network
from mergestream.pool.expert_card import CARD
from mergestream.runtime.option_checks import parse_options
from mergestream.runtime.seeding import cpu_threads
from mergestream.training.training_run import candidate_folder, fits_at_once

FEW, BATCH = 4, 32  # images per timed step: few where a network is slow
SLOW = 0.1  # seconds of a forward pass of a few images
VIEWS = 2  # of the experts' logits: the image and one augmentation
GRADIENTS = ("adamerging",)
BACKWARD = 3  # a step with gradients, in forward passes


@dataclass(frozen=True)
class HoursEstimate:
    """Fits that one backbone still has to train, those that are finished, and the hours of the work that is left."""

    network: str
    fits: int
    finished: int
    training: float
    benchmark: float

    def sentence(self) -> str:
        done = f" ({self.finished} are done)" if self.finished else ""
        return (
            f"{self.network}: {self.fits} fits to train{done}, about {_shown(self.training)}; statistics and "
            f"benchmark {'at most' if self.finished else 'about'} {_shown(self.benchmark)}."
        )


def estimate_hours(request: ReproductionRequest) -> list[HoursEstimate]:
    """One estimate per backbone, from a few timed steps on this machine."""
    estimates = []
    for backbone in request.backbones:
        places = [place for place in request.usable if request.parts_of(place.name, backbone)]
        if not places:
            continue
        work = [_remaining(request, place, backbone) for place in places]
        fits, finished, *images = (sum(column) for column in zip(*work, strict=True))
        seconds = _seconds_per_image(request, backbone)
        plan = training_plan(request, places[0], backbone, request.training_seeds[0])
        processes = fits_at_once(plan, request.jobs), request.jobs
        hours = [count * each / jobs / 3600 for count, each, jobs in zip(images, seconds, processes, strict=True)]
        estimates.append(HoursEstimate(backbone, fits, finished, *hours))
    return estimates


def describe_hours(estimates: list[HoursEstimate], request: ReproductionRequest) -> list[str]:
    hours = sum(each.training + each.benchmark for each in estimates)
    jobs = f"{request.jobs} process{'es' * (request.jobs > 1)}"
    where = f"with {jobs} on this machine" if request.engine == "local" else "divided by the machines of the cluster"
    return [*(each.sentence() for each in estimates), f"Together about {_shown(hours)} {where}."]


def _shown(hours: float) -> str:
    if hours >= 10:
        return f"{hours:,.0f} hours"
    return f"{hours:.1f} hours" if hours >= 1 else f"{max(1, ceil(60 * hours))} min"


def _remaining(request: ReproductionRequest, place: DatasetPlace, backbone: str) -> tuple[int, int, int, int]:
    """Fits to train, finished ones, and images that still pass through the network: with gradients, forward only."""
    fits = [
        (request.pool_folder(place.name, backbone, seed), domain, recipe)
        for seed in request.training_seeds
        for recipe in training_plan(request, place, backbone, seed).settings
        for domain in place.domains
    ]
    left = [recipe for pool, site, recipe in fits if not (candidate_folder(pool, site, recipe) / CARD).exists()]
    experts, answered = len(place.domains) - 1, 0
    for part in request.parts_of(place.name, backbone):
        if part in PRESETS:
            streams = len(PLANS[PRESETS[part]]["streams"].split(","))
            passes = [BACKWARD * experts if v.method in GRADIENTS else 1 for v in rows_of_preset(PRESETS[part])]
            seeds = 1 if part == "cost" else len(request.size.seeds.split(",")) * len(request.training_seeds)
            answered += place.images * (VIEWS * experts * len(request.seeds_of(part)) + streams * seeds * sum(passes))
    # Statistics belong to an expert and to every pool without one of the others.
    answered += (
        len(request.training_seeds)
        * len(place.domains)
        * sum(request.size.statistics.values())
        * (1 + experts)
        * BACKWARD
    )
    trained = sum(recipe.steps * recipe.batch_size for recipe in left)
    return len(left), len(fits) - len(left), trained, answered


def _seconds_per_image(request: ReproductionRequest, backbone: str) -> tuple[float, float]:
    """Of a training step and of a forward pass, per image, in one thread as in training."""
    device = "cuda" if request.device != "cpu" and torch.cuda.is_available() else "cpu"
    network = create_network(backbone, num_classes=10, **dict(parse_options(request.network_arguments(backbone))))
    module, size = network.module.to(device), network.require_preprocessing().size

    def train(images: Tensor) -> Tensor:
        loss: Tensor = module(images).float().square().mean()
        loss.backward()
        return loss

    @torch.no_grad()
    def forward(images: Tensor) -> Tensor:
        answer: Tensor = module(images)
        return answer

    few, many = (torch.zeros(count, 3, *size, device=device) for count in (FEW, BATCH))
    with cpu_threads(1):
        _timed(forward, few)  # warms up
        images = many if _timed(forward, few) < SLOW else few
        return _timed(train, images) / len(images), _timed(forward, images) / len(images)


def _timed(step: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """Seconds of the fastest of three steps."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        step(images).sum().item()  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    return min(seconds)
