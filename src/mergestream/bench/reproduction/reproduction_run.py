"""Runs a reproduction: every data set, then figures, then one page with the paper's numbers beside ours."""

import os
from dataclasses import asdict, replace
from pathlib import Path

import torch

from mergestream.bench.drift.pool_drift import Drift, analyse_drift
from mergestream.bench.engine.pool_at_target import load_pool, trained_at
from mergestream.bench.landscape import landscape_run
from mergestream.bench.landscape.landscape_record import Landscape
from mergestream.bench.landscape.landscape_run import LandscapeRequest, run_landscape
from mergestream.bench.reproduction.dataset_search import DatasetPlace
from mergestream.bench.reproduction.measurement import measure_dataset
from mergestream.bench.reproduction.reproduction_figures import write_figures
from mergestream.bench.reproduction.reproduction_page import write_page
from mergestream.bench.reproduction.reproduction_plan import RECIPE, TARGET, ReproductionRequest
from mergestream.bench.reproduction.reproduction_record import PoolMemory, ReproductionRecord
from mergestream.methods import create_method
from mergestream.pool.expert_card import library_versions
from mergestream.pool.pool_folder import read_pool
from mergestream.runtime.devices import resolve_device
from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.runtime.files import json_round_trip, make_folder
from mergestream.runtime.parallel import Track, run_jobs

RECORD, PAGE, TABLES_FOLDER = "reproduction.json", "reproduction.html", "tables"
FIGURES = "figures"
DRIFT, LANDSCAPE = "fig2", "fig3"
PATH = "entropy_adaptive/iid"


def run_reproduction(request: ReproductionRequest, track: Track, command: str) -> ReproductionRecord:
    """Do all that is not done yet, then write OUT/reproduction.json, .html, OUT/tables and OUT/figures."""
    if not request.usable:
        raise InputError("None of the data sets is there, so there is nothing to reproduce: see the list above.")
    make_folder(request.out)
    if request.size.sets_at_once:
        with track("data sets", len(request.usable)) as advance:
            jobs = [(request, place) for place in request.usable]
            measured = run_jobs(
                measure_dataset,
                jobs,
                workers=request.jobs,
                on_done=advance,
                engine=request.engine,
                device=request.device,
            )
    else:
        measured = [measure_dataset(request, place, track, request.jobs) for place in request.usable]
    pacs = next((place for place in request.usable if place.name == "pacs"), None)
    parts = {*request.parts}
    drift = measure_drift(request, pacs, track) if pacs and parts & {"fig2", "fig5"} else None
    landscape = measure_landscape_of(request, pacs, track, command) if pacs and "fig3" in parts else None
    memory = measure_memory(request, pacs) if pacs and "cost" in parts else None
    on_gpu = resolve_device(request.device) == "cuda"
    record = ReproductionRecord(
        command=command,
        smoke=request.smoke,
        parts=request.parts,
        backbones=request.backbones,
        places=request.places,
        rows=tuple(row for each in measured for row in each.rows),
        experts=tuple(expert for each in measured for expert in each.experts),
        theory=tuple(check for each in measured for check in each.theory),
        memory=memory,
        recipe={"name": RECIPE, **request.recipe(request.training_seeds[0])},
        changes=_changes(request),
        environment=library_versions()
        | {"device": torch.cuda.get_device_name() if on_gpu else f"{os.cpu_count()} cores"},
    )
    record.save(request.out / RECORD)
    write_page(record, drift, landscape, request.out / PAGE, request.out / TABLES_FOLDER)
    write_figures(record, drift, landscape, make_folder(request.out / FIGURES))
    return record


def _changes(request: ReproductionRequest) -> list[str]:
    """Options that replace the paper's training."""
    init = dict.fromkeys(Path(request.init_of(backbone)).name for backbone in request.backbones)
    given = {"--settings": request.settings, "--steps": request.steps, "--init": ",".join(init)}
    given["--arg"] = " --arg ".join(request.arguments) or None
    usual = {"--init": request.size.init}
    changed = [f"{name} {value}" for name, value in given.items() if value != usual.get(name)]
    return [f"Not trained as in the paper: {', '.join(changed)}."] if changed else []


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
