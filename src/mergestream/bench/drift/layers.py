"""Layers and components of a network's tensors; layers are in the network's own order of depth."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import nn

from mergestream.networks.flat_layout import Layout

# Where the libraries keep their blocks, the most specific first; the first pattern that matches a network is used.
_ROOT = r"(?:\w+\.)?(?:encoder\.)?"
BLOCKS: tuple[str, ...] = (
    rf"{_ROOT}(?:stages|layers)\.\d+\.(?:blocks|layers)\.\d+",  # ConvNeXt, Swin and ResNetV2 of timm; Hugging Face CNNs
    r"(?:\w+\.)?layer\d+\.\d+",  # ResNet
    r"(?:\w+\.)?blocks\.\d+\.\d+",  # EfficientNet and MobileNet of timm
    r"(?:\w+\.)?features\.\d+\.\d+(?=\.(?:block|attn|mlp|norm\d|layer_scale)\b)",  # torchvision EfficientNet, ConvNeXt
    r"(?:\w+\.)?features\.denseblock\d+\.denselayer\d+",  # DenseNet
    r"(?:\w+\.)?features\.\d+(?=\.(?:block|conv)\.)",  # MobileNet of torchvision
    r"(?:\w+\.)?features\.\d+(?=\.(?:weight|bias)$)",  # VGG, AlexNet: every convolution
    r"s\d+\.b\d+",  # RegNet of timm
    r"(?:\w+\.)?encoder\.layers\.encoder_layer_\d+",  # ViT of torchvision
    rf"{_ROOT}(?:blocks|layers|layer)\.\d+",  # ViT of timm, Hugging Face, MONAI
)
HEAD, NORMS, CONVOLUTION, MLP = "head", "norms", "convolution", "MLP"
# Patterns over a tensor's name, in the order in which they are tried.
_PATTERNS = {
    "position embedding": r"pos_embed|position_embed|relative_position",
    "tokens": r"(?:cls|class|dist|reg|mask)_token|class_embedding|register_token",
    "patch embedding": r"patch_embed|conv_proj",
    "layer scale": r"layer_scale|\.gamma$|\.lambda_?\d$|\.ls\d\.",
    "squeeze-excitation": r"\.se\.|SqueezeExcit",
    "downsampling": r"downsampl|shortcut|transition|reduction",
    "attention qkv": r"att(?:n|ention).*\.(?:qkv|[qkv](?:_proj|_bias|_norm)?|in_proj_\w+|query|key|value)\b",
    "attention proj": r"att(?:n|ention)\w*\.",
    MLP: r"mlp|ffn|pwconv|intermediate|output\.dense",
}
# The rows of the heat map.
COMPONENTS = (
    "patch embedding", "position embedding", "tokens", "attention qkv", "attention proj", MLP, CONVOLUTION,
    "squeeze-excitation", "downsampling", NORMS, "layer scale", "other", HEAD,
)  # fmt: skip
_NAMED_NORM = re.compile(r"(?:^|\.)(?:\w*norm\w*|ln_?\d*|bn\d*)\.(?:weight|bias)$")
_NAMED_STEM = re.compile(
    r"(?:\w+\.)*?(?:\w+_token|pos_embed\w*|patch_embed\w*|class_embedding|conv_proj|embeddings|embedder|stem|conv_stem|"
    r"conv1|bn1|conv0|norm0|pre_layrnorm)(?:\.|$)"
)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class TensorPlace:
    """A parameter: its name, its shape, and the types of the modules around it, outermost first."""

    name: str
    shape: tuple[int, ...]
    types: tuple[str, ...] = ()


@dataclass(frozen=True)
class NetworkLayer:
    """One step of depth. kind: stem, block, rest (between and after the blocks) or head."""

    name: str
    label: str
    kind: str
    parts: tuple[TensorPlace, ...]

    def component(self, part: TensorPlace) -> str:
        return HEAD if self.kind == HEAD else component_of(part)


def places_of(module: nn.Module, head: tuple[str, ...]) -> list[TensorPlace]:
    """A network's parameters in its own order, tied ones once, the head's last."""
    places = []
    for entry in Layout.of(module, head).parameters:
        types = (type(module.get_submodule(path)).__name__ for path in ["", *_parents(entry.name)])
        places.append(TensorPlace(entry.name, tuple(entry.shape), tuple(types)))
    return places


def places_by_name(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> list[TensorPlace]:
    """Order the parameters of a network that cannot be built by name: stem, numbered blocks, the rest.

    Running statistics are left out; other buffers look like parameters.
    """
    parameters = {name: shape for name, shape in shapes if not name.endswith(_STATISTICS)}
    # Neighbours of the blocks, such as a stage's downsampling, share the prefix before the first number.
    numbered = tuple({re.split(r"\d", path)[0] for path in _blocks(list(parameters)).values()})

    def depth(name: str) -> tuple[int, list[tuple[int, str]]]:
        pieces = [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]
        return (0 if _NAMED_STEM.match(name) else 1 if name.startswith(numbered) else 2), pieces

    return [TensorPlace(name, parameters[name]) for name in sorted(parameters, key=depth)]


def layers_of(places: Sequence[TensorPlace], head: tuple[str, ...]) -> tuple[NetworkLayer, ...]:
    """Layers in order of depth: everything before the first block is the stem, the head comes last.

    A network without recognised blocks is grouped by its outermost modules.
    """
    in_head = [place for place in places if place.name.startswith(tuple(f"{part}." for part in head))]
    encoder = [place for place in places if place not in in_head]
    blocks = _blocks([place.name for place in encoder])
    parents = {parent for path in (*blocks.values(), *head) for parent in _parents(path)}
    first = next((i for i, place in enumerate(encoder) if place.name in blocks), 0)
    groups: dict[tuple[str, str], list[TensorPlace]] = {}
    for position, place in enumerate(encoder):
        if place.name in blocks:
            key = "block", blocks[place.name]
        elif position < first:
            key = "stem", "stem"
        else:
            # The outermost module around it that contains neither a block nor the head.
            outermost = (path for path in _parents(place.name) if path not in parents)
            key = "rest" if blocks else "block", next(outermost, place.name)
        groups.setdefault(key, []).append(place)
    groups["head", "head"] = in_head
    labels = _numbers(list(dict.fromkeys(blocks.values())))
    return tuple(
        NetworkLayer(name, labels.get(name) or _label(name), kind, tuple(parts))
        for (kind, name), parts in groups.items()
    )


def component_of(place: TensorPlace) -> str:
    """Component of a tensor of the encoder, by the type of its module and by its name."""
    owner = place.types[-1] if place.types else ""
    if "Norm" in owner or (not owner and _NAMED_NORM.search(place.name)):
        return NORMS
    with_types = "/".join((place.name, *place.types[1:]))
    for component, pattern in _PATTERNS.items():
        if re.search(pattern, with_types if component == "squeeze-excitation" else place.name):
            return component
    if "Conv" in owner or (not owner and len(place.shape) > 2):
        return CONVOLUTION
    return MLP if "Linear" in owner else "other"


def _blocks(names: Sequence[str]) -> dict[str, str]:
    """The block of every tensor that is in one."""
    for pattern in BLOCKS:
        blocks = {name: match.group() for name in names if (match := re.match(rf"{pattern}(?=\.)", name))}
        if blocks:
            return blocks
    return {}


def _parents(path: str) -> list[str]:
    """The modules around a module or tensor, outermost first."""
    words = path.split(".")
    return [".".join(words[:count]) for count in range(1, len(words))]


def _numbers(blocks: Sequence[str]) -> dict[str, str]:
    """Short labels for an axis: the numbers that distinguish the blocks."""
    shared = takewhile(lambda words: len(set(words)) == 1, zip(*(_parents(block) for block in blocks), strict=False))
    common = len(list(shared))
    return {block: ".".join(re.findall(r"\d+", ".".join(block.split(".")[common:]))) for block in blocks}


def _label(name: str) -> str:
    """The last word of a name, with the one before if that is a stage's number."""
    *_, before, last = ("", *name.split("."))
    return f"{before}.{last}" if before.isdigit() or last.isdigit() else last
