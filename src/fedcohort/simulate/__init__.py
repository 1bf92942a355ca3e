"""Training many clients at once, and the rounds around it; PyTorch is loaded at first use."""

import sys
from types import ModuleType
from typing import Any

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)


class _Package(ModuleType):
    """Can be called: Python finds this package in place of the function of that name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.simulate(*arguments, **options)


sys.modules[__name__].__class__ = _Package
