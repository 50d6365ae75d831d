"""Comparing methods on one model: `run` from a request to the report, by `cells`, `summary` and `report`."""
