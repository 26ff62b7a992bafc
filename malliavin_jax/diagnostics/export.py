"""Chains for other libraries: export to ArviZ."""

from typing import Any

import numpy as np

from ..chain.passive import Chain


def to_arviz(chain: Chain) -> Any:
    """The chain for ArviZ, whose plots and summaries then apply.

    Group `posterior` holds `alpha`; `sample_stats` holds the rest, and `finite`, False once a chain diverged.

    Args:
        chain: what `passive_langevin` returned.

    Returns:
        InferenceData with ArviZ of version 0, a DataTree from version 1 on.

    Raises:
        ImportError: if ArviZ is not installed.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import malliavin_jax as mj

        chain = mj.passive_langevin(
            jax.random.key(1), mj.TrueField(mj.potentials.Quartic()), jnp.zeros((8, 1)),
            num_steps=100, burn_in=20, step_size=0.05, inverse_temperature=1.0,
        )
        data = mj.diagnostics.to_arviz(chain)  # then arviz.plot_trace(data), arviz.summary(data), …
        ```
    """
    try:
        import arviz
    except ImportError as error:
        raise ImportError("to_arviz needs ArviZ, which is not installed: pip install arviz") from error
    positions = np.asarray(chain.positions)
    statistics = {
        "gradient": chain.gradients,
        "gradient_stderr": chain.gradient_stderr,
        "density": chain.density,
        "density_stderr": chain.density_stderr,
        "trusted": chain.trusted,
        "finite": np.isfinite(positions).all(-1),
    }
    groups: dict[str, Any] = {
        "posterior": {"alpha": positions},
        "sample_stats": {name: np.asarray(value) for name, value in statistics.items()},
    }
    dims = {name: ["dimension"] for name in ("alpha", "gradient", "gradient_stderr")}
    if int(arviz.__version__.split(".")[0]) >= 1:
        return arviz.from_dict(groups, dims=dims)
    return arviz.from_dict(**groups, dims=dims)
