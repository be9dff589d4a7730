"""All methods: ours in one literal table, and those of other packages."""

import inspect
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
from mergestream.methods.spelling import PRESETS, unknown_method
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
from mergestream.runtime.errors import InputError, some, unknown_name
from mergestream.runtime.open_table import OpenTable

__all__ = [
    "METHODS",
    "ORIGINAL",
    "Batch",
    "ExpertLogits",
    "Method",
    "State",
    "Step",
    "create_method",
    "instance_of",
    "list_methods",
]

OWN: dict[str, type[Method[Any]]] = {
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


def _usable(name: str, kind: Any) -> type[Method[Any]]:
    """A class that can be created by this name; others are refused with a sentence."""
    if not (isinstance(kind, type) and issubclass(kind, Method)) or inspect.isabstract(kind):
        raise InputError(f"{kind!r} is no method: a class that inherits mergestream.Method and defines `advance`.")
    if not name.isidentifier():
        raise InputError(f"A method's name is letters, digits and underscores, as in 'my_method'; got {name!r}.")
    if vars(kind).get("name", name) != name:
        raise InputError(f"The class {kind.__qualname__} calls itself '{kind.name}', not '{name}'.")
    kind.name = name
    return kind


METHODS: OpenTable[type[Method[Any]]] = OpenTable("method", "mergestream.methods", OWN, _usable, lambda kind: kind)


def register_method(name: str | type[Method[Any]], kind: type[Method[Any]] | None = None, /) -> Any:
    """Add a method of your own, so that it can be named wherever ours can: in Python, in bench and in serve.

    As a decorator, `@register_method` (the name is the class's `name`) or `@register_method("name")`; or as a call,
    `register_method("name", MyMethod)`. A name that is taken is refused.
    """
    if not isinstance(name, str):
        return METHODS.register(str(getattr(name, "name", "")), name)
    return METHODS.register(name, kind) if kind is not None else lambda kind: METHODS.register(name, kind)


def list_methods() -> list[str]:
    return list(METHODS)


def create_method(name: str, pool: ExpertPool, **options: Any) -> Method[Any]:
    """Create a method by name. Unknown names and options are refused with the nearest match."""
    if isinstance(name, str) and name in PRESETS:
        name, preset = PRESETS[name]
        options = {**preset, **options}
    if not isinstance(name, str) or name not in METHODS:
        raise unknown_method(str(name))
    if not isinstance(pool, ExpertPool):
        raise InputError(f"A method needs an ExpertPool, got {type(pool).__name__}.")
    return instance_of(METHODS[name], pool, **options)


def instance_of(kind: type[Method[Any]], pool: ExpertPool, /, **options: Any) -> Method[Any]:
    """Create a method of a class, registered or not, with options as they are spelt in records."""
    name, parameters = kind.name, kind._parameters()
    spelt = {option if option in parameters else f"{option}_": value for option, value in options.items()}
    for option in spelt:
        if option not in parameters:
            raise unknown_name(f"option of '{name}'", option.removesuffix("_"), kind.option_names())
    for option, parameter in parameters.items():
        if option not in spelt and parameter.default is parameter.empty:
            raise InputError(f"The method '{name}' needs the option '{option}'. Experts: {some(pool.names)}.")
    return kind(pool, **spelt)
