"""Small pools to test with. Their networks have random weights: the algebra does not care."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics.measurement import KINDS, measure_statistics

CLASSES = ("round", "spiculated", "ring", "divided", "other")
NAMES = ("lyon", "brest", "turin")
# Eight of ten images of a class are recognised, the others taken for the next class.
CONFUSION = (8 * torch.eye(len(CLASSES)) + 2 * torch.eye(len(CLASSES)).roll(1, dims=0)).tolist()
PREPROCESSING = Preprocessing(size=(16, 16))


class HandWritten(nn.Module):
    """A user's own network: an integer buffer, tied layers and BatchNorm, none of a known library."""

    scale: Tensor

    def __init__(self, classes: int = len(CLASSES)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Linear(8, 8)
        self.mix_again = self.mix
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("cache", torch.arange(4.0), persistent=False)
        self.fc = nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.stem(images))).mean(dim=(2, 3)) * self.scale
        return self.fc(torch.tanh(self.mix_again(torch.tanh(self.mix(features)))))


def micro_vit(classes: int = len(CLASSES)) -> nn.Module:
    import timm

    size = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", **size, num_classes=classes)


def micro_resnet(classes: int = len(CLASSES)) -> nn.Module:
    import timm

    size = {"layers": (1, 1, 1, 1), "channels": (8, 12, 16, 24)}
    return timm.create_model("resnet18", **size, zero_init_last=False, num_classes=classes)


FACTORIES: dict[str, Callable[..., nn.Module]] = {
    "vit": micro_vit,
    "resnet": micro_resnet,
    "hand_written": HandWritten,
}


def make_experts(
    factory: Callable[[], nn.Module], names: tuple[str, ...] = NAMES, seed: int = 0, head_noise: float = 1.0
) -> dict[str, nn.Module]:
    """Experts that share a start and differ clearly, heads most of all; BatchNorm statistics differ too."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        start = factory().state_dict()
        experts = {}
        for number, name in enumerate(names):
            module = factory()
            module.load_state_dict(start)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
                for key, buffer in module.named_buffers():
                    if "running_var" in key:
                        buffer.add_(torch.rand_like(buffer))
                    elif "running_mean" in key:
                        buffer.add_(0.3 * torch.randn_like(buffer))
                    elif "num_batches" in key:
                        buffer.add_(number + 1)
                for key, parameter in module.named_parameters():
                    if key.startswith(("head.", "fc.", "classifier.", "heads.")):
                        parameter.add_(head_noise * (number + 1) * torch.randn_like(parameter))
            experts[name] = module.eval()
    return experts


def make_base(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The start that `make_experts` gives its experts at this seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return factory().eval()


def make_pool(
    kind: str, names: tuple[str, ...] = NAMES, seed: int = 0, base: bool = False, statistics: bool = False
) -> ExpertPool:
    factory = FACTORIES[kind]
    pool = ExpertPool.from_modules(
        make_experts(factory, names, seed),
        classes=CLASSES,
        preprocessing=PREPROCESSING if kind != "vit" else None,
        base=make_base(factory, seed) if base else None,
    )
    return with_statistics(pool) if statistics else pool


def make_images(count: int = 6, size: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def with_statistics(pool: ExpertPool) -> ExpertPool:
    """Every kind of statistics the pool's network allows, each expert's on images of its own."""
    images = {name: make_images(10, seed=100 + sum(map(ord, name))) for name in pool.names}
    kinds = [kind for kind in KINDS if kind != "gram_pp" or has_blocks(pool)]
    return measure_statistics(pool, images, kinds, batch_size=4)


def has_blocks(pool: ExpertPool) -> bool:
    return not isinstance(pool.template.module, HandWritten)


def with_confusion(pool: ExpertPool) -> ExpertPool:
    """Cards with a confusion matrix."""
    table = CONFUSION if len(pool.classes) == len(CLASSES) else [[10.0]]
    for name in pool.names:
        pool = pool.annotate(name, metrics={"validation": {"confusion": table}})
    return pool


@cache
def full_pool(network: str, names: tuple[str, ...] = NAMES, classes: int = len(CLASSES)) -> ExpertPool:
    """A pool with all that a method may ask for: base, statistics and confusion matrices. Never change it.

    An expert is the same whatever its place in the pool.
    """
    factory = partial(FACTORIES[network], classes)
    experts = make_experts(factory)
    pool = ExpertPool.from_modules(
        {name: experts[name] for name in names},
        classes=CLASSES[:classes],
        preprocessing=PREPROCESSING if network != "vit" else None,
        base=make_base(factory),
    )
    return with_confusion(with_statistics(pool))


def own_copy(pool: ExpertPool) -> ExpertPool:
    """The same pool with weights of its own."""
    return pool._with(bank=pool.bank.clone())
