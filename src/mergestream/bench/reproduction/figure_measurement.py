"""Measures what Figures 2, 3 and 5 and the cost table need: drift, landscape, memory. Finished parts are reused."""

from dataclasses import asdict, replace

import torch

from mergestream.bench.drift.pool_drift import Drift, analyse_drift
from mergestream.bench.engine.pool_at_target import load_pool, trained_at
from mergestream.bench.landscape import landscape_run
from mergestream.bench.landscape.landscape_record import Landscape
from mergestream.bench.landscape.landscape_run import LandscapeRequest, run_landscape
from mergestream.bench.reproduction.dataset_search import DatasetPlace
from mergestream.bench.reproduction.reproduction_plan import TARGET, ReproductionRequest
from mergestream.bench.reproduction.reproduction_record import PoolMemory
from mergestream.methods import create_method
from mergestream.pool.pool_folder import read_pool
from mergestream.runtime.errors import MergestreamError
from mergestream.runtime.files import json_round_trip, make_folder
from mergestream.runtime.parallel import Track

DRIFT, LANDSCAPE = "fig2", "fig3"
PATH = "entropy_adaptive/iid"


def measure_drift(request: ReproductionRequest, place: DatasetPlace, track: Track) -> Drift:
    """Drift of the experts that a target's images meet: the target's own is left out."""
    pool = request.pool_folder(place.name, request.backbones[0])
    path = make_folder(request.out / DRIFT) / "drift.json"
    cards = read_pool(pool).cards
    own = [name for name, card in cards.items() if (card.domain or name) == TARGET]
    try:
        stored = Drift.load(path)
        if {
            name: cards[name].weights_sha256 for name in cards if name not in own
        }.items() <= stored.weights_sha256.items():
            return stored
    except (OSError, MergestreamError):
        pass
    drift = analyse_drift(pool, without=own, track=track)
    drift.save(path)
    return drift


def measure_landscape_of(request: ReproductionRequest, place: DatasetPlace, track: Track, command: str) -> Landscape:
    """The loss on the target's images over the plane through three experts, with the path of the paper's method."""
    pool = request.pool_folder(place.name, request.backbones[0])
    size, out = request.size, request.out / LANDSCAPE
    landscape_request = LandscapeRequest(
        str(pool),
        replace(request.data(place), images=size.landscape_images),
        TARGET,
        resolution=size.landscape,
        path=PATH,
        stream_batch_size=size.batch_size,
        device=request.device,
    )
    try:
        stored = Landscape.load(out / landscape_run.RECORD)
        whole = load_pool(str(pool), "cpu")
        same = stored.provenance["pool"] == whole.without(*trained_at(whole, (TARGET,))).fingerprint()
        if same and stored.provenance["arguments"] == json_round_trip(asdict(landscape_request)):
            return stored
    except (OSError, KeyError, MergestreamError):
        pass
    return run_landscape(landscape_request, out, track, command=command)


def measure_memory(request: ReproductionRequest, place: DatasetPlace) -> PoolMemory:
    """Memory of the experts that one target meets, and on a GPU the peak of the paper's method on one batch."""
    whole = load_pool(str(request.pool_folder(place.name, request.backbones[0])), request.device)
    pool = whole.without(*trained_at(whole, (TARGET,)))
    weights, peak, device = pool.bank.numel() * pool.bank.element_size() / 1e9, None, "the CPU"
    if pool.device.type == "cuda":
        height, width = pool.template.require_preprocessing().size
        images = torch.zeros(request.size.batch_size, 3, height, width, dtype=torch.uint8)
        torch.cuda.reset_peak_memory_stats()
        create_method("entropy_adaptive", pool).step(images)
        peak, device = torch.cuda.max_memory_allocated() / 1e9, torch.cuda.get_device_name()
    return PoolMemory(len(pool), weights, peak, device)
