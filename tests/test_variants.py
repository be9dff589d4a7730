"""Methods as a table spells them."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mergestream as ms
from mergestream.bench.engine.plan import Variant, parse_variants


def test_names_options_and_grids() -> None:
    text = "mean, entropy_adaptive(head=shared|select, momentum=0|0.9),ensemble( average = probabilities )"
    variants = parse_variants(text)
    assert variants[0] == Variant("mean")
    assert variants[1:5] == tuple(
        Variant("entropy_adaptive", (("head", head), ("momentum", momentum)))
        for head in ("shared", "select")
        for momentum in (0, 0.9)
    )
    assert variants[5] == Variant("ensemble", (("average", "probabilities"),))
    assert len(variants) == 6


def test_values_of_all_kinds() -> None:
    (variant,) = parse_variants("entropy_adaptive(views=(), momentum=1e-3, temperature=card)")
    assert dict(variant.options) == {"views": (), "momentum": 0.001, "temperature": "card"}
    (variant,) = parse_variants("entropy_adaptive(views=[hflip, vflip], recalibrate_bn=true)")
    assert dict(variant.options) == {"views": ("hflip", "vflip"), "recalibrate_bn": True}
    assert dict(parse_variants("mean(coefficients=(0.5, 0.3, 0.2))")[0].options)["coefficients"] == (0.5, 0.3, 0.2)


def test_all_is_every_method_once() -> None:
    assert [variant.method for variant in parse_variants("all, mean")] == ms.list_methods()


@pytest.mark.parametrize(
    "text", ["", " , ", "mean(", "mean)", "mean(a", "mean(head)", "mean()()", "no such", "all(x=1)"]
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ms.MergestreamError):
        parse_variants(text)


WORDS = st.sampled_from(["shared", "select", "card", 0.9, 3, True, False, (), ("hflip",), ("hflip", "vflip")])


@given(st.dictionaries(st.sampled_from(["head", "momentum", "views", "temperature"]), WORDS))
def test_a_spelt_variant_reads_back(options: dict) -> None:
    variant = Variant("entropy_adaptive", tuple(sorted(options.items())))
    assert parse_variants(str(variant)) == (variant,)


@given(st.text(max_size=60))
def test_any_text_parses_or_is_refused(text: str) -> None:
    with suppress(ms.MergestreamError):
        assert parse_variants(text)
