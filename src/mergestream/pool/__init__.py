"""Experts on disk and in memory: pools, statistics, exchange between sites, import."""
