"""Experts fine-tuned from a shared start, each on its own domain; the step with the lowest validation loss stays."""

from mergestream.training.experts import probe, put_probes, train_base, train_expert, write_start
from mergestream.training.fitting import Fit, Keeping, OnLook, OnStep, fit
from mergestream.training.recipe import Recipe
from mergestream.training.splitting import split
from mergestream.training.starts import HEAD_INITS
from mergestream.training.temperature import fit_temperature

__all__ = [
    "HEAD_INITS",
    "Fit",
    "Keeping",
    "OnLook",
    "OnStep",
    "Recipe",
    "fit",
    "fit_temperature",
    "probe",
    "put_probes",
    "split",
    "train_base",
    "train_expert",
    "write_start",
]
