"""Pure functions of tensors: scores, coefficients, merges, priors, head fit and metrics."""
