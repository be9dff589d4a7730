"""The recipe of a fit: every choice by name, checked, and written into the expert's card."""

from dataclasses import dataclass

from mergestream.networks.preprocessing import require_views
from mergestream.runtime.option_checks import number, one_of, whole_number, yes_or_no

CHOICES = {
    "optimiser": ("adam", "adamw", "sgd"),
    "schedule": ("constant", "cosine", "one_cycle"),
    "loss": ("plain", "weighted"),
    "criterion": ("plain", "balanced"),
    "accelerator": ("auto", "cpu", "cuda"),
    "precision": ("32-true", "bf16-mixed", "16-mixed"),
    "compile": ("auto", "always", "never"),
}


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of one fit. Defaults as in DomainBed and DiWA: Adam at 5e-5, 5,001 steps of 32, augmented."""

    steps: int = 5001
    batch_size: int = 32
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    dropout: float = 0.0  # before the head
    optimiser: str = "adam"
    schedule: str = "constant"  # or cosine (the first tenth of the steps warms up), or one_cycle
    augmentation: float = 1.0  # strength of crop, colour and grey: 0 none, 1 DomainBed's
    views: tuple[str, ...] = ("hflip",)  # label-preserving, each applied to a random half of a batch
    loss: str = "plain"  # or weighted by class, from the training split's counts
    label_smoothing: float = 0.0
    freeze_bn: bool = False  # keep BatchNorm's statistics as the start has them
    criterion: str = "plain"  # validation cross-entropy that chooses the step: mean over images, or balanced
    validate_every: int = 100
    validation_share: float = 0.2
    seed: int = 0
    split_seed: int | None = None  # of the validation split, so that fits of several seeds can share one
    accelerator: str = "auto"
    precision: str = "32-true"
    compile: str = "auto"  # on a CUDA device; the arithmetic is the same, the rounding differs
    threads: int = 1  # on a CPU the number of threads decides the order of sums, and so the exact weights

    @property
    def seed_of_split(self) -> int:
        return self.seed if self.split_seed is None else self.split_seed

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "validate_every", "threads"):
            whole_number(name, getattr(self, name), low=1)
        for name in ("seed", "seed_of_split"):
            whole_number(name, getattr(self, name), low=0)
        number("learning_rate", self.learning_rate, above=0)
        number("weight_decay", self.weight_decay, low=0)
        number("augmentation", self.augmentation, low=0, high=2)
        number("validation_share", self.validation_share, above=0, below=1)
        for name in ("dropout", "label_smoothing"):
            number(name, getattr(self, name), low=0, below=1)
        for name, choices in CHOICES.items():
            one_of(name, getattr(self, name), choices)
        yes_or_no("freeze_bn", self.freeze_bn)
        require_views(self.views)
