"""Extend the context of pretrained Hugging Face models, and measure honestly whether it worked.

What is public stands in `__init__.pyi` beside this file and is imported on first use, so `import ctxext` costs
nothing.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
