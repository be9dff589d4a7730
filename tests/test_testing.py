"""mergestream.testing: good methods and data sets pass; broken ones fail with the sentence for their fault."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import mergestream as ms
from mergestream.data.datasets import DatasetCard, GeneratedSource
from mergestream.methods import ORIGINAL, Batch, Method, State, Step
from mergestream.methods.state import PER_EXPERT
from mergestream.testing import RULES, check_dataset, check_method


@dataclass(frozen=True)
class Seen(State):
    """Running mean of the experts' confidence [K], and the number of batches."""

    confidence: Tensor = field(metadata=PER_EXPERT)
    batches: int = 0


@dataclass(kw_only=True, eq=False, repr=False)
class Confident(Method[Seen]):
    """The experts' mean logits, weighed by how confident each has been along the stream."""

    name: ClassVar[str] = "confident"
    power: float = 2.0

    def start(self) -> Seen:
        return Seen(torch.ones(len(self.pool)))

    def advance(self, batch: Batch, state: Seen) -> tuple[Step, Seen]:
        logits = self.logits(batch)
        now = torch.softmax(logits, dim=-1).amax(dim=-1).mean(dim=-1)  # [K]
        seen = Seen(state.confidence + now, state.batches + 1)
        shares = seen.confidence**self.power / (seen.confidence**self.power).sum()
        return Step(torch.einsum("k,kbc->bc", shares, logits), encoder_coefficients=shares), seen

    def logits(self, batch: Batch) -> Tensor:
        return self.pool.logits_of_views(batch)[ORIGINAL]


def test_a_good_method_passes_by_class_and_by_name() -> None:
    check_method(Confident)
    check_method(Confident, options={"power": 4}, networks=["hand_written"])
    check_method("ensemble", networks=["vit"])


# --- broken methods ---------------------------------------------------------------------------------------------

Broken = Callable[[Confident, Batch, Seen], tuple[Step, Seen]]
good = Confident.advance


def mutates_its_state(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    state.confidence.mul_(0.9)
    return good(self, batch, state)


def changes_the_images(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    batch.images.mul_(0.5)
    return good(self, Batch(batch.images.clone()), state)


def changes_the_pool(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    answer = good(self, batch, state)
    self.pool.bank.add_(1e-7)
    return answer


def keeps_something_outside(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    step, after = good(self, batch, state)
    self.batches = getattr(self, "batches", 0) + 1
    return replace(step, logits=step.logits * self.batches), after


def draws_global_numbers(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    step, after = good(self, batch, state)
    return replace(step, logits=step.logits + torch.rand(1)), after


def seeds_global_numbers(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    step, after = good(self, batch, state)
    torch.manual_seed(0)
    return replace(step, logits=step.logits + torch.rand(1)), after


def answers_in_the_wrong_shape(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    step, after = good(self, batch, state)
    return replace(step, logits=step.logits.T.contiguous()), after


def answers_in_half_precision(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    step, after = good(self, batch, state)
    return replace(step, logits=step.logits.half()), after


def gives_no_shares(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    step, after = good(self, batch, state)
    return replace(step, encoder_coefficients=torch.tensor([0.9, 0.9, 0.9][: len(self.pool)])), after


def reads_labels(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    step, after = good(self, batch, state)
    frame: Any = sys._getframe()
    while frame is not None:
        data, picked = frame.f_locals.get("data"), frame.f_locals.get("picked")
        if picked is not None:
            labels = torch.nn.functional.one_hot(data.labels[picked], len(self.pool.classes))
            return replace(step, logits=step.logits + labels), after
        frame = frame.f_back
    return step, after


def favours_the_first_expert(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    step, after = good(self, batch, state)
    return replace(step, logits=self.logits(batch)[0]), after


def runs_a_network_itself(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    step, after = good(self, batch, state)
    return replace(step, logits=step.logits + 0 * self.pool.expert(0)(batch.images)), after


def needs_two_images(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    if len(batch.images) == 1:
        raise IndexError("no second image")
    return good(self, batch, state)


def reads_a_card(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    step, after = good(self, batch, state)
    share = self.pool.cards[0].recipe.get("loss") == "weighted"
    return replace(step, logits=step.logits * (1.0 + share)), after


def treats_given_logits_otherwise(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    given = ORIGINAL in batch.expert_logits
    step, after = good(self, batch, state)
    return replace(step, logits=step.logits * (1 + given)), after


def swallows_bad_batches(self: Confident, batch: Batch, state: Seen) -> tuple[Step, Seen]:
    try:
        return good(self, batch, state)
    except ms.MergestreamError:
        return Step(torch.zeros(len(batch.images), len(self.pool.classes))), state


FAULTS: dict[Broken, str] = {
    answers_in_the_wrong_shape: r"answers are well-formed.*logits have the shape \(5, 5\)|\(5, 2\), not \[B,C\]",
    answers_in_half_precision: "logits are torch.float16, not torch.float32",
    gives_no_shares: "encoder_coefficients .* are not shares: each at least 0, and 1 in sum",
    draws_global_numbers: "equal batches get equal answers.*answered the same batches differently: draw random",
    seeds_global_numbers: "torch's global random numbers, or sets their seed",
    mutates_its_state: "a step changes nothing.*changed the state that it was given",
    changes_the_images: "changed the images that it was given",
    changes_the_pool: "changed the pool's weights|answered the same batches differently",
    keeps_something_outside: r"all that is carried is in the state.*after reset\(\) the same stream got other answers",
    swallows_bad_batches: "bad batches are refused.*it answered images of another size",
    needs_two_images: "it raised IndexError: no second image",
    runs_a_network_itself: "networks run through the pool.*4 forwards through expert networks, and 3 were counted",
    reads_labels: "labels are never seen.*other labels of the same images changed its answers",
    treats_given_logits_otherwise: "given expert logits change nothing.*computed before changed its answers",
    favours_the_first_expert: "the order of experts does not matter.*another order gave other answers",
    reads_a_card: "card values are in the provenance.*it reads 'loss' of an expert's card",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_of_a_step_is_named(fault: Broken) -> None:
    kind = type("Faulty", (Confident,), {"advance": fault, "__module__": __name__})
    with pytest.raises(AssertionError, match=f"^Faulty breaks the rule '.*{FAULTS[fault]}") as failed:
        check_method(kind, networks=["vit"])
    assert str(failed.value).count("\n") == 0


@dataclass(kw_only=True, eq=False, repr=False)
class Doubled(Confident):
    """An option that is not what was given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.power = 2 * self.power


@dataclass(eq=False, repr=False)
class ByPlace(Confident):
    """An option that can be given by place."""

    scale: float = 1.0


@dataclass(kw_only=True, eq=False, repr=False)
class WithAFunction(Confident):
    """An option that no record can hold."""

    power: Any = abs


@dataclass(frozen=True)
class WithASet(Seen):
    """A state with something that is neither a tensor nor a number."""

    names: Any = None


class Unsaved(Confident):
    """Its state cannot be saved."""

    def start(self) -> Seen:
        return WithASet(torch.ones(len(self.pool)), names=io_like)

    def advance(self, batch: Batch, state: Seen) -> tuple[Step, Seen]:
        step, after = super().advance(batch, state)
        return step, WithASet(after.confidence, after.batches, io_like)


def io_like() -> None:
    """A function, which only a pickle could hold."""


@dataclass
class Loose:
    """A state that is no State."""

    batches: int = 0


class NoState(Confident):
    """Its state is a class of its own."""

    def start(self) -> Any:
        return Loose()

    def advance(self, batch: Batch, state: Any) -> tuple[Step, Any]:
        return Step(self.logits(batch).mean(dim=0)), Loose(state.batches + 1)


@dataclass(frozen=True)
class Unmarked(State):
    """One number per expert, without the mark."""

    confidence: Tensor


class NotCarried(Confident):
    """Its state keeps numbers of experts that are switched off."""

    def start(self) -> Any:
        return Unmarked(torch.ones(len(self.pool)))

    def advance(self, batch: Batch, state: Any) -> tuple[Step, Any]:
        step, after = super().advance(batch, Seen(state.confidence))
        return step, Unmarked(after.confidence)


KINDS: dict[Any, str] = {
    Doubled: r"options are keyword-only and read back.*\{'power': 4.0\} became \{'power': 8.0\}",
    ByPlace: "scale can be given by place: use @dataclass",
    WithAFunction: "its options cannot be written as JSON",
    type("Nameless", (ms.Method,), {"advance": good}): "it has no name",
    ms.Method: "inherits mergestream.Method and defines `advance`",
    Unsaved: "the state is saved and loaded.*a state holds tensors and numbers, nothing else",
    NoState: "its state is a Loose: it has to be a frozen dataclass",
    NotCarried: "carried to fewer and more experts.*'confidence' of its state has the shape .*mark the field",
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_fault_of_options_and_states_is_named(kind: Any) -> None:
    with pytest.raises(AssertionError, match=KINDS[kind]):
        check_method(kind, networks=["vit"])


def test_every_rule_has_a_method_that_breaks_it() -> None:
    sentences = " ".join([*FAULTS.values(), *KINDS.values()])
    named = {rule for rule in RULES if rule in sentences or rule.removeprefix("the state is ") in sentences}
    assert set(RULES) - named == {"single images are answered", "one class is the answer to every image"}


def test_a_rule_can_be_broken_on_purpose_and_names_are_checked() -> None:
    kind = type("Faulty", (Confident,), {"advance": favours_the_first_expert, "__module__": __name__})
    check_method(kind, networks=["vit"], except_for=["the order of experts does not matter"])
    with pytest.raises(ms.MergestreamError, match="Did you mean 'labels are never seen'"):
        check_method(kind, except_for=["labels are not seen"])
    with pytest.raises(ms.MergestreamError, match="Did you mean 'resnet'"):
        check_method(kind, networks=["resnet18"])


@pytest.mark.slow
def test_a_plain_script_needs_no_pytest() -> None:
    script = """
import sys
sys.modules["pytest"] = None  # an import of it now fails
from mergestream.testing import check_dataset, check_method
check_method("mean", networks=["hand_written"])
check_dataset("phantom", images=20)
"""
    done = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


# --- data sets --------------------------------------------------------------------------------------------------

CARD = DatasetCard("tiny", "Two sites of noise", "nothing", "public domain", "this test")


def tiny(seed: int = 0, **changes: Any) -> ms.Dataset:
    generator = torch.Generator().manual_seed(seed)
    domains: dict[str, ms.DomainData] = {}
    for domain in ("north", "south"):
        pixels = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8, generator=generator)
        data = ms.DomainData("tiny", domain, ("a", "b"), pixels, torch.arange(12) % 2)
        domains[domain] = replace(data, **{k: v for k, v in changes.items() if hasattr(data, k)})
    about = {"name": "tiny", "classes": ("a", "b"), "domains": tuple(domains), "views": ("hflip",)}
    about |= {key: value for key, value in changes.items() if key in ("views", "domains")}
    return ms.Dataset(**about, synthetic=True, read_domain=domains.__getitem__)


def test_a_good_data_set_passes() -> None:
    assert check_dataset(GeneratedSource(CARD, tiny)).domains == ("north", "south")
    assert len(check_dataset("phantom", images=20)) == 4


def other_every_time() -> ms.Dataset:
    return tiny(int(torch.randint(0, 2**31, ())))


BAD_SETS: dict[str, tuple[Any, Callable[[], ms.Dataset], str]] = {
    "card": (replace(CARD, licence=""), tiny, "the card describes the data': its card has no licence"),
    "classes": (replace(CARD, classes=("a", "c")), tiny, "its card names the classes"),
    "one domain": (CARD, lambda: tiny(domains=("north",)), "two domains or more"),
    "views": (CARD, lambda: tiny(views=("upside_down",)), "views leave labels true"),
    "grey": (CARD, lambda: tiny(images=torch.zeros(12, 1, 8, 8, dtype=torch.uint8)), r"\(12, 1, 8, 8\), not \[N,3"),
    "labels": (CARD, lambda: tiny(labels=torch.zeros(12)), "labels are torch.float32"),
    "groups": (replace(CARD, group="patient"), tiny, "groups stay together' in 'north': 12 images are in 0 groups"),
    "subgroups": (replace(CARD, subgroups=("scanner",)), tiny, "the subgroups scanner of its card are absent"),
    "random": (CARD, other_every_time, "the same bits every time': 'north' differs"),
    "ids": (CARD, lambda: tiny(ids=list("abcdefghijkl")), "two images have one id"),
}


@pytest.mark.parametrize("fault", BAD_SETS)
def test_each_fault_of_a_data_set_is_named(fault: str) -> None:
    card, generate, message = BAD_SETS[fault]
    with pytest.raises(AssertionError, match=f"^The data set 'tiny' breaks the rule .*{message}"):
        check_dataset(GeneratedSource(card, generate))
