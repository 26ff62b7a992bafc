"""The command line: `malliavin-jax check | estimate | recover | reproduce`."""

from .entry import main as main
