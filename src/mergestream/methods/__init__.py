"""All methods, in one literal table."""

from typing import Any

from mergestream.methods.adamerging import AdaMerging
from mergestream.methods.auto import Auto
from mergestream.methods.base import Method
from mergestream.methods.corrected import Corrected
from mergestream.methods.dawin import DaWin
from mergestream.methods.ensemble import Ensemble
from mergestream.methods.entropy_adaptive import EntropyAdaptive
from mergestream.methods.fisher import Fisher
from mergestream.methods.image_weights import ImageWeights
from mergestream.methods.label_shift import LabelShift
from mergestream.methods.lame import Lame
from mergestream.methods.mean import Mean
from mergestream.methods.merge_and_fit import MergeAndFit, MergeOnce
from mergestream.methods.prior_roid import PriorRoid
from mergestream.methods.regmean import RegMean
from mergestream.methods.regmean_pp import RegMeanPlusPlus
from mergestream.methods.sar import Sar
from mergestream.methods.select_expert import SelectExpert
from mergestream.methods.single_expert import SingleExpert
from mergestream.methods.spelling import unknown_method
from mergestream.methods.state import State, Step
from mergestream.methods.surgery import Surgery
from mergestream.methods.t3_js import T3JS
from mergestream.methods.t3a import T3A
from mergestream.methods.task_arithmetic import TaskArithmetic
from mergestream.methods.tent import Tent
from mergestream.methods.ties import Ties
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.runner import Batch, ExpertLogits
from mergestream.runtime.errors import InputError, unknown_name

__all__ = ["METHODS", "ORIGINAL", "Batch", "ExpertLogits", "Method", "State", "Step", "create_method", "list_methods"]

METHODS: dict[str, type[Method[Any]]] = {
    "entropy_adaptive": EntropyAdaptive,
    "mean": Mean,
    "ensemble": Ensemble,
    "task_arithmetic": TaskArithmetic,
    "ties": Ties,
    "adamerging": AdaMerging,
    "fisher": Fisher,
    "regmean": RegMean,
    "regmean_pp": RegMeanPlusPlus,
    "single_expert": SingleExpert,
    "select_expert": SelectExpert,
    "merge_and_fit": MergeAndFit,
    "merge_once": MergeOnce,
    "corrected": Corrected,
    "auto": Auto,
    "lame": Lame,
    "t3a": T3A,
    "label_shift": LabelShift,
    "prior_roid": PriorRoid,
    "tent": Tent,
    "sar": Sar,
    "dawin": DaWin,
    "t3_js": T3JS,
    "image_weights": ImageWeights,
    "surgery": Surgery,
}


def list_methods() -> list[str]:
    return list(METHODS)


def create_method(name: str, pool: ExpertPool, **options: Any) -> Method[Any]:
    """Create a method by name. Unknown names and options are refused with the nearest match."""
    if not isinstance(name, str) or name not in METHODS:
        raise unknown_method(str(name))
    if not isinstance(pool, ExpertPool):
        raise InputError(f"A method needs an ExpertPool, got {type(pool).__name__}.")
    kind = METHODS[name]
    parameters = kind._parameters()
    spelt = {option if option in parameters else f"{option}_": value for option, value in options.items()}
    for option in spelt:
        if option not in parameters:
            raise unknown_name(f"option of '{name}'", option.removesuffix("_"), kind.option_names())
    for option, parameter in parameters.items():
        if option not in spelt and parameter.default is parameter.empty:
            raise InputError(f"The method '{name}' needs the option '{option}'. Experts: {', '.join(pool.names)}.")
    return kind(pool, **spelt)
