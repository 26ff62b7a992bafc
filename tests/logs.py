"""Logs as a user has them: a learner written in NumPy, for tests of recordings, files and the command line."""

import numpy as np


def gradient(x, coupling=0.0):
    """Of Σ x⁴/4 + |x|²/2 + coupling · x₀x₁, as in `Quartic`."""
    return x**3 + x + (coupling * x[..., ::-1] if x.shape[-1] == 2 else 0)


def hessian(x, coupling=0.0):
    d = x.shape[-1]
    off = coupling * (1 - np.eye(d)) if d == 2 else 0
    return (3 * x**2 + 1)[..., None] * np.eye(d) + off


def quartic_log(seed, episodes, steps, *, d=1, step_size=0.02, beta=2.0, noise=0.0, coupling=0.0, dtype=np.float64):
    """A learner in NumPy, as a user has one: x, gradient and hessian of every episode and step."""
    rng = np.random.default_rng(seed)
    step_size, beta = (np.broadcast_to(v, episodes)[:, None] for v in (step_size, beta))
    x = np.empty((episodes, steps + 1, d))
    g = np.empty_like(x)
    x[:, 0] = rng.normal(size=(episodes, d))
    for k in range(steps + 1):
        g[:, k] = gradient(x[:, k], coupling) + noise * rng.normal(size=(episodes, d))
        if k < steps:
            move = np.sqrt(2 * step_size / beta) * rng.normal(size=(episodes, d))
            x[:, k + 1] = x[:, k] - step_size * g[:, k] + move
    return {"x": x.astype(dtype), "gradient": g.astype(dtype), "hessian": hessian(x, coupling).astype(dtype)}
