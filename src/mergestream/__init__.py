"""Many hospitals' models in, one model per batch out: online, label-free, forward passes only."""

from mergestream.bench.evaluation import evaluate, leave_one_domain_out
from mergestream.bench.records import Run
from mergestream.data import streams
from mergestream.data.datasets import Dataset, DomainData, concatenate, list_datasets, load_dataset
from mergestream.methods import Method, Step, create_method, list_methods, soups
from mergestream.methods.entropy_adaptive import EntropyAdaptive
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.execution import Execution
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics.measurement import measure_statistics
from mergestream.runtime.errors import MergestreamError

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
