"""Evaluation, records, analysis and reports. Calling the package, `mergestream.bench(...)`, runs a benchmark."""

import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """This package and the public function share the name `mergestream.bench`, so the package can be called."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from mergestream.bench.python_calls import bench

        return bench(*arguments, **options)


sys.modules[__name__].__class__ = CallablePackage
