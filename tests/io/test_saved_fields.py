"""Fitted fields in files: the same bits back, and nothing believed that does not fit together."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import malliavin_jax as mj

LOSS = mj.potentials.Quartic()
ALPHAS = jnp.array([[-0.7], [0.5], [9.0]])


@pytest.fixture(scope="module")
def samples():
    learner = mj.ForwardLearner(LOSS, mj.initial.Normal(), step_size=0.01, gradient_noise=0.5)
    return mj.observe(jax.random.key(0), learner, num_episodes=300, times=[0.4, 0.8])


FIELDS = {
    "malliavin": mj.MalliavinField,
    "full": lambda samples: mj.MalliavinField(samples, mj.Laplace(0.5), correction="full"),
    "dense": lambda samples: mj.MalliavinField(samples, mj.Centered(), control=LOSS),
    "kernel": lambda samples: mj.kernel.NadarayaWatson(samples, 0.2),
    "polynomial": lambda samples: mj.kernel.LocalPolynomial(samples, 0.4, degree=2),
    "table": lambda samples: mj.TabulatedField(mj.TrueField(LOSS), (jnp.linspace(-2.0, 2.0, 41),)),
    "true": lambda samples: mj.TrueField(LOSS),
    "adaptive": lambda samples: mj.AdaptiveField(-3.0, 3.0).update(samples),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_comes_back_to_the_bit(name, samples, tmp_path):
    field = FIELDS[name](samples)
    mj.io.save_field(tmp_path / "field.npz", field)
    again = mj.io.load_field(tmp_path / "field.npz")
    assert type(again) is type(field)
    assert jax.tree.structure(again) == jax.tree.structure(field)
    for before, after in zip(jax.tree.leaves(field), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(after, before)
        assert np.asarray(after).dtype == np.asarray(before).dtype
    query = jax.jit(lambda field, at: jax.vmap(field)(at))
    for before, after in zip(jax.tree.leaves(query(field, ALPHAS)), jax.tree.leaves(query(again, ALPHAS)), strict=True):
        np.testing.assert_array_equal(after, before)
    if name == "malliavin":
        assert repr(again) == repr(field)


def test_what_no_file_can_hold(samples, tmp_path, no_type_checks):
    guess = mj.Potential(lambda x: x @ x, lambda x: 2 * x, lambda x: 2 * jnp.eye(1))
    field = mj.MalliavinField(samples, mj.Laplace(0.5), control=guess)
    for message, call in {
        "field.folds[0].potential cannot be written, it is a Potential": lambda: mj.io.save_field(
            tmp_path / "field.npz", field
        ),
        "path must end in .npz, got": lambda: mj.io.save_field(tmp_path / "field", mj.TrueField(LOSS)),
        "field must be a field of malliavin_jax, got a Samples": lambda: mj.io.save_field(tmp_path / "a.npz", samples),
        "is not there": lambda: mj.io.load_field(tmp_path / "none.npz"),
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    assert list(tmp_path.iterdir()) == []


def spoiled(path, change):
    """The file with its header, its tree or its arrays changed by `change(header, tree, arrays)`."""
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    header = json.loads(str(arrays.pop("header")))
    tree = json.loads(header["tree"])
    change(header, tree, arrays)
    header["tree"] = header["tree"] if header["tree"] == "[1, 2]" else json.dumps(tree)
    np.savez(path, header=np.asarray(json.dumps(header)), **arrays)


SPOILED = {
    r"does not hold a whole field: 'os.system' is no class that a field is made of": lambda h, tree, a: tree.update(
        {"class": "os.system"}
    ),
    r"fields.MalliavinField must have the fields folds, localizer": lambda h, tree, a: tree["fields"].pop("low"),
    r"does not hold a whole field: 'array0'": lambda h, tree, a: a.pop("array0"),
    r"list is no part of a field": lambda h, tree, a: h.update({"tree": "[1, 2]"}),
    r"version '1', it holds 'malliavin_jax field', version '9'": lambda h, tree, a: h.update({"version": "9"}),
    r"it holds 'something', version '1'": lambda h, tree, a: h.update({"format": "something"}),
    r"does not hold a whole field: ": lambda h, tree, a: a.update(
        {tree["fields"]["table"]["fields"]["columns"]["array"]: np.zeros((5, 2))}
    ),
    r"which is no field": lambda h, tree, a: tree.update(tree["fields"]["table"]),
}


@pytest.mark.parametrize("message", SPOILED)
def test_a_file_that_does_not_fit_together_is_refused(message, samples, tmp_path, no_type_checks):
    path = tmp_path / "field.npz"
    mj.io.save_field(path, mj.MalliavinField(samples))
    spoiled(path, SPOILED[message])
    with pytest.raises(ValueError, match=re.escape(message)):
        mj.io.load_field(path)


def test_damaged_files_and_pickles_are_refused(tmp_path):
    path = tmp_path / "field.npz"
    mj.io.save_field(path, mj.TrueField(LOSS))
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"not an archive"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="truncated, damaged or not a field"):
            mj.io.load_field(path)
    np.savez(path, header=np.array([{"format": "malliavin_jax field"}], object))
    with pytest.raises(ValueError, match="Object arrays cannot be loaded"):
        mj.io.load_field(path)


def test_float64_needs_x64(samples, tmp_path):
    path = tmp_path / "field.npz"
    mj.io.save_field(path, mj.MalliavinField(samples))
    with jax.enable_x64(False), pytest.raises(ValueError, match="is in float64, and JAX is not"):
        mj.io.load_field(path)
