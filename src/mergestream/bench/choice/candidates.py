"""Methods that `mergestream choose` compares, and how: fixed before any result was seen."""

from collections.abc import Sequence

from mergestream.data.datasets import Dataset
from mergestream.methods.recommendation import DEFAULT
from mergestream.methods.spelling import Variant, parse_variant

# The order decides: of candidates that are equally good, the first is chosen. So it goes from principled and general to
# special: first the project's recommended rule, then rules without any memory of the stream, then the others.
CANDIDATES = (
    DEFAULT,
    "ensemble(views=hflip)",
    "mean",
    "corrected(ensemble(views=hflip))",
    "corrected(mean)",
    "corrected(entropy_adaptive)",
    "entropy_adaptive",
    "lame(ensemble(views=hflip))",
    "t3a(mean)",
)
# No choice may be far below this candidate at any pseudo-target.
REFERENCE = "ensemble(views=hflip)"
STREAMS = ("iid", "dirichlet:0.05")
# The mixes of classes: the site's own, and one with a quarter of the images of its rarest class.
OWN, RARE = "own", "rare"
RARE_SHARE = 0.25
BATCH_SIZE = 32
SEED = 0
# Raised whenever the same pool and images would give other numbers.
REVISION = 1


def variants_for(dataset: Dataset, texts: Sequence[str]) -> list[Variant]:
    """Candidates on a data set: where mirror images do not keep its labels true, with a view that does."""
    views = ("hflip",) if "hflip" in dataset.views else dataset.views[:1]
    spelt = f"views=({', '.join(views)})"
    return [parse_variant(text.replace("views=hflip", spelt)) for text in texts]
