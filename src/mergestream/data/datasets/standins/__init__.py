"""Tiny stand-ins of every data set, in exactly the published layout, odd corners included."""
