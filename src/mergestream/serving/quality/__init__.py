"""Estimated quality without labels: accuracy, prevalence and prediction sets of a stream."""
