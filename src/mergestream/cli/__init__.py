"""The command line: one file per group of commands; each parses, calls one function and prints."""
