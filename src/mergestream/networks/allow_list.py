"""Networks that a card may ask for, of timm, torchvision, Hugging Face and MONAI, and limits on them.

Cards and configuration files come from other sites. Building their networks must read no file, contact no server, run
no code of theirs, and take no more memory than their weights.
"""

import importlib
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mergestream.runtime.errors import InputError, NetworkError, require_known, unknown_name

# Plain image classifiers of transformers: no wrapper of another loader (TimmWrapper), no language model.
TRANSFORMERS = tuple(
    f"{kind}ForImageClassification"
    for kind in (
        *("Beit", "Bit", "CLIP", "ConvNext", "ConvNextV2", "Cvt", "Data2VecVision", "DeiT", "Dinov2"),
        *("Dinov2WithRegisters", "EfficientNet", "FocalNet", "Hiera", "IJepa", "Levit", "MobileNetV1", "MobileNetV2"),
        *("MobileViT", "MobileViTV2", "PoolFormer", "Pvt", "PvtV2", "RegNet", "ResNet", "Segformer", "Siglip"),
        *("SwiftFormer", "Swin", "Swinv2", "TextNet", "ViT", "ViTMSN"),
    )
)
# Classifiers of MONAI, in its several spellings. Others download weights when built (Transchex), or pass their
# arguments on to other libraries (TorchVisionFCModel).
MONAI = re.compile(
    r"densenet(121|169|201|264)?|resnet(10|18|34|50|101|152|200)?|senet(154)?|seresnet(50|101|152)|seresnext(50|101)|"
    r"efficientnetbn|vit",
    re.IGNORECASE,
)
# All texts that an argument may be: names of activations, norms, pools, positions, blocks and first weights.
WORDS = re.compile(
    r"|relu6?|gelu(_tanh|_new|_fast|_python|_pytorch_tanh)?|quick_?gelu|silu|swish|memswish|mish|tanh|sigmoid|softmax|"
    r"[cs]?elu|prelu|leaky_?relu|hard_?(swish|sigmoid|mish|tanh)|softplus|linear|identity|geglu|swiglu|"
    r"none|(frozen)?batch(norm[12]?d?)?|instance(norm)?|group(norm1?)?|layer(norm(2d)?)?|rmsnorm(2d)?|localresponse|"
    r"(cat)?(avg|max|avgmax)|fast(avg|max)?|token|map|mean|cls|learn(able|ed)?|sincos|rope|conv|perceptron|"
    r"abs(olute)?|rel|relative_key(_query)?|axial|mixed|bias|mlp|same|valid|global|subsample|deep(_tiered)?|se|eca|"
    r"basic|bottleneck|se_(resnet_|resnext_)?bottleneck|preactivation|dw_bn|[abxy]|stem|stage[0-9]{1,2}|"
    r"skip|reset|jax(_nlhb)?|moco|eager|sdpa|(single|multi)_label_classification|(clip|siglip)_(vision|text)_model|"
    r"efficientnet-b[0-9]",
    re.IGNORECASE | re.ASCII,
)
WORDS_OF = {"attn_implementation": re.compile("eager|sdpa"), "model_type": re.compile(r"[\w-]{1,60}", re.ASCII)}
REFUSED = re.compile(
    r"_.*|weights.*|(.*_)?(pretrained|checkpoint|cache|hub|url|file|remote|quantization|backbone|kernels)(_.*)?"
)
LABELS = ("id2label", "label2id")
LARGEST, DEEPEST, MOST_ITEMS, LONGEST = 100_000, 4, 1000, 200
MOST_NUMBERS, MOST_OPERATIONS = 1 << 33, 300_000


def require_arguments(title: str, arguments: dict[str, Any]) -> None:
    """Refuse arguments that are more than numbers, listed words, and short lists of those."""
    problem = _problem("", arguments)
    if problem:
        raise InputError(
            f"Cannot build {title}: {problem}. Make a pool of other networks with ExpertPool.from_modules."
        )


def _problem(name: str, value: Any, depth: int = 0) -> str | None:
    """Why an argument is refused; None if it may be used."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return None if abs(value) <= LARGEST else f"'{name}' is not a number up to {LARGEST:,}"
    if isinstance(value, str):
        allowed = WORDS_OF.get(name, WORDS).fullmatch(value)
        return None if allowed else f"'{name}' is {value[:LONGEST]!r}, which is not one of the words that are allowed"
    if not isinstance(value, dict | list | tuple):
        return f"'{name}' is a {type(value).__name__}"
    if name in LABELS and isinstance(value, dict):
        texts = [text for pair in value.items() for text in pair]
        plain = all(isinstance(text, int) or (isinstance(text, str) and len(text) <= LONGEST) for text in texts)
        return None if plain else f"'{name}' holds more than names and numbers"
    if depth > DEEPEST or len(value) > MOST_ITEMS:
        return f"'{name}' is too long or nested too deeply"
    for key, inner in value.items() if isinstance(value, dict) else [(name, inner) for inner in value]:
        if not isinstance(key, str) or len(key) > LONGEST or not key.isprintable():
            return f"{str(key)[:LONGEST]!r} is not the name of an argument"
        if REFUSED.fullmatch(key):
            return f"'{key}' is not an argument of an architecture: weights come from safetensors only"
        problem = _problem(key, inner, depth + 1)
        if problem:
            return problem
    return None


Build = Callable[[], nn.Module]


def _timm(name: str, arguments: dict[str, Any]) -> Build:
    import timm

    # A name and at most a tag: prefixes such as 'hf-hub:' and 'local-dir:' would make timm read elsewhere.
    if not re.fullmatch(r"\w+(\.\w+)?", name, re.ASCII) or not timm.is_model(name):
        raise unknown_name("timm network", name, timm.list_models())
    return partial(timm.create_model, name, **{**arguments, "pretrained": False})


def _torchvision(name: str, arguments: dict[str, Any]) -> Build:
    from torchvision import models

    classifiers = models.list_models(module=models)
    require_known("torchvision network", name, classifiers)
    return partial(models.get_model, name, **{**arguments, "weights": None})


def _transformers(name: str, arguments: dict[str, Any]) -> Build:
    require_known("transformers network", name, TRANSFORMERS)
    import transformers

    network = getattr(transformers, name)
    return lambda: network(network.config_class(**arguments))


def _monai(name: str, arguments: dict[str, Any]) -> Build:
    try:
        from monai.networks import nets
    except ImportError:
        raise NetworkError("MONAI is not installed: pip install 'mergestream[monai]'.") from None
    classifiers = {n: v for n, v in vars(nets).items() if MONAI.fullmatch(n) and not inspect.ismodule(v)}
    require_known("MONAI classifier", name, classifiers)
    parameters = inspect.signature(classifiers[name]).parameters
    given = dict(arguments)
    if "num_classes" not in parameters and "out_channels" in parameters:
        given.setdefault("out_channels", given.pop("num_classes", None))
    if "pretrained" in parameters:
        given["pretrained"] = False  # some of MONAI's networks download weights by default
    return partial(classifiers[name], **given)


LIBRARIES = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers, "monai": _monai}


def construct(build: Callable[[], nn.Module], title: str, most: int | None = None) -> nn.Module:
    """Build a network without a server, after a trial on the meta device, which takes no memory.

    most: how many numbers its weights hold; a network that is far larger is refused. Its own are then left unwritten,
    since those replace them.
    """
    limit = MOST_NUMBERS if most is None else 4 * most + (1 << 24)
    with offline_hub(), nullcontext() if most is None else _Unwritten():
        try:
            with torch.device("meta"), _Meter(title, limit):
                build()
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            with _Meter(title, limit):  # its constructor reads numbers, which the meta device does not have
                return build()
        return build()


class _Unwritten(TorchFunctionMode):
    """Leaves new parameters as they are allocated: random numbers that are replaced anyway take long to draw."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {**(kwargs or {})}
        first = args[0] if args else given.get("tensor")
        name = getattr(function, "__name__", "")
        if isinstance(first, nn.Parameter) and name.endswith("_") and name[:1] != "_" and name != "requires_grad_":
            return first
        return function(*args, **given)


class _Meter(TorchDispatchMode):
    """Stops the construction of a network that is too large, before its memory is allocated."""

    def __init__(self, title: str, limit: int) -> None:
        super().__init__()
        self._title, self._limit, self._numbers, self._operations = title, limit, 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._operations += 1
        if args and isinstance(args[0], list | tuple) and all(isinstance(size, int) for size in args[0]):
            self._numbers += math.prod(args[0])
        self._require(self._numbers)
        result = function(*args, **(kwargs or {}))
        self._require(result.numel() if isinstance(result, Tensor) else 0)
        return result

    def _require(self, numbers: int) -> None:
        if numbers > self._limit or self._operations > MOST_OPERATIONS:
            raise NetworkError(
                f"Cannot build {self._title}: by its arguments it is far larger than its weights, or than "
                f"{MOST_NUMBERS:,} numbers."
            )


_LOCK = threading.RLock()


@contextmanager
def offline_hub() -> Iterator[None]:
    """Let Hugging Face's libraries contact no server inside the block."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    with _LOCK:
        before = constants.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before
