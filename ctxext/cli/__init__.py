"""The `ctxext` command."""

from .app import main as main
