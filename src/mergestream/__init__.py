"""Many hospitals' models in, one model per batch out: online, label-free, forward passes only."""

from mergestream import soups, streams
from mergestream.calibration import measure_statistics
from mergestream.datasets import Dataset, DomainData, concatenate, list_datasets, load_dataset
from mergestream.errors import MergestreamError
from mergestream.evaluation import evaluate, leave_one_domain_out
from mergestream.execution import Execution
from mergestream.methods import Method, Step, create_method, list_methods
from mergestream.methods.entropy_adaptive import EntropyAdaptive
from mergestream.pool import ExpertPool
from mergestream.preprocessing import Preprocessing
from mergestream.records import Run

__version__ = "0.1.0"

__all__ = [
    "Dataset",
    "DomainData",
    "EntropyAdaptive",
    "Execution",
    "ExpertPool",
    "MergestreamError",
    "Method",
    "Preprocessing",
    "Run",
    "Step",
    "concatenate",
    "create_method",
    "evaluate",
    "leave_one_domain_out",
    "list_datasets",
    "list_methods",
    "load_dataset",
    "measure_statistics",
    "soups",
    "streams",
]
