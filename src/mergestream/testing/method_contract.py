"""Run the contract on a method: every rule, on small networks of three kinds."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mergestream.methods import METHODS, Method
from mergestream.runtime.errors import unknown_name
from mergestream.testing import answer_rules, pool_rules, state_rules
from mergestream.testing.method_case import MethodCase
from mergestream.testing.small_pools import FACTORIES

Rule = Callable[[MethodCase], None]

# In this order: a simple mistake is reported by the simplest rule. Those of the second table need one network only.
ON_EVERY_NETWORK: dict[str, Rule] = {
    "options are keyword-only and read back": answer_rules.options_are_read_back,
    "answers are well-formed": answer_rules.answers_are_well_formed,
    "equal batches get equal answers": answer_rules.answers_are_deterministic,
    "a step changes nothing": state_rules.step_changes_nothing,
    "all that is carried is in the state": state_rules.all_is_in_the_state,
    "the state is saved and loaded": state_rules.state_is_saved_and_loaded,
    "bad batches are refused": state_rules.bad_batches_are_refused,
    "single images are answered": answer_rules.single_images_are_answered,
    "networks run through the pool": pool_rules.forwards_are_counted,
}
ON_ONE_NETWORK: dict[str, Rule] = {
    "labels are never seen": answer_rules.labels_are_never_seen,
    "given expert logits change nothing": pool_rules.given_logits_change_nothing,
    "the order of experts does not matter": pool_rules.order_does_not_matter,
    "one class is the answer to every image": pool_rules.one_class_is_the_answer,
    "card values are in the provenance": pool_rules.card_values_are_in_the_provenance,
    "the state is carried to fewer and more experts": state_rules.state_follows_the_experts,
}
RULES: dict[str, Rule] = ON_EVERY_NETWORK | ON_ONE_NETWORK


def check_method(
    kind: type[Method[Any]] | str,
    *,
    options: Mapping[str, Any] | None = None,
    networks: Sequence[str] = tuple(FACTORIES),
    except_for: Collection[str] = (),
) -> None:
    """Check a method against the rules of all methods; the first that is broken is an AssertionError.

    A class, or the name of a registered method. `options`: to be checked with other options than its defaults.
    `networks`: some of 'vit', 'resnet' and 'hand_written', for a method that cannot take all. `except_for`: rules of
    `RULES` that it breaks on purpose.
    """
    kind = METHODS[kind] if isinstance(kind, str) else kind
    for names, known, what in ((except_for, RULES, "rule"), (networks, FACTORIES, "network")):
        for name in names:
            if name not in known:
                raise unknown_name(what, name, known)
    for number, network in enumerate(networks):
        case = MethodCase(kind, dict(options or {}), network)
        for rule, check in (RULES if number == 0 else ON_EVERY_NETWORK).items():
            if rule not in except_for:
                _apply(rule, check, case)


def _apply(rule: str, check: Rule, case: MethodCase) -> None:
    where = f"{case.kind.__qualname__} breaks the rule '{rule}' on the network '{case.network}'"
    try:
        check(case)
    except AssertionError as broken:
        raise AssertionError(f"{where}: {broken}") from broken
    except Exception as error:
        raise AssertionError(f"{where}: it raised {type(error).__name__}: {error}") from error
