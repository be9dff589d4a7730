"""The contract of methods and data sets, for anybody's: run it from a test or from a plain script.

>>> from mergestream.testing import check_method
>>> check_method(MyMethod)                       # doctest: +SKIP
>>> check_method(MyMethod, options={"power": 4}) # doctest: +SKIP

A rule that is broken is an AssertionError that names the rule and says what happened.
"""

from mergestream.testing.dataset_contract import check_dataset
from mergestream.testing.method_contract import RULES, check_method

__all__ = ["RULES", "check_dataset", "check_method"]
