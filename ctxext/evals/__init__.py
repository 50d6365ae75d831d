"""Evaluators: perplexity by length and position, passkeys, RULER, LongPPL, lm-eval, and comparisons of methods."""
