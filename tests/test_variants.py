"""Methods as a table spells them."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mergestream as ms
from conftest import make_pool
from mergestream.methods.spelling import Variant, parse_variants


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


@pytest.mark.parametrize(
    ("text", "spelt"),
    [
        ("corrected(mean)", "corrected(mean)"),
        ("corrected( base = mean , anchor=0.5)", "corrected(mean, anchor=0.5)"),
        ("corrected(ensemble( views = hflip ), memory=16)", "corrected(ensemble(views=hflip), memory=16)"),
        (
            "corrected(memory=16, base=ensemble(views=(hflip, vflip)))",
            "corrected(ensemble(views=(hflip, vflip)), memory=16)",
        ),
        ("corrected", "corrected"),
    ],
)
def test_a_base_needs_no_name(text: str, spelt: str) -> None:
    (variant,) = parse_variants(text)
    assert str(variant) == spelt
    assert parse_variants(spelt) == (variant,)
    assert variant.innermost == ("ensemble" if "mean" not in spelt else "mean")


def test_bases_make_grids_too() -> None:
    texts = [
        str(variant) for variant in parse_variants("corrected(mean|entropy_adaptive(head=shared|select), memory=8)")
    ]
    assert texts == [
        "corrected(mean, memory=8)",
        "corrected(entropy_adaptive(head=shared), memory=8)",
        "corrected(entropy_adaptive(head=select), memory=8)",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("corrected(corrected)", "cannot be its own base"),
        ("corrected(meen)", "Did you mean 'mean'"),
        ("corrected(mean, base=ensemble)", "given twice"),
        ("corrected(anchor=0, mean)", "write option=value"),
        ("corrected(mean(head))", "write option=value"),
        ("corrected(all)", "no method called 'all'"),
        ("mean(ensemble)", "write option=value"),
        ("mean(head_rows=all, head_rows=seen)", "given twice"),
        ("corrected(3)", "method"),
    ],
)
def test_wrong_bases_are_refused(text: str, message: str) -> None:
    with pytest.raises(ms.MergestreamError, match=message):
        parse_variants(text)


@pytest.mark.parametrize("base", [3, None, "mean|ensemble", "mean, ensemble", "corrected(mean)"])
def test_a_wrapper_takes_one_base(vit_pool: ms.ExpertPool, base: object) -> None:
    with pytest.raises(ms.MergestreamError):
        ms.create_method("corrected", vit_pool, base=base)


def test_a_base_has_one_spelling(vit_pool: ms.ExpertPool) -> None:
    texts = ("ensemble(views=hflip)", "ensemble( views = (hflip) )", "ensemble(average=logits, views=(hflip))")
    methods = [ms.create_method("corrected", vit_pool, base=text) for text in texts]
    assert {method.label() for method in methods} == {"corrected"}
    assert all(method.provenance == methods[0].provenance for method in methods)
    other = ms.create_method("corrected", vit_pool, base="entropy_adaptive(views=(), temperature=(0.5, 1, 2))")
    assert other.label() == "corrected(entropy_adaptive(temperature=(0.5, 1, 2), views=()))"
    assert other.wrapped()["options"]["temperature"] == [0.5, 1, 2]


WORDS = st.sampled_from(["shared", "select", "card", 0.9, 3, True, False, (), ("hflip",), ("hflip", "vflip")])


@given(st.dictionaries(st.sampled_from(["head", "momentum", "views", "temperature"]), WORDS))
def test_a_spelt_variant_reads_back(options: dict) -> None:
    variant = Variant("entropy_adaptive", tuple(sorted(options.items())))
    assert parse_variants(str(variant)) == (variant,)


@given(st.text(max_size=60))
def test_any_text_parses_or_is_refused(text: str) -> None:
    with suppress(ms.MergestreamError):
        assert parse_variants(text)


def test_the_papers_rule_has_a_name_that_is_spelt_out_in_tables() -> None:
    assert str(parse_variants("paper")[0]) == "entropy_adaptive(momentum=0.9)"
    spelt = [str(variant) for variant in parse_variants("paper(momentum=0.5|0.9, head_sharpness=2)")]
    assert spelt == [f"entropy_adaptive(head_sharpness=2, momentum={momentum})" for momentum in (0.5, 0.9)]
    assert str(parse_variants("corrected(paper)")[0]) == "corrected(entropy_adaptive(momentum=0.9))"
    pool = make_pool("vit")
    assert ms.create_method("paper", pool).momentum == 0.9
    assert ms.create_method("paper", pool, momentum=0.5).label() == "entropy_adaptive(momentum=0.5)"
