"""Many hospitals' models in, one model per batch out: online, label-free, forward passes only.

Public names are loaded on first use, so that `import mergestream` and `mergestream --help` do not wait for PyTorch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mergestream.bench.evaluation import evaluate, leave_one_domain_out
    from mergestream.bench.python_calls import bench, report
    from mergestream.bench.records import Run
    from mergestream.data import streams
    from mergestream.data.datasets import (
        Dataset,
        DomainData,
        concatenate,
        list_datasets,
        load_dataset,
        register_dataset,
    )
    from mergestream.methods import Method, Step, create_method, list_methods, register_method, soups
    from mergestream.methods.entropy_adaptive import EntropyAdaptive
    from mergestream.networks.preprocessing import Preprocessing
    from mergestream.pool.execution import Execution
    from mergestream.pool.expert_pool import ExpertPool
    from mergestream.pool.statistics.measurement import measure_statistics
    from mergestream.runtime.errors import MergestreamError
    from mergestream.training.python_calls import train

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
    "bench",
    "concatenate",
    "create_method",
    "evaluate",
    "leave_one_domain_out",
    "list_datasets",
    "list_methods",
    "load_dataset",
    "measure_statistics",
    "register_dataset",
    "register_method",
    "report",
    "soups",
    "streams",
    "train",
]

# The module of each public name; the same as in the imports above, which only type checkers and editors read.
_MODULES = {
    "bench.evaluation": ("evaluate", "leave_one_domain_out"),
    "bench.python_calls": ("bench", "report"),
    "bench.records": ("Run",),
    "data": ("streams",),
    "data.datasets": ("Dataset", "DomainData", "concatenate", "list_datasets", "load_dataset", "register_dataset"),
    "methods": ("Method", "Step", "create_method", "list_methods", "register_method", "soups"),
    "methods.entropy_adaptive": ("EntropyAdaptive",),
    "networks.preprocessing": ("Preprocessing",),
    "pool.execution": ("Execution",),
    "pool.expert_pool": ("ExpertPool",),
    "pool.statistics.measurement": ("measure_statistics",),
    "runtime.errors": ("MergestreamError",),
    "training.python_calls": ("train",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            package = __import__(f"{__name__}.{module}", fromlist=[name])  # also imports a submodule of that name
            return globals().setdefault(name, getattr(package, name))
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
