"""The command line: `malliavin-jax check | estimate | recover | watch | reproduce`."""

from .entry import main as main
