"""Many hospitals' models in, one model per batch out: online, label-free, forward passes only."""

from mergestream import streams
from mergestream.datasets import Dataset, DomainData, concatenate, list_datasets, load_dataset
from mergestream.errors import MergestreamError
from mergestream.evaluation import evaluate, leave_one_domain_out
from mergestream.methods import Method, Step, create_method, list_methods
from mergestream.methods.ensemble import Ensemble
from mergestream.methods.entropy_adaptive import EntropyAdaptive
from mergestream.methods.mean import Mean
from mergestream.methods.select_expert import SelectExpert
from mergestream.methods.single_expert import SingleExpert
from mergestream.pool import ExpertPool
from mergestream.preprocessing import Preprocessing
from mergestream.records import Run

__version__ = "0.1.0"

__all__ = [
    "Dataset",
    "DomainData",
    "Ensemble",
    "EntropyAdaptive",
    "ExpertPool",
    "Mean",
    "MergestreamError",
    "Method",
    "Preprocessing",
    "Run",
    "SelectExpert",
    "SingleExpert",
    "Step",
    "concatenate",
    "create_method",
    "evaluate",
    "leave_one_domain_out",
    "list_datasets",
    "list_methods",
    "load_dataset",
    "streams",
]
