"""E[ℓ | g = a] for functionals ℓ and g of any diffusion: the paper's Theorem 1 in general.

    sample = wiener.weigh(key, diffusion, ell, g, num_paths=10_000)
    estimate = wiener.conditional_expectation(sample, 0.0)

For a real functional g of the noise and any process u with ⟨Dg, u⟩ = 1, every localizer (K, G) gives

    E[ℓ δ(g − a)] = E[ ℓ K(g−a) + G(g−a) (ℓ S(u) − ⟨Dℓ, u⟩) ],

which is the formula of `estimate/conditional.py` with g in place of the position and ⟨Dℓ, u⟩ in place of the Jacobian;
its localizers and standard errors are used here unchanged. The diffusion is discretised first and differentiated
afterwards (see `calculus.py`), so that integration by parts adds no error of its own: what is estimated is the
conditional expectation of the discretised process.

Here the user's functionals are differentiated, in contrast to the rest of the package, where derivatives are observed.
"""

from .calculus import (
    canonical as canonical,
    derivative as derivative,
    inner as inner,
    reciprocal as reciprocal,
    skorohod as skorohod,
)
from .conditional import (
    best_localizer as best_localizer,
    conditional_expectation as conditional_expectation,
    weigh as weigh,
)
from .diffusion import Diffusion as Diffusion, Trajectory as Trajectory
from .sensitivities import Greeks as Greeks, greeks as greeks
from .weighed import WeighedPaths as WeighedPaths
