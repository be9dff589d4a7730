"""Bytes from untrusted clients -> uint8 pictures, within limits."""
