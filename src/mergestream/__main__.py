from mergestream.cli import main

main()
