"""The command line: one file per command or group of commands; each parses, calls one function and prints."""
