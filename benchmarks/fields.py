"""How fast is a field, per query?

Run `python benchmarks/fields.py` (some two minutes). One dimension: the sorted field against the dense one on a million
samples, and how its query time grows with their number. Two dimensions: the dense field, which is a kernel sum with its
Malliavin correction and the standard errors, against the plain kernel sum in NumPy and scikit-learn. Written to
results/fields.json.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import machine, parser, race, save, show
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.neighbors import KernelDensity

import malliavin_jax as mj

LENGTH = 0.5


def some_samples(episodes, d):
    """A standard normal with the weights it has, S = x, and a gradient to average: no simulation is needed here."""
    x = jax.random.normal(jax.random.key(0), (episodes, 1, d))
    hessian = jnp.broadcast_to(jnp.eye(d), (episodes, 1, d, d))
    return mj.Samples(x, x, hessian, x, jnp.ones((episodes, 1), bool))


def values_and_errors(field, alphas, batch_size):
    estimate = jax.lax.map(field, alphas, batch_size=batch_size)
    return estimate.value, estimate.stderr


# NumPy uses the widest vectors of the processor by itself; XLA takes half of AVX-512 unless it is told.
query = eqx.filter_jit(values_and_errors)
query_wide = eqx.filter_jit(values_and_errors, compiler_options={"xla_cpu_prefer_vector_width": 512})


def queries(number, d):
    return 0.5 * jax.random.normal(jax.random.key(1), (number, d))


def one_dimension(fast):
    sizes = (10_000, 100_000) if fast else (10_000, 100_000, 1_000_000)
    many, few = queries(100_000, 1), queries(64, 1)
    fields = {n: mj.MalliavinField(some_samples(n, 1), mj.Laplace(LENGTH), control=None) for n in sizes}
    dense = eqx.tree_at(lambda f: f.sorted, fields[sizes[-1]], None)
    runs = {f"sorted, {n} samples": (lambda f=f: query(f, many, len(many))) for n, f in fields.items()}
    runs[f"dense, {sizes[-1]} samples"] = lambda: query(dense, few, 8)
    first, best = race(runs, 5)
    dense_name, last = f"dense, {sizes[-1]} samples", f"sorted, {sizes[-1]} samples"
    each = {name: seconds / len(few if name == dense_name else many) for name, seconds in best.items()}
    title = f"d = 1, {len(many)} queries (dense: {len(few)}); values and standard errors"
    ratio = show(title, first, each, ours=last, unit="ns a query")[dense_name]
    growth = each[last] / each[f"sorted, {sizes[0]} samples"]
    log_growth = np.log(sizes[-1]) / np.log(sizes[0])
    print(f"  dense/sorted: {ratio:.0f}")
    print(f"  sorted, {sizes[-1]} against {sizes[0]} samples: {growth:.2f} times slower (log N: {log_growth:.2f})")
    return {"seconds_a_query": each, "dense_to_sorted": ratio, "growth": growth, "growth_of_log": log_growth}


def plain_sums(x, gradient, alphas):
    """Nadaraya–Watson by NumPy, in place, 64 queries at a time."""
    scale = x.dtype.type(-1 / (2 * LENGTH**2))
    out = []
    for start in range(0, len(alphas), 64):
        some = alphas[start : start + 64]
        weight = np.subtract(x[:, 0][None], some[:, :1])
        weight *= weight
        other = np.subtract(x[:, 1][None], some[:, 1:])
        other *= other
        weight += other
        weight *= scale
        np.exp(weight, out=weight)
        out.append(weight @ gradient / weight.sum(1, keepdims=True))
    return np.concatenate(out)


def sklearn_sums(x, gradient, alphas):
    out = []
    for start in range(0, len(alphas), 256):
        weight = rbf_kernel(alphas[start : start + 256], x, gamma=1 / (2 * LENGTH**2))
        out.append(weight @ gradient / weight.sum(1, keepdims=True))
    return np.concatenate(out)


def two_dimensions(fast):
    episodes, number = (10_000, 512) if fast else (100_000, 4096)
    samples, alphas = some_samples(episodes, 2), queries(number, 2)
    ours = mj.MalliavinField(samples, mj.Gaussian(LENGTH, 0.2), control=None)
    columns = (samples.x[:, 0], samples.gradient[:, 0], alphas)
    arrays = {t.__name__: [np.asarray(a, t) for a in columns] for t in (np.float32, np.float64)}
    tree = KernelDensity(bandwidth=LENGTH, rtol=0).fit(arrays["float64"][0])
    few = number // 32
    runs = {
        "this library, with errors": lambda: query(ours, alphas, 256),
        "the same, 512-bit vectors": lambda: query_wide(ours, alphas, 256),
        "NumPy float32, plain sum": lambda: plain_sums(*arrays["float32"]),
        "NumPy float64, plain sum": lambda: plain_sums(*arrays["float64"]),
        "scikit-learn rbf float32": lambda: sklearn_sums(*arrays["float32"]),
        "scikit-learn rbf float64": lambda: sklearn_sums(*arrays["float64"]),
        "scikit-learn KernelDensity": lambda: tree.score_samples(arrays["float64"][2][:few]),
    }
    first, best = race(runs, 5)
    best["scikit-learn KernelDensity"] *= number / few
    title = f"d = 2, {episodes} samples × {number} queries"
    ratios = show(title, first, best, ours="this library, with errors", unit="s")
    return {"seconds": best, "ratio_to_ours": ratios}


def main():
    fast = parser(__doc__, "a tenth of the samples").parse_args().fast
    results = {"machine": machine(), "one_dimension": one_dimension(fast), "two_dimensions": two_dimensions(fast)}
    save("fields", results, fast=fast)


if __name__ == "__main__":
    main()
