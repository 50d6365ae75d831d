"""A pico model under every method that there is, by name; beyond those of two other files, the static ones."""

from conftest import pico_model
from encoded_models import METHODS as ENCODED
from encoded_models import patched
from staged_models import METHODS as STAGED
from staged_models import staged

import ctxext
from ctxext import methods

FACTORS = [1 + 3 * i / 16 for i in range(16)]


def static(method, **options):
    model = pico_model()
    if method:
        ctxext.patch(model, method, 4, **options)
    return model


MODELS = {"unpatched": lambda: static(None), "nope everywhere": lambda: static("nope")}
MODELS["start tokens"] = lambda: static("longrope", long_factor=FACTORS, start_tokens=4)
MODELS |= {name: (lambda name=name: staged(method=name)) for name in STAGED}
MODELS |= {name: (lambda name=name: patched(name)) for name in ENCODED}
MODELS |= {name: (lambda name=name: static(name)) for name in methods.all_methods() if name not in MODELS}


def is_stock_attention(model):
    """Whether attention is the model's own, whatever it is given."""
    schedule = ctxext.schedule_of(model)
    return schedule is None or (len(schedule.stages) == 1 and not schedule.in_attention)
