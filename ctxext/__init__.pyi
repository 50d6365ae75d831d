from . import methods as methods
from .errors import CtxextError as CtxextError
from .errors import CtxextWarning as CtxextWarning
from .errors import UsageError as UsageError
from .evals.measure import evaluate as evaluate
from .folders.doctor import doctor as doctor
from .folders.gguf_export import export as export
from .folders.load import load as load
from .folders.merge import merge as merge
from .folders.patch import patch_checkpoint as patch_checkpoint
from .live.patch import apply as apply
from .live.patch import patch as patch
from .live.patch import schedule_of as schedule_of
from .live.patch import unpatch as unpatch
from .rope import Rope as Rope
from .rope import Schedule as Schedule
from .search.run import search_factors as search_factors
from .training.run import train as train

__version__: str
