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


def nope(theta, d, length, s):
    return [mpf(0)] * (d // 2), mpf(1)


ROPES = [(10000, 32, 256), (10000, 128, 4096), (100000, 64, 8192), (500000, 128, 8192), (1000000, 96, 32768)]
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
}


def main():
    rows = []
    for name, (function, options) in CASES.items():
        for rope in ROPES:
            for s in (1, 2, 8, 32):
                for given in options:
                    if given == "rising":
                        n = rope[1] // 2
                        given = {"long_factor": [1 + (s - 1) * (i / n) ** 2 for i in range(n)]}
                    args = {"base_" if k == "base" else k: v for k, v in given.items()}
                    freqs, scale = function(*rope, s, **args)
                    rows.append(
                        {
                            "method": name,
                            "theta": rope[0],
                            "dim": rope[1],
                            "trained_length": rope[2],
                            "factor": s,
                            "params": given,
                            "attention_scale": mp.nstr(scale, 20),
                            "inv_freq": [mp.nstr(f, 20) for f in freqs],
                        }
                    )
    path = Path(__file__).with_name("methods.json")
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(f"{len(rows)} schedules written to {path}")


if __name__ == "__main__":
    main()
