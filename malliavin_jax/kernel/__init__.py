"""Kernel regression of the observed gradients on the observed positions: the baselines."""

from .bandwidth import cross_validated_bandwidth as cross_validated_bandwidth
from .chain import KernelChain as KernelChain, single_kernel_langevin as single_kernel_langevin
from .fields import LocalPolynomial as LocalPolynomial, NadarayaWatson as NadarayaWatson
