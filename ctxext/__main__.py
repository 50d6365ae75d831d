"""`python -m ctxext`, which `accelerate launch -m ctxext` needs."""

from .cli import main

main()
