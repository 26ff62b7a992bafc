"""Least squares on derivatives, arrays in and arrays out: what the fitted potentials and the local fits are made of."""
