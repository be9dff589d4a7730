"""The contract of mergestream's methods, run on this one: `pytest`, or `python test_confident_experts.py`."""

from my_method import ConfidentExperts

from mergestream.testing import check_method


def test_contract() -> None:
    check_method(ConfidentExperts)
    check_method(ConfidentExperts, options={"power": 0.0}, networks=["vit"])


if __name__ == "__main__":
    test_contract()
