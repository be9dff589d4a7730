"""Replicas: several engines on a Ray cluster behind one service."""
