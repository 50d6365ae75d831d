"""`python -m ctxext`, which `accelerate launch -m ctxext` needs."""

from .cli.app import main

main()
