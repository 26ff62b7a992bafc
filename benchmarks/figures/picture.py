"""What does this library do, in one picture?

Run `python benchmarks/figures/picture.py` (a minute on two cores; `--fast` for a glance). It observes a learner with
noisy gradients on a tilted double well, and draws what was observed, the gradient estimated from it beside a kernel's,
and the loss recovered, each against the truth that the estimators did not see. It writes docs/pages/picture.png, which
stands in the README.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import malliavin_jax as mj
from malliavin_jax import plots

PICTURE = Path(__file__).parents[2] / "docs" / "pages" / "picture.png"


def draw(num_episodes: int):
    """The figure, and the root mean square errors of the two gradients on [−1.2, 1.2]."""
    loss = mj.potentials.DoubleWell(tilt=0.3)
    learner = mj.ForwardLearner(loss, mj.initial.Normal(), step_size=0.01, gradient_noise=2.0)
    samples = mj.observe(jax.random.key(0), learner, num_episodes=num_episodes, times=[0.4, 0.8])
    fields = {"malliavin_jax": mj.MalliavinField(samples), "kernel": mj.kernel.NadarayaWatson(samples)}
    alphas = jnp.linspace(-1.3, 1.3, 105)[:, None]
    truth = jax.vmap(loss.gradient)(alphas)
    estimates = {name: jax.jit(jax.vmap(field))(alphas) for name, field in fields.items()}
    recovered = {name: mj.loss_from_field(field, jnp.linspace(-1.4, 1.4, 71)) for name, field in fields.items()}
    paths = jax.vmap(lambda key: mj.simulate(key, learner, 80))(jax.random.split(jax.random.key(1), 5))
    grid = jnp.linspace(-1.6, 1.6, 161)
    true_loss = jax.vmap(loss.value)(grid[:, None])

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.0, 3.7), layout="constrained")
    plots.observed_paths(paths.x, step_size=0.01, ax=left).set_title(f"observed: 5 of {num_episodes} episodes")
    plots.gradient_bands(alphas, estimates, truth, ax=middle).set_title("estimated: the gradient of the loss")
    plots.loss_recovery(recovered, grid, true_loss - true_loss.min(), ax=right).set_title("recovered: the loss")
    inner = np.abs(np.asarray(alphas)) <= 1.2
    error = {name: float(np.sqrt(np.mean(np.asarray(e.value - truth)[inner] ** 2))) for name, e in estimates.items()}
    return figure, error


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="fewer episodes, and nothing is written")
    fast = parser.parse_args().fast
    figure, error = draw(1000 if fast else 3000)
    for name, value in error.items():
        print(f"{name}: RMSE of the gradient on [-1.2, 1.2] {value:.3f}")
    if not fast:
        figure.savefig(PICTURE, dpi=100)
        print(f"wrote {PICTURE.relative_to(PICTURE.parents[2])}")


if __name__ == "__main__":
    main()
