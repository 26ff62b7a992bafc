"""This library in its forms, and the paper's estimator as it is printed."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import evaluate, sweep

import malliavin_jax as mj

from .models import Found

# What `MalliavinField` is asked for in each form; the first is the one that is compared.
FORMS = {
    "this library": {},
    "full correction": {"correction": "full"},
    "no correction": {"correction": "none"},
    "version 0.1.0": {"correction": "full", "control": "polynomial"},
    "without control": {"correction": "full", "control": None},
}
LENGTHS = np.geomspace(0.02, 6.0, 16)  # of a localizer, in units of the spread of the positions
PAPER = mj.Reciprocal(third="ito", jacobian="exponential")


def field(samples, form="this library"):
    """The field in one of `FORMS`."""
    return mj.MalliavinField(samples, **FORMS[form])


def estimates(view, form):
    """Its estimates at all α; version 0.1.0 also had other weights."""
    samples = view.look(scheme=mj.Canonical()) if form == "version 0.1.0" else view.samples
    return evaluate(field(samples, form), view.alphas)


def length_of(field):
    return field.localizer.length


def oracle_length(view):
    """Without control, at each of many lengths; in one dimension."""
    made = mj.MalliavinField(view.samples, mj.Laplace(1.0), control=None, correction="full")
    # The sorted form is made for one length: the dense one serves a sweep.
    dense = eqx.tree_at(lambda f: f.sorted, made, None, is_leaf=lambda leaf: leaf is None)
    lengths = jnp.asarray(view.scale * LENGTHS, view.samples.x.dtype)
    return Found(sweep(dense, view.alphas, lengths, length_of), [f"length {length:.2g} sd" for length in LENGTHS])


@jax.jit
def _paper(samples, alphas):
    arguments = samples, samples.gradient, samples.hessian
    return jax.vmap(lambda alpha: mj.conditional_expectation(*arguments, alpha, mj.Heaviside()).value)(alphas)


def paper(view):
    """Its weights and its localizer, at one time and in one dimension."""
    return Found(np.asarray(_paper(view.look(scheme=PAPER), view.alphas))[None], ["as printed"])
