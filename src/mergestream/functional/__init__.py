"""Pure functions of tensors: scores, coefficients, merges, class priors, head fit, metrics."""
