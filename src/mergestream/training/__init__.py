"""Experts fine-tuned from a shared base, each on its own domain; the step with the lowest validation loss is kept."""

from mergestream.training.expert_training import train_base, train_expert, write_start
from mergestream.training.recipe import Recipe
from mergestream.training.training_loop import Fit, fit, split, split_of

__all__ = ["Fit", "Recipe", "fit", "split", "split_of", "train_base", "train_expert", "write_start"]
