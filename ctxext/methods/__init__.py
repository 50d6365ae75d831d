"""The methods, one file each, named after it; `registry` finds them.

    schedule = methods.schedule(rope, "yarn", 8, beta_fast=16)

To add a method, add a file with one function under `@method` (see `registry`); nothing else has to change.
"""

from .registry import Method, Option, all_methods, check_factor, get, method, options, schedule

__all__ = ["Method", "Option", "all_methods", "check_factor", "get", "method", "options", "schedule"]
