"""Runs a reproduction: every data set, then figures, then one page with the paper's numbers beside ours."""

import os
from pathlib import Path

import torch

from mergestream.bench.reproduction.figure_measurement import measure_drift, measure_landscape_of, measure_memory
from mergestream.bench.reproduction.measurement import measure_dataset
from mergestream.bench.reproduction.reproduction_figures import write_figures
from mergestream.bench.reproduction.reproduction_page import write_page
from mergestream.bench.reproduction.reproduction_plan import RECIPE, ReproductionRequest
from mergestream.bench.reproduction.reproduction_record import ReproductionRecord
from mergestream.pool.expert_card import library_versions
from mergestream.runtime.devices import resolve_device
from mergestream.runtime.errors import InputError
from mergestream.runtime.files import make_folder
from mergestream.runtime.parallel import Track, run_jobs

RECORD, PAGE, TABLES_FOLDER = "reproduction.json", "reproduction.html", "tables"
FIGURES = "figures"


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
