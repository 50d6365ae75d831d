"""Derive the golden frequencies in 50-digit arithmetic, from the papers' formulas and nothing else.

    python tests/golden/derive.py        writes methods.json beside this file

Imports no ctxext. Each function below is written from its paper (or, where the paper leaves the detail to code,
from the authors' code), in mpmath.
"""

import json
from pathlib import Path

from mpmath import ceil, floor, log, mp, mpf, pi, sqrt

mp.dps = 50


def base(theta, d):
    """RoFormer eq. 15: theta_i = theta^(-2(i-1)/d)."""
    return [mpf(theta) ** (-mpf(2 * i) / d) for i in range(d // 2)]


def turns(f, length):
    """YaRN eq. 17: r(d) = L / lambda_d."""
    return mpf(length) * f / (2 * pi)


def ramp(x, low, high):
    return mpf(0) if x < low else mpf(1) if x > high else (x - low) / (high - low)


def position_interpolation(theta, d, length, s):
    return [f / s for f in base(theta, d)], mpf(1)


def ntk(theta, d, length, s):
    """YaRN eq. 16: b' = b s^(|D|/(|D|-2))."""
    return base(mpf(theta) * mpf(s) ** (mpf(d) / (d - 2)), d), mpf(1)


def ntk_by_parts(theta, d, length, s, alpha=1, beta=32):
    """YaRN eq. 18 and 19."""
    out = []
    for f in base(theta, d):
        g = ramp(turns(f, length), mpf(alpha), mpf(beta))
        out.append((1 - g) * f / s + g * f)
    return out, mpf(1)


def yarn(
    theta,
    d,
    length,
    s,
    beta_fast=32,
    beta_slow=1,
    truncate=True,
    attention_factor=None,
    mscale=None,
    mscale_all_dim=None,
):
    """The YaRN authors' code: correction dims by inverting eq. 17, a ramp over dims, and eq. 22."""

    def correction(rotations):
        return mpf(d) * log(mpf(length) / (mpf(rotations) * 2 * pi)) / (2 * log(mpf(theta)))

    low, high = correction(beta_fast), correction(beta_slow)
    if truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, mpf(0)), min(high, mpf(d - 1))
    if low == high:
        high += mpf("0.001")
    out = []
    for i, f in enumerate(base(theta, d)):
        inter = min(mpf(1), max(mpf(0), (i - low) / (high - low)))
        out.append(f / s * inter + f * (1 - inter))

    def scale(weight):
        return mpf(weight) / 10 * log(mpf(s)) + 1 if s > 1 else mpf(1)

    if attention_factor is not None:
        a = mpf(attention_factor)
    elif mscale and mscale_all_dim:
        a = scale(mscale) / scale(mscale_all_dim)
    else:
        a = scale(1)
    return out, a


def llama3(theta, d, length, s, low_freq_factor=1, high_freq_factor=4):
    """Meta's apply_scaling, by wavelength."""
    out = []
    for f in base(theta, d):
        wavelength = 2 * pi / f
        if wavelength < mpf(length) / high_freq_factor:
            out.append(f)
        elif wavelength > mpf(length) / low_freq_factor:
            out.append(f / s)
        else:
            smooth = (mpf(length) / wavelength - low_freq_factor) / (mpf(high_freq_factor) - low_freq_factor)
            out.append((1 - smooth) * f / s + smooth * f)
    return out, mpf(1)


def theta(theta, d, length, s, base_=None):
    """Liu et al. 2023, theorem 2 with the pretraining length as reference: b' = b^(log_{L/2pi}(sL/2pi))."""
    new = mpf(base_) if base_ else mpf(theta) ** (log(mpf(s) * length / (2 * pi)) / log(mpf(length) / (2 * pi)))
    return base(new, d), mpf(1)


def longrope(theta, d, length, s, long_factor):
    """LongRoPE eq. 3 for n >= n-hat; attention factor of its code, sqrt(1 + ln s / ln L)."""
    return [f / mpf(k) for f, k in zip(base(theta, d), long_factor, strict=True)], sqrt(
        1 + log(mpf(s)) / log(mpf(length))
    )


def nope(theta, d, length, s, **options):
    """No rotation, whatever else takes its place (a bias, sinusoids, a temperature: test_encodings.py)."""
    return [mpf(0)] * (d // 2), mpf(1)


def as_trained(theta, d, length, s, **options):
    """Rotation as it was; other distances are given to it (test_encoding_distances.py)."""
    return base(theta, d), mpf(1)


def staged(static, theta, d, length, s, granularity, strength=1, temperature=0, sharpen=True, **options):
    """YaRN section 3.3: scale n / L for a prefix of n tokens, here for the longest prefix of each stage.

    Stage 0 is the model as it was, for n <= L; stage m covers L + (m-1) g < n <= L + m g, up to s L.
    """
    stages = [(0, mpf(1), base(theta, d))]
    start = length
    while start < length * s:
        scale = mpf(min(start + granularity, length * s)) / length
        freqs, a = static(theta, d, length, strength * scale - (strength - 1), **options)
        a = a if sharpen else mpf(1)
        stages.append((start, a * sqrt(1 + mpf(temperature) * log(scale)), freqs))
        start += granularity
    return stages


def two_stages(theta, d, length, s, short_factor, long_factor):
    """LongRoPE with re-searched short factors: short for n <= L, long beyond."""
    short, _ = longrope(theta, d, length, 1, short_factor)
    long, a = longrope(theta, d, length, s, long_factor)
    return [(0, mpf(1), short), (length, a, long)]


ROPES = [(10000, 32, 256), (10000, 128, 4096), (100000, 64, 8192), (500000, 128, 8192), (1000000, 96, 32768)]
FACTORS = (1, 2, 8, 32)
CASES = {
    "pi": (position_interpolation, [{}]),
    "ntk": (ntk, [{}]),
    "ntk_by_parts": (ntk_by_parts, [{}, {"alpha": 2, "beta": 16}]),
    "yarn": (
        yarn,
        [
            {},
            {"truncate": False},
            {"beta_fast": 16, "beta_slow": 2},
            {"attention_factor": 1.25},
            {"mscale": 0.707, "mscale_all_dim": 1.0},
        ],
    ),
    "llama3": (llama3, [{}, {"low_freq_factor": 2, "high_freq_factor": 8}]),
    "theta": (theta, [{}, {"base": 80000000}]),
    "longrope": (longrope, ["rising"]),
    "nope": (nope, [{}]),
    "drope": (nope, [{}, {"temperature": 0.1}]),
    "alibi": (nope, [{}]),
    "t5_bias": (nope, [{}]),
    "sinusoidal": (nope, [{}]),
    "self_extend": (as_trained, [{}]),
    "rerope": (as_trained, [{}]),
    "dual_chunk": (as_trained, [{}]),
}


def rising(rope, s):
    """Factors 1 .. s, quadratic in the dimension."""
    n = rope[1] // 2
    return [1 + (s - 1) * (i / n) ** 2 for i in range(n)]


def row(name, rope, s, params, stages):
    return {
        "method": name,
        "theta": rope[0],
        "dim": rope[1],
        "trained_length": rope[2],
        "factor": s,
        "params": params,
        "stages": [[start, mp.nstr(a, 18), [mp.nstr(f, 18) for f in freqs]] for start, a, freqs in stages],
    }


def static_rows():
    for name, (function, options) in CASES.items():
        for rope in ROPES:
            for s in FACTORS:
                for given in options:
                    params = {"long_factor": rising(rope, s)} if given == "rising" else given
                    freqs, a = function(*rope, s, **{"base_" if k == "base" else k: v for k, v in params.items()})
                    yield row(name, rope, s, params, [(0, a, freqs)])


def staged_rows():
    for rope in ROPES[::2]:
        g = rope[2] // 2
        yield row("dynamic_pi", rope, 2, {"granularity": g}, staged(position_interpolation, *rope, 2, g))
        # 2.25 is no whole number of stages: the last one is shorter.
        yield row(
            "dynamic_pi", rope, 2.25, {"granularity": g}, staged(position_interpolation, *rope, mpf("2.25"), g)
        )
        yield row("dynamic_ntk", rope, 2, {"granularity": g}, staged(ntk, *rope, 2, g))
        given = {"granularity": g, "strength": 2, "temperature": 0.3}
        yield row("dynamic_ntk", rope, 4, given, staged(ntk, *rope, 4, g, strength=2, temperature=0.3))
        yield row("dynamic_yarn", rope, 2, {"granularity": g}, staged(yarn, *rope, 2, g))
        given = {"granularity": g, "beta_fast": 16, "attention": False, "temperature": 0.2}
        stages = staged(yarn, *rope, 4, g, temperature=0.2, sharpen=False, beta_fast=16)
        yield row("dynamic_yarn", rope, 4, given, stages)
        given = {"short_factor": [1 + i / 100 for i in range(rope[1] // 2)], "long_factor": rising(rope, 4)}
        yield row("longrope", rope, 4, given, two_stages(*rope, 4, **given))


def main():
    rows = [*static_rows(), *staged_rows()]
    path = Path(__file__).with_name("methods.json")
    path.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")
    print(f"{len(rows)} schedules written to {path}")


if __name__ == "__main__":
    main()
