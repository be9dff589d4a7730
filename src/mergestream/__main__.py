"""`python -m mergestream`: the command line."""

from mergestream.cli.app import main

if __name__ == "__main__":
    main()
