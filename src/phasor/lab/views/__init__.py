"""What the page asks for, a module per view: records of the requests, and the functions that answer them.

A module here registers its endpoints when it is imported, and imports torch inside of its functions only, so that the
page is served before torch is loaded. `import_views` finds the modules.
"""

from __future__ import annotations

import importlib
import pkgutil


def import_views() -> None:
    """Import every module of this package, which registers its endpoints.

    >>> import_views()
    """
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
